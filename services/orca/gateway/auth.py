"""Keys of clients. A route dependency, never a rule about path strings.

These routes are open, every other one needs a key where there are keys:

    /               the page's own text: it holds no data, and asks for a key to send with its calls
    /health         kubelets probe it and have no key; it tells nothing
    /ready          likewise; names the model, its groups and how many requests wait
    /metrics        scrapers have no key; sums over all clients, no prompts and no keys; see the setting metrics_port
    /openapi.json   the API's document: the same text for every deployment
"""

import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request

from orca.gateway.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
"""The table above, for the tests. Nothing is decided by it."""


def key_check(keys: Sequence[str], calls_max: int | None) -> Callable[[Request], AsyncIterator[None]]:
    """A dependency that lets a call pass if it shows one of `keys`; without keys, every call passes.

    Args: calls_max: calls at a time with one key; None bounds nothing. A call is counted until its answer has ended.
    Raises (the dependency): ApiError 401 or 429. The time it takes does not tell how much of a key was right.
    """
    known = [_digest(key) for key in keys]
    open_calls: Counter[bytes] = Counter()

    async def check(request: Request) -> AsyncIterator[None]:
        if not known:
            yield
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        shown = _digest(key.strip() if scheme.lower() == "bearer" else "")
        # All are compared, whichever fits.
        if not any([hmac.compare_digest(shown, one) for one in known]):  # noqa: C419
            raise ApiError(401, "no valid API key: send `Authorization: Bearer <key>`", code="invalid_api_key")
        if calls_max is not None and open_calls[shown] >= calls_max:
            message = f"more than {calls_max} calls at a time with this key"
            raise ApiError(429, message, kind="overloaded_error", code="too_many_calls", retry_after_s=1)
        open_calls[shown] += 1
        try:
            yield
        finally:
            open_calls[shown] -= 1

    return check


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
