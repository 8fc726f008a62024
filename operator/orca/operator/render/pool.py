"""The pool's Redis, and how the parts reach it: one of ours in a StatefulSet, or one that a Secret points to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca.operator import names
from orca.operator.render.pods import container, template, variable
from orca.operator.resource import Deployment, Json
from orca.pool.codec import room_for_requests

PORT = 6379
USER = "orca"

_LOGIN_FOLDER = "/etc/orca/pool"
_CONFIG_FOLDER = "/etc/redis"
_ALIVE = f"timeout 5 redis-cli -p {PORT} ping | grep -qE 'PONG|NOAUTH|LOADING'"
_READY = f"timeout 5 redis-cli -p {PORT} ping | grep -qE 'PONG|NOAUTH'"


def word(deployment: Deployment) -> str:
    """Which keeps this deployment's keys apart in one Redis."""
    return f"{deployment.namespace}/{deployment.name}"


@dataclass(frozen=True, slots=True)
class Link:
    """What a part is given to reach the pool."""

    url: Json  # an entry of `env` without its name
    environment: tuple[Json, ...]
    volumes: tuple[Json, ...]
    mounts: tuple[Json, ...]


def link(deployment: Deployment) -> Link:
    spec = deployment.spec.pool
    bounds = [
        variable("ORCA_POOL_MAX_QUEUED", spec.max_queued),
        variable("ORCA_POOL_RETENTION_MS", spec.retention_seconds * 1000),
        variable("ORCA_POOL_RETIRE_MS", deployment.spec.drain_seconds * 1000),
    ]
    mount = {"name": "pool-login", "mountPath": _LOGIN_FOLDER, "readOnly": True}
    login = [variable("ORCA_POOL_USER", USER), variable("ORCA_POOL_PASSWORD_FILE", f"{_LOGIN_FOLDER}/password")]
    if spec.external is None:
        secret = names.pool(deployment.name)
        volume = _secret_volume(secret, ["password"])
        url = {"value": f"redis://{secret}.{deployment.namespace}.svc:{PORT}/0"}
        bounds.append(variable("ORCA_POOL_BYTES_MAX", room_for_requests(spec.managed.memory_mib << 20)))
        return Link(url, (*login, *bounds), (volume,), (mount,))
    of = spec.external.url_secret
    url = {"valueFrom": {"secretKeyRef": {"name": of.name, "key": of.key}}}
    user = {"name": "ORCA_POOL_USER", "valueFrom": {"secretKeyRef": {"name": of.name, "key": "user"}}}
    bounds.append(variable("ORCA_POOL_REPLICAS", spec.external.min_replicas))
    volume = _secret_volume(of.name, ["password"])
    return Link(url, (user, login[1], *bounds), (volume,), (mount,))


def managed(deployment: Deployment, image: str) -> list[Json]:
    """Service, claim and StatefulSet of one Redis."""
    return [_service(deployment), _claim(deployment), _stateful_set(deployment, image)]


def _service(deployment: Deployment) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment),
        "spec": {
            "selector": {names.DEPLOYMENT_LABEL: deployment.name, names.ROLE_LABEL: "pool"},
            "ports": [{"name": "redis", "port": PORT, "targetPort": "redis", "protocol": "TCP"}],
        },
    }


def _claim(deployment: Deployment) -> Json:
    """Made apart from the StatefulSet, so that its owner, and with it its end, follows deletionPolicy."""
    managed = deployment.spec.pool.managed
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{managed.storage_gib}Gi"}},
    }
    if managed.storage_class_name is not None:
        spec["storageClassName"] = managed.storage_class_name
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata(deployment), "spec": spec}


def _stateful_set(deployment: Deployment, image: str) -> Json:
    spec = deployment.spec
    name = names.pool(deployment.name)
    labels = names.labels(deployment.name, "pool")
    main = container(
        "redis",
        image,
        _redis_arguments(deployment),
        images=spec.images,
        resources=spec.pool.resources,
        ports={"redis": PORT},
        mounts=[
            {"name": "data", "mountPath": "/data"},
            {"name": "users", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        ],
        more={
            "command": ["redis-server"],
            "startupProbe": _exec_probe(_ALIVE, period_s=1, failures=3600),
            "readinessProbe": _exec_probe(_READY, period_s=5, failures=2),
            # Long, since what a slow disk has not taken yet is only in its memory.
            "livenessProbe": _exec_probe(_ALIVE, period_s=10, failures=6),
        },
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(deployment),
        "spec": {
            "serviceName": name,
            "replicas": 1,
            "selector": {"matchLabels": {names.DEPLOYMENT_LABEL: deployment.name, names.ROLE_LABEL: "pool"}},
            "template": template(
                labels,
                main,
                images=spec.images,
                volumes=[
                    {"name": "data", "persistentVolumeClaim": {"claimName": name}},
                    {**_secret_volume(name, ["users.acl"]), "name": "users"},
                ],
                more={"terminationGracePeriodSeconds": 60},
                patch=spec.pool.pod_patch,
            ),
        },
    }


def _redis_arguments(deployment: Deployment) -> list[str]:
    managed = deployment.spec.pool.managed
    settings: Mapping[str, Sequence[str]] = {
        "dir": ["/data"],
        "port": [str(PORT)],
        "bind": ["*", "-::*"],
        "save": [""],
        "appendonly": ["yes"],
        "appendfsync": [managed.fsync],
        "maxmemory": [str(managed.memory_mib << 20)],
        "maxmemory-policy": ["noeviction"],
        # The nodes of a log are allocated whole: 1 KiB holds some 70 tokens, the default of 4 KiB mostly air.
        "stream-node-max-bytes": ["1024"],
        "aclfile": [f"{_CONFIG_FOLDER}/users.acl"],
    }
    return [word for name, values in settings.items() for word in (f"--{name}", *values)]


def _exec_probe(script: str, *, period_s: int, failures: int) -> Json:
    return {
        "exec": {"command": ["sh", "-c", script]},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 6,
    }


def _secret_volume(secret: str, keys: Sequence[str]) -> Json:
    items = [{"key": key, "path": key} for key in keys]
    return {"name": "pool-login", "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}


def metadata(deployment: Deployment) -> Json:
    name = names.pool(deployment.name)
    return {"name": name, "namespace": deployment.namespace, "labels": names.labels(deployment.name, "pool")}
