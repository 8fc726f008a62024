"""A server of a few lines that says exactly what a test tells it to say, and the parts of a stream of completions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import orjson

from orca.bench.client import LoadTarget

Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(body: object) -> bytes:
    """Return a server-sent event with this JSON body."""
    return b"data: " + (body if isinstance(body, bytes) else orjson.dumps(body)) + b"\n\n"


def token(number: int) -> bytes:
    """Return the event of one token."""
    return b"id: 0.%d\n" % number + event({"choices": [{"text": "x", "token_ids": [number]}]})


def usage(count: int) -> bytes:
    """Return the event of the usage."""
    return event({"choices": [], "usage": {"completion_tokens": count}})


def chunk(data: bytes) -> bytes:
    """Return the bytes as one chunk of HTTP."""
    return f"{len(data):x}".encode() + b"\r\n" + data + b"\r\n"


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[LoadTarget]:
    """A server that reads one request per connection, lets `answer` write, and closes."""

    handling: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get(b"Content-Length", b"0")))
        await answer(orjson.loads(body) if body else {"path": head.split(b" ")[1].decode()}, writer)
        writer.close()
        # The client may have left.
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield LoadTarget(url=f"http://127.0.0.1:{port}", model="m", vocab_size=50, timeout_s=60)
    await asyncio.gather(*handling, return_exceptions=True)
