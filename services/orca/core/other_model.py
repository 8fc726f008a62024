"""A model besides a gateway's own, as one entry of `--other-models`. Those who start gateways write such entries.

    /models/old?name=austen&dtype=bfloat16&max_model_len=512

An entry is a folder and, after a question mark, the same options that the gateway's own model has as flags, in the form
of a URL's query. Entries are comma-separated, so a comma in a name or a folder is written %2C.
"""

from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlencode

from orca.core.answer_formats import AUTO_FORMAT, REASONING_FORMATS, TOOL_FORMATS
from orca.core.domain.model import DTYPES, QUANTIZATIONS

DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    folder: str
    name: str | None = None  # what clients call it; None means the folder's name
    dtype: str = DTYPE
    quantization: str | None = None  # None leaves weights in dtype
    max_model_len: int | None = None  # in tokens; None means what the model allows
    tool_format: str = AUTO_FORMAT
    reasoning_format: str = AUTO_FORMAT

    def to_text(self) -> str:
        """Return the entry that `from_text` reads."""
        fields = {
            "name": self.name,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "max_model_len": self.max_model_len,
            # Gateways of the release before, which may read the entry, do not know these options.
            "tool_format": None if self.tool_format == AUTO_FORMAT else self.tool_format,
            "reasoning_format": None if self.reasoning_format == AUTO_FORMAT else self.reasoning_format,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return f"{quote(self.folder)}?{urlencode(given)}"

    @classmethod
    def from_text(cls, text: str) -> "OtherModel":
        """Read an entry. Raises: ValueError for another form, an unknown option, or a value that no model can have."""
        folder, _, query = text.partition("?")
        given = {name: values[-1] for name, values in parse_qs(query, strict_parsing=bool(query)).items()}
        names = ("name", "dtype", "quantization", "max_model_len")
        name, dtype, quantization, length = (given.pop(field, None) for field in names)
        tool_format, reasoning_format = (given.pop(field, AUTO_FORMAT) for field in ("tool_format", "reasoning_format"))
        if given or not folder or dtype not in (None, *DTYPES) or quantization not in (None, *QUANTIZATIONS):
            raise ValueError(text)
        if tool_format not in TOOL_FORMATS or reasoning_format not in REASONING_FORMATS:
            raise ValueError(text)
        return cls(
            folder=unquote(folder),
            name=name,
            dtype=dtype or DTYPE,
            quantization=quantization,
            max_model_len=None if length is None else int(length),
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )
