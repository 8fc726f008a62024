"""The official client works unchanged: sync and async, streaming and not, many at once."""

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from orca.core.domain.request import FinishReason, Request
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import WORDS, ids, recording
from support.gateway.gateway_server import served

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_the_async_client_gets_completions_and_chats_streamed_or_not() -> None:
    async with served() as one, openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="none") as client:
        completion = await client.completions.create(model="tiny", prompt="the fox", max_tokens=50)
        assert completion.choices[0].text == WORDS
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == WORDS
        stream = await client.completions.create(model="tiny", prompt="the fox", max_tokens=50, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == WORDS


async def test_the_client_streams_a_chat_with_usage_and_logprobs() -> None:
    async with served() as one, openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
        *chunks, usage = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == WORDS
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[0].choices[0].logprobs is not None
        assert usage.choices == []
        assert usage.usage is not None
        assert usage.usage.completion_tokens == len(ids(WORDS))


async def test_the_sync_client_completes_and_chats() -> None:
    def calls(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
            whole = client.completions.create(model="tiny", prompt="the fox", max_tokens=50).choices[0].text
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[arg-type]
            return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with served() as one:
        assert await asyncio.to_thread(calls, one.url) == (WORDS, WORDS)


class Step(BaseModel):
    explanation: str = Field(description="For a student.", max_length=200)
    output: str


class Solution(BaseModel):
    """A class as applications declare it: nested, with alternatives, an optional field and a list."""

    kind: Literal["sum", "product"]
    steps: list[Step]
    answer: int | str
    unit: str | None


async def test_the_client_parses_an_answer_into_the_class_that_it_asked_for() -> None:
    solution = Solution(kind="sum", steps=[Step(explanation="1 + 1", output="2")], answer=2, unit=None)
    found: list[Request] = []
    async with served() as one, openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="none") as client:
        one.rig.scheduler.answer = recording(found, f"{solution.model_dump_json()}<|end|>")
        chat = await client.chat.completions.parse(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            response_format=Solution,
        )
        assert chat.choices[0].message.parsed == solution
        async with client.chat.completions.stream(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            response_format=Solution,
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == solution
    grammars = {request.sampling.grammar for request in found}
    assert len(grammars) == 1
    assert "additionalProperties" in (grammars.pop() or "")


async def test_a_hundred_streams_at_once_each_get_their_own_tokens() -> None:
    async with served() as one, openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="none") as client:
        one.rig.scheduler.answer = lambda request: request.prompt

        async def stream(i: int) -> str:
            chunks = await client.completions.create(model="tiny", prompt=f"stream {i}", max_tokens=50, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        assert await asyncio.gather(*(stream(i) for i in range(100))) == [f"stream {i}" for i in range(100)]


async def test_errors_arrive_as_the_clients_own_classes() -> None:
    settings = GatewaySettings(model="tiny", port=0, api_keys=("right",), drain_seconds=1)
    async with served(settings) as one:
        async with openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="right") as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            assert (await client.models.retrieve("tiny")).id == "tiny"
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(model="huge", prompt="a")
            assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model="tiny", prompt="a", temperature=9)
            assert bad.value.param == "temperature"


async def test_a_failing_stream_raises_in_the_client() -> None:
    async with served() as one, openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="none") as client:
        one.rig.scheduler.reason = FinishReason.ERROR
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="every group"):
            async for _ in stream:
                pass


async def test_the_client_does_not_repeat_a_call_whose_deadline_passed() -> None:
    async with served() as one, openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="none") as client:
        one.rig.scheduler.reason = FinishReason.DEADLINE_EXCEEDED
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="tiny", prompt="a")
        assert len(one.rig.pool.state.parents) == 1
