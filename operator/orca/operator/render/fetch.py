"""The download of a model: a volume, and the Job that fills it. Its pods are the only ones that look outside."""

from orca.core.fetch_report import NEVER_EXIT
from orca.operator import names
from orca.operator.quantity import is_less
from orca.operator.render import model
from orca.operator.render.group import LOST_NODE
from orca.operator.render.pods import container, flags, http_probe, template
from orca.operator.resource import Deployment, Json, Resources

ROLE = "fetch"
PORT = 9090

_FAILED_PODS_MAX = 100
"""Of one Job; with the waits between them, which grow to ten minutes, they last for half a day or more."""
_RESOURCES = Resources(requests={"cpu": "100m", "memory": "128Mi"}, limits={"memory": "1Gi"})


def claim(deployment: Deployment, there: Json | None) -> Json:
    """The volume of the wanted model.

    Args: there: the claim as it is, which keeps what cannot change of one: its class, its access mode, and its size
        from shrinking.
    """
    cache = deployment.spec.model.cache
    size, modes, storage_class = f"{cache.size_gib}Gi", [cache.access_mode], cache.storage_class_name
    if there is not None:
        modes, storage_class = there["spec"]["accessModes"], there["spec"].get("storageClassName")
        size_there = there["spec"]["resources"]["requests"]["storage"]
        size = size_there if is_less(size, size_there) else size
    spec: Json = {"accessModes": modes, "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(deployment), "spec": spec}


def job(deployment: Deployment, image: str) -> Json:
    """Goes on from what the volume holds, so its pods may be killed and placed anew as often as need be."""
    labels = _metadata(deployment)["labels"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(deployment),
        "spec": {
            "backoffLimit": _FAILED_PODS_MAX,
            # Never two at a time on one volume.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    # Another try would end the same way: no such model, no right to it, or none that can be served.
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": ROLE, "operator": "In", "values": [NEVER_EXIT]},
                    },
                    # A drained node is nobody's failure.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": _pod(deployment, image, labels),
        },
    }


def _pod(deployment: Deployment, image: str, labels: dict[str, str]) -> Json:
    spec = deployment.spec
    values = {
        "uri": spec.model.uri,
        "revision": spec.model.revision,
        "into": model.FETCHED,
        "listen": f"0.0.0.0:{PORT}",
        "log_format": "json",
    }
    main = container(
        ROLE,
        image,
        ["fetch", *flags(values)],
        images=spec.images,
        resources=_RESOURCES,
        ports={"progress": PORT},
        environment=_environment(deployment),
        mounts=[{"name": "model", "mountPath": model.FOLDER}],
        more={
            "livenessProbe": http_probe("/health", "progress", period_s=10, failures=6),
            "startupProbe": http_probe("/health", "progress", period_s=1, failures=120),
        },
    )
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": _metadata(deployment)["name"]}}
    return template(
        labels,
        main,
        images=spec.images,
        volumes=[volume],
        more={
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 10,
            # The node of the first pod may decide where the volume is: one on which stages can run.
            "nodeSelector": dict(spec.worker.node_selector) or None,
            "tolerations": [*spec.worker.tolerations, *LOST_NODE],
        },
    )


def _environment(deployment: Deployment) -> list[Json]:
    """Where from and as whom, in the variables of the libraries that ask."""
    wanted = deployment.spec.model
    found = [{"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"}] if wanted.is_on_hub else []
    if wanted.endpoint is not None:
        found.append({"name": "HF_ENDPOINT" if wanted.is_on_hub else "AWS_ENDPOINT_URL", "value": wanted.endpoint})
    if wanted.token_secret is None:
        return found
    secret = wanted.token_secret.name
    if wanted.is_on_hub:
        return [*found, _of_secret("HF_TOKEN", secret, wanted.token_secret.key)]
    return [
        *found,
        _of_secret("AWS_ACCESS_KEY_ID", secret, "accessKeyId"),
        _of_secret("AWS_SECRET_ACCESS_KEY", secret, "secretAccessKey"),
        _of_secret("AWS_SESSION_TOKEN", secret, "sessionToken", is_optional=True),
        _of_secret("AWS_REGION", secret, "region", is_optional=True),
    ]


def _of_secret(variable: str, secret: str, key: str, *, is_optional: bool = False) -> Json:
    reference: Json = {"name": secret, "key": key}
    if is_optional:
        reference["optional"] = True
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _metadata(deployment: Deployment) -> Json:
    digest = model.digest(deployment.spec.model)
    labels = names.labels(deployment.name, ROLE, {names.MODEL_LABEL: digest})
    return {"name": names.model(deployment.name, digest), "namespace": deployment.namespace, "labels": labels}
