"""Whole answers divide as `parse_response` of transformers divides them by an equivalent template."""

from typing import Any

import orjson
import pytest
from transformers.utils.chat_parsing import parse_response

from support.gateway.tool_rig import ANSWERS, PLAIN, TOOLS, template, tool_rig

_REASONING = {"open": "<think>", "close": "</think>"}
_JSON_CALL = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
_FIELDS: dict[str, dict[str, Any]] = {
    "hermes": {
        **_JSON_CALL,
        "transform": {"name": "{content.name}", "arguments": "{content.arguments}"},
    },
    "mistral": {
        "open_pattern": r"\[TOOL_CALLS\]",
        "close_pattern": r"\Z",
        "content": "json",
        "transform_each": True,
        "transform": {"name": "{name}", "arguments": "{arguments}"},
    },
    "mistral_args": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]+)(?:\[ARGS\])?",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "repeats": True,
        "content": "json",
        "transform": {"name": "{name}", "arguments": "{content}"},
    },
    "llama3_json": {
        "open_pattern": r'(?:<\|python_tag\|>|; )?(?=\{(?:"type": "function", )?"name")',
        "close_pattern": r"(?=; )|\Z",
        "repeats": True,
        "content": "json",
        "transform": {"name": "{content.name}", "arguments": "{content.parameters}"},
    },
    "qwen3_xml": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"},
        # Only calls of this shape get the types of the schema.
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}
CASES = [(name, answer) for name, answers in ANSWERS.items() for answer in answers]


def response_template(name: str) -> dict[str, Any]:
    return {
        "start_anchor": "<|assistant|>",
        "fields": {
            "content": {"repeats": True, "join": "", "optional": True},
            "reasoning": _REASONING,
            "tool_calls": _FIELDS[name],
        },
    }


async def message_of(name: str, text: str) -> dict[str, Any]:
    """Return the parts of our answer as transformers names them."""
    async with tool_rig(template(name, thinks=True), text) as one:
        message = (await one.chat(tools=TOOLS, max_tokens=900))["choices"][0]["message"]
    calls = [
        {"name": call["function"]["name"], "arguments": orjson.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]
    return {"content": message["content"], "reasoning": message["reasoning"], "tool_calls": calls}


def expected(name: str, text: str) -> dict[str, Any]:
    found = parse_response(text, response_template(name), prefix="<|assistant|>", tools=TOOLS)
    calls = [call.get("function", call) for call in found.get("tool_calls") or []]
    return {"content": found.get("content"), "reasoning": found.get("reasoning"), "tool_calls": calls}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("name", "answer"), CASES)
async def test_calls_and_reasoning_are_those_of_transformers(name: str, answer: Any, thinks: bool) -> None:
    text = f"<think>\nLet me see {{.\n</think>\n\n{answer.text}" if thinks else answer.text
    ours, theirs = await message_of(name, text), expected(name, text)
    assert ours == {**theirs, "content": theirs["content"] or None}
    assert len(ours["tool_calls"]) == len(answer.calls)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("text", [text for text in PLAIN if text.strip()])
async def test_plain_text_is_that_of_transformers_but_for_its_ends(name: str, text: str) -> None:
    ours, theirs = await message_of(name, text), expected(name, text)
    assert (ours["content"] or "").strip() == theirs["content"]
    assert ours["tool_calls"] == theirs["tool_calls"] == []
