"""Contents that clients send as a text or as parts: Orca takes parts of text only."""

from collections.abc import Mapping
from typing import Any

from orca.core.domain.errors import InvalidRequest
from orca.gateway.errors import shown, unsupported


def joined_text(content: Any, param: str, fields: Mapping[str, str]) -> str:
    """Return the text of a content: a text, or the texts of its parts, with a line break between two.

    Args:
        fields: the types that a part may have -> the field with its text.
    Raises: InvalidRequest, ApiError, which name the part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param}: must be text or a list of parts, not {shown(content)}", param=param)
    return "\n".join(_text_of(part, f"{param}[{i}]", fields) for i, part in enumerate(content))


def _text_of(part: Any, param: str, fields: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in fields:
        types = " or ".join(fields)
        raise unsupported(f"{param}.type", f"must be {types}, not {shown(kind)}: no other parts are supported")
    text = part.get(fields[kind]) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}: must be an object with a type and a text", param=param)
    return text
