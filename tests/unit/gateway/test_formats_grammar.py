"""Tool calls as grammars: what a grammar allows, the parser reads as calls that obey their schemas."""

import random
import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import jsonschema_rs
import orjson
import pytest

from orca.core.domain.errors import InvalidRequest
from orca.core.grammars.matching import GrammarVocabulary
from orca.gateway.formats.grammar import AnswerGrammar
from orca.gateway.formats.marked_text import Markers
from orca.gateway.formats.parser import AnswerParser
from orca.gateway.formats.tables import REASONING_FORMATS, TOOL_FORMATS, ModelFormats
from orca.gateway.formats.tools import CallTools, tools_of
from orca.gateway.grammars.fields import NamedGrammar, ResponseFormat, grammar_of
from support.effort import tries
from support.gateway.tool_rig import FORMATS, template, tokenizer

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "P", "days": 3}'
ONE: dict[str, str] = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nP\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
}
TWO: dict[str, str] = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral_args": ONE["mistral_args"] + "[TOOL_CALLS]now[ARGS]{}",
    "llama3_json": ONE["llama3_json"] + '; {"name": "now", "parameters": {}}',
    "qwen3_xml": ONE["qwen3_xml"] + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
}
WRONG = {name: text.replace("get_weather", "get_whether") for name, text in ONE.items()}
JSON = grammar_of(ResponseFormat.model_validate({"type": "json_object"}), None)
THOUGHT = "so <tool_call> [x\n</think>\n\n"


@cache
def vocabulary() -> GrammarVocabulary:
    own = tokenizer(template("hermes"))
    return GrammarVocabulary(own, own.vocab_size, [0])


def is_allowed(grammar: NamedGrammar, text: str) -> bool:
    """Return whether a text is a whole answer."""
    matcher = vocabulary().matcher(grammar.text)
    assert matcher.failure is None, matcher.failure
    for token in tokenizer(template("hermes")).encode(text):
        if matcher.is_complete:
            return False
        matcher.consume([token])
        if matcher.failure is not None:
            return False
    return matcher.is_complete or bool(matcher.mask()[0] & 1)  # EOS has the id 0


def of_calls(
    name: str,
    tools: CallTools,
    *,
    thinks: bool = False,
    opens: bool = False,
    answer: NamedGrammar | None = None,
    loosened: Collection[str] = (),
) -> NamedGrammar:
    formats = ModelFormats(TOOL_FORMATS[name], REASONING_FORMATS["think"] if thinks else None)
    own = tokenizer(template("hermes"))
    return AnswerGrammar(formats, own, opens).of_calls(tools, answer, loosened=loosened)


def chosen(choice: Any, *, parallel: bool | None = None) -> CallTools:
    tools = tools_of(TOOLS, choice, parallel)
    assert tools is not None
    return tools


