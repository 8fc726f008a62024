"""A model as gateways are given it: their own, and beside it those that a change of the model has left behind.

Gateways mount each in a place of its own. What they have is read back from their pods' templates in the cluster, since
a spec tells only of the model that is wanted now.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orca.core.other_model import DTYPE, OtherModel
from orca.operator.domain.resource import Deployment, Json
from orca.operator.render.model import FOLDER, place
from orca.operator.render.pods import flags_of

OTHERS_FOLDER = "/other-models"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    claim: str | None  # that holds it; None for a folder of the images
    folder: str  # inside the claim, or of the images
    dtype: str
    quantization: str | None = None
    name: str | None = None  # what clients call it; None takes the folder's name
    max_model_len: int | None = None

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What tells it from others: two that differ in the rest write the same tokens."""
        return self.claim, self.folder, self.dtype, self.quantization

    @property
    def mount(self) -> str:
        """Of its claim, where it is not the gateway's own model; one for all models of a claim."""
        assert self.claim is not None
        return f"{OTHERS_FOLDER}/{_digest(self.claim)}"

    def to_text(self) -> str:
        """For `--other-models`."""
        folder = self.folder if self.claim is None else f"{self.mount}/{self.folder}".rstrip("/")
        return OtherModel(
            folder=folder,
            name=self.name,
            dtype=self.dtype,
            quantization=self.quantization,
            max_model_len=self.max_model_len,
        ).to_text()

    def volume(self) -> tuple[Json, Json]:
        """Volume and mount of its claim."""
        assert self.claim is not None
        name = f"model-{_digest(self.claim)}"
        volume = {"name": name, "persistentVolumeClaim": {"claimName": self.claim, "readOnly": True}}
        return volume, {"name": name, "mountPath": self.mount, "readOnly": True}


def wanted(deployment: Deployment) -> KnownModel:
    """The model that the spec names."""
    spec, at = deployment.spec.model, place(deployment)
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in at.volumes]
    return KnownModel(
        claim=claims[0] if claims else None,
        folder=at.folder.removeprefix(FOLDER).strip("/") if claims else at.folder,
        dtype=spec.dtype,
        quantization=spec.quantization,
        name=spec.name,
        max_model_len=spec.max_model_len,
    )


def read_back(pod: Json, container: str) -> list[KnownModel]:
    """The models of a gateway, or the model of a stage, its own first. Args: pod: its spec. container: its name.

    None of a pod whose user has written other arguments over ours.
    """
    of = next((each for each in pod.get("containers") or () if each["name"] == container), {})
    try:
        return [_located(pod, of, told) for told in _told(flags_of(of))]
    except ValueError:
        return []


def _told(flags: Mapping[str, str]) -> Iterable[OtherModel]:
    """Raises: ValueError."""
    if "--model" in flags:
        length = flags.get("--max-model-len")
        yield OtherModel(
            folder=flags["--model"],
            name=flags.get("--name"),
            dtype=flags.get("--dtype", DTYPE),
            quantization=flags.get("--quantization"),
            max_model_len=None if length is None else int(length),
        )
    for word in flags.get("--other-models", "").split(","):
        if word:
            yield OtherModel.from_text(word)


def _located(pod: Json, container: Json, told: OtherModel) -> KnownModel:
    claim, folder = None, told.folder
    for mount in container.get("volumeMounts") or []:
        found = _claim(pod, mount["name"])
        if found is not None and f"{told.folder}/".startswith(f"{mount['mountPath']}/"):
            claim, folder = found, told.folder.removeprefix(mount["mountPath"]).strip("/")
    return KnownModel(
        claim=claim,
        folder=folder,
        dtype=told.dtype,
        quantization=told.quantization,
        name=told.name,
        max_model_len=told.max_model_len,
    )


def _claim(pod: Json, volume: str) -> str | None:
    for each in pod.get("volumes") or []:
        if each["name"] == volume and "persistentVolumeClaim" in each:
            return str(each["persistentVolumeClaim"]["claimName"])
    return None


def _digest(claim: str) -> str:
    return hashlib.sha256(claim.encode()).hexdigest()[:8]
