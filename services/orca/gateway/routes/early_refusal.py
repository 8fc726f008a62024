"""Refuses calls for the load in front of the router: the refusal of `Overload.check`, at a part of what it costs there.

A gateway that is asked for many times what the groups can do mostly refuses, and where it shares processors with them,
each refusal takes computing time from a call that was accepted.
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
    """What the router would have noted of a call, for those who count by it."""

    path: str


class EarlyRefusal:
    """ASGI middleware. Whatever is not plainly one call too many passes, and is judged behind the router: other paths,
    calls without a valid key, and those that may repeat an accepted call.
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
            return _known(gateway.overload, None)
        key = shown_key(gateway.keys, scope)
        refusal = None if key is None else _known(gateway.overload, key.limits.queue_percent)
        if key is None or refusal is None:
            return None
        try:
            with counted(gateway.keys, key, scope, makes_work=True):
                return refusal
        except ApiError as beyond_its_limits:
            return beyond_its_limits


def _known(overload: Overload, queue_percent: int | None) -> ApiError | None:
    if late := overload.lag.refusal():
        return late
    full = overload.known_refusal(queue_percent)
    return None if full is None else api_error(full)
