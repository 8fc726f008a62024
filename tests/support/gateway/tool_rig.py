"""A gateway whose model calls tools and reasons: a template, a tokenizer and whole answers for each format."""

import contextlib
import copy
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from orca.core.domain.request import Request
from orca.core.domain.text import Tokenizer
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import MODEL, FakeScheduler, Rig, rig

SPECIAL = ["<|end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
ADDED = ["<tool_call>", "</tool_call>"]
"""One token each, and ordinary text, as in Qwen's vocabulary. `<think>` is text of several tokens here."""

_MESSAGES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "CALL{% endfor %}{% if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>",
    "qwen3_xml": "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}]',
    "mistral_args": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    "llama3_json": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    '{# the format is {"name": function name, "parameters": dictionary of argument name and its value} #}',
}
FORMATS = tuple(_CALLS)


def template(tool_format: str | None, *, thinks: bool = False, opens: bool = False) -> str:
    """Return a chat template. Args: thinks: it cuts reasoning; opens: a prompt ends in `<think>`."""
    tools = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}" if tool_format else ""
    messages = _MESSAGES.replace("CALL", _CALLS[tool_format] if tool_format else "")
    if not tool_format:
        messages = messages.replace("{% for c in m.tool_calls or [] %}{% endfor %}", "")
    if opens:
        messages = messages.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
    return tools + messages + ("{# </think> #}" if thinks or opens else "")


@functools.cache
def tokenizer(chat_template: str) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(
        ['{"name": "get_weather", "arguments": {"city": "Paris"}} and more of the same'] * 3, trainer
    )
    inner.add_tokens([AddedToken(text, special=False) for text in ADDED])
    return Tokenizer(
        inner,
        decoder=orjson.loads(inner.to_str())["decoder"],
        named_special_tokens={"eos_token": "<|end|>"},
        chat_template=chat_template,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The text that a model writes, and its parts."""

    text: str
    content: str | None
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    reasoning: str | None = None


CITY, NONE = '{"city": "Pa}ris, \\"là\\" [1"}', "{}"
_F, _G = ("get_weather", CITY), ("now", NONE)
ANSWERS: dict[str, tuple[Answer, ...]] = {
    "hermes": (
        Answer(f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>', None, (_F,)),
        Answer(
            f'Wait.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n<tool_call>\n'
            '{"name": "now", "arguments": {}}\n</tool_call>',
            "Wait.",
            (_F, _G),
        ),
        Answer(f'<tool_call>{{"arguments":{CITY},"name":"get_weather"}}</tool_call> ok', "ok", (_F,)),
    ),
    "mistral": (
        Answer(
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}, "id": "123456789"}}, '
            '{"name": "now", "arguments": {}}]',
            None,
            (_F, _G),
        ),
        Answer(f'So:[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}}}]', "So:", (_F,)),
    ),
    "mistral_args": (
        Answer(f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}", None, (_F, _G)),
        Answer(f"So: [TOOL_CALLS]get_weather{CITY}", "So:", (_F,)),
    ),
    "llama3_json": (
        Answer(f'{{"name": "get_weather", "parameters": {CITY}}}', None, (_F,)),
        Answer(f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {CITY}}}', None, (_F,)),
        Answer(
            f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "now", "parameters": {{}}}}', None, (_F, _G)
        ),
    ),
    "qwen3_xml": (
        Answer(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa<ris>\nlà\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            None,
            (("get_weather", '{"city": "Pa<ris>\\nlà", "days": 3}'), _G),
        ),
    ),
}
PLAIN = ("Hello, there.", " two  spaces ", "a <tool_ca", "[1] {2}", "1 < 2", "<think", "", "é 🐋")
MALFORMED: dict[str, tuple[str, ...]] = {
    "hermes": (
        "<tool_call>\nhello\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1,}}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "x"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a"',
        '<tool_call>\n{"name"',
        "<tool_call>",
        "a <tool_call> b",
    ),
    "mistral": ('[TOOL_CALLS] {"name": "f", "arguments": {}}', "[TOOL_CALLS] [1]", "[TOOL_CALLS]"),
    "mistral_args": (
        "[TOOL_CALLS]two words[ARGS]{}",
        "[TOOL_CALLS]f[ARGS][1]",
        "[TOOL_CALLS]f[ARGS]{1}",
        "[TOOL_CALLS]",
    ),
    "llama3_json": (
        '{"city": 1}',
        '{"name": "Ann", "age": 3}',
        '{"name": "f", "parameters": [1]}',
        "{",
        "<|python_tag|>x",
    ),
    "qwen3_xml": (
        "<tool_call>\n<fun=f>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\nwords\n</function>\n</tool_call>",
    ),
}
"""Answers that are content, unchanged. In a stream the arguments may have been sent before that is known."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def without_special(text: str) -> str:
    """Return the text that an answer has for a client: special tokens have none."""
    for token in SPECIAL:
        text = text.replace(token, "")
    return text


def served(
    chat_template: str, settings: GatewaySettings | None = None, *, response_template: Any = None, **formats: str
) -> ServedModel:
    own = copy.copy(tokenizer(chat_template))
    own.response_template = response_template
    model = replace(MODEL, vocab_size=own.vocab_size, max_model_len=2000)
    return ServedModel.of(model, own, settings or GatewaySettings(model="tiny", grammar_seconds_max=60.0), **formats)


def ids(chat_template: str, text: str) -> tuple[int, ...]:
    """Return the tokens of an answer, with its end."""
    return (*tokenizer(chat_template).encode(text), tokenizer(chat_template).encode("<|end|>")[0])


@contextlib.asynccontextmanager
async def tool_rig(
    chat_template: str,
    answer: str = "",
    *,
    asked: list[Request] | None = None,
    pool: MemoryPool | None = None,
    schedules: bool = True,
    response_template: Any = None,
    settings: GatewaySettings | None = None,
    **formats: str,
) -> AsyncIterator[Rig]:
    """A gateway whose model gives one answer.

    Args:
        asked: takes the requests that the model gets.
        formats: as for `ServedModel.of`.
    """
    newest = served(chat_template, response_template=response_template, **formats)

    def written(request: Request) -> Sequence[int]:
        if asked is not None:
            asked.append(request)
        return ids(chat_template, answer)

    def scheduler(pool: Any) -> FakeScheduler:
        return FakeScheduler(pool, answer=written, tokenizer=newest.tokenizer, eos_ids=(0,))

    async with rig(
        settings=settings,
        model=newest.info,
        newest=newest,
        pool=pool,
        schedules=schedules,
        slots=2000,
        make_scheduler=scheduler,
    ) as one:
        yield one
