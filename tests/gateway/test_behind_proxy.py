"""Answers to forwarded requests wait until a proxy has seen the end of what it forwards."""

import asyncio
import time
from typing import Any

import pytest
from gateway_rig import rig

from orca.gateway import behind_proxy
from orca.gateway.behind_proxy import BehindProxy
from orca.gateway.connection import SEND_BODY
from orca.gateway.settings import Settings

PAUSE_S = 0.2
FORWARDED = (b"x-forwarded-for", b"192.0.2.7")
BODY = (b"content-length", b"3")


async def answer_s(headers: list[tuple[bytes, bytes]], *, reads: bool = True) -> float:
    """Seconds from the last of the request to the start of its answer."""
    heard_s = began_s = 0.0

    async def receive() -> dict[str, Any]:
        nonlocal heard_s
        heard_s = time.monotonic()
        return {"type": "http.request", "body": b"abc", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal began_s
        if message["type"] == "http.response.start":
            began_s = time.monotonic()

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - an application's shape
        if reads:
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    heard_s = time.monotonic()
    await BehindProxy(app, PAUSE_S)({"type": "http", "headers": headers}, receive, send)  # type: ignore[arg-type]
    return began_s - heard_s


@pytest.mark.parametrize("mark", [FORWARDED, (b"forwarded", b"for=192.0.2.7")])
async def test_an_answer_through_a_proxy_waits_for_the_end_of_the_request(mark: tuple[bytes, bytes]) -> None:
    assert await answer_s([mark, BODY]) >= PAUSE_S


async def test_a_refusal_before_the_body_waits_too() -> None:
    assert await answer_s([FORWARDED, BODY], reads=False) >= PAUSE_S


@pytest.mark.parametrize("headers", [[BODY], [FORWARDED], []])
async def test_nobody_else_waits(headers: list[tuple[bytes, bytes]]) -> None:
    assert await answer_s(headers) < PAUSE_S


class Stream:
    """Of a forwarded call: events go out past the application's middleware, as a stream's do."""

    def __init__(self) -> None:
        self.sent: list[str] = []  # types of messages, in their order
        self.goes_on = asyncio.Event()

    async def run(self) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"abc", "more_body": False}

        async def send(message: Any) -> None:
            await asyncio.sleep(0.01)  # as where a socket is full
            self.sent.append(message["type"])

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.goes_on.wait()
            for _ in range(3):
                await scope["extensions"][SEND_BODY]["send"]({"type": "http.response.body", "body": b"data: 1"})

        scope = {"type": "http", "headers": [FORWARDED, BODY], "extensions": {SEND_BODY: {"send": send}}}
        await BehindProxy(app, 0.01)(scope, receive, send)  # type: ignore[arg-type]


ALL = ["http.response.start", *["http.response.body"] * 3]


async def test_the_headers_of_a_stream_go_with_its_first_event() -> None:
    stream = Stream()
    running = asyncio.create_task(stream.run())
    await asyncio.sleep(0.1)
    assert not stream.sent
    stream.goes_on.set()
    await running
    assert stream.sent == ALL


async def test_a_stream_without_events_begins_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 0.05)
    stream = Stream()
    running = asyncio.create_task(stream.run())
    while not stream.sent:  # the test's own limit ends it
        await asyncio.sleep(0.001)
    assert stream.sent == ALL[:1]
    stream.goes_on.set()
    await running
    assert stream.sent == ALL


@pytest.mark.parametrize("late_s", [0.045, 0.05, 0.055])
async def test_events_stay_behind_the_headers_that_are_just_leaving(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind_proxy, "FIRST_EVENT_S", 0.05)
    stream = Stream()
    running = asyncio.create_task(stream.run())
    await asyncio.sleep(late_s)
    stream.goes_on.set()
    await running
    assert stream.sent == ALL


async def test_without_a_pause_all_calls_pass_untouched() -> None:
    given: list[Any] = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        given.extend((receive, send))

    async def receive() -> Any: ...
    async def send(_: Any) -> None: ...

    await BehindProxy(app, 0)({"type": "http", "headers": [FORWARDED, BODY]}, receive, send)
    assert given == [receive, send]


async def test_a_gateway_waits_for_as_long_as_its_setting_says() -> None:
    async with rig(schedules=False, settings=Settings(model="tiny", proxy_pause_seconds=PAUSE_S)) as one:
        began_s = time.monotonic()
        await one.client.post("/tokenize", json={"prompt": "a"}, headers={"x-forwarded-for": "192.0.2.7"})
        assert time.monotonic() - began_s >= PAUSE_S
