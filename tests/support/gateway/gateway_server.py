"""A real server on a loopback port, in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from orca.gateway.http.bounds import OpenConnections
from orca.gateway.server import GatewayServer, make_server
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import Rig, rig, until

LIMIT_SECONDS = 60.0
"""Longer than anything takes on a busy machine."""


@dataclass
class Served:
    """A gateway on a real socket, with the rig behind it."""

    rig: Rig
    server: GatewayServer
    task: asyncio.Task[None]
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def open_connections(self) -> OpenConnections:
        """Return the open connections of the port for calls."""
        found = self.server.config.http.open_connections  # type: ignore[union-attr]
        assert isinstance(found, OpenConnections)
        return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def open(self, head: bytes, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(head + body)
        await writer.drain()
        self.keep(writer)
        return reader, writer

    def keep(self, writer: asyncio.StreamWriter) -> None:
        """Close this connection at the end of the test."""
        self._writers.append(writer)

    async def close_all(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def open_stream(self, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A streaming completion, with nothing between test and socket."""
        return await self.open(completion(**{"stream": True, **body}))


def completion(**body: Any) -> bytes:
    """A call as it goes over the wire."""
    content = orjson.dumps({"prompt": "the fox", "max_tokens": 100, **body})
    head = b"POST /v1/completions HTTP/1.1\r\nhost: orca\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(content) + content


@contextlib.asynccontextmanager
async def served(settings: GatewaySettings | None = None, **options: Any) -> AsyncIterator[Served]:
    """Serve a gateway on a real socket, until the block ends."""
    settings = settings or GatewaySettings(model="tiny", port=0, drain_seconds=1, grammar_seconds_max=LIMIT_SECONDS)
    async with rig(settings=settings, runs_tasks=False, **options) as one:
        server = make_server(one.app, settings)
        task = asyncio.create_task(server.serve())
        doors = 1 if settings.metrics_port is None else 2
        await until(lambda: server.started and len(server.servers) == doors)
        await until(lambda: one.pool.state.revision is not None)
        both = Served(one, server, task)
        try:
            yield both
        finally:
            await both.close_all()
            server.should_exit = server.force_exit = True
            await task


async def refusal(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer behind which the connection ends; in OpenAI's shape."""
    head, _, body = (await asyncio.wait_for(reader.read(), LIMIT_SECONDS)).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert b"connection: close" in lines
    assert b"content-type: application/json" in lines
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(lines[0].split()[1]), error
