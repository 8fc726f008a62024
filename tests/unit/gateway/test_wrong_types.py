"""Every field of a call, with values of each wrong type: 400 that names the field, never 5xx and never silence."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.gateway.gateway_rig import Rig
from support.gateway.tool_rig import template, tool_rig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "number": [5, 0, 1.5],
    "text": ["x", ""],
    "list": [[5], []],
    "object": [{"x": 5}, {}],
}
"""Values of each type of JSON; Python counts the second ones as false. null means absent everywhere."""

SCHEMA = {"type": "object", "properties": {"x": {"type": "array", "items": {"enum": ["a"]}}}, "required": ["x"]}
FUNCTION = {"name": "f", "description": "Do it.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": ["a"]}'}}
COMMON: dict[str, Any] = {
    "model": "tiny", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 1,
    "temperature": 1, "top_p": 1, "top_k": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "logit_bias": {"5": 1}, "seed": 1, "stop": ["a"], "stop_token_ids": [5], "min_tokens": 1,
    "ignore_eos": False, "allowed_token_ids": [5], "bad_words": ["a"], "include_stop_str_in_output": False,
    "skip_special_tokens": True, "prompt_logprobs": 0, "return_token_ids": False, "add_special_tokens": False,
    "on_disconnect": "keep", "background": True, "deadline_ms": 100000, "priority": 1, "max_tokens": 5,
    "structured_outputs": {"json": {}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}}
FORMS: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": "a"}},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"grammar": "start: /a/"}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "refusal": "no", "tool_calls": [CALL]},
    {"role": "assistant", "content": "a", "reasoning": "r"},
    {"role": "tool", "tool_call_id": "1", "content": "t"},
    {"role": "assistant", "content": "the"},
]
CHATS: list[dict[str, Any]] = [
    {
        "model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required",
        "parallel_tool_calls": True, "reasoning_effort": "low", "chat_template_kwargs": {}, "logprobs": True,
        "top_logprobs": 1, "max_completion_tokens": 5, "add_generation_prompt": False, "continue_final_message": True,
    },
    *(
        {"messages": MESSAGES[1:2], "tools": [TOOL], "tool_choice": choice}
        for choice in (
            {"type": "function", "function": {"name": "f"}},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        )
    ),
    *({"messages": MESSAGES[1:2], **form} for form in FORMS),
]  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {**COMMON, "prompt": ["a"], "echo": True, "logprobs": 1, "best_of": 1},
        *({"prompt": "a", **form} for form in FORMS),
    ],
    CHAT: CHATS,
}
ALSO: dict[str, set[str]] = {
    r"stop": {"text"},
    r"bad_words|tools|stop_token_ids": {"list"},  # an empty list asks for nothing
    r"messages\[\d\]\.tool_calls": {"list"},
    r"prompt|messages\[\d\]\.content": {"text", "list"},
    r"prompt\[0\]": {"number", "list"},
    r"tool_choice": {"text", "object"},
    r"response_format\.json_schema\.schema": {"object"},
    r"structured_outputs\.json": {"object"},
    r".*\.arguments": {"object", "text"},
    # Any list has words, and any name is one of them.
    r".*(\.required|\.enum)": {"list"},
    r".*\.enum\[0\]": {*VALUES},
    r".*\.properties\.x": {"bool", "object"},
    r".*\.items": {"bool", "object", "list"},
}
"""Types that a field takes besides that of its example."""


def kind(value: Any) -> str:
    kinds = {bool: "bool", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return kinds[type(value)]


def places(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each field of a body with the keys that lead to it."""
    inside = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, each in inside:
        name = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else key
        yield name, [key]
        yield from ((inner, [key, *keys]) for inner, keys in places(each, name))


def replaced(body: dict[str, Any], keys: list[Any], value: Any) -> tuple[dict[str, Any], Any]:
    """Return a body with another value of one field, and the value that it had."""
    changed: Any = copy.deepcopy(body)
    inner = changed
    for key in keys[:-1]:
        inner = inner[key]
    before, inner[keys[-1]] = inner[keys[-1]], value
    return changed, before


async def problem_of(one: Rig, path: str, body: dict[str, Any], name: str) -> str | None:
    """Return what is wrong with the answer to a body whose field of this name has a wrong value; None if nothing is."""
    response = await one.client.post(path, json=body)
    if response.status_code != 400:
        return f"{response.status_code} {response.text[:80]}"
    error = response.json()["error"]
    param = error["param"] or ""
    names_it = bool(param) and (name.startswith(param) or param.startswith(name))
    return None if names_it and error["message"].startswith(param) else f"{param}: {error['message'][:120]}"


@pytest.mark.parametrize("path", BODIES)
async def test_a_value_of_a_wrong_type_is_400_and_its_field_is_named(path: str) -> None:
    problems: dict[str, str | None] = {}
    async with tool_rig(template("hermes", thinks=True), schedules=False) as one:
        for body in BODIES[path]:
            for name, keys in places(body):
                allowed = next((kinds for pattern, kinds in ALSO.items() if re.fullmatch(pattern, name)), set[str]())
                for given, values in VALUES.items():
                    for value in values:
                        place = f"{name} = {value!r}"
                        # Whatever is accepted is answered at once.
                        changed, before = replaced({"background": True, **body}, keys, value)
                        if place not in problems and given != kind(before) and given not in allowed:
                            problems[place] = await problem_of(one, path, changed, name)
    assert {place: problem for place, problem in problems.items() if problem is not None} == {}
    assert len(problems) > 300


@pytest.mark.parametrize("path", BODIES)
async def test_the_bodies_are_good_without_a_wrong_value(path: str) -> None:
    async with tool_rig(template("hermes", thinks=True), "") as one:
        for body in BODIES[path]:
            response = await one.client.post(path, json={**body, "background": True})
            assert response.status_code == 202, response.text
