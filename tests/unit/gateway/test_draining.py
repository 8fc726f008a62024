"""The end of a gateway: what a signal, the drain's time and a second signal do to streams, calls and the pool."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from orca.core.domain.errors import SettingError
from orca.gateway.answer.tracing import CLOSE_SECONDS, Tracing
from orca.gateway.http import bounds
from orca.gateway.server import make_server
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import rig, until
from support.gateway.gateway_server import LIMIT_SECONDS, Served, refusal, served

HOURS = GatewaySettings(model="tiny", port=0, drain_seconds=3600)
SECONDS = GatewaySettings(model="tiny", port=0, drain_seconds=0.2)


class Kept(SpanExporter):
    """Notes that it was closed."""

    is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002 - the interface
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.is_closed = True


class Hanging(Kept):
    """Does not close before it is told to."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def shutdown(self) -> None:
        self.may_end.wait(LIMIT_SECONDS)


async def open_and_paused(one: Served, *, accept: str = "*/*", **body: Any) -> asyncio.StreamReader:
    """A stream that has its first token and gets no more."""
    one.rig.scheduler.turns_left = 1
    content = orjson.dumps({"prompt": "the fox", "max_tokens": 100, "stream": True, **body})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: orca\r\naccept: {accept}\r\ncontent-type: application/json\r\n"
    reader, _ = await one.open(f"{head}content-length: {len(content)}\r\n\r\n".encode(), content)
    await until(lambda: any(record.log for record in one.rig.pool.state.records.values()))
    return reader


def signalled(one: Served, times: int = 1) -> None:
    for _ in range(times):
        one.server.handle_exit(signal.SIGTERM, None)


async def ended(one: Served) -> None:
    await asyncio.wait_for(asyncio.shield(one.task), LIMIT_SECONDS)


async def test_after_the_first_signal_new_calls_are_503_and_open_streams_complete() -> None:
    async with served(HOURS) as one, httpx.AsyncClient(base_url=one.url) as client:
        assert (await client.get("/ready")).status_code == 200
        reader = await open_and_paused(one)
        signalled(one)
        await until(lambda: one.rig.app.state.gateway.drain.has_begun)
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["draining"]) == (503, True)
        for path in ("/v1/completions", "/v1/chat/completions"):
            refused = await client.post(path, json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_draining")
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        assert b"data: [DONE]" in await asyncio.wait_for(reader.read(), LIMIT_SECONDS)
        await ended(one)


async def test_idle_connections_are_closed_while_streams_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "IDLE_LEAST_SECONDS", 0.0)
    async with served(HOURS) as one:
        reader = await open_and_paused(one)
        idle, _ = await one.open(b"GET /health HTTP/1.1\r\nhost: orca\r\n\r\n")
        await idle.readuntil(b'"ok"}')
        signalled(one)
        assert await asyncio.wait_for(idle.read(), LIMIT_SECONDS) == b""
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        assert b"data: [DONE]" in await asyncio.wait_for(reader.read(), LIMIT_SECONDS)


async def test_without_open_streams_the_first_signal_ends_at_once() -> None:
    async with served(HOURS) as one:
        signalled(one)
        await ended(one)


async def test_a_stream_with_event_ids_is_cut_with_the_place_to_resume() -> None:
    async with served(SECONDS) as one:
        reader = await open_and_paused(one, accept="text/event-stream", n=2)
        signalled(one)
        events = (await asyncio.wait_for(reader.read(), LIMIT_SECONDS)).decode()
        _, _, last = events.rpartition("event: resume\n")
        data = orjson.loads(last.partition("data: ")[2].partition("\n\n")[0])
        assert data["error"]["code"] == "gateway_draining"
        (parent,) = one.rig.pool.state.parents
        assert data["resume"] == {"request_id": parent, "last_event_ids": ["0.0", "1.0"]}
        assert "[DONE]" not in events
        await ended(one)
        assert not one.rig.pool.state.parents[parent].readers


async def test_a_stream_without_event_ids_is_cut_with_an_error() -> None:
    async with served(SECONDS) as one:
        reader = await open_and_paused(one)
        signalled(one)
        events = await asyncio.wait_for(reader.read(), LIMIT_SECONDS)
        assert b'data: {"error":{"message":"this gateway is shutting down' in events
        assert b"event: resume" not in events
        assert b"[DONE]" not in events


async def test_a_whole_answer_that_is_cut_is_503_so_that_clients_try_again() -> None:
    async with served(SECONDS) as one:
        reader = await open_and_paused(one, stream=False)
        signalled(one)
        status, error = await refusal(reader)
        assert (status, error["code"]) == (503, "gateway_draining")


@pytest.mark.parametrize("signals", [1, 2])
async def test_both_kinds_of_shutdown_leave_no_reader_and_no_span(signals: int) -> None:
    kept = Kept()
    settings = SECONDS if signals == 1 else HOURS
    async with served(settings, tracing=Tracing(kept)) as one:
        await open_and_paused(one)
        (parent,) = one.rig.pool.state.parents.values()
        assert parent.readers
        signalled(one, signals)
        await ended(one)
        assert not parent.readers
        assert kept.is_closed


async def test_a_second_signal_during_the_drain_ends_at_once() -> None:
    async with served(HOURS) as one:
        await open_and_paused(one)
        signalled(one)
        await until(lambda: one.rig.app.state.gateway.drain.has_begun)
        signalled(one)
        await ended(one)


async def test_a_start_that_fails_at_the_metrics_port_ends_the_lifespan() -> None:
    kept = Kept()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = GatewaySettings(model="tiny", port=0, metrics_port=taken.getsockname()[1])
        async with rig(settings=settings, runs_tasks=False, tracing=Tracing(kept)) as one:
            with pytest.raises(SettingError, match="metrics_port"):
                await make_server(one.app, settings).serve()
    assert kept.is_closed


async def test_a_hanging_pool_does_not_delay_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    async with served(HOURS) as one:
        await open_and_paused(one)
        monkeypatch.setattr(one.rig.pool, "detach", hang)
        signalled(one, 2)
        await ended(one)


def test_a_hanging_trace_collector_does_not_delay_the_shutdown() -> None:
    hanging = Hanging()
    began = time.monotonic()
    Tracing(hanging).close()
    elapsed = time.monotonic() - began
    hanging.may_end.set()
    assert CLOSE_SECONDS <= elapsed < 60