@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize(("thinks", "opens"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_must_call_is_calls(name: str, thinks: bool, opens: bool, parallel: bool | None) -> None:
    grammar = of_calls(name, chosen("required", parallel=parallel), thinks=thinks, opens=opens)
    first = THOUGHT if opens else ""
    assert is_allowed(grammar, first + ONE[name])
    assert is_allowed(grammar, first + TWO[name]) is (parallel is None)
    for other in ("", "Hello", WRONG[name], '{"x": 1}', f"Hello {ONE[name]}"):
        assert not is_allowed(grammar, first + other)
    if thinks and not opens:
        assert is_allowed(grammar, f"<think>\n{THOUGHT}{ONE[name]}")
        assert not is_allowed(grammar, f"<think>\n{THOUGHT}")


@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize(("thinks", "opens"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_with_strict_tools_is_any_text_and_sound_calls(
    name: str, thinks: bool, opens: bool, parallel: bool | None
) -> None:
    grammar = of_calls(name, chosen("auto", parallel=parallel), thinks=thinks, opens=opens)
    first = THOUGHT if opens else ""
    for text in ("Hello <tool", ONE[name], "é"):
        assert is_allowed(grammar, first + text)
    assert is_allowed(grammar, first + TWO[name]) is (parallel is None)
    assert not is_allowed(grammar, first + WRONG[name])
    if name != "llama3_json":
        assert is_allowed(grammar, f"{first}Hello\n\n{ONE[name]}")
        assert not is_allowed(grammar, f"{first}Hello\n\n{WRONG[name]}")
    if thinks and not opens and name != "llama3_json":
        assert is_allowed(grammar, f"<think>\n{THOUGHT}Hello")
        assert is_allowed(grammar, f"<think>\n{THOUGHT}{ONE[name]}")
        assert not is_allowed(grammar, f"<think>\n{THOUGHT}{WRONG[name]}")


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_is_calls_or_the_response_format(name: str) -> None:
    grammar = of_calls(name, chosen("auto"), answer=JSON)
    begin = "<|python_tag|>" if name == "llama3_json" else ""
    assert is_allowed(grammar, '{"x": 1}')
    assert is_allowed(grammar, begin + TWO[name])
    assert not is_allowed(grammar, "Hello")
    assert not is_allowed(grammar, begin + WRONG[name])


def test_reasoning_comes_before_a_response_format() -> None:
    assert JSON is not None
    own = tokenizer(template("hermes"))
    for opens in (False, True):
        formats = ModelFormats(None, REASONING_FORMATS["think"])
        grammar = AnswerGrammar(formats, own, opens).of_answer(JSON)
        assert is_allowed(grammar, ("" if opens else "<think>") + 'hm {</think>\n\n{"x": 1}')
        assert is_allowed(grammar, '{"x": 1}') is not opens
    assert AnswerGrammar(ModelFormats(), own, False).of_answer(JSON) is JSON


@pytest.mark.parametrize("name", FORMATS)
def test_a_choice_limits_the_functions(name: str) -> None:
    named = of_calls(name, chosen({"type": "function", "function": {"name": "get_weather"}}))
    assert is_allowed(named, ONE[name])
    assert not is_allowed(named, TWO[name])
    tools = [{"type": "function", "function": {"name": "now"}}]
    allowed = chosen({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}})
    assert allowed.constrains
    assert not is_allowed(of_calls(name, allowed), ONE[name])
    assert is_allowed(of_calls(name, allowed), "Hello")


def random_answers(grammar: NamedGrammar, count: int, *, seed: int, beginning: str = "") -> Iterator[str]:
    """Yield answers that draw each token from its mask. They seldom draw letters, so that strings end."""
    own, chance = tokenizer(template("hermes")), random.Random(seed)
    tokens = [own.token_bytes(token_id) for token_id in range(own.vocab_size)]
    plain = {i for i, text in enumerate(tokens) if re.fullmatch(rb"[^a-zA-Z0-9\"\\{}<>\[\],:]+", text)}
    for _ in range(count):
        matcher, drawn = vocabulary().matcher(grammar.text), beginning.encode()
        matcher.consume(own.encode(beginning))
        while len(drawn) < 2000:
            if matcher.is_complete:
                yield drawn.decode()
                break
            mask = matcher.mask()
            allowed = [i for i in range(own.vocab_size) if mask[i // 8] >> i % 8 & 1]
            some = [i for i in allowed if i not in plain] or allowed
            token = chance.choice(some if chance.random() < 0.95 else allowed)
            if token == 0 or (0 in allowed and chance.random() < 0.3):
                yield drawn.decode()
                break
            matcher.consume([token])
            assert matcher.failure is None
            drawn += tokens[token]


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_are_drawn_from_the_masks_obey_their_schemas(name: str, choice: str) -> None:
    own, formats, found = tokenizer(template("hermes")), ModelFormats(TOOL_FORMATS[name]), 0
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    beginning = TOOL_FORMATS[name].begin if choice == "auto" else ""
    for text in random_answers(of_calls(name, chosen(choice)), tries(60), seed=7, beginning=beginning):
        parser = AnswerParser(Markers(formats, own), holds_calls=True, schemas=schemas)
        deltas = [
            parser.push(token_id, own.visible_bytes(token_id).decode(errors="replace")) for token_id in own.encode(text)
        ]
        deltas.append(parser.flush("", is_cut=False))
        calls = [call for delta in deltas for call in delta.calls]
        for call in calls:
            assert call.name is not None
            assert jsonschema_rs.is_valid(schemas[call.name], orjson.loads(call.arguments)), call.arguments
        if choice == "required":
            assert calls
            assert not "".join(delta.content for delta in deltas).strip()
        found += len(calls)
    assert found


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_args", "llama3_json"])
def test_a_function_may_be_loosened(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function.parameters: the keyword 'uniqueItems'"):
        of_calls(name, strict({"uniqueItems": True}))
    grammar = of_calls(name, strict({"uniqueItems": True}, is_strict=False), loosened=["f"])
    assert is_allowed(grammar, ONE[name].replace("get_weather", "f").replace(ARGUMENTS, '{"any": [1]}'))


def test_a_tagged_string_takes_no_keyword_that_it_cannot_obey() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}
    strict = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    tools = tools_of(strict, "required", None)
    assert tools is not None
    with pytest.raises(InvalidRequest, match="the parameter 'x' is a string with the keyword 'pattern'"):
        of_calls("qwen3_xml", tools)


def strict(parameters: dict[str, Any], *, is_strict: bool = True) -> CallTools:
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    tools = tools_of([{"type": "function", "function": function}], "required", None)
    assert tools is not None
    return tools


def tagged(**parameters: str) -> str:
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"


X_IS_TEXT = {"properties": {"x": {"type": "string"}}}
OPTIONAL_WORD = {"anyOf": [{"$ref": "#/$defs/W"}, {"type": "null"}]}
WORDS = {"properties": {"x": OPTIONAL_WORD}, "required": ["x"], "$defs": {"W": {"enum": ["a", "b"], "type": "string"}}}


@pytest.mark.parametrize("parameters", [{}, {"anyOf": [{"type": "object"}, {"type": "string"}]}, {"properties": {}}])
@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_args", "llama3_json"])
def test_arguments_are_an_object_whatever_the_schema_says(name: str, parameters: dict[str, Any]) -> None:
    grammar = of_calls(name, strict(parameters))
    one = ONE[name].replace("get_weather", "f")
    assert is_allowed(grammar, one.replace(ARGUMENTS, "{}"))
    for arguments in ("[1]", '"x"', "1", "null"):
        assert not is_allowed(grammar, one.replace(ARGUMENTS, arguments))


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_of_other_things_than_objects_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="must be the schema of an object, not of the type 'array'"):
        of_calls(name, strict({"type": "array"}))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"x": {"type": ["string", "null"], "maxLength": 2}}}, "'x' is a string with .* 'maxLength'"),
        ({"properties": {"x": {"enum": ["a", 1]}}}, "'x' is a string with the keyword 'enum'"),
        ({"properties": {"x": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}}}, "'anyOf'"),
        ({"properties": {"x": {"pattern": "^a$"}}}, "'x' is a string with the keyword 'pattern'"),
        ({"properties": {"x": {"type": "string", "enum": [""]}}}, "the keyword 'enum'"),
        ({"properties": {"x": {"enum": ["a", "b</parameter>c"]}}}, "the parameter 'x' has the word 'b</parameter>c'"),
        (
            {"properties": {"x": {"type": ["string", "null"], "enum": ["null"]}}},
            "the parameter 'x' has the word 'null'",
        ),
        ({"properties": {"x": {"anyOf": [{"const": " None"}, {"type": "null"}]}}}, "has the word ' None'"),
        ({"properties": {"x": False}}, "the keyword 'false'"),
        ({"$ref": "#/$defs/A", "$defs": {"A": X_IS_TEXT}}, "has the keyword '\\$ref'"),
        ({"additionalProperties": {"type": "integer"}}, "has the keyword 'additionalProperties'"),
        ({**X_IS_TEXT, "minProperties": 1}, "has the keyword 'minProperties'"),
        ({**X_IS_TEXT, "required": ["y"]}, "has the keyword 'required'"),
    ],
)
def test_a_strict_schema_that_tags_cannot_obey_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        of_calls("qwen3_xml", strict(parameters))
    assert error.value.param == "tools[0].function.parameters"
    of_calls("qwen3_xml", strict(parameters, is_strict=False))


