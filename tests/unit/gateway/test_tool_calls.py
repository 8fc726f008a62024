"""Tool calls and reasoning over HTTP: whole answers, streams from every index, history, and clear errors."""

import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from orca.core.domain.request import Request
from orca.core.grammars.matching import GrammarVocabulary
from orca.gateway.models.chat_template import ChatTemplate
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import WallClock, error_of, events
from support.gateway.tool_rig import (
    ANSWERS,
    FORMATS,
    MALFORMED,
    TOOLS,
    ids,
    template,
    tokenizer,
    tool_rig,
    without_special,
)

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the weather?"}]
ANSWER = ANSWERS["hermes"][1]
THOUGHT = "Let me see."
CASES = [(name, answer) for name, answers in ANSWERS.items() for answer in answers]


def merged(stream: str) -> dict[str, Any]:
    """Return the message that the deltas of choice 0 make, with the finish reason and the usage."""
    message: dict[str, Any] = {"content": None, "calls": []}
    for _, event in events(stream):
        if event == "[DONE]":
            continue
        message["usage"] = event.get("usage") or message.get("usage")
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    message["calls"].append({key: call[key] for key in ("id", "type", "function")})
                else:
                    message["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


@pytest.mark.parametrize(("name", "answer"), CASES)
async def test_a_whole_answer_and_a_stream_have_the_same_calls(name: str, answer: Any) -> None:
    async with tool_rig(template(name), answer.text) as one:
        whole = (await one.chat(tools=TOOLS, max_tokens=500))["choices"][0]
        stream = await one.post(CHAT, messages=MESSAGES, tools=TOOLS, max_tokens=500, stream=True)
    calls = whole["message"]["tool_calls"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == list(answer.calls)
    assert whole["message"]["content"] == answer.content
    assert whole["finish_reason"] == "tool_calls"
    found = merged(stream.text)
    assert [call["function"] for call in found["calls"]] == [call["function"] for call in calls]
    assert (found["content"] or None) == answer.content
    assert found["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in (*calls, *found["calls"])}) == 2 * len(calls)
    assert all(len(call["id"]) == (9 if name.startswith("mistral") else 29) for call in calls)


async def test_a_stream_has_one_event_for_each_token() -> None:
    source = template("hermes")
    async with tool_rig(source, ANSWER.text) as one:
        stream = await one.post(CHAT, messages=MESSAGES, tools=TOOLS, max_tokens=500, stream=True)
    found = [event for _, event in events(stream.text) if event != "[DONE]"]
    assert len(found) == len(ids(source, ANSWER.text)) + 1
    assert (
        found[0]["choices"][0]["delta"] == {"role": "assistant", "content": "W"}
        or found[0]["choices"][0]["delta"]["role"]
    )
    names = [
        call["function"]["name"]
        for event in found
        for call in event["choices"][0]["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert names == ["get_weather", "now"]


def cut_streams(stream: str) -> Iterator[tuple[str, str]]:
    """Yield each event id with the rest of the stream."""
    blocks = [block + "\n\n" for block in stream.split("\n\n")[:-1]]
    for place, block in enumerate(blocks):
        event_id = block.split("\n")[0].removeprefix("id: ")
        if event_id[0].isdigit():
            yield event_id, "".join(blocks[place + 1 :])


@pytest.mark.parametrize(("name", "answer"), CASES)
async def test_a_second_gateway_goes_on_from_every_index_with_the_same_bytes(name: str, answer: Any) -> None:
    source, pool = template(name, thinks=True), MemoryPool(WallClock())
    text = f"<think>\n{THOUGHT}\n</think>\n\n{answer.text}"
    async with tool_rig(source, text, pool=pool) as first, tool_rig(source, pool=pool, schedules=False) as second:
        body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 900, "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        stream = await first.client.post(CHAT, json=body, headers={"accept": "text/event-stream"})
        assert merged(stream.text)["reasoning"] == THOUGHT
        url = f"/v1/requests/{stream.headers['x-request-id']}/events"
        for event_id, rest in cut_streams(stream.text):
            resumed = await second.client.get(url, headers={"last-event-id": event_id})
            assert resumed.text == rest


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
async def test_a_malformed_call_is_content(name: str, text: str) -> None:
    async with tool_rig(template(name), text) as one:
        choice = (await one.chat(tools=TOOLS, max_tokens=500))["choices"][0]
        stream = await one.post(CHAT, messages=MESSAGES, tools=TOOLS, max_tokens=500, stream=True)
    assert choice["message"] == {"role": "assistant", "content": without_special(text), "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert stream.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("opens", [False, True])
async def test_reasoning_is_told_from_the_answer(opens: bool) -> None:
    text = f"{THOUGHT}\n</think>\n\nIt rains."
    source = template(None, thinks=True, opens=opens)
    async with tool_rig(source, text if opens else f"<think>\n{text}") as one:
        answer = await one.chat(messages=MESSAGES, max_tokens=500)
        stream = await one.post(
            CHAT, messages=MESSAGES, max_tokens=500, stream=True, stream_options={"include_usage": True}
        )
        models = (await one.client.get("/v1/models")).json()
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "It rains.",
        "refusal": None,
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
    }
    own = tokenizer(source)
    reasoning = own.encode(("" if opens else "<think>\n") + f"{THOUGHT}\n</think>")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] in (len(reasoning), len(reasoning) + 1)
    found = merged(stream.text)
    assert (found["reasoning_content"], found["content"]) == (THOUGHT, "It rains.")
    assert found["usage"] == answer["usage"]
    assert models["data"][0]["reasoning_format"] == "think"
    assert models["data"][0]["tool_format"] is None


EXACT_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"choice": [" yes\n", "no"]}, " yes\n"),
    ({"choice": ["\n\n yes", "no"]}, "\n\n yes"),
    ({"choice": ["\t", "\n"]}, "\t"),
    ({"regex": r"\s{0,9}[a-z]+\s{0,9}"}, "\n\n\n  yes \n\n"),
    ({"regex": r"[a-z]*"}, ""),
    ({"grammar": "start: /\\s*[a-z]+\\s*/"}, " \n yes "),
]


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize(("structured", "form"), EXACT_FORMS, ids=str)
async def test_an_answer_of_a_form_is_exact_after_reasoning(
    structured: dict[str, Any], form: str, reasons: bool, with_tools: bool
) -> None:
    source, asked = template("hermes", thinks=True), list[Request]()
    text = f"<think>\n{THOUGHT}\n</think>\n\n{form}" if reasons else form
    body = {"structured_outputs": structured, "max_tokens": 200} | ({"tools": TOOLS} if with_tools else {})
    async with tool_rig(source, text, asked=asked) as one:
        message = (await one.chat(**body))["choices"][0]["message"]
        stream = await one.post(CHAT, messages=MESSAGES, stream=True, **body)
    assert (message["content"] or "", message["reasoning_content"]) == (form, THOUGHT if reasons else None)
    found = merged(stream.text)
    assert (found["content"] or "", found.get("reasoning")) == (form, THOUGHT if reasons else None)
    own = tokenizer(source)
    matcher = GrammarVocabulary(own, own.vocab_size, [0]).matcher(asked[0].sampling.grammar or "")
    for token_id in ids(source, text):
        assert not matcher.is_complete or token_id == 0
        if token_id:
            matcher.consume([token_id])
        assert matcher.failure is None
    assert matcher.is_complete or matcher.mask()[0] & 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "rest", "reasoning", "content"),
    [
        ("<think>\nIt", " rains.\n</think>\n\nYes.", " rains.", "Yes."),
        ("<think>\nIt rains.", "</think>\n\nYes.", None, "Yes."),
        ("<think>", "\nIt rains.</think>Yes.", "It rains.", "Yes."),
        ("<think>\n", "It rains.</think>Yes.", "It rains.", "Yes."),
        ("<think>a</think>\n\n<think>", "b</think>c", "b", "c"),
        ("<think>\nIt rains.\n</think>\n\nYes,", " it does.", None, " it does."),
        ("Yes,", " it does.", None, " it does."),
    ],
)
async def test_an_answer_that_continues_reasoning_is_reasoning(
    given: str, rest: str, reasoning: str | None, content: str, stream: bool
) -> None:
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": given}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 200}
    async with tool_rig(template(None, thinks=True), rest) as one:
        if stream:
            found = merged((await one.post(CHAT, stream=True, **body)).text)
            assert (found.get("reasoning"), found["content"]) == (reasoning, content)
            return
        message = (await one.chat(**body))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)


