"""How a gateway is told of a model beside its own, as one word of `--other-models`; whoever starts gateways writes it.

    /models/old?name=austen&dtype=bfloat16&max_model_len=512

A folder, and behind a question mark, in the form of a URL's query, what the flags of those names are for the gateway's
own model. Commas part such words, so one in a name or a folder is written %2C.
"""

from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlencode

from orca.core.domain.model import DTYPES, QUANTIZATIONS

DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    folder: str
    name: str | None = None  # what clients call it; None takes the folder's name
    dtype: str = DTYPE
    quantization: str | None = None  # None leaves weights in dtype
    max_model_len: int | None = None  # in tokens; None takes what the model allows

    def to_text(self) -> str:
        """As `read` takes it."""
        fields = {
            "name": self.name,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "max_model_len": self.max_model_len,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return f"{quote(self.folder)}?{urlencode(given)}"

    @classmethod
    def from_text(cls, word: str) -> "OtherModel":
        """Raises: ValueError when it is not of the form, names another field, or has a value that no model can have."""
        folder, _, query = word.partition("?")
        given = {name: values[-1] for name, values in parse_qs(query, strict_parsing=bool(query)).items()}
        names = ("name", "dtype", "quantization", "max_model_len")
        name, dtype, quantization, length = (given.pop(field, None) for field in names)
        if given or not folder or dtype not in (None, *DTYPES) or quantization not in (None, *QUANTIZATIONS):
            raise ValueError(word)
        return cls(
            folder=unquote(folder),
            name=name,
            dtype=dtype or DTYPE,
            quantization=quantization,
            max_model_len=None if length is None else int(length),
        )
