"""Structured output on real stages: every answer that ends by itself has its form, and a cut one begins one.

The model is random, so an answer takes any way through its grammar.
"""

import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.errors import InvalidRequest
from orca.core.domain.model import load_model_info
from orca.core.domain.request import FinishReason, SamplingParams
from orca.core.domain.text import Tokenizer
from orca.core.grammars.matching import GrammarVocabulary
from orca.gateway.formats.grammar import AnswerGrammar
from orca.gateway.formats.marked_text import Markers
from orca.gateway.formats.parser import AnswerParser
from orca.gateway.formats.tables import TOOL_FORMATS, ModelFormats, ToolFormat
from orca.gateway.formats.tools import tools_of
from orca.gateway.grammars.fields import StructuredOutputs, grammar_of
from support.grammars.schemas import CORPUS, Schema, generated
from support.system.running_group import RunningGroup, Work

pytestmark = pytest.mark.timeout(900)

TOKENS = 70
TOGETHER = 500  # requests of one scheduler's life: fewer than the queue holds
REGEXES = (
    r"\d{3}-\d{4}",
    r"[A-Za-z_]\w{0,9}",
    r"(a|bb)*c?",
    r"^x+$",
    "[^\n]{2,5}",
    r"(GET|POST) /[a-z/]{0,8} HTTP/1\.[01]",
)
CHOICES = (["yes", "no"], ["a", "aa", "aaa"], ['quoted "text"', "line\nbreak", "ß"])
GRAMMARS: dict[str, str] = {
    'start: sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]{1,3}/': r"[0-9]{1,3}(\+[0-9]{1,3})*",
    'start: "<" NAME ">" TEXT "</" NAME ">"\nNAME: /[a-z]{1,4}/\nTEXT: /[^<>]{0,9}/': (
        r"<[a-z]{1,4}>[^<>]{0,9}</[a-z]{1,4}>"
    ),
    'start: %json {"type": "boolean"} ";" | "none"': "(true|false);|none",
}

Case = tuple[str, Callable[[str], bool]]
"""A grammar, and what tells whether a text has that form."""


def is_json_of(schema: Schema, text: str) -> bool:
    # llguidance allows a leap second at any time of the day.
    text = text.replace(":60", ":59")
    value = json.loads(text, parse_float=_finite)
    return jsonschema_rs.is_valid(schema, value, validate_formats=True, formats={"email": _is_email})


def _is_email(text: str) -> bool:
    """The grammar of RFC 5321 has no bounds. Its section 4.5.3 and DNS have some, which llguidance does not know."""
    if len(text) > 63:
        return all(text.rpartition("@"))
    return jsonschema_rs.is_valid({"type": "string", "format": "email"}, text, validate_formats=True)


def _finite(digits: str) -> float:
    """JSON has numbers beyond those of a float, and the model writes them."""
    return min(max(float(digits), -sys.float_info.max), sys.float_info.max)


def is_whole_match(regex: str, text: str) -> bool:
    return re.fullmatch(regex, text, re.ASCII) is not None


def cases(schemas: Sequence[Schema]) -> list[Case]:
    found: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
        ({"json": schema}, partial(is_json_of, schema)) for schema in schemas
    ]
    found += [({"regex": regex}, partial(is_whole_match, regex)) for regex in REGEXES]
    found += [({"choice": choice}, choice.__contains__) for choice in CHOICES]
    found += [({"grammar": grammar}, partial(is_whole_match, regex)) for grammar, regex in GRAMMARS.items()]
    return [(grammar_text(fields), has_form) for fields, has_form in found]


def grammar_text(fields: dict[str, Any]) -> str:
    grammar = grammar_of(None, StructuredOutputs.model_validate(fields))
    assert grammar is not None
    return grammar.text


def cases_of_tools(folder: Path, schemas: Sequence[Schema], formats: Sequence[ToolFormat]) -> list[Case]:
    """Return forced calls of a strict function with each schema, in each format that can write it."""
    tokenizer = Tokenizer.from_folder(folder)
    found: list[Case] = []
    for table, schema in itertools.product(formats, schemas):
        if schema.get("type") != "object":
            continue
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        tools = tools_of([tool], "required", None)
        assert tools is not None
        model = ModelFormats(table)
        try:
            grammar = AnswerGrammar(model, tokenizer, False).of_calls(tools, None)
        except InvalidRequest:
            assert table.name == "qwen3_xml"
            continue
        found.append((grammar.text, partial(is_calls_of, Markers(model, tokenizer), schema)))
    return found


