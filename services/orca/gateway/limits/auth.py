"""Keys of clients. Routes check them, by a dependency or by a call; never a rule about path strings.

These routes are open, every other one needs a key where there are keys:

    /               the page's own text: it holds no data, and asks for a key to send with its calls
    /health         kubelets probe it and have no key; it tells nothing
    /ready          likewise; names the model, its groups and how many requests wait
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
from orca.gateway.settings import Settings

log = logging.getLogger(__name__)

KEYS_SHOWN = "orca.keys_shown"
"""In a call's scope: a list that the middleware puts there, and that gets the key which the call showed."""

BEHIND_ANSWER = "orca.behind_answer"
"""In a call's scope: what ends when its answer has ended. The middleware puts it there."""

KEY_FOUND = "orca.key_found"
"""In a call's scope: what `shown_key` found."""

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
"""The table above, for the tests. Nothing is decided by it."""


def check_access(settings: Settings, keys: KeyRing) -> None:
    """Say who may call. An API that is open to a network has to be wanted.

    Raises: SettingError.
    """
    if not keys.is_open:
        log.info("calls must show an API key", extra={"keys": len(keys.names)})
    elif is_loopback(settings.host):
        log.info("the API is open, to this machine only: no keys are set")
    elif settings.open_to_network:
        log.warning("the API is open to all who can reach %s: no keys are set, and open_to_network is", settings.host)
    else:
        raise SettingError(
            f"setting host: {settings.host} can be reached from outside and no API keys are set: give api_keys_file "
            "(`orca keys make NAME` makes a key), or set open_to_network to true"
        )


def key_check(keys: KeyRing, *, makes_work: bool) -> Callable[[Request], Awaitable[None]]:
    """What lets a call pass if it shows one of `keys` and keeps within that key's limits; a dependency, too.

    A call is counted until its answer has ended. Not by a dependency that yields, for which FastAPI runs some hundred
    functions a call. Args: makes_work: as for `KeyRing.enter`.
    Raises (what is returned): ApiError 401 or 429.
    """

    async def check(request: Request) -> None:
        if keys.is_open:
            return
        key = shown_key(keys, request.scope)
        if key is None:
            raise ApiError(401, "no valid API key: send `Authorization: Bearer <key>`", code="invalid_api_key")
        behind_answer: contextlib.ExitStack = request.scope[BEHIND_ANSWER]
        behind_answer.enter_context(counted(keys, key, request.scope, makes_work=makes_work))

    return check


def shown_key(keys: KeyRing, scope: Scope) -> ApiKey | None:
    """The one of `keys` that a call shows; it is looked for once."""
    if KEY_FOUND not in scope:
        scheme, _, shown = Headers(scope=scope).get("authorization", "").partition(" ")
        scope[KEY_FOUND] = keys.find(shown.strip() if scheme.lower() == "bearer" else "")
    found: ApiKey | None = scope[KEY_FOUND]
    return found


@contextlib.contextmanager
def counted(keys: KeyRing, key: ApiKey, scope: Scope, *, makes_work: bool) -> Iterator[None]:
    """A call counts for its key, and against its limits while it lasts. Args, raises: as `KeyRing.enter`."""
    scope[KEYS_SHOWN].append(key)
    keys.enter(key, makes_work=makes_work)
    try:
        yield
    finally:
        keys.leave(key, makes_work=makes_work)


def key_of(scope: Scope) -> ApiKey | None:
    """Return the key that let a call in; None where there are no keys."""
    shown: list[ApiKey] = scope[KEYS_SHOWN]
    return shown[0] if shown else None


def owner_of(key: ApiKey | None) -> str:
    """Return the text that stands for a key in stored requests. It does not reveal the key.

    Without keys everybody is one owner, and the text is empty.
    """
    return "" if key is None else hashlib.sha256(b"orca owner " + key.digest).hexdigest()[:32]
