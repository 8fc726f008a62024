"""A stream that waits says that it lives, and no client takes that for an event."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
from openai import AsyncOpenAI, AsyncStream
from openai.types import Completion

from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import WORDS, ids
from support.gateway.gateway_server import LIMIT_SECONDS, served
from support.waiting import until

OFTEN = GatewaySettings(model="tiny", port=0, keep_alive_seconds=0.05)
SELDOM = GatewaySettings(model="tiny", port=0, keep_alive_seconds=3)
EVENTS = {"Accept": "text/event-stream"}
CALL = {"model": "tiny", "prompt": "the fox", "max_tokens": 3, "stream": True}


async def test_a_stream_without_tokens_gets_comments_until_the_first_token() -> None:
    async with served(OFTEN) as one, httpx.AsyncClient(base_url=one.url, timeout=LIMIT_SECONDS) as client:
        one.rig.scheduler.may_run.clear()
        async with client.stream("POST", "/v1/completions", json=CALL, headers=EVENTS) as answer:
            lines = answer.aiter_lines()
            comments = [line for _ in range(4) if (line := await anext(lines))]
            assert comments == [": waiting", ": waiting"]
            one.rig.scheduler.may_run.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"


class Listening(httpx.AsyncHTTPTransport):
    """Notes what comes in, however little of it a client tells."""

    heard = b""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        parts = response.aiter_raw()

        async def noted() -> AsyncIterator[bytes]:
            async for part in parts:
                self.heard += part
                yield part

        return httpx.Response(response.status_code, headers=response.headers, content=noted())


async def test_the_openai_client_ignores_keep_alive_comments() -> None:
    line = Listening()
    async with served(OFTEN) as one, httpx.AsyncClient(transport=line, timeout=LIMIT_SECONDS) as http:
        one.rig.scheduler.may_run.clear()
        client = AsyncOpenAI(
            base_url=f"{one.url}/v1", api_key="none", http_client=http, max_retries=0, default_headers=EVENTS
        )
        async with await client.completions.create(**CALL) as stream:
            seen = asyncio.create_task(reasons_of(stream))
            await until(lambda: line.heard.count(b": waiting") >= 3, LIMIT_SECONDS)
            one.rig.scheduler.may_run.set()
            reasons = await seen
        assert reasons[-1] == "length"


async def reasons_of(stream: AsyncStream[Completion]) -> list[str]:
    return [event.choices[0].finish_reason async for event in stream]


async def test_a_client_that_does_not_accept_event_streams_gets_no_comments() -> None:
    async with served(OFTEN) as one, httpx.AsyncClient(base_url=one.url, timeout=LIMIT_SECONDS) as client:
        one.rig.scheduler.may_run.clear()
        posted = asyncio.create_task(client.post("/v1/completions", json=CALL))
        await until(lambda: one.rig.pool.state.records, LIMIT_SECONDS)
        async with client.stream("POST", "/v1/completions", json=CALL, headers=EVENTS) as beside:
            lines = beside.aiter_lines()
            for _ in range(6):  # three comments: it has had the time for as many
                await anext(lines)
            one.rig.scheduler.may_run.set()
            answer = await posted
        assert all(line.startswith("data: ") for line in answer.text.splitlines() if line)


async def test_a_stream_with_steady_tokens_has_no_comments() -> None:
    async with served(SELDOM) as one, httpx.AsyncClient(base_url=one.url, timeout=LIMIT_SECONDS) as client:
        one.rig.scheduler.turn_seconds = 0.25
        one.rig.scheduler.answer = lambda _: ids(WORDS) * 15
        began = time.monotonic()
        answer = await client.post("/v1/completions", json={**CALL, "max_tokens": 15}, headers=EVENTS)
        assert time.monotonic() - began > 3
        assert ": waiting" not in answer.text
        assert "data: [DONE]\n\n" in answer.text
