"""The gateways: a Deployment, the Service in front of it, and the door to the cluster's outside."""

from collections.abc import Mapping, Sequence

from orca.operator.domain import names
from orca.operator.domain.resource import GATEWAY_LEAVE_S, Deployment, Json, SecretKey
from orca.operator.render import model, pool
from orca.operator.render.current_model import KnownModel
from orca.operator.render.group import LOST_NODE
from orca.operator.render.objects import metadata, selector
from orca.operator.render.pods import container, flags, http_probe, secret_volume, template

PORT = 8000
METRICS_PORT = 9090
ROLE = "gateway"

_KEYS_FOLDER = "/etc/orca/keys"

# Streams are held back, or cut, by the defaults of most controllers.
_STREAM_SAFE: Mapping[str, str] = {
    "nginx.ingress.kubernetes.io/proxy-buffering": "off",
    "nginx.ingress.kubernetes.io/proxy-request-buffering": "off",
    "nginx.ingress.kubernetes.io/proxy-read-timeout": "3600",
    "nginx.ingress.kubernetes.io/proxy-send-timeout": "3600",
    "nginx.ingress.kubernetes.io/proxy-body-size": "256m",
    "haproxy.org/timeout-server": "3600s",
    "haproxy-ingress.github.io/timeout-server": "3600s",
    "alb.ingress.kubernetes.io/load-balancer-attributes": "idle_timeout.timeout_seconds=3600",
    "alb.ingress.kubernetes.io/target-type": "ip",
}


def gateways(
    deployment: Deployment,
    image: str,
    keys: SecretKey | None,
    link: pool.Link,
    others: Sequence[KnownModel] = (),
) -> list[Json]:
    """Service, Deployment and disruption budget, and Ingress or HTTPRoute.

    Args:
        keys: where the file of hashed keys is; None serves without keys.
        others: models before the wanted one, whose answers are still read.
    """
    manifests = [
        _service(deployment),
        _deployment(deployment, image, keys, link, others),
        _disruption_budget(deployment),
    ]
    if deployment.spec.gateway.ingress is not None:
        manifests.append(_ingress(deployment))
    if deployment.spec.gateway.http_route is not None:
        manifests.append(_http_route(deployment))
    return manifests


def _service(deployment: Deployment) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, deployment.name, ROLE),
        "spec": {
            "selector": selector(deployment, ROLE),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _deployment(
    deployment: Deployment, image: str, keys: SecretKey | None, link: pool.Link, others: Sequence[KnownModel]
) -> Json:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, names.gateway(deployment.name), ROLE),
        "spec": {
            "replicas": 0 if deployment.spec.suspend else deployment.spec.gateway.replicas,
            "selector": {"matchLabels": selector(deployment, ROLE)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": _pod(deployment, image, keys, link, others),
        },
    }


def _pod(
    deployment: Deployment, image: str, keys: SecretKey | None, link: pool.Link, others: Sequence[KnownModel]
) -> Json:
    spec, gateway = deployment.spec, deployment.spec.gateway
    volumes, mounts = _volumes(deployment, keys, link, others)
    main = container(
        ROLE,
        image,
        ["gateway", *flags(_settings(deployment, keys, others))],
        images=spec.images,
        resources=gateway.resources,
        ports={"http": PORT, "metrics": METRICS_PORT},
        environment=[{"name": "ORCA_GATEWAY_POOL", **link.url}, *link.environment],
        mounts=mounts,
        more={
            # It serves while the pool or the groups are away, and says so itself: /ready is for people. So it does when
            # clients have taken all connections of their port, where a probe would be refused like them. The port for
            # metrics counts its own, and opens last.
            "readinessProbe": http_probe("/health", "metrics", period_s=2, failures=2),
            "livenessProbe": http_probe("/health", "metrics", period_s=5, failures=3),
            "startupProbe": http_probe("/health", "metrics", period_s=1, failures=300),
            "lifecycle": {"preStop": {"sleep": {"seconds": GATEWAY_LEAVE_S}}},
        },
    )
    return template(
        names.labels(deployment.name, ROLE),
        main,
        account=deployment.name,
        images=spec.images,
        volumes=volumes,
        more={
            "terminationGracePeriodSeconds": GATEWAY_LEAVE_S + gateway.drain_seconds + 10,
            "nodeSelector": dict(gateway.node_selector) or None,
            "tolerations": [*gateway.tolerations, *LOST_NODE],
            "topologySpreadConstraints": [_spread(deployment)],
        },
        patch=gateway.pod_patch,
    )


