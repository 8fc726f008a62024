"""References to models, as the operator gives them to pods, and the digests that tell one model from another."""

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from orca.core.answer_formats import REASONING_FORMATS, TOOL_FORMATS
from orca.core.domain.model import DTYPES, QUANTIZATIONS
from orca.operator.domain.resource import Json, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """The place of a model, and how a gateway or a stage reads it."""

    claim: str | None  # that holds it; None for a folder of the images
    folder: str  # inside the claim, or of the images
    dtype: str
    quantization: str | None = None
    name: str | None = None  # that clients use; None takes the folder's name
    max_model_len: int | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None

    @property
    def identity(self) -> tuple[str | None, ...]:
        """The fields that decide its tokens. Models that differ only in other fields write the same tokens."""
        return self.claim, self.folder, self.dtype, self.quantization

    def as_json(self) -> Json:
        """Return its fields as `read_model` takes them; fields that are None are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_model(value: Any) -> ModelReference:
    """Read a model that `as_json` wrote. Raises: ValueError if it is anything else."""
    if not isinstance(value, dict) or value.keys() - {each.name for each in fields(ModelReference)}:
        raise ValueError(f"{value!r} is not a model")
    texts = [value.get(name) for name in ("claim", "quantization", "name")]
    length = value.get("max_model_len")
    is_sound = (
        isinstance(value.get("folder"), str)
        and all(text is None or isinstance(text, str) for text in texts)
        and value.get("dtype") in DTYPES
        and value.get("quantization") in (None, *QUANTIZATIONS)
        and value.get("tool_format") in (None, *TOOL_FORMATS)
        and value.get("reasoning_format") in (None, *REASONING_FORMATS)
        and (length is None or (isinstance(length, int) and not isinstance(length, bool)))
    )
    if not is_sound:
        raise ValueError(f"{value!r} is not a model")
    return ModelReference(claim=value.pop("claim", None), **value)


def source_digest(model: ModelSpec) -> str:
    """Name what is fetched: 8 hex digits of where it comes from and of its revision."""
    return _digest(model.uri, model.revision, model.endpoint)


def outputs_digest(model: ModelSpec, image: str) -> str:
    """Name what decides outputs, as far as the spec tells: 8 hex digits. Args: image: of the stages."""
    # A model without quantization has the digest that it had before there was any.
    rounded = () if model.quantization is None else (model.quantization,)
    image_of_model = image if model.scheme == "file" else None
    return _digest(model.uri, model.revision, model.endpoint, model.dtype, image_of_model, *rounded)


def _digest(*words: str | None) -> str:
    return hashlib.sha256(" ".join(word or "-" for word in words).encode()).hexdigest()[:8]
