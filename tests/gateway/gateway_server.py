"""A real server on a loopback port, in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
from gateway_rig import Rig, rig, until

from orca.gateway.server import Server, make_server
from orca.gateway.settings import Settings


@dataclass
class Served:
    rig: Rig
    server: Server
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def open(self, head: bytes, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(head + body)
        await writer.drain()
        return reader, writer

    async def open_stream(self, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A streaming completion, with nothing between test and socket."""
        content = orjson.dumps({"prompt": "the fox", "max_tokens": 100, "stream": True, **body})
        head = b"POST /v1/completions HTTP/1.1\r\nhost: orca\r\ncontent-type: application/json\r\n"
        head += b"content-length: %d\r\n\r\n" % len(content)
        return await self.open(head, content)


@contextlib.asynccontextmanager
async def served(settings: Settings | None = None, **options: Any) -> AsyncIterator[Served]:
    settings = settings or Settings(model="tiny", port=0, drain_seconds=1)
    async with rig(settings=settings, runs_tasks=False, **options) as one:
        server = make_server(one.app, settings)
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        await until(lambda: one.pool.revision is not None)
        try:
            yield Served(one, server, task)
        finally:
            server.should_exit = server.force_exit = True
            await task
