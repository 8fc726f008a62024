"""The gateways: a Deployment, the Service in front of it, and the Ingress or HTTPRoute to the outside."""

from collections.abc import Mapping, Sequence

from orca.operator.domain import facts, names
from orca.operator.domain.model_references import ModelReference
from orca.operator.domain.resource import GATEWAY_LEAVE_S, Json, OrcaDeployment, SecretKey
from orca.operator.render import model, pool
from orca.operator.render.group import LOST_NODE
from orca.operator.render.objects import metadata, selector
from orca.operator.render.pods import container, flags, http_probe, metric_names, secret_volume, template
from orca.operator.render.pool import PoolConnection

PORT = 8000
METRICS_PORT = 9090

_KEYS_FOLDER = "/etc/orca/keys"

# With their defaults, most controllers hold back streams or cut them off.
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
    deployment: OrcaDeployment,
    image: str,
    keys: SecretKey | None,
    connection: PoolConnection,
    older: Sequence[ModelReference] = (),
) -> list[Json]:
    """Render Service, Deployment and disruption budget, and Ingress or HTTPRoute.

    Args:
        keys: where the file of hashed keys is; None serves without keys.
        older: models that the wanted one replaces, whose answers are still read.
    """
    manifests = [
        _service(deployment),
        _deployment(deployment, image, keys, connection, older),
        _disruption_budget(deployment),
    ]
    if deployment.spec.gateway.ingress is not None:
        manifests.append(_ingress(deployment))
    if deployment.spec.gateway.http_route is not None:
        manifests.append(_http_route(deployment))
    return manifests


def _service(deployment: OrcaDeployment) -> Json:
    chosen = deployment.spec.gateway.service
    spec: Json = {
        # Written also where it is the default: with another type, the API server takes away what the one before had
        # added, such as ports of nodes.
        "type": chosen.type,
        # Of a cluster with one family, the default is that family.
        "ipFamilyPolicy": chosen.ip_family_policy,
        "selector": selector(deployment, names.GATEWAY),
        "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
    }
    if chosen.ip_families:
        spec["ipFamilies"] = list(chosen.ip_families)
    if chosen.load_balancer_class is not None:
        spec["loadBalancerClass"] = chosen.load_balancer_class
    if chosen.external_traffic_policy is not None:
        spec["externalTrafficPolicy"] = chosen.external_traffic_policy
    marks = metadata(deployment, deployment.name, names.GATEWAY)
    marks["labels"] = {**chosen.labels, **marks["labels"]}
    if chosen.annotations:
        marks["annotations"] = dict(chosen.annotations)
    return {"apiVersion": "v1", "kind": "Service", "metadata": marks, "spec": spec}


def _deployment(
    deployment: OrcaDeployment,
    image: str,
    keys: SecretKey | None,
    connection: PoolConnection,
    older: Sequence[ModelReference],
) -> Json:
    marks = metadata(deployment, names.gateway(deployment.name), names.GATEWAY)
    if known := facts.pool_annotations(connection.external_url):
        marks["annotations"] = known
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": marks,
        "spec": {
            **_replicas(deployment),
            "selector": {"matchLabels": selector(deployment, names.GATEWAY)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": _pod(deployment, image, keys, connection, older),
        },
    }


def _replicas(deployment: OrcaDeployment) -> Json:
    if deployment.spec.suspend:
        return {"replicas": 0}
    return {} if deployment.spec.gateway.autoscaled else {"replicas": deployment.spec.gateway.replicas}


def only_replicas(there: Json) -> Json:
    """Render the number of gateways that the Deployment has, and nothing else.

    After a suspension it is 1, since autoscalers leave alone what has no pods.
    """
    marks = {key: there["metadata"][key] for key in ("name", "namespace", "uid")}
    spec = {"replicas": max(1, there["spec"]["replicas"])}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": marks, "spec": spec}


def _pod(
    deployment: OrcaDeployment,
    image: str,
    keys: SecretKey | None,
    connection: PoolConnection,
    older: Sequence[ModelReference],
) -> Json:
    spec, gateway = deployment.spec, deployment.spec.gateway
    volumes, mounts = _volumes(deployment, keys, connection, older)
    main = container(
        names.GATEWAY,
        image,
        ["gateway", *flags(_settings(deployment, keys, older))],
        images=spec.images,
        resources=gateway.resources,
        ports={"http": PORT, "metrics": METRICS_PORT},
        environment=[{"name": "ORCA_GATEWAY_POOL", **connection.url}, *connection.environment],
        mounts=mounts,
        more={
            # A gateway serves while the pool or the groups are away, and its answers say so: /ready is for people. It
            # also serves while clients use all connections of their port, and there a probe would be refused like a
            # client. The metrics port has its own count of connections, and opens last.
            "readinessProbe": http_probe("/health", "metrics", period_s=2, failures=2),
            "livenessProbe": http_probe("/health", "metrics", period_s=5, failures=3),
            "startupProbe": http_probe("/health", "metrics", period_s=1, failures=300),
            "lifecycle": {"preStop": {"sleep": {"seconds": GATEWAY_LEAVE_S}}},
        },
    )
    return template(
        names.labels(deployment.name, names.GATEWAY),
        main,
        account=deployment.account,
        images=spec.images,
        volumes=volumes,
        more={
            "terminationGracePeriodSeconds": GATEWAY_LEAVE_S + gateway.drain_seconds + 10,
            "nodeSelector": dict(gateway.node_selector) or None,
            "tolerations": [*gateway.tolerations, *LOST_NODE],
            "topologySpreadConstraints": _spread(deployment),
        },
        patch=gateway.pod_patch,
        remove=gateway.pod_patch_remove,
        annotations=facts.models_annotations([model.wanted_model(deployment), *older]),
    )


