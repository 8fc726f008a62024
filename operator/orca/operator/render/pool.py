"""The pool's Redis, in a StatefulSet of ours or wherever a Secret points to, and how the parts reach it."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orca.operator.domain import names
from orca.operator.domain.resource import (
    REDIS,
    REDIS_FOLDER,
    REDIS_VOLUME,
    Json,
    OrcaDeployment,
    PoolSpec,
    ResourcesSpec,
)
from orca.operator.render import objects
from orca.operator.render.objects import metadata, selector
from orca.operator.render.pods import container, secret_volume, template, variable
from orca.pool.codec import room_for_requests

PORT = 6379
USER = "orca"
CPU_REQUEST = "100m"
"""CPUs that Redis requests by default. It uses at most one, and only while requests run."""

_LOGIN_FOLDER = "/etc/orca/pool"
LOGIN_FILES: Mapping[str, str] = {
    "password": "PASSWORD_FILE",
    "ca.crt": "TLS_CA_FILE",
    "tls.crt": "TLS_CERTIFICATE_FILE",
    "tls.key": "TLS_KEY_FILE",
}
"""Keys of the pool's Secret that clients of Redis read as files, with the setting that names each."""

_CONFIG_FOLDER = "/etc/redis"
USERS_FILE = "users.acl"
SECRET_KEYS = ("password", USERS_FILE)
"""Keys of a managed pool's Secret."""
_ALIVE = f"timeout 5 redis-cli -p {PORT} ping | grep -qE 'PONG|NOAUTH|LOADING'"
_READY = f"timeout 5 redis-cli -p {PORT} ping | grep -qE 'PONG|NOAUTH'"


def key_prefix(deployment: OrcaDeployment) -> str:
    """Return what keeps this deployment's keys apart from those of others in the same Redis."""
    return f"{deployment.namespace}/{deployment.name}"


@dataclass(frozen=True, slots=True)
class PoolConnection:
    """Everything that a part needs to reach the pool."""

    url: Json  # an entry of `env` without its name
    external_url: str | None  # the same as text; None for a managed pool, and if it is unknown
    environment: tuple[Json, ...]
    volumes: tuple[Json, ...]
    mounts: tuple[Json, ...]


def external_url(deployment: OrcaDeployment, secret: Json | None) -> str | None:
    """Return the URL in the Secret of an external pool.

    None means that the pool is managed, or that the Secret has no URL that parts accept. A URL with a user or password
    must not appear in a pod's spec.
    """
    external = deployment.spec.pool.external
    encoded = ((secret or {}).get("data") or {}).get(None if external is None else external.url_secret.key)
    try:
        url = base64.b64decode(encoded or "").decode().strip()
    except ValueError:
        return None
    is_plain = re.fullmatch(r"rediss?://[^\s@]+", url) is not None and "password=" not in url
    return url if is_plain else None


def connection(deployment: OrcaDeployment, secret: Json | None) -> PoolConnection:
    """Return how parts reach the pool. Args: secret: of an external pool; its keys decide what the parts get."""
    spec = deployment.spec.pool
    bounds = [
        variable("ORCA_POOL_MAX_QUEUED", spec.max_queued),
        variable("ORCA_POOL_RETENTION_MS", spec.retention_seconds * 1000),
        variable("ORCA_POOL_RETIRE_MS", deployment.spec.drain_seconds * 1000),
    ]
    if spec.external is None:
        name = names.pool(deployment.name)
        bounds.append(variable("ORCA_POOL_BYTES_MAX", room_for_requests(spec.managed.memory_mib << 20)))
        managed_url = {"value": f"redis://{name}.{deployment.namespace}.svc:{PORT}/0"}
        return _connection(managed_url, [variable("ORCA_POOL_USER", USER)], name, ["password"], bounds)
    named = spec.external.url_secret
    there = (secret or {}).get("data") or {}
    text = external_url(deployment, secret)
    # The reference is never written: parts wait for a URL that they accept (plan/plan.py).
    url: Json = {"valueFrom": {"secretKeyRef": {"name": named.name, "key": named.key}}}
    if text is not None:
        # Not a reference: a pod that restarts would follow a Secret that names another Redis (plan/pool_move.py).
        url = {"value": text}
    user: Json = {"name": "ORCA_POOL_USER", "valueFrom": {"secretKeyRef": {"name": named.name, "key": "user"}}}
    bounds.append(variable("ORCA_POOL_REPLICAS", spec.external.min_replicas))
    files = [key for key in LOGIN_FILES if key in there]
    found = _connection(url, [user] if "user" in there else [], named.name, files, bounds)
    return replace(found, external_url=text)


def _connection(
    url: Json, user: Sequence[Json], secret: str, files: Sequence[str], bounds: Sequence[Json]
) -> PoolConnection:
    """Args: files: keys of the Secret that the parts read as files."""
    login = [variable(f"ORCA_POOL_{LOGIN_FILES[key]}", f"{_LOGIN_FOLDER}/{key}") for key in files]
    volume = secret_volume("pool-login", secret, {key: key for key in files})
    mount = {"name": volume["name"], "mountPath": _LOGIN_FOLDER, "readOnly": True}
    environment = (*user, *login, *bounds)
    volumes, mounts = ((volume,), (mount,)) if files else ((), ())
    return PoolConnection(url=url, external_url=None, environment=environment, volumes=volumes, mounts=mounts)


