"""Locations of models in pods: a folder of the images, a user's claim, or a claim of ours."""

import hashlib
from dataclasses import dataclass

from orca.core.answer_formats import AUTO_FORMAT
from orca.core.other_model import OtherModel
from orca.operator.domain import names
from orca.operator.domain.model_references import ModelReference, source_digest
from orca.operator.domain.resource import Json, OrcaDeployment

FOLDER = "/models"
FETCHED = f"{FOLDER}/model"
"""The folder that a fetch completes at its end."""

OLDER_MODELS_FOLDER = "/other-models"
"""Gateways mount the claims of older models here, each in a folder of its own."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The model's folder inside the pods, and what has to be mounted for it."""

    folder: str
    volumes: tuple[Json, ...] = ()
    mounts: tuple[Json, ...] = ()


def locate(deployment: OrcaDeployment) -> ModelLocation:
    """Locate the wanted model. All pods read the same volume, and none writes to it."""
    model = deployment.spec.model
    path = model.uri.partition("://")[2]
    if model.scheme == "file":
        return ModelLocation(path)
    if model.scheme == "pvc":
        claim, _, inside = path.partition("/")
        return _on_claim(claim, f"{FOLDER}/{inside}".rstrip("/"))
    return _on_claim(names.model(deployment.name, source_digest(model)), FETCHED)


def _on_claim(claim: str, folder: str) -> ModelLocation:
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return ModelLocation(folder, (volume,), ({"name": "model", "mountPath": FOLDER, "readOnly": True},))


def wanted_model(deployment: OrcaDeployment) -> ModelReference:
    """Return the model that the spec names."""
    spec, location = deployment.spec.model, locate(deployment)
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in location.volumes]
    return ModelReference(
        claim=claims[0] if claims else None,
        folder=location.folder.removeprefix(FOLDER).strip("/") if claims else location.folder,
        dtype=spec.dtype,
        quantization=spec.quantization,
        name=spec.name,
        max_model_len=spec.max_model_len,
        tool_format=spec.tool_format,
        reasoning_format=spec.reasoning_format,
    )


def older_model_flag(model: ModelReference) -> str:
    """Return what `--other-models` of a gateway says about a model beside its own."""
    folder = model.folder if model.claim is None else f"{_mount_path(model.claim)}/{model.folder}".rstrip("/")
    return OtherModel(
        folder=folder,
        name=model.name,
        dtype=model.dtype,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        tool_format=model.tool_format or AUTO_FORMAT,
        reasoning_format=model.reasoning_format or AUTO_FORMAT,
    ).to_text()


def older_model_volume(claim: str) -> tuple[Json, Json]:
    """Return volume and mount of a claim with older models. One mount serves all models of a claim."""
    name = f"model-{_digest(claim)}"
    volume = {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return volume, {"name": name, "mountPath": _mount_path(claim), "readOnly": True}


def _mount_path(claim: str) -> str:
    return f"{OLDER_MODELS_FOLDER}/{_digest(claim)}"


def _digest(claim: str) -> str:
    return hashlib.sha256(claim.encode()).hexdigest()[:8]
