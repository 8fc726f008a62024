"""Checks API keys. Routes call the check, or have it as a dependency; no rule looks at path strings.

These routes are open. If there are keys, every other route needs one:

    /               the page's own text: it has no data, and asks for a key to send with its calls
    /health         kubelets probe it and have no key; it reveals nothing
    /ready          likewise; it names the model, its groups and the number of waiting requests
    /metrics        scrapers have no key; sums over all clients, no prompts and no keys; see the setting metrics_port
    /openapi.json   the API's document: the same text for every deployment
"""

import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from orca.core.api_keys import ApiKey
from orca.core.domain.errors import SettingError
from orca.core.process.settings import is_loopback
from orca.gateway.errors import ApiError
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.origins import ANY_ORIGIN
from orca.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

KEYS_SHOWN = "orca.keys_shown"
"""Key in a call's scope: a list from the middleware, to which the key that the call showed is added."""

ANSWER_STACK = "orca.answer_stack"
"""Key in a call's scope: an exit stack from the middleware, which is closed when the call's answer has ended."""

KEY_FOUND = "orca.key_found"
"""Key in a call's scope: the result of `shown_key`."""

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
"""The table above, for the tests. It decides nothing."""


def check_access(settings: GatewaySettings, keys: KeyRing) -> None:
    """Log who may call, and refuse an API that would be open to a network by mistake. Raises: SettingError."""
    if keys.is_open and ANY_ORIGIN in settings.cors_origins:
        log.warning("cors_origins is * and no keys are set: every web page that a user opens can call the API")
    if not keys.is_open:
        log.info("calls must show an API key", extra={"keys": len(keys.names)})
    elif is_loopback(settings.host):
        log.info("the API is open to this machine only: no keys are set")
    elif settings.open_to_network:
        log.warning("the API is open to all who can reach %s: no keys are set, and open_to_network is", settings.host)
    else:
        raise SettingError(
            f"setting host: {settings.host} can be reached from outside and no API keys are set: set api_keys_file "
            "(`orca keys make NAME` makes a key), or set open_to_network to true"
        )


def key_check(keys: KeyRing, *, makes_work: bool) -> Callable[[Request], Awaitable[None]]:
    """Return a check that a call shows one of `keys` and keeps that key's limits. It is usable as a dependency.

    A call counts until its answer has ended. A dependency that yields could do that too, but FastAPI would run some
    hundred functions for it per call.

    Args: makes_work: as for `KeyRing.enter`.
    The check raises: ApiError 401 or 429.
    """

    async def check(request: Request) -> None:
        if keys.is_open:
            return
        key = shown_key(keys, request.scope)
        if key is None:
            raise _key_error(request.scope)
        answer_stack: contextlib.ExitStack = request.scope[ANSWER_STACK]
        answer_stack.enter_context(counted(keys, key, request.scope, makes_work=makes_work))

    return check


def _key_error(scope: Scope) -> ApiError:
    """Return the error for a call without a valid key. It never quotes what the call shows."""
    if "authorization" in Headers(scope=scope):
        message = "Incorrect API key provided: send a valid one as `Authorization: Bearer <key>`."
        return ApiError(401, message, code="invalid_api_key")
    return ApiError(
        401, "You didn't provide an API key: send it as `Authorization: Bearer <key>`.", code="invalid_api_key"
    )


def shown_key(keys: KeyRing, scope: Scope) -> ApiKey | None:
    """Return the one of `keys` that a call shows. The scope keeps the result."""
    if KEY_FOUND not in scope:
        scheme, _, shown = Headers(scope=scope).get("authorization", "").partition(" ")
        scope[KEY_FOUND] = keys.find(shown.strip() if scheme.lower() == "bearer" else "")
    found: ApiKey | None = scope[KEY_FOUND]
    return found


@contextlib.contextmanager
def counted(keys: KeyRing, key: ApiKey, scope: Scope, *, makes_work: bool) -> Iterator[None]:
    """Count a call for its key, and against the key's limits while it lasts. Args, raises: as `KeyRing.enter`."""
    scope[KEYS_SHOWN].append(key)
    keys.enter(key, makes_work=makes_work)
    try:
        yield
    finally:
        keys.leave(key, makes_work=makes_work)


def key_of(scope: Scope) -> ApiKey | None:
    """Return the key that let a call in; None if there are no keys."""
    shown: list[ApiKey] = scope[KEYS_SHOWN]
    return shown[0] if shown else None


def owner_of(key: ApiKey | None) -> str:
    """Return the text that stands for a key in stored requests. It does not reveal the key.

    Without keys everybody is one owner, and the text is empty.
    """
    return "" if key is None else hashlib.sha256(b"orca owner " + key.digest).hexdigest()[:32]
