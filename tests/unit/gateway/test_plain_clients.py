"""Clients of the old kind: HTTP/1.0, and those that close their way out behind the request."""

import asyncio

import httpx
import pytest

from support.gateway.gateway_rig import WORDS, events, until
from support.gateway.gateway_server import LIMIT_SECONDS, Served, served

BODY = b'{"prompt": "the fox", "max_tokens": 100, "stream": %s}'


async def ask(one: Served, *, version: str, stream: bool, ends_input: bool = False) -> bytes:
    """The whole answer, until the connection ends."""
    body = BODY % (b"true" if stream else b"false")
    head = f"POST /v1/completions HTTP/{version}\r\nhost: orca\r\ncontent-type: application/json\r\n"
    reader, writer = await one.open(f"{head}content-length: {len(body)}\r\n\r\n".encode(), body)
    if ends_input:
        writer.write_eof()
    return await asyncio.wait_for(reader.read(), LIMIT_SECONDS)


async def test_http_1_0_gets_its_stream_unchunked_until_the_connection_closes() -> None:
    async with served() as one:
        head, _, body = (await ask(one, version="1.0", stream=True)).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        found = [data for _, data in events(body)]
        assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == WORDS
        assert found[-1] == "[DONE]"


async def test_http_1_0_gets_a_whole_answer_with_its_length() -> None:
    async with served() as one:
        head, _, body = (await ask(one, version="1.0", stream=False)).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert b"connection: close" in head


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_half_closes_its_connection_gets_its_answer(version: str, stream: bool) -> None:
    async with served() as one:
        answer = await ask(one, version=version, stream=stream, ends_input=True)
        assert b" 200 " in answer
        assert (b"data: [DONE]" if stream else b'"usage"') in answer


async def test_probing_a_half_closed_client_adds_nothing_to_the_stream() -> None:
    async with served() as one:
        one.rig.scheduler.turns_left = 1
        reader, writer = await one.open_stream()
        await reader.readuntil(b"\n\n\r\n")
        writer.write_eof()
        # The zero in front of the next chunk's size.
        assert await asyncio.wait_for(reader.readexactly(1), LIMIT_SECONDS) == b"0"
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        size = int(b"0" + await reader.readline(), 16)
        assert (await reader.readexactly(size)).startswith(b"data: ")
        assert (await asyncio.wait_for(reader.read(), LIMIT_SECONDS)).endswith(b"0\r\n\r\n")


async def test_before_an_answer_begins_the_probe_is_an_interim_response() -> None:
    async with served() as one:
        one.rig.scheduler.turns_left = 1
        reader, writer = await one.open_stream(stream=False)
        await until(lambda: one.rig.pool.state.records)
        writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        assert (await asyncio.wait_for(reader.read(), LIMIT_SECONDS)).startswith(b"HTTP/1.1 200")


async def test_a_request_that_is_cut_in_the_middle_is_dropped_at_once() -> None:
    async with served() as one, httpx.AsyncClient(base_url=one.url) as client:
        _, writer = await one.open(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 99\r\n\r\n{")
        writer.write_eof()
        await until(lambda: not one.server.server_state.tasks and not one.server.server_state.connections)
        assert (await client.get("/health")).status_code == 200