def _settings(deployment: Deployment, keys: SecretKey | None, others: Sequence[KnownModel]) -> dict[str, object]:
    """What its flags say."""
    spec, gateway = deployment.spec, deployment.spec.gateway
    return {
        "model": model.place(deployment).folder,
        "other_models": ",".join(each.to_text() for each in others) or None,
        "name": spec.model.name,
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "max_model_len": spec.model.max_model_len,
        "host": "0.0.0.0",
        "port": PORT,
        "metrics_port": METRICS_PORT,
        "deployment": pool.word(deployment),
        "api_keys_file": None if keys is None else f"{_KEYS_FOLDER}/keys",
        "open_to_network": keys is None or None,
        "drain_seconds": gateway.drain_seconds,
        "connections_max": gateway.limits.connections,
        "calls_per_key_max": gateway.limits.calls_per_key,
        "body_bytes_max": gateway.limits.body_bytes,
        "slo_enforce": gateway.slo_enforce or None,
        "log_format": "json",
    }


def _volumes(
    deployment: Deployment, keys: SecretKey | None, link: pool.Link, others: Sequence[KnownModel]
) -> tuple[list[Json], list[Json]]:
    """Volumes and their mounts: its own model, the claims of others, what leads to the pool, and the keys."""
    place = model.place(deployment)
    volumes, mounts = [*place.volumes, *link.volumes], [*place.mounts, *link.mounts]
    for volume, mount in {each.claim: each.volume() for each in others if each.claim is not None}.values():
        volumes.append(volume)
        mounts.append(mount)
    if keys is not None:
        volumes.append(secret_volume("api-keys", keys.name, {keys.key: "keys"}))
        mounts.append({"name": "api-keys", "mountPath": _KEYS_FOLDER, "readOnly": True})
    return volumes, mounts


def _spread(deployment: Deployment) -> Json:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(deployment, ROLE)},
    }


def _disruption_budget(deployment: Deployment) -> Json:
    """Lets a node be drained of a single gateway too: its streams resume at the one that takes its place.

    One that is not ready may always go: it serves nobody, and by default it would keep its node from being drained.
    """
    selected = {"selector": {"matchLabels": selector(deployment, ROLE)}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, names.gateway(deployment.name), ROLE),
        "spec": {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", **selected},
    }


def _ingress(deployment: Deployment) -> Json:
    ingress = deployment.spec.gateway.ingress
    assert ingress is not None
    backend = {"service": {"name": deployment.name, "port": {"name": "http"}}}
    rule: Json = {"http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    spec: Json = {"rules": [rule]}
    if ingress.host is not None:
        rule["host"] = ingress.host
    if ingress.class_name is not None:
        spec["ingressClassName"] = ingress.class_name
    if ingress.tls_secret_name is not None:
        hosts = {} if ingress.host is None else {"hosts": [ingress.host]}
        spec["tls"] = [{"secretName": ingress.tls_secret_name, **hosts}]
    annotated = metadata(deployment, deployment.name, ROLE) | {"annotations": {**_STREAM_SAFE, **ingress.annotations}}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": annotated, "spec": spec}


def _http_route(deployment: Deployment) -> Json:
    route = deployment.spec.gateway.http_route
    assert route is not None
    rule = {
        "backendRefs": [{"name": deployment.name, "port": 80}],
        # An answer may stream for as long as it takes.
        "timeouts": {"request": "0s"},
    }
    spec: Json = {"parentRefs": [dict(each) for each in route.parent_refs], "rules": [rule]}
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(deployment, deployment.name, ROLE),
        "spec": spec,
    }


def url(deployment: Deployment) -> str:
    """Where clients reach the API, as far as the spec tells."""
    gateway = deployment.spec.gateway
    if gateway.ingress is not None and gateway.ingress.host is not None:
        return f"{'https' if gateway.ingress.tls_secret_name else 'http'}://{gateway.ingress.host}/v1"
    if gateway.http_route is not None and gateway.http_route.hostnames:
        return f"http://{gateway.http_route.hostnames[0]}/v1"
    return f"http://{deployment.name}.{deployment.namespace}.svc/v1"