@pytest.mark.parametrize(
    "parameters",
    [
        {**X_IS_TEXT, "required": 5},
        {**X_IS_TEXT, "required": "x"},
        {"properties": ["x"]},
        {"properties": {"a>b": {}}},
        {"properties": {"": {}}},
        {"properties": {"a" * 1025: {}}},
    ],
)
def test_a_schema_that_is_none_makes_no_grammar_of_tags(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function.parameters: (required|properties) must be"):
        of_calls("qwen3_xml", strict(parameters, is_strict=False))


def test_a_tagged_value_ends_at_the_first_closing_tag() -> None:
    grammar = of_calls("qwen3_xml", strict(X_IS_TEXT))
    assert is_allowed(grammar, tagged(x="a <b> c"))
    assert not is_allowed(grammar, tagged(x="a</parameter> b"))


def test_a_tagged_word_may_be_declared_elsewhere_and_be_null() -> None:
    grammar = of_calls("qwen3_xml", strict(WORDS))
    assert [is_allowed(grammar, tagged(x=text)) for text in ("a", "b", "null", "c")] == [True, True, True, False]
    turning = {"properties": {"x": {"$ref": "#/$defs/W"}}, "$defs": {"W": {"anyOf": [{"$ref": "#/$defs/W"}] * 9}}}
    of_calls("qwen3_xml", strict(turning, is_strict=False))


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<parameter=x>",
    "</parameter",
    "\n a \n",
    "null",
    "3",
]


