"""Clients that leave, drip, stall or hang on: what happens on real sockets."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.request import FinishReason
from orca.gateway.settings import GatewaySettings
from orca.pool.settings import PoolSettings
from support.gateway.gateway_rig import events, ids, until
from support.gateway.gateway_server import LIMIT_SECONDS, completion, refusal, served

LONG = "more " * 30
STREAM = completion(stream=True)
READERS = PoolSettings(reader_lease_ms=400, resume_grace_ms=400)


async def test_headers_come_before_the_first_token_and_events_as_they_are_committed() -> None:
    async with served() as one:
        one.rig.scheduler.turns_left = 2
        reader, writer = await one.open_stream()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        assert b"x-request-id: cmpl-" in head
        first = await reader.readuntil(b"\n\n\r\n")
        second = first if first.count(b"data: ") == 2 else first + await reader.readuntil(b"\n\n\r\n")
        assert second.count(b"data: ") == 2
        assert b"[DONE]" not in second
        writer.close()
        await writer.wait_closed()


async def test_a_disconnect_detaches_the_reader_and_the_pool_cancels() -> None:
    async with served(GatewaySettings(model="tiny", port=0, round_seconds=0.05), pool_settings=READERS) as one:
        one.rig.scheduler.turns_left = 1
        _, writer = await one.open_stream()
        await until(lambda: any(record.log for record in one.rig.pool.state.records.values()))
        writer.close()
        await writer.wait_closed()
        (parent,) = one.rig.pool.state.parents.values()
        await until(lambda: not parent.readers)
        (record,) = one.rig.pool.state.records.values()
        await until(lambda: record.end is not None)
        assert record.end is not None
        assert record.end.reason is FinishReason.CANCELLED


async def test_a_disconnect_after_a_pipelined_request_is_noticed_without_tokens() -> None:
    async with served() as one:
        one.rig.scheduler.turns_left = 1
        reader, writer = await one.open_stream()
        await reader.readuntil(b"\n\n\r\n")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        await writer.drain()
        writer.transport.abort()
        (parent,) = one.rig.pool.state.parents.values()
        await until(lambda: not parent.readers and not one.server.server_state.connections)


async def test_a_client_that_leaves_a_whole_answer_is_noticed_too() -> None:
    async with served() as one:
        one.rig.scheduler.turns_left = 1
        _, writer = await one.open_stream(stream=False)
        await until(lambda: any(parent.readers for parent in one.rig.pool.state.parents.values()))
        writer.close()
        await writer.wait_closed()
        await until(lambda: not any(parent.readers for parent in one.rig.pool.state.parents.values()))


async def test_readers_are_renewed_as_long_as_the_connection_is_open() -> None:
    async with served(GatewaySettings(model="tiny", port=0, round_seconds=0.05), pool_settings=READERS) as one:
        one.rig.scheduler.turns_left = 1
        reader, writer = await one.open_stream()
        await until(lambda: one.rig.pool.state.records)
        (record,) = one.rig.pool.state.records.values()
        began = one.rig.pool.state.awake
        # Well beyond lease and grace together.
        await until(lambda: one.rig.pool.state.awake > began + 1_200)
        assert record.end is None
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        assert b"[DONE]" in await reader.readuntil(b"[DONE]")
        writer.close()
        await writer.wait_closed()


async def test_a_slowly_sent_body_is_cut_with_408() -> None:
    async with served(GatewaySettings(model="tiny", port=0, body_seconds_max=0.2)) as one:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
        )
        reader, writer = await one.open(head, b"{")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"body_timeout"' in answer
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("sent", [b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: b\r\n"])
async def test_slowly_sent_headers_are_cut_with_408(sent: bytes) -> None:
    async with served(GatewaySettings(model="tiny", port=0, header_seconds_max=0.2)) as one:
        reader, _ = await one.open(sent)
        status, error = await refusal(reader)
        assert (status, error["code"]) == (408, "header_timeout")
        assert "0.2 seconds" in error["message"]


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
async def test_a_connection_without_a_request_is_closed_without_an_answer(sent: bytes) -> None:
    async with served(GatewaySettings(model="tiny", port=0, header_seconds_max=0.2)) as one:
        reader, _ = await one.open(sent)
        assert await asyncio.wait_for(reader.read(), LIMIT_SECONDS) == b""


async def test_empty_lines_between_requests_do_not_keep_a_connection_open() -> None:
    async with served(GatewaySettings(model="tiny", port=0, header_seconds_max=0.2)) as one:
        reader, writer = await one.open(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b'"ok"}')
        writer.write(b"\r\n")
        assert await asyncio.wait_for(reader.read(), LIMIT_SECONDS) == b""


async def test_a_body_sent_after_its_answer_does_not_keep_a_connection_open() -> None:
    async with served(
        GatewaySettings(model="tiny", port=0, header_seconds_max=LIMIT_SECONDS, idle_seconds_max=0.2)
    ) as one:
        reader, writer = await one.open(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 404 " in head
        writer.write(b"12345")
        await asyncio.wait_for(reader.read(), LIMIT_SECONDS / 2)


async def test_a_body_never_sent_after_its_answer_does_not_keep_a_connection_open() -> None:
    async with served(GatewaySettings(model="tiny", port=0, header_seconds_max=0.2)) as one:
        reader, _ = await one.open(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
        assert b" 404 " in await asyncio.wait_for(reader.read(), LIMIT_SECONDS)


async def test_a_request_right_after_such_a_body_has_its_full_time() -> None:
    async with served(GatewaySettings(model="tiny", port=0, idle_seconds_max=0.2)) as one:
        one.rig.scheduler.turns_left = 1
        reader, writer = await one.open(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"12345" + STREAM)
        await until(lambda: one.rig.pool.state.awake > 800)
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"[DONE]"), LIMIT_SECONDS)


async def test_a_second_request_on_a_connection_has_its_own_time_for_headers() -> None:
    async with served(GatewaySettings(model="tiny", port=0, header_seconds_max=0.3)) as one:
        reader, writer = await one.open(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b'"ok"}')
        writer.write(b"GET /hea")
        assert (await refusal(reader))[0] == 408


async def test_a_long_answer_is_not_cut_by_the_timeout_for_headers() -> None:
    async with served(GatewaySettings(model="tiny", port=0, header_seconds_max=0.1)) as one:
        one.rig.scheduler.turns_left = 1
        reader, writer = await one.open_stream()
        await until(lambda: one.rig.pool.state.awake > 400)
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        await reader.readuntil(b"[DONE]")
        writer.close()
        await writer.wait_closed()


async def test_events_waiting_for_one_reader_are_sent_in_one_write() -> None:
    async with served() as one:
        one.rig.scheduler.tokens_per_turn = 20
        one.rig.scheduler.answer = lambda _: ids(LONG)[:20]
        reader, writer = await one.open_stream()
        await reader.readuntil(b"\r\n\r\n")
        # One chunk of chunked encoding: its size in hexadecimal, then all twenty-one events and the end.
        size = int(await reader.readline(), 16)
        found = list(events(await reader.readexactly(size)))
        assert len(found) == 22
        writer.close()
        await writer.wait_closed()


async def test_a_reader_that_stops_delays_nobody_and_gets_all_events_later() -> None:
    async with served() as one:
        one.rig.scheduler.tokens_per_turn = 20
        one.rig.scheduler.answer = lambda request: (7,) * request.max_new_tokens
        reader, writer = await one.open_stream(n=20, logprobs=20)
        assert (await one.rig.complete(max_tokens=5))["usage"]["completion_tokens"] == 5
        await until(lambda: all(record.end for record in one.rig.pool.state.records.values()))
        found = b""
        while b"[DONE]" not in found:
            found += await asyncio.wait_for(reader.read(1 << 20), 10)
        assert found.count(b"data: ") == 20 * 101 + 1
        writer.close()
        await writer.wait_closed()


async def ready_when(client: httpx.AsyncClient, is_so: Callable[[dict[str, Any]], bool]) -> httpx.Response:
    """Return the answer of /ready when it has that status; its counts may be a moment old."""
    async with asyncio.timeout(20):
        while not is_so((answer := await client.get("/ready")).json()):
            await asyncio.sleep(0.01)
    return answer


async def test_ready_is_503_until_a_group_has_formed_and_200_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any) -> Any:
        raise PoolUnavailable("away")

    async with served(schedules=False) as one, httpx.AsyncClient(base_url=one.url) as client:
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["pool"], answer.json()["groups"]) == (503, "ok", [])
        await one.rig.pool.promise_slots("r1", 64)
        answer = await ready_when(client, lambda answer: answer["ready"])
        found = (answer.status_code, answer.json()["max_total_tokens"], answer.json()["groups_formed"])
        assert found == (200, 64, [])
        monkeypatch.setattr(one.rig.pool, "stats", away)
        answer = await ready_when(client, lambda answer: answer["pool"] == "away")
        assert answer.status_code == 200
        assert (await client.get("/health")).json() == {"status": "ok"}
