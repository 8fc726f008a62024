"""Calls that their client may repeat: `Idempotency-Key` names the generation.

The same key of the same owner is one generation, on any gateways and also at the same time, for as long as the pool
keeps the request. The name is derived from owner and key and reveals neither.
"""

import hashlib

import orjson
from pydantic import BaseModel
from starlette.datastructures import Headers

from orca.gateway.errors import ApiError

HEADER = "idempotency-key"
CHARACTERS_MAX = 255


def read_idempotency_key(headers: Headers) -> str | None:
    """Return the call's key, None without one. Raises: ApiError 400."""
    keys = set(headers.getlist(HEADER))
    if len(keys) > 1:
        message = "Idempotency-Key: occurs more than once, with different values"
        raise ApiError(400, message, param="Idempotency-Key", code="invalid_idempotency_key")
    key = keys.pop() if keys else None
    if key is not None and not (1 <= len(key) <= CHARACTERS_MAX and key.isascii() and key.isprintable()):
        message = f"Idempotency-Key: must be 1 to {CHARACTERS_MAX} printable ASCII characters"
        raise ApiError(400, message, param="Idempotency-Key", code="invalid_idempotency_key")
    return key


def keyed_name(owner: str, key: str) -> str:
    """Return the id of the generation that an owner's key stands for."""
    return f"keyed-{_hash(f'{owner} {key}'.encode())}"


def body_digest(path: str, body: BaseModel) -> str:
    """Hash a body so that equal meaning gives an equal hash: field order and null for a default do not matter."""
    fields = {name: value for name, value in body.model_dump(mode="json").items() if value is not None}
    return _hash(path.encode() + b" " + orjson.dumps(fields, option=orjson.OPT_SORT_KEYS))


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
