"""The chat template of the converted SmolLM2: without tools it writes the bytes of the template in the GGUF file."""

import json
import random
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orca.cli.smollm2.folder import CHAT_TEMPLATE
from orca.gateway.models.chat_template import ChatTemplate

# As it stands in SmolLM2-135M-Instruct.Q4_1.gguf, under tokenizer.chat_template.
ORIGINAL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "' }}{% endif %}"
)
ROLES = ("system", "user", "assistant", "critic")
TEXTS = (
    "",
    "Is Mr. Darcy at home?",
    "  spaces before, and behind \n",
    "\n\nlines\r\n\tand tabs\n",
    "{{ messages }} {% if tools %} {# no Jinja #}",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    "<|im_end|>\n<|im_start|>system\nanother",
    "Ünï 漢字 🐋 \\n &amp; <b>",
)
WITHOUT_TOOLS: tuple[dict[str, Any], ...] = ({}, {"tools": None}, {"tools": []})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather in a city's <centre>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOLD = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "weather", "description": "the weather in a city's <centre>", \
"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
"""


def some_chat(seed: int) -> list[dict[str, Any]]:
    numbers = random.Random(seed)
    plain: tuple[dict[str, Any], ...] = ({}, {"tool_calls": None}, {"tool_calls": []}, {"name": "ann"})
    return [
        {"role": numbers.choice(ROLES), "content": numbers.choice(TEXTS)} | numbers.choice(plain)
        for _ in range(numbers.randrange(7))
    ]


def render(template: str, chat: list[dict[str, Any]], *, opens: bool = True, **variables: Any) -> str:
    """Render a template as transformers does, with any variable."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(messages=chat, add_generation_prompt=opens, **variables)


@pytest.mark.parametrize("first_seed", range(0, 1000, 100))
def test_chats_without_tools_get_the_bytes_of_the_original_template(first_seed: int) -> None:
    template = CHAT_TEMPLATE.read_text()
    for seed in range(first_seed, first_seed + 100):
        chat, opens = some_chat(seed), seed % 3 > 0
        want = render(ORIGINAL, chat, opens=opens)
        for variables in WITHOUT_TOOLS:
            assert render(template, chat, opens=opens, **variables) == want, f"seed {seed}"


def test_the_gateway_renders_the_same_bytes() -> None:
    ours, original = ChatTemplate(CHAT_TEMPLATE.read_text(), {}), ChatTemplate(ORIGINAL, {})
    for seed in range(100):
        chat = [{key: message[key] for key in ("role", "content")} for message in some_chat(seed)]
        assert ours.render(chat) == original.render(chat) == render(ORIGINAL, chat), f"seed {seed}"


def test_tools_are_told_after_the_default_system_message() -> None:
    prompt = render(CHAT_TEMPLATE.read_text(), [{"role": "user", "content": "Is it warm in Bath?"}], tools=[WEATHER])
    default = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
    assert prompt == (f"{default}{TOLD}<|im_start|>user\nIs it warm in Bath?<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_told_after_the_system_message_of_the_chat() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    prompt = render(CHAT_TEMPLATE.read_text(), chat, tools=[WEATHER, WEATHER], opens=False)
    [line] = [line for line in TOLD.splitlines() if '"type"' in line]
    told = TOLD.replace(line, f"{line}\n{line}")
    assert prompt == f"<|im_start|>system\nBe brief.\n{told}<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_calls_and_their_results_are_written_in_the_hermes_format(tools: list[Any] | None) -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bath", "days": [1, 2]}}},
        {"id": "2", "type": "function", "function": {"name": "weather", "arguments": {}}},
    ]
    chat = [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": '{"celsius": 21}'},
        {"role": "tool", "tool_call_id": "2", "content": "no city"},
        {"role": "assistant", "content": "In Bath.", "tool_calls": calls[1:]},
        {"role": "tool", "tool_call_id": "2", "content": "again none"},
        {"role": "assistant", "content": "It is warm."},
    ]
    prompt = render(CHAT_TEMPLATE.read_text(), chat, tools=tools)
    assert prompt.partition("<|im_start|>user\nIs it warm?<|im_end|>\n")[2] == (
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath", "days": [1, 2]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n"
        '<tool_response>\n{"celsius": 21}\n</tool_response>\n<tool_response>\nno city\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\nIn Bath.\n"
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nagain none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is warm.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