async def test_a_form_comes_after_the_reasoning_that_is_continued() -> None:
    asked: list[Request] = []
    messages = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "<think>\nIt"}]}]
    body = {"messages": messages, "continue_final_message": True, "response_format": {"type": "json_object"}}
    async with tool_rig(template(None, thinks=True), 'rains</think>\n{"a": 1}', asked=asked) as one:
        message = (await one.chat(max_tokens=99, **body))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("rains", '{"a": 1}')
    assert "start: thought" in (asked[0].sampling.grammar or "")


async def test_an_answer_without_tools_keeps_its_text() -> None:
    async with tool_rig(template("hermes"), ANSWER.text) as one:
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = (await one.chat(max_tokens=500, **body))["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": ANSWER.text, "refusal": None}
            assert choice["finish_reason"] == "stop"


async def test_json_of_a_form_is_no_tool_call_without_its_marker() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"tools": TOOLS, "response_format": form, "max_tokens": 500}
    text = '{"name": "get_weather", "parameters": {"city": "Pa"}}'
    source = template("llama3_json")
    async with tool_rig(source, text) as one:
        message = (await one.chat(**body))["choices"][0]["message"]
        assert message == {"role": "assistant", "content": text, "refusal": None}
        assert (await one.chat(tools=TOOLS, max_tokens=500))["choices"][0]["finish_reason"] == "tool_calls"
    async with tool_rig(source, f"<|python_tag|>{text}") as one:
        assert (await one.chat(**body))["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_setting_switches_the_formats_off() -> None:
    text = f"<think>hm</think>{ANSWER.text}"
    source = template("hermes", thinks=True)
    async with tool_rig(source, text, tool_format="none", reasoning_format="none") as one:
        choice = (await one.chat(tools=TOOLS, max_tokens=500))["choices"][0]
        models = (await one.client.get("/v1/models")).json()
    assert choice["message"]["content"] == text
    assert models["data"][0]["tool_format"] is models["data"][0]["reasoning_format"] is None


async def test_a_call_that_the_length_cuts_ends_by_length() -> None:
    async with tool_rig(template("hermes"), ANSWER.text) as one:
        choice = (await one.chat(tools=TOOLS, max_tokens=30))["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert ANSWER.calls[0][1].startswith(call["function"]["arguments"])


async def prompt_of(source: str, **body: Any) -> str:
    asked: list[Request] = []
    async with tool_rig(source, asked=asked) as one:
        response = await one.post(CHAT, **{"messages": MESSAGES, **body})
        assert response.status_code == 200, response.text
    return tokenizer(source).decode(asked[0].prompt, skip_special_tokens=False)


async def test_the_template_gets_the_tools_as_the_client_wrote_them() -> None:
    tools = [{"function": {"strict": None, "name": "f", "x": [1.0, "é"]}, "type": "function"}]
    prompt = await prompt_of(template("hermes"), tools=tools)
    assert prompt.startswith(f"TOOLS {orjson.dumps(tools).decode().replace(':', ': ').replace(',', ', ')}\n")
    assert "TOOLS" not in await prompt_of(template("hermes"), tools=tools, tool_choice="none")


@pytest.mark.parametrize("name", FORMATS)
async def test_the_template_gets_earlier_calls_with_objects_and_their_results(name: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Pa"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    prompt = await prompt_of(template(name), messages=history, tools=TOOLS)
    assert "get_weather" in prompt
    assert ("<parameter=city>\nPa\n" if name == "qwen3_xml" else '{"city": "Pa"}') in prompt
    assert "<|tool|>sunny of " in prompt
    if name.startswith("mistral"):
        short_id = prompt.partition("sunny of ")[2][:9]
        assert short_id.isalnum()
        assert "call_1" not in prompt
        assert name != "mistral" or f'"id": "{short_id}"' in prompt


async def test_arguments_that_are_no_object_stay_a_text() -> None:
    written = "{{ c.function.name }} {{ c.function.arguments }}"
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}" + written
    source += "{% endfor %}{% endfor %}"
    for arguments, expected in (('{"a": 1,', 'f {"a": 1,'), ("", "f {}"), (None, "f {}"), ('{"a": 1}', "f {'a': 1}")):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
        assert expected in await prompt_of(source, messages=messages)


async def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    source = template(None) + "{{ reasoning_effort | default('unset') }}"
    assert (await prompt_of(source)).endswith("unset")
    assert (await prompt_of(source, reasoning_effort="high")).endswith("high")
    both = await prompt_of(source, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert both.endswith("low")
    assert (await prompt_of(template(None), reasoning_effort="high")).endswith("<|assistant|>")


async def test_a_forced_call_gets_a_grammar_and_a_free_one_gets_none() -> None:
    asked: list[Request] = []
    async with tool_rig(template("hermes"), ANSWER.text, asked=asked) as one:
        await one.chat(tools=TOOLS, max_tokens=500)
        await one.chat(tools=TOOLS, max_tokens=500, tool_choice="required")
        await one.chat(tools=TOOLS, max_tokens=500, parallel_tool_calls=False)
        strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
        await one.chat(tools=strict, max_tokens=500)
    grammars = [request.sampling.grammar for request in asked]
    assert grammars[0] is None
    assert all(grammar is not None and "get_weather" in grammar for grammar in grammars[1:])
    assert len(set(grammars)) == 4


async def test_a_loose_schema_without_a_grammar_does_not_refuse_the_call() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    asked: list[Request] = []
    async with tool_rig(template("hermes"), "", asked=asked) as one:
        await one.chat(tools=tools, max_tokens=5, tool_choice="required")
        tools[0]["function"]["strict"] = True
        status, error = await one.error(CHAT, messages=MESSAGES, tools=tools)
    assert asked[0].sampling.grammar is not None
    assert (status, error["param"]) == (400, "tools[0].function.parameters")
    assert "'uniqueItems'" in error["message"]


def function(name: str, parameters: dict[str, Any], *, is_strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": is_strict}}


def with_x(**declared: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": declared}, "required": ["x"], "additionalProperties": False}


def brief(name: str) -> str:
    """Return a template that writes the names of the tools only."""
    return template(name).replace("{{ tools | tojson }}", "{{ tools | map(attribute='function.name') | join(' ') }}")


WORD = with_x(enum=["only-this"])
WITHOUT_GRAMMAR = {
    "a keyword": with_x(type="array", uniqueItems=True),
    "no schema": with_x(type="integer", minimum="low"),
    "a reference to nothing": with_x(**{"$ref": "#/$defs/nothing"}),
    "more bytes than a grammar may have": with_x(enum=[f"{i:0100}" for i in range(800)]),
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
@pytest.mark.parametrize("kind", WITHOUT_GRAMMAR)
async def test_only_a_function_without_a_grammar_is_loosened(kind: str, name: str) -> None:
    asked: list[Request] = []
    tools = [function("f", WORD), function("g", WITHOUT_GRAMMAR[kind]), function("h", WORD, is_strict=True)]
    async with tool_rig(brief(name), "", asked=asked) as one:
        await one.chat(tools=tools, max_tokens=5, tool_choice="required")
    grammar = asked[0].sampling.grammar
    assert grammar is not None
    assert grammar.count("only-this") == 2


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "g"}}])
@pytest.mark.parametrize("kind", WITHOUT_GRAMMAR)
async def test_the_strict_function_without_a_grammar_is_named(kind: str, choice: Any, name: str) -> None:
    tools = [function("f", WORD), function("g", WITHOUT_GRAMMAR[kind], is_strict=True)]
    async with tool_rig(brief(name), schedules=False) as one:
        status, error = await one.error(CHAT, messages=MESSAGES, tools=tools, tool_choice=choice)
    assert (status, error["param"]) == (400, "tools[1].function.parameters")
    assert error["message"].startswith("tools[1].function.parameters: ")


async def test_functions_that_are_too_much_together_are_loosened_or_refused() -> None:
    parameters = with_x(enum=[f"{i:0100}" for i in range(400)])
    asked: list[Request] = []
    async with tool_rig(brief("hermes"), "", asked=asked) as one:
        tools = [function("f", parameters), function("g", parameters)]
        await one.chat(tools=tools, max_tokens=5, tool_choice="required")
        tools = [function(name, parameters, is_strict=True) for name in ("f", "g")]
        status, error = await one.error(CHAT, messages=MESSAGES, tools=tools)
    assert len(asked[0].sampling.grammar or "") < 1000
    assert (status, error["param"]) == (400, "tools")
    assert "more than 65536" in error["message"]


F: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calling(call: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": call}]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": 5}, "tools", "must be a list, not 5"),
    ({"tools": [5]}, "tools[0]", "must be an object with type function and a function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0]", "must be an object with type function and a function"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "must be function, not 'custom'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "must be 1 to 64 letters"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "not 'a b'"),
    ({"tools": [F, F]}, "tools[1].function.name", "two functions have the name 'f'"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        "must be an object, not an empty list",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        "tools[0].function.strict",
        "must be true or false, not 'yes'",
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs tools, and the call has none"),
    ({"tools": [F], "tool_choice": "any"}, "tool_choice", "must be none, auto or required"),
    ({"tools": [F], "tool_choice": 1}, "tool_choice", "must be none, auto or required"),
    ({"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "not 'custom'"),
    (
        {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "names no function of tools (f)",
    ),
    (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools",
        "must be an object with a mode",
    ),
    (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}},
        "tool_choice.allowed_tools.tools[0]",
        "names no function of tools (f)",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    (calling(5), "messages[1].tool_calls", "must be a list, not 5"),
    (
        {"messages": [{**MESSAGES[0], "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
        "only a message of the assistant has tool calls",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}, "strict": True}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
        "must be the schema of an object, not of the type 'array'",
    ),
    (calling([5]), "messages[1].tool_calls[0]", "must be an object with type function and a function"),
    (calling([{**CALL, "type": "custom"}]), "messages[1].tool_calls[0].type", "must be function, not 'custom'"),
    (calling([{**CALL, "id": 5}]), "messages[1].tool_calls[0].id", "must be a text, not 5"),
    (calling([{**CALL, "function": {}}]), "messages[1].tool_calls[0].function.name", "must be a text, not null"),
    (
        calling([{**CALL, "function": {"name": "f", "arguments": [1]}}]),
        "messages[1].tool_calls[0].function.arguments",
        "must be the text of a JSON object, not a list",
    ),
    (
        {"messages": [*MESSAGES, {"role": "tool", "content": "x", "tool_call_id": 5}]},
        "messages[1].tool_call_id",
        "must be a text, not 5",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=str)
async def test_bad_input_is_refused_by_name(body: dict[str, Any], param: str, words: str) -> None:
    async with tool_rig(template("hermes")) as one:
        status, error = await one.error(CHAT, **{"messages": MESSAGES, **body})
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


async def test_tools_need_a_template_with_tools() -> None:
    async with tool_rig(template(None), "ok") as one:
        status, error = await one.error(CHAT, messages=MESSAGES, tools=TOOLS)
        assert (status, error["param"]) == (400, "tools")
        assert "this model's chat template has no place for tools" in error["message"]
        await one.chat(tools=TOOLS, tool_choice="none", max_tokens=5)
        status, error = await one.error(CHAT, **calling([CALL]))
        assert (status, error["param"]) == (400, "messages[1].tool_calls")
        assert "leaves tool calls out of the prompt" in error["message"]


async def test_calls_of_an_unknown_format_are_text_and_cannot_be_forced() -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with tool_rig(source, "CALL f()") as one:
        choice = (await one.chat(tools=TOOLS, max_tokens=50))["choices"][0]
        assert choice["message"]["content"] == "CALL f()"
        strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
        for body in ({"parallel_tool_calls": False}, {"tools": strict}):
            choice = (await one.chat(**{"tools": TOOLS, "max_tokens": 50, **body}))["choices"][0]
            assert choice["message"]["content"] == "CALL f()"
        status, error = await one.error(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="required")
    assert (status, error["param"]) == (400, "tool_choice")
    assert "the format in which this model calls tools is not known" in error["message"]


async def test_calls_with_tools_wait_for_the_newer_schema_and_reasoning_stays_text() -> None:
    pool = MemoryPool(WallClock())
    pool.state.schema = 2
    source = template("hermes", thinks=True)
    async with tool_rig(source, "<think>hm</think>ok", pool=pool) as one:
        one.app.state.gateway.models.schema = 2
        response = await one.post(CHAT, messages=MESSAGES, tools=TOOLS)
        status, error = error_of(response)
        assert (status, error["param"]) == (400, "tools")
        assert "schema 2 of the release before is in force" in error["message"]
        message = (await one.chat(max_tokens=50))["choices"][0]["message"]
        assert message["content"] == "<think>hm</think>ok"


async def test_tokenize_counts_the_tools() -> None:
    async with tool_rig(template("hermes")) as one:
        with_tools = (await one.post("/tokenize", messages=MESSAGES, tools=TOOLS)).json()["count"]
        without = (await one.post("/tokenize", messages=MESSAGES)).json()["count"]
    assert with_tools > without


LONG = "x" * 200_000
LONG_CHATS: dict[str, dict[str, Any]] = {
    "calls": {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f'{{"a": "{LONG}"}}'}}]},
        ]
    },
    "reasoning": {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "reasoning_content": LONG}]},
    "tools": {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
}


@pytest.mark.parametrize("name", LONG_CHATS)
async def test_long_tool_calls_and_tools_are_rendered_in_a_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tool_rig(template("hermes"), schedules=False) as one:
        await one.post("/tokenize", messages=MESSAGES, tools=TOOLS)  # tries the template
        render, threads = ChatTemplate.render, []

        def noting(*words: Any, **named: Any) -> str:
            threads.append(threading.current_thread())
            return render(*words, **named)

        monkeypatch.setattr(ChatTemplate, "render", noting)
        await one.post("/tokenize", **LONG_CHATS[name])
    assert threads
    assert threading.current_thread() not in threads
