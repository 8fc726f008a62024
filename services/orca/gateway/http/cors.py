"""Lets web pages of chosen other origins call the API (CORS).

A browser asks the server before a page's script may send JSON or a key to another origin, and before the script may
read an answer. Without `cors_origins` nothing here runs, and the browser refuses such calls.

`Access-Control-Allow-Credentials` is never sent: the API has no cookies, and a key is a header that the page itself
sets. So a page cannot use anything that the browser stores for this server.

Starlette's own middleware does not do. It answers the preflights of all other origins itself. It adds no headers to the
answer after a bug of ours, so the page could not read that answer.
"""

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca.gateway.origins import ANY_ORIGIN, as_browsers_write

METHODS = "GET, HEAD, POST, DELETE"

REQUEST_HEADERS = (
    "authorization", "content-type", "accept", "idempotency-key", "last-event-id", "prefer", "traceparent",
    "tracestate", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms",
)  # fmt: skip
"""Headers that the API reads. Others are allowed as a page asks for them: SDKs send many that no server reads."""

EXPOSED_HEADERS = (
    "x-request-id", "location", "preference-applied", "retry-after", "retry-after-ms", "x-should-retry",
    "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
)  # fmt: skip
"""Headers of answers that a page may read besides those that it always may."""

# Browsers keep the answer to a preflight at most 2 to 24 hours. A page that lost its right loses it soon.
_PREFLIGHT_SECONDS = 600

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+", re.IGNORECASE)


class CorsRules:
    """The headers of answers to pages of other origins."""

    def __init__(self, origins: Collection[str]) -> None:
        """Args: origins: as `origins.is_origin` takes them; none allows no page."""
        self._is_any = ANY_ORIGIN in origins
        self._origins = frozenset(map(as_browsers_write, origins))
        self.are_off = not origins

    def allows(self, origin: str) -> bool:
        return self._is_any or origin in self._origins

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers that every answer gets. Args: origin: of the page; None for other clients."""
        if self.are_off:
            return {}
        # Caches must not give one origin's answer to another, nor an answer without these headers to a page.
        vary = {} if self._is_any else {"vary": "Origin"}
        if origin is None or not self.allows(origin):
            return vary
        allowed = ANY_ORIGIN if self._is_any else origin
        return {
            "access-control-allow-origin": allowed,
            "access-control-expose-headers": ", ".join(EXPOSED_HEADERS),
            **vary,
        }

    def preflight(self, origin: str, asked: Headers) -> Response:
        """Return the answer to a browser that asks before it sends a page's call."""
        names = [name.strip().lower() for name in asked.get("access-control-request-headers", "").split(",")]
        allowed = dict.fromkeys((*REQUEST_HEADERS, *filter(_HEADER_NAME.fullmatch, names)))
        headers = self.headers(origin) | {
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": ", ".join(allowed),
            "access-control-max-age": str(_PREFLIGHT_SECONDS),
        }
        del headers["access-control-expose-headers"]
        if asked.get("access-control-request-private-network") == "true":
            # A page of the internet calls a server of a private network. Its origin is allowed, so this is meant.
            headers["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=headers)


class Cors:
    """ASGI middleware that answers preflights before any check of keys, and adds the headers to all other answers."""

    def __init__(self, app: ASGIApp, rules: CorsRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        origin = asked.get("origin")
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in asked
        if is_preflight and origin is not None and self._rules.allows(origin):
            await self._rules.preflight(origin, asked)(scope, receive, send)
            return
        added = [(name.encode(), text.encode("latin-1")) for name, text in self._rules.headers(origin).items()]

        async def add_headers_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, add_headers_and_send)
