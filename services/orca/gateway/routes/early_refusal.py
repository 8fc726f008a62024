"""Refuses calls for load before the router: the refusal of `Overload.check`, at a fraction of its cost.

A gateway that gets many times the load that its groups can serve mostly refuses. If it shares CPUs with them, each
refusal takes time from a call that was accepted.
"""

from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orca.gateway.calls.idempotency import HEADER
from orca.gateway.errors import ApiError, api_error, error_response
from orca.gateway.gateway import Gateway
from orca.gateway.limits.auth import counted, shown_key
from orca.gateway.limits.overload import Overload


@dataclass(frozen=True, slots=True)
class _Route:
    """The route of a refused call, for metrics: the router has not recorded one."""

    path: str


class EarlyRefusal:
    """ASGI middleware. It refuses only what is certainly one call too many.

    Other paths, calls without a valid key, and calls that may repeat an accepted one pass, and are checked later.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway, paths: Collection[str]) -> None:
        """Args: paths: of the calls that generate."""
        self._app = app
        self._gateway = gateway
        self._routes = {path: _Route(path) for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        refusal = None if route is None else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            scope["route"] = route
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        gateway = self._gateway
        if gateway.drain.has_begun or HEADER in Headers(scope=scope):
            return None
        if gateway.keys.is_open:
            return _load_refusal(gateway.overload, None)
        key = shown_key(gateway.keys, scope)
        refusal = None if key is None else _load_refusal(gateway.overload, key.limits.queue_percent)
        if key is None or refusal is None:
            return None
        try:
            with counted(gateway.keys, key, scope, makes_work=True):
                return refusal
        except ApiError as beyond_its_limits:
            return beyond_its_limits


def _load_refusal(overload: Overload, queue_percent: int | None) -> ApiError | None:
    if lag_refusal := overload.lag.refusal():
        return lag_refusal
    full = overload.known_refusal(queue_percent)
    return None if full is None else api_error(full)
