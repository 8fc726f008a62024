"""Plain ASGI middleware; Starlette's base class for it would hide disconnects."""

import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca.core.api_keys import ApiKey
from orca.gateway.limits.auth import BEHIND_ANSWER, KEYS_SHOWN
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.metrics import Metrics


class HttpMetrics:
    """Counts HTTP answers by method, route and status, and by the key that their call showed."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_answered = False

        async def counting(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                self._count(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:
            # A bug of ours, which Starlette answers outside of all middleware.
            if not is_answered:
                self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        # The route's template: paths that nobody serves must not make up metrics.
        self._metrics.count_http(scope["method"], getattr(scope.get("route"), "path", "other"), status)
        for key in scope.get(KEYS_SHOWN, ()):
            self._metrics.count_key(key.name, status)


class RateLimitHeaders:
    """Tells of the rate of the key that a call showed, and knows when its answer ends."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown: list[ApiKey] = []
        scope[KEYS_SHOWN] = shown

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and shown:
                told = [(name.encode(), text.encode()) for name, text in self._keys.headers(shown[0]).items()]
                message = {**message, "headers": [*message["headers"], *told]}
            await send(message)

        with contextlib.ExitStack() as scope[BEHIND_ANSWER]:
            await self._app(scope, receive, telling)


class HeadAsGet:
    """Answers HEAD as GET without a body, as HTTP asks for; routers made for APIs do not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        inner = {**scope, "method": "GET"}

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Metrics outside count the method that was used, and the route that the router noted.
                scope["route"] = inner.get("route")
                await send(message)
            else:
                await send({**message, "body": b""})

        await self._app(inner, receive, without_body)
