"""The fetch of a model: a volume, and the Job that fills it. Only pods of this Job connect to the outside."""

from orca.core.fetch_report import PERMANENT_EXIT
from orca.operator.domain import names
from orca.operator.domain.model_references import source_digest
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.render import model, objects
from orca.operator.render.group import LOST_NODE
from orca.operator.render.objects import metadata
from orca.operator.render.pods import container, everywhere, flags, http_probe, template

PORT = 9090

_FAILED_PODS_MAX = 100
"""Failed pods of one Job. The waits between pods grow to ten minutes, so this many last for half a day or more."""


def claim(deployment: OrcaDeployment, there: Json | None) -> Json:
    """Render the volume of the wanted model. Args: there: the claim as it is; None if there is none."""
    cache = deployment.spec.model.cache
    return objects.claim(_metadata(deployment), cache.size_gib, cache.access_mode, cache.storage_class_name, there)


def job(deployment: OrcaDeployment, image: str) -> Json:
    """Render the Job. It continues from what the volume holds, so its pods may be killed and replaced at any time."""
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
                    # Another try would end in the same way: no such model, no right to it, or it cannot be served.
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": names.FETCH, "operator": "In", "values": [PERMANENT_EXIT]},
                    },
                    # A drained node is not a failure of the fetch.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": _pod(deployment, image, labels),
        },
    }


def _pod(deployment: OrcaDeployment, image: str, labels: dict[str, str]) -> Json:
    spec = deployment.spec
    values = {
        "uri": spec.model.uri,
        "revision": spec.model.revision,
        "into": model.FETCHED,
        "listen": everywhere(PORT),
        "log_format": "json",
    }
    main = container(
        names.FETCH,
        image,
        ["fetch", *flags(values)],
        images=spec.images,
        resources=spec.fetch.resources,
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
        account=deployment.account,
        images=spec.images,
        volumes=[volume],
        more={
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 10,
            # The node of the first pod may decide where the volume is, so it must be a node on which stages can run.
            "nodeSelector": dict(spec.worker.node_selector) or None,
            "tolerations": [*spec.worker.tolerations, *LOST_NODE],
            "affinity": _beside_other_readers(deployment) if spec.model.cache.access_mode == "ReadWriteOnce" else None,
        },
        patch=spec.fetch.pod_patch,
        remove=spec.fetch.pod_patch_remove,
    )


def _beside_other_readers(deployment: OrcaDeployment) -> Json:
    """Render the affinity to the pods that read models.

    While models change, gateways mount the volumes of both models. If one volume is on one node only, the other must be
    on that node too. The fetch's own role is in the list, so that the first fetch of a deployment needs no other pod.
    """
    roles = {"key": names.ROLE_LABEL, "operator": "In", "values": [names.FETCH, names.GATEWAY, names.STAGE]}
    selector = {"matchLabels": {names.DEPLOYMENT_LABEL: deployment.name}, "matchExpressions": [roles]}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _environment(deployment: OrcaDeployment) -> list[Json]:
    """Return source and credentials, in the environment variables of the libraries that connect."""
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


def _metadata(deployment: OrcaDeployment) -> Json:
    digest = source_digest(deployment.spec.model)
    return metadata(deployment, names.model(deployment.name, digest), names.FETCH, {names.MODEL_LABEL: digest})
