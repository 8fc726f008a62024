"""Answers to forwarded requests wait until a proxy has seen the end of what it forwards."""

import asyncio
import time
from typing import Any

import pytest

from orca.gateway.http import behind_proxy
from orca.gateway.http.behind_proxy import ProxyPause
from orca.gateway.http.connection import SEND_BODY
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import rig

PAUSE_S = 0.2
FORWARDED = (b"x-forwarded-for", b"192.0.2.7")
BODY = (b"content-length", b"3")
START = {"type": "http.response.start", "status": 200, "headers": []}
EVENT = {"type": "http.response.body", "body": b"data: 1", "more_body": True}


class Call:
    """One call and what of its answer has left. The application reads the request and sends a start. Then it sends an
    event for each release of `goes_on`, past all middleware if the server has a way for that.
    """

    def __init__(self, *headers: tuple[bytes, bytes], reads: bool = True, body_after_s: float = 0.0) -> None:
        self.scope = {"type": "http", "headers": list(headers)}
        self.reads, self.body_after_s = reads, body_after_s
        self.sent: list[str] = []  # start, body or event, in the order in which they have left
        self.heard_s = time.monotonic()
        self.began_s = 0.0
        self.may_start = asyncio.Event()  # else a start is on its way out, as where a socket is full
        self.may_start.set()
        self.is_told = asyncio.Event()  # the application has given its start
        self.starts = asyncio.Event()
        self.goes_on = asyncio.Semaphore(0)
        self.events = 0
        self.error: Exception | None = None

    def with_own_way_for_bodies(self) -> "Call":
        self.scope["extensions"] = {SEND_BODY: {"send": self._send_event}}
        return self

    async def run(self, pause_s: float = PAUSE_S) -> None:
        await ProxyPause(self._answer, pause_s)(self.scope, self._receive, self._send)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if self.reads:
            await receive()
        await send(START)
        self.is_told.set()
        send = scope.get("extensions", {}).get(SEND_BODY, {"send": send})["send"]
        for _ in range(self.events):
            await self.goes_on.acquire()
            await send(EVENT)
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _receive(self) -> Any:
        await asyncio.sleep(self.body_after_s)
        self.heard_s = time.monotonic()
        return {"type": "http.request", "body": b"abc", "more_body": False}

    async def _send(self, message: Any) -> None:
        if message is START:
            self.began_s = time.monotonic()
            self.starts.set()
            await self.may_start.wait()
        self.sent.append("start" if message is START else "body")

    async def _send_event(self, _: Any) -> None:
        self.sent.append("event")

    @property
    def waited_s(self) -> float:
        """Return the time from the end of the request to the start of the answer."""
        return self.began_s - self.heard_s


@pytest.mark.parametrize("mark", [FORWARDED, (b"forwarded", b"for=192.0.2.7")])
async def test_an_answer_through_a_proxy_waits_for_the_end_of_the_request(mark: tuple[bytes, bytes]) -> None:
    call = Call(mark, BODY)
    await call.run()
    assert call.waited_s >= PAUSE_S


async def test_the_pause_begins_at_the_end_of_a_slow_request() -> None:
    call = Call(FORWARDED, BODY, body_after_s=2 * PAUSE_S)
    await call.run()
    assert call.waited_s >= PAUSE_S


async def test_a_refusal_before_the_body_is_delayed_too() -> None:
    call = Call(FORWARDED, BODY, reads=False)
    await call.run()
    assert call.waited_s >= PAUSE_S


@pytest.mark.parametrize("headers", [[BODY], [FORWARDED], []])
async def test_calls_without_a_proxy_are_not_delayed(headers: list[tuple[bytes, bytes]]) -> None:
    call = Call(*headers)
    await call.run()
    assert call.waited_s < PAUSE_S


@pytest.mark.parametrize("has_own_way", [True, False])
@pytest.mark.parametrize("events", [0, 1])
async def test_an_answer_that_is_ready_waits_no_longer_than_the_pause(
    events: int, has_own_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 1000.0)
    call = Call(FORWARDED, BODY)
    if has_own_way:
        call.with_own_way_for_bodies()
    call.events = events
    call.goes_on.release()
    async with asyncio.timeout(60):
        await call.run()
    assert call.waited_s >= PAUSE_S
    assert call.sent == ["start", *["event" if has_own_way else "body"] * (events + 1)]


async def test_the_headers_of_a_stream_are_sent_with_its_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 1000.0)
    call = Call(FORWARDED, BODY).with_own_way_for_bodies()
    call.events = 2
    running = asyncio.create_task(call.run(0.001))
    await call.is_told.wait()
    await asyncio.sleep(0.05)  # many pauses
    assert not call.sent
    call.goes_on.release()
    call.goes_on.release()
    await running
    assert call.sent == ["start", "event", "event", "event"]


async def test_a_stream_without_events_still_sends_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 0.01)
    call = Call(FORWARDED, BODY)
    call.events = 1
    running = asyncio.create_task(call.run(0.001))
    async with asyncio.timeout(60):
        await call.starts.wait()
    assert call.sent == ["start"]
    call.goes_on.release()
    await running
    assert call.sent == ["start", "body", "body"]


@pytest.mark.parametrize("has_own_way", [True, False])
async def test_an_event_is_not_sent_before_headers_that_are_being_written(
    has_own_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 0.01)
    call = Call(FORWARDED, BODY)
    if has_own_way:
        call.with_own_way_for_bodies()
    call.events = 1
    call.may_start.clear()
    running = asyncio.create_task(call.run(0.001))
    async with asyncio.timeout(60):
        await call.starts.wait()
    call.goes_on.release()
    await asyncio.sleep(0.02)
    assert not call.sent
    call.may_start.set()
    await running
    assert call.sent == ["start", *["event" if has_own_way else "body"] * 2]


async def test_after_an_error_the_announced_answer_begins_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is counted, and its call accepted: as without a proxy it is cut off."""
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 0.01)
    call = Call(FORWARDED, BODY)
    call.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        await call.run(0.001)
    assert call.sent == ["start"]
    await asyncio.sleep(0.05)
    assert call.sent == ["start"]


async def test_a_cancelled_call_sends_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 0.05)
    call = Call(FORWARDED, BODY)
    call.events = 1
    running = asyncio.create_task(call.run(0.001))
    await call.is_told.wait()
    running.cancel()
    await asyncio.wait([running])
    await asyncio.sleep(0.1)
    assert not call.sent


async def test_without_a_pause_all_calls_pass_unchanged() -> None:
    given: list[Any] = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        given.extend((receive, send))

    async def receive() -> Any: ...
    async def send(_: Any) -> None: ...

    await ProxyPause(app, 0)({"type": "http", "headers": [FORWARDED, BODY]}, receive, send)
    assert given == [receive, send]


async def test_a_gateway_waits_as_long_as_its_setting_says() -> None:
    async with rig(schedules=False, settings=GatewaySettings(model="tiny", proxy_pause_seconds=PAUSE_S)) as one:
        began_s = time.monotonic()
        await one.client.post("/tokenize", json={"prompt": "a"}, headers={"x-forwarded-for": "192.0.2.7"})
        assert time.monotonic() - began_s >= PAUSE_S
