"""Where the pods of a deployment find the model: a folder of the images, a claim of the user's, or one of ours."""

import hashlib
from dataclasses import dataclass

from orca.operator.domain import names
from orca.operator.domain.resource import Deployment, Json, Model

FOLDER = "/models"
FETCHED = f"{FOLDER}/model"
"""The folder that the download makes whole at its end."""


@dataclass(frozen=True, slots=True)
class Place:
    """The model's folder inside the pods, and what has to be mounted for it."""

    folder: str
    volumes: tuple[Json, ...] = ()
    mounts: tuple[Json, ...] = ()


def digest(model: Model) -> str:
    """Names what is fetched: 8 hex digits of where from and which revision."""
    return _digest(model.uri, model.revision, model.endpoint)


def outputs_digest(model: Model, image: str) -> str:
    """Names what decides outputs, as far as the spec tells: 8 hex digits. Args: image: of the stages."""
    # Without quantization as earlier releases have it: a new operator must not take what is there for another model.
    rounded = () if model.quantization is None else (model.quantization,)
    image_of_model = image if model.scheme == "file" else None
    return _digest(model.uri, model.revision, model.endpoint, model.dtype, image_of_model, *rounded)


def _digest(*words: str | None) -> str:
    return hashlib.sha256(" ".join(word or "-" for word in words).encode()).hexdigest()[:8]


def place(deployment: Deployment) -> Place:
    """Of the wanted model. Everybody reads the same volume, and nobody writes to it."""
    model = deployment.spec.model
    path = model.uri.partition("://")[2]
    if model.scheme == "file":
        return Place(path)
    if model.scheme == "pvc":
        claim, _, inside = path.partition("/")
        return _on_claim(claim, f"{FOLDER}/{inside}".rstrip("/"))
    return _on_claim(names.model(deployment.name, digest(model)), FETCHED)


def _on_claim(claim: str, folder: str) -> Place:
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return Place(folder, (volume,), ({"name": "model", "mountPath": FOLDER, "readOnly": True},))
