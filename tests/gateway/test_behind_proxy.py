"""Answers to forwarded requests wait until a proxy has seen the end of what it forwards."""

import time
from typing import Any

import pytest
from gateway_rig import rig

from orca.gateway.behind_proxy import BehindProxy
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
