"""Answers through a proxy do not begin before the proxy has seen the end of the request that it forwards.

A reverse proxy written in Go, such as Traefik or Caddy, closes its own request's body when the first byte of an answer
comes back (net/http, before Server.EnableFullDuplex). If it has not looked for the end of that body yet, which it does
in a read of its own behind the last byte, it takes this for a broken request and cuts the answer off. Headers here
leave within a few milliseconds of the body: on two busy processors, 27 of 676 answers through Traefik 3.6 were cut
behind their headers, and with a pause of 50 ms none of 610.

The pause is time for a goroutine of the proxy to run once. A proxy that gets no processor for longer still cuts: beside
six busy processes with the shares of a pod that asks for 1 CPU, of a Traefik with those of one that asks for none 3 of
260 answers, with shares like theirs none of 523. So the headers of a stream, of little use alone, wait further, for its
first event: the busier the machine, the later that is.
"""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca.gateway.http.connection import SEND_BODY

FIRST_EVENT_S = 1.0
"""From the end of a request: a client whose first event takes longer is told that its call was accepted."""

_MARKS = frozenset({b"x-forwarded-for", b"forwarded"})


class ProxyPause:
    """Holds the start of an answer to a request that has a body and was forwarded; all others pass untouched.

    It goes out with the first of the answer's body, or after `FIRST_EVENT_S`.

    Args: pause_s: from the end of a request to the first byte of its answer, at least. 0 holds nothing.
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
            send_body = answer.behind_start(extensions[SEND_BODY]["send"])
            scope = {**scope, "extensions": {**extensions, SEND_BODY: {"send": send_body}}}

        async def hearing() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                answer.heard_s = time.monotonic()
            return message

        try:
            await self._app(scope, hearing, answer.send)
        except Exception:
            await answer.begin()  # what was told as an answer is one, and is cut off: it is no other error now
            raise
        finally:
            answer.close()


class _Answer:
    """One that is on its way out. `heard_s` is when the last of its request came, by `time.monotonic`."""

    def __init__(self, send: Send, pause_s: float) -> None:
        self.heard_s = time.monotonic()
        self._send = send
        self._pause_s = pause_s
        self._start: Message | None = None
        self._turn = asyncio.Lock()
        self._late: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._late = asyncio.create_task(self._begin(max(self._pause_s, FIRST_EVENT_S)))
        else:
            await self.begin()
            await self._send(message)

    def behind_start(self, send: Send) -> Send:
        """What sends a body past this one: not before its start."""

        async def sending(message: Message) -> None:
            await self.begin()
            await send(message)

        return sending

    async def begin(self) -> None:
        """Send the start, if there is one that has not gone out, behind the pause."""
        await self._begin(self._pause_s)

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()

    async def _begin(self, least_s: float) -> None:
        if self._start is None and not self._turn.locked():
            return
        await asyncio.sleep(self.heard_s + least_s - time.monotonic())
        async with self._turn:  # who comes while it leaves waits for it
            start, self._start = self._start, None
            if start is not None:
                await self._send(start)


def _is_forwarded_body(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    return bool(names & _MARKS) and bool(names & {b"content-length", b"transfer-encoding"})
