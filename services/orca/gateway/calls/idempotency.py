"""A call that its client may repeat: `Idempotency-Key` names its generation.

The same key of the same owner is one generation, whichever gateways the calls come to, also at the same time, for as
long as the pool keeps the request. The name follows from owner and key and tells neither.
"""

import hashlib

import orjson
from pydantic import BaseModel
from starlette.datastructures import Headers

from orca.gateway.errors import ApiError

HEADER = "idempotency-key"
CHARACTERS_MAX = 255


def read_idempotency_key(headers: Headers) -> str | None:
    """Return the key that a call shows, None without one. Raises: ApiError 400."""
    keys = set(headers.getlist(HEADER))
    if len(keys) > 1:
        message = "the Idempotency-Key header is there more than once, with different values"
        raise ApiError(400, message, param="Idempotency-Key", code="invalid_idempotency_key")
    key = keys.pop() if keys else None
    if key is not None and not (1 <= len(key) <= CHARACTERS_MAX and key.isascii() and key.isprintable()):
        message = f"the Idempotency-Key header must be 1 to {CHARACTERS_MAX} printable ASCII characters"
        raise ApiError(400, message, param="Idempotency-Key", code="invalid_idempotency_key")
    return key


def keyed_name(owner: str, key: str) -> str:
    """The id of the generation that an owner's key stands for."""
    return f"keyed-{_hash(f'{owner} {key}'.encode())}"


def body_digest(path: str, body: BaseModel) -> str:
    """Equal for bodies that mean the same: neither the order of fields nor null for a default makes a difference."""
    fields = {name: value for name, value in body.model_dump(mode="json").items() if value is not None}
    return _hash(path.encode() + b" " + orjson.dumps(fields, option=orjson.OPT_SORT_KEYS))


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