def managed(deployment: OrcaDeployment, image: str, secret: Json | None, there: Json | None) -> list[Json]:
    """Render Service, claim and StatefulSet of one Redis.

    Args: secret: with its users; None if there is none yet. there: the claim as it is; None if there is none.
    """
    return [_service(deployment), _claim(deployment, there), _stateful_set(deployment, image, secret)]


def _service(deployment: OrcaDeployment) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, names.pool(deployment.name), names.POOL),
        "spec": {
            "selector": selector(deployment, names.POOL),
            "ports": [{"name": "redis", "port": PORT, "targetPort": "redis", "protocol": "TCP"}],
        },
    }


def _claim(deployment: OrcaDeployment, there: Json | None) -> Json:
    """Render the claim apart from the StatefulSet, so that its owner and its end follow deletionPolicy."""
    managed = deployment.spec.pool.managed
    marks = metadata(deployment, names.pool(deployment.name), names.POOL)
    return objects.claim(marks, managed.storage_gib, "ReadWriteOnce", managed.storage_class_name, there)


def _stateful_set(deployment: OrcaDeployment, image: str, secret: Json | None) -> Json:
    spec = deployment.spec
    name = names.pool(deployment.name)
    labels = names.labels(deployment.name, names.POOL)
    main = container(
        REDIS,
        image,
        _redis_arguments(deployment),
        images=spec.images,
        resources=_with_requests(spec.pool),
        ports={"redis": PORT},
        mounts=[
            {"name": REDIS_VOLUME, "mountPath": REDIS_FOLDER},
            {"name": "users", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        ],
        more={
            "command": ["redis-server"],
            "startupProbe": _exec_probe(_ALIVE, period_s=1, failures=3600),
            "readinessProbe": _exec_probe(_READY, period_s=5, failures=2),
            # It allows much time: what a slow disk has not written yet is only in the memory of Redis.
            "livenessProbe": _exec_probe(_ALIVE, period_s=10, failures=6),
        },
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(deployment, names.pool(deployment.name), names.POOL),
        "spec": {
            "serviceName": name,
            "replicas": 1,
            # With the default policy, a pod that cannot start blocks the very change that would repair it.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector(deployment, names.POOL)},
            "template": template(
                labels,
                main,
                account=deployment.account,
                images=spec.images,
                volumes=[
                    {"name": REDIS_VOLUME, "persistentVolumeClaim": {"claimName": name}},
                    secret_volume("users", name, {USERS_FILE: USERS_FILE}),
                ],
                # Redis reads its users only when it starts. Without a restart, a new password would be wrong for ever,
                # and a right that a release adds would be missing.
                annotations={names.USERS_ANNOTATION: _digest_of_users(secret)},
                more={"terminationGracePeriodSeconds": 60},
                patch=spec.pool.pod_patch,
                remove=spec.pool.pod_patch_remove,
            ),
        },
    }


def _with_requests(pool: PoolSpec) -> ResourcesSpec:
    """Return requests and limits with the default requests of what the spec does not mention.

    Without requests, the pod that holds all requests of clients would be the first that a node under pressure evicts.
    A limit without a request is also a request, so it gets no default.
    """
    given = (pool.resources, pool.patched_resources)
    mentioned = {name for each in given for name in (*each.requests, *each.limits)}
    defaults = {"cpu": CPU_REQUEST, "memory": f"{pool.managed.memory_mib}Mi"}
    more = {name: amount for name, amount in defaults.items() if name not in mentioned}
    return replace(pool.resources, requests={**more, **pool.resources.requests})


def _digest_of_users(secret: Json | None) -> str:
    users = ((secret or {}).get("data") or {}).get(USERS_FILE, "")
    return hashlib.sha256(users.encode()).hexdigest()[:16]


def _redis_arguments(deployment: OrcaDeployment) -> list[str]:
    managed = deployment.spec.pool.managed
    settings: Mapping[str, Sequence[str]] = {
        "dir": [REDIS_FOLDER],
        "port": [str(PORT)],
        "bind": ["*", "-::*"],
        "save": [""],
        "appendonly": ["yes"],
        "appendfsync": [managed.fsync],
        "maxmemory": [str(managed.memory_mib << 20)],
        "maxmemory-policy": ["noeviction"],
        # Nodes of a log are allocated whole: 1 KiB holds about 70 tokens, and the default of 4 KiB is mostly empty.
        "stream-node-max-bytes": ["1024"],
        "aclfile": [f"{_CONFIG_FOLDER}/{USERS_FILE}"],
    }
    return [argument for name, values in settings.items() for argument in (f"--{name}", *values)]


def _exec_probe(script: str, *, period_s: int, failures: int) -> Json:
    return {
        "exec": {"command": ["sh", "-c", script]},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 6,
    }