@pytest.mark.parametrize("word", MARKS)
def test_a_tagged_word_may_have_every_other_marker(word: str) -> None:
    """The parser reads what the grammar allows as this word."""
    parameters = {"properties": {"x": {"enum": [word, "other"]}}, "required": ["x"]}
    text = tagged(x=word)
    assert is_allowed(of_calls("qwen3_xml", strict(parameters)), text)
    formats = ModelFormats(TOOL_FORMATS["qwen3_xml"])
    parser = AnswerParser(Markers(formats, tokenizer(template("hermes"))), schemas={"f": parameters})
    deltas = [*(parser.push(-1, letter) for letter in text), parser.flush("", is_cut=False)]
    assert orjson.loads("".join(call.arguments for delta in deltas for call in delta.calls)) == {"x": word}


PLACE = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"], "additionalProperties": False}
REFERENCES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"properties": {"a": PLACE, "x": {"$ref": "#/properties/a"}}}, ['{"at": 1}'], ["{}", "1"]),
    ({"properties": {"a": PLACE, "x": {"$ref": "#/properties/a/properties/at"}}}, ["1"], ['{"at": 1}']),
    ({"properties": {"a": {"enum": ["u", "v"]}, "x": {"$ref": "#/properties/a"}}}, ["u", "v"], ["w"]),
    (
        {
            "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/P"}}, "a": {"type": "boolean"}},
            "$defs": {"P": {"$ref": "#/properties/a"}},
        },
        ["[true]", "[]"],
        ["[1]"],
    ),
    (
        {"properties": {"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "additionalProperties": False},
        ["null", '{"x": {"x": null}}'],
        ['{"x": 1}', '{"y": null}'],
    ),
    (
        {"properties": {"x": {"items": {"enum": ["#", "#/x"]}, "type": "array"}, "y": {"$ref": "#"}}},
        ['["#"]'],
        ['["a"]'],
    ),
]


@pytest.mark.parametrize(("parameters", "good", "bad"), REFERENCES, ids=str)
def test_a_reference_may_name_any_part_of_the_schema(
    parameters: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = of_calls("qwen3_xml", strict({"$schema": "https://json-schema.org/draft/2020-12/schema", **parameters}))
    assert [is_allowed(grammar, tagged(x=text)) for text in good] == [True] * len(good)
    assert [is_allowed(grammar, tagged(x=text)) for text in bad] == [False] * len(bad)


def test_tags_without_declared_parameters_may_be_forbidden() -> None:
    assert not is_allowed(of_calls("qwen3_xml", strict({"additionalProperties": False})), tagged(x="a"))
    assert is_allowed(of_calls("qwen3_xml", strict({})), tagged(x="a"))


def test_a_call_without_a_marker_is_sound_also_after_reasoning() -> None:
    grammar = of_calls("llama3_json", chosen("auto"), thinks=True)
    for thought in ("", "<think>a</think>\n", " <think>a</think>"):
        assert is_allowed(grammar, thought + ONE["llama3_json"])
        assert not is_allowed(grammar, thought + WRONG["llama3_json"])
        assert is_allowed(grammar, thought + "Hello <think>")


def test_plain_tools_need_no_grammar() -> None:
    tools = tools_of([{"type": "function", "function": {"name": "f"}}], None, None)
    assert tools is not None
    assert not tools.constrains