def _settings(deployment: OrcaDeployment, keys: SecretKey | None, older: Sequence[ModelReference]) -> dict[str, object]:
    """Return the flags of a gateway."""
    spec, gateway = deployment.spec, deployment.spec.gateway
    return {
        "model": model.locate(deployment).folder,
        "other_models": ",".join(map(model.older_model_flag, older)) or None,
        "name": spec.model.name,
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "max_model_len": spec.model.max_model_len,
        "tool_format": spec.model.tool_format,
        "reasoning_format": spec.model.reasoning_format,
        "host": "::",
        "port": PORT,
        "metrics_port": METRICS_PORT,
        "deployment": pool.key_prefix(deployment),
        "api_keys_file": None if keys is None else f"{_KEYS_FOLDER}/keys",
        "open_to_network": keys is None or None,
        "drain_seconds": gateway.drain_seconds,
        "connections_max": gateway.limits.connections,
        "calls_per_key_max": gateway.limits.calls_per_key,
        "body_bytes_max": gateway.limits.body_bytes,
        "cors_origins": ",".join(gateway.cors_origins) or None,
        # The default needs no flag: gateways of earlier releases do not know it.
        "prefix_sharing": None if gateway.prefix_sharing == "All" else gateway.prefix_sharing.lower(),
        "slo_enforce": gateway.slo_enforce or None,
        "metric_names": metric_names(spec.metric_names),
        "log_format": "json",
    }


def _volumes(
    deployment: OrcaDeployment, keys: SecretKey | None, connection: PoolConnection, older: Sequence[ModelReference]
) -> tuple[list[Json], list[Json]]:
    """Return volumes and mounts of its own model, of older models, of the connection to the pool, and of the keys."""
    location = model.locate(deployment)
    volumes, mounts = [*location.volumes, *connection.volumes], [*location.mounts, *connection.mounts]
    for claim in dict.fromkeys(each.claim for each in older if each.claim is not None):
        volume, mount = model.older_model_volume(claim)
        volumes.append(volume)
        mounts.append(mount)
    if keys is not None:
        volumes.append(secret_volume("api-keys", keys.name, {keys.key: "keys"}))
        mounts.append({"name": "api-keys", "mountPath": _KEYS_FOLDER, "readOnly": True})
    return volumes, mounts


def _spread(deployment: OrcaDeployment) -> list[Json] | None:
    key = deployment.spec.spread.topology_key
    if not key:
        return None
    selected = {"labelSelector": {"matchLabels": selector(deployment, names.GATEWAY)}}
    return [{"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", **selected}]


def _disruption_budget(deployment: OrcaDeployment) -> Json:
    """Render a budget that lets a node be drained of a single gateway too: its streams resume at the next gateway.

    A gateway that is not ready may always go: it serves nobody, and by default it would block a drain of its node.
    """
    selected = {"selector": {"matchLabels": selector(deployment, names.GATEWAY)}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, names.gateway(deployment.name), names.GATEWAY),
        "spec": {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", **selected},
    }


def _ingress(deployment: OrcaDeployment) -> Json:
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
    annotated = metadata(deployment, deployment.name, names.GATEWAY) | {
        "annotations": {**_STREAM_SAFE, **ingress.annotations}
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": annotated, "spec": spec}


def _http_route(deployment: OrcaDeployment) -> Json:
    route = deployment.spec.gateway.http_route
    assert route is not None
    rule: Json = {"backendRefs": [{"name": deployment.name, "port": 80}]}
    # Some Gateways refuse a route that has timeouts, and others cut off streams of one that has none.
    limits = {"request": route.timeouts.request_seconds, "backendRequest": route.timeouts.backend_request_seconds}
    if timeouts := {name: f"{seconds}s" for name, seconds in limits.items() if seconds is not None}:
        rule["timeouts"] = timeouts
    spec: Json = {"parentRefs": [dict(each) for each in route.parent_refs], "rules": [rule]}
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(deployment, deployment.name, names.GATEWAY),
        "spec": spec,
    }