def is_calls_of(markers: Markers, schema: Schema, text: str) -> bool:
    """Return whether a text is tool calls whose arguments obey the schema, and nothing else."""
    parser = AnswerParser(markers, holds_calls=True, schemas={"f": schema})
    deltas = [parser.push(-1, text), parser.flush("", is_cut=False)]
    calls = [call for delta in deltas for call in delta.calls]
    is_nothing_else = not any(delta.content or delta.reasoning for delta in deltas)
    return bool(calls) and is_nothing_else and all(is_json_of(schema, call.arguments) for call in calls)


async def check(folder: Path, checked: Sequence[Case], answers: int, seed: int, *, tokens: int = TOKENS) -> int:
    """Serve answers of all cases, in mixed batches, and check each. Returns: how many ended by themselves.

    Args: tokens: of the longest answers.
    """
    chance = random.Random(seed)
    info, tokenizer = load_model_info(folder), Tokenizer.from_folder(folder)
    vocabulary = GrammarVocabulary(tokenizer, info.vocab_size, info.eos_token_ids)
    grammars = [grammar for grammar, _ in checked]
    works = [
        Work(
            prompt=tuple(chance.randrange(2, 100) for _ in range(chance.randint(1, 9))),
            max_new_tokens=chance.randint(1, tokens),
            sampling=SamplingParams(seed=number, temperature=3.0, grammar=grammars[number % len(grammars)]),
        )
        for number in range(answers)
    ]
    with RunningGroup(folder, slots_max=1 << 14) as group:
        outputs = [
            output
            for first in range(0, answers, TOGETHER)
            for output in await group.serve(
                works[first : first + TOGETHER], max_batch_size=32, prefetch=1, limit_s=800.0
            )
        ]
    ended = 0
    for number, output in enumerate(outputs):
        grammar, has_form = checked[number % len(checked)]
        assert output.end.reason in (FinishReason.STOP, FinishReason.LENGTH), (grammar, output.end)
        if output.end.reason is FinishReason.STOP:
            ended += 1
            text = tokenizer.decode(output.ids)
            assert has_form(text), (grammar, text)
        else:
            matcher = vocabulary.matcher(grammar)
            matcher.consume(output.ids)
            assert matcher.failure is None, (grammar, output.ids)
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A token for each byte: without one of them some texts of a schema could not be written.
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), vocab_size=300, max_position_embeddings=1024)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2])
async def test_answers_have_the_form_of_their_call(folder: Path, seed: int) -> None:
    checked = cases([*CORPUS, *generated(20, seed)])
    assert await check(folder, checked, 2 * len(checked), seed) > len(checked) // 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [3, 4])
async def test_forced_tool_calls_obey_their_schema(folder: Path, seed: int) -> None:
    checked = cases_of_tools(folder, generated(8, seed), [*TOOL_FORMATS.values()])
    assert await check(folder, checked, 2 * len(checked), seed)


@pytest.mark.prove
@pytest.mark.parametrize("table", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
async def test_five_hundred_structured_tool_calls_of_each_format(folder: Path, table: ToolFormat) -> None:
    checked = cases_of_tools(folder, [*CORPUS, *generated(300 - len(CORPUS), 8)], [table])
    # A token is a byte, and a call has many of them around its arguments.
    ended = await check(folder, checked, 500, 8, tokens=900)
    print(f"{ended} of 500 answers ended by themselves, of {len(checked)} schemas in the format {table.name}")
    assert ended > 50


@pytest.mark.prove
async def test_two_thousand_structured_answers_of_three_hundred_schemas(folder: Path) -> None:
    checked = cases([*CORPUS, *generated(300 - len(CORPUS), 7)])
    ended = await check(folder, checked, 2_000, 7)
    print(f"{ended} of 2000 answers ended by themselves, of {len(checked)} forms")
    assert ended > 600
