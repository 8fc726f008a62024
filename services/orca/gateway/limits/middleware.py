"""Plain ASGI middleware; Starlette's base class for it would hide disconnects."""

import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca.core.api_keys import ApiKey
from orca.gateway.limits.auth import ANSWER_STACK, KEYS_SHOWN
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.metrics import GatewayMetrics


class HttpMetrics:
    """Counts HTTP answers by method, route and status, and by the key that the call showed."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_answered = False

        async def count_and_send(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                self._count(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, count_and_send)
        except Exception:
            # A bug in the gateway: Starlette answers it outside of all middleware.
            if not is_answered:
                self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        # Count by the route's template: unknown paths must not create metrics.
        self._metrics.count_http(scope["method"], getattr(scope.get("route"), "path", "other"), status)
        for key in scope.get(KEYS_SHOWN, ()):
            self._metrics.count_key(key.name, status)


class RateLimitHeaders:
    """Adds the headers about the key's rate, and closes the call's exit stack when its answer ends."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown: list[ApiKey] = []
        scope[KEYS_SHOWN] = shown

        async def add_headers_and_send(message: Message) -> None:
            if message["type"] == "http.response.start" and shown:
                added = [(name.encode(), text.encode()) for name, text in self._keys.headers(shown[0]).items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        with contextlib.ExitStack() as scope[ANSWER_STACK]:
            await self._app(scope, receive, add_headers_and_send)


class HeadAsGet:
    """Answers HEAD as GET without a body, as HTTP requires. FastAPI's router does not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        inner = {**scope, "method": "GET"}

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                # HttpMetrics outside counts the method that was used, and the route that the router recorded.
                scope["route"] = inner.get("route")
                await send(message)
            else:
                await send({**message, "body": b""})

        await self._app(inner, receive, send_without_body)
