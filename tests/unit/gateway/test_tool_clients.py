"""The official client reads tool calls and reasoning unchanged: whole, as a stream, parsed, and over two turns."""

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from orca.core.domain.request import Request
from support.gateway.tool_rig import ANSWERS, FORMATS, TOOLS, template, tokenizer, tool_rig

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather?"}]
ANY_TOOLS: Any = TOOLS


def client_of(one: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://orca/v1", api_key="none", http_client=one.client)


@pytest.mark.parametrize("name", FORMATS)
async def test_the_stream_helper_collects_the_calls(name: str) -> None:
    for answer in ANSWERS[name]:
        text = f"<think>\nhm\n</think>\n\n{answer.text}"
        async with tool_rig(template(name, thinks=True), text) as one:
            create = client_of(one).chat.completions.stream
            async with create(model="tiny", messages=MESSAGES, tools=ANY_TOOLS, max_tokens=900) as stream:
                kinds = [event.type async for event in stream]
                message = (await stream.get_final_completion()).choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        assert calls == list(answer.calls)
        assert (message.content or None) == answer.content
        assert kinds.count("tool_calls.function.arguments.done") == len(calls)


class City(BaseModel):
    city: str


async def test_parse_gives_the_arguments_as_an_object() -> None:
    tool = openai.pydantic_function_tool(City, name="get_weather")
    asked: list[Request] = []
    async with tool_rig(template("hermes"), ANSWERS["hermes"][0].text, asked=asked) as one:
        answer = await client_of(one).chat.completions.parse(
            model="tiny", messages=MESSAGES, tools=[tool], max_tokens=500
        )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == City(city='Pa}ris, "là" [1')
    assert asked[0].sampling.grammar is not None  # the client's tools are strict


async def test_a_conversation_goes_on_with_the_results() -> None:
    source = template("hermes")
    asked: list[Request] = []
    async with tool_rig(source, ANSWERS["hermes"][1].text, asked=asked) as one:
        client = client_of(one)
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=ANY_TOOLS, tool_choice="auto", max_tokens=500
        )
        message = answer.choices[0].message
        messages = [*MESSAGES, message.model_dump(exclude_none=True)]
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.id}"}
            for call in message.tool_calls or ()
        ]
        await client.chat.completions.create(model="tiny", messages=messages, tools=ANY_TOOLS, max_tokens=500)
    prompt = tokenizer(source).decode(asked[1].prompt, skip_special_tokens=False)
    assert ANSWERS["hermes"][0].text in prompt
    for call in message.tool_calls or ():
        assert f"result of {call.id} of {call.id}" in prompt
