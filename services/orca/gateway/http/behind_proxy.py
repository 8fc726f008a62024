"""Delays answers through a proxy until the proxy has seen the end of the request that it forwards.

A reverse proxy written in Go, such as Traefik or Caddy, closes its own request's body when the first byte of an answer
comes back (net/http, before Server.EnableFullDuplex). It sees the end of that body only by a separate read after the
last byte. If it has not read yet, it takes the request for broken and cuts the answer off. Headers leave the gateway
within a few milliseconds of the body. On two busy CPUs, 27 of 676 answers through Traefik 3.6 were cut after their
headers. With a pause of 50 ms none of 610 was cut.

The pause lets a goroutine of the proxy run once. A proxy that gets no CPU for longer still cuts. Six busy processes
with the CPU shares of a pod that requests 1 CPU ran beside Traefik. With the shares of a pod without a CPU request,
Traefik cut 3 of 260 answers. With the same shares as the others, it cut none of 523. So the headers of a stream, of
little use alone, wait longer, for the first event: the busier the machine, the later that is.
"""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca.gateway.http.connection import SEND_BODY

FIRST_EVENT_S = 1.0
"""The headers are sent without the first event if it comes later than this after the end of the request."""

_MARKS = frozenset({b"x-forwarded-for", b"forwarded"})


class ProxyPause:
    """Delays the start of the answer to a forwarded request with a body; all others pass unchanged.

    The start is sent with the first part of the answer's body, or after `FIRST_EVENT_S`.

    Args: pause_s: least time from the end of a request to the first byte of its answer. 0 delays nothing.
    """

    def __init__(self, app: ASGIApp, pause_s: float) -> None:
        self._app = app
        self._pause_s = pause_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._pause_s or not _is_forwarded_body(scope):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._pause_s)
        extensions = scope.get("extensions", {})
        if SEND_BODY in extensions:
            send_body = answer.after_start(extensions[SEND_BODY]["send"])
            scope = {**scope, "extensions": {**extensions, SEND_BODY: {"send": send_body}}}

        async def receive_and_note_time() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                answer.received_s = time.monotonic()
            return message

        try:
            await self._app(scope, receive_and_note_time, answer.send)
        except Exception:
            await answer.begin()  # an answer that has begun is cut off: it must not turn into another error
            raise
        finally:
            answer.close()


class _Answer:
    """One answer on its way out. `received_s` is when the end of its request came, by `time.monotonic`."""

    def __init__(self, send: Send, pause_s: float) -> None:
        self.received_s = time.monotonic()
        self._send = send
        self._pause_s = pause_s
        self._start: Message | None = None
        self._lock = asyncio.Lock()
        self._late: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._late = asyncio.create_task(self._begin(max(self._pause_s, FIRST_EVENT_S)))
        else:
            await self.begin()
            await self._send(message)

    def after_start(self, send: Send) -> Send:
        """Return a `send` for the body that sends the start first."""

        async def send_after_start(message: Message) -> None:
            await self.begin()
            await send(message)

        return send_after_start

    async def begin(self) -> None:
        """Send the start after the pause, if there is one that was not sent."""
        await self._begin(self._pause_s)

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()

    async def _begin(self, least_s: float) -> None:
        if self._start is None and not self._lock.locked():
            return
        await asyncio.sleep(self.received_s + least_s - time.monotonic())
        async with self._lock:  # others wait while the start is being sent
            start, self._start = self._start, None
            if start is not None:
                await self._send(start)


def _is_forwarded_body(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    return bool(names & _MARKS) and bool(names & {b"content-length", b"transfer-encoding"})
