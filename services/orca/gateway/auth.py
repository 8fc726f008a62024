"""Keys of clients. A route dependency, never a rule about path strings."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request

from orca.gateway.errors import ApiError


def key_check(keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets a call pass if it shows one of `keys`; without keys, every call passes.

    Raises (the dependency): ApiError 401. The time it takes does not tell how much of a key was right.
    """
    known = [_digest(key) for key in keys]

    async def check(request: Request) -> None:
        if not known:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        shown = _digest(key.strip() if scheme.lower() == "bearer" else "")
        # All are compared, whichever fits.
        if not any([hmac.compare_digest(shown, one) for one in known]):  # noqa: C419
            raise ApiError(401, "no valid API key: send `Authorization: Bearer <key>`", code="invalid_api_key")

    return check


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
