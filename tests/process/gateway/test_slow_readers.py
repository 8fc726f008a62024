"""Readers that stop reading: the others notice nothing, the gateway keeps little for them, and they get everything."""

import asyncio
import socket
from typing import Any

import orjson
import pytest

from orca.gateway.answer.log_watcher import UNTAKEN_MAX
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import until
from support.gateway.gateway_server import LIMIT_SECONDS, Served, served

READERS = 50
# More than the gateway reads ahead for a connection.
CHOICES, TOKENS = 12, 150
SYSTEM_BUFFER_BYTES = 16 << 10
"""Buffer of each socket, at both ends: the rest of a stream has to be somewhere else."""

TOKEN_BYTES_MAX = 500  # of an event
SETTINGS = GatewaySettings(model="tiny", port=0, drain_seconds=1, unread_seconds_max=30_000)
IMPATIENT = GatewaySettings(model="tiny", port=0, drain_seconds=1, unread_seconds_max=0.5)


def call(**more: Any) -> bytes:
    body = {"prompt": "the fox", "n": CHOICES, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **more}
    content = orjson.dumps(body)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: orca\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(content) + content


async def stopped_reader(one: Served, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent its call and takes no more bytes than its system does."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SYSTEM_BUFFER_BYTES)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", one.server.port))
    reader, writer = await asyncio.open_connection(sock=own)
    writer.transport.pause_reading()
    writer.write(call(**body))
    one.keep(writer)
    return reader, writer


async def read_a_stream(port: int) -> None:
    """Read a whole stream, as a client that does not stop."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(call())
    answer = await asyncio.wait_for(reader.read(), 4 * LIMIT_SECONDS)
    writer.close()
    assert answer.count(b'"text"') >= CHOICES * TOKENS


def kept_for_each(one: Served) -> tuple[int, int]:
    """Return what the gateway holds for one connection at most: bytes not yet sent, tokens not yet taken."""
    connections: Any = one.server.server_state.connections
    watcher = one.rig.app.state.gateway.watcher
    subscriptions = {
        *watcher._paused,
        *(subscription for readers in watcher._reading.values() for subscription in readers),
    }
    sent = max(connection.transport.get_write_buffer_size() for connection in connections)
    return sent, max(subscription.untaken_tokens for subscription in subscriptions)


async def test_fifty_readers_that_stop_hold_up_nobody_else() -> None:
    async with served(SETTINGS) as one:
        one.rig.scheduler.answer = lambda request: [5] * request.max_new_tokens
        one.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SYSTEM_BUFFER_BYTES)
        stopped = [await stopped_reader(one) for _ in range(READERS)]
        await until(lambda: ended(one) == READERS * CHOICES, limit_s=4 * LIMIT_SECONDS)

        await read_a_stream(one.server.port)
        bytes_kept, tokens_kept = kept_for_each(one)
        print(f"kept for each at most: {bytes_kept} bytes, {tokens_kept} tokens")
        assert 0 < bytes_kept <= UNTAKEN_MAX * TOKEN_BYTES_MAX
        # A reader that stops in the middle of a read of the pool gets that one too.
        assert 0 < tokens_kept <= 2 * UNTAKEN_MAX

        for answer in await asyncio.gather(*(rest_of_the_stream(*reader) for reader in stopped)):
            assert answer.count(b'"text"') >= CHOICES * TOKENS
            assert b"data: [DONE]" in answer[-100:]


async def rest_of_the_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    writer.transport.resume_reading()
    return await asyncio.wait_for(reader.read(), 4 * LIMIT_SECONDS)


def ended(one: Served) -> int:
    return sum(record.end is not None for record in one.rig.pool.state.records.values())


def door(one: Served) -> Any:
    """The socket that the clients' connections come from and take their options of."""
    return one.server.servers[0].sockets[0]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system does not bound how long bytes lie")
async def test_a_reader_that_stops_for_too_long_in_the_middle_of_a_stream_is_cut() -> None:
    async with served(IMPATIENT) as one:
        one.rig.scheduler.answer = lambda request: [5] * request.max_new_tokens
        door(one).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SYSTEM_BUFFER_BYTES)
        await stopped_reader(one)
        await until(lambda: one.rig.pool.state.parents)
        await until(lambda: not one.server.server_state.connections)
        (parent,) = one.rig.pool.state.parents.values()
        await until(lambda: not parent.readers)


async def test_a_closed_connection_whose_answer_is_not_read_is_cut_even_without_tcp_user_timeout() -> None:
    async with served(IMPATIENT) as one:
        one.rig.scheduler.answer = lambda request: [5] * request.max_new_tokens
        door(one).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SYSTEM_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            door(one).setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        await stopped_reader(one, stream=False, logprobs=5)
        await until(lambda: ended(one) == CHOICES)
        await until(lambda: not one.server.server_state.connections)
