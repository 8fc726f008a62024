"""The formats of calls and reasoning: every answer divides into the same parts, however its tokens are cut."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from orca.core import answer_formats
from orca.core.domain.text import Tokenizer
from orca.gateway.formats.marked_text import Markers
from orca.gateway.formats.parser import AnswerParser
from orca.gateway.formats.parts import AnswerDelta
from orca.gateway.formats.readers import NamedCallReader
from orca.gateway.formats.tables import REASONING_FORMATS, TOOL_FORMATS, ModelFormats, NamedCall, choose_formats
from support.effort import tries
from support.gateway.chat_templates import CHAT_TEMPLATES
from support.gateway.tool_rig import (
    ANSWERS,
    FORMATS,
    MALFORMED,
    PLAIN,
    SPECIAL,
    TOOLS,
    template,
    tokenizer,
    without_special,
)

SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
THOUGHTS = "Let me see: <tool_call>\nno {call} [TOOL"
_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


class Divided:
    """The parts of one answer."""

    def __init__(self, deltas: Iterable[AnswerDelta]) -> None:
        self.content = self.reasoning = ""
        self.calls: list[tuple[str, str]] = []
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            for call in delta.calls:
                if call.name is not None:
                    assert call.position == len(self.calls)
                    self.calls.append((call.name, call.arguments))
                else:
                    name, arguments = self.calls[call.position]
                    self.calls[call.position] = name, arguments + call.arguments

    @property
    def all(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, self.calls


def pieces_of(text: str, cuts: Sequence[int]) -> list[tuple[int, str]]:
    """Return tokens and their texts. Args: cuts: lengths of the pieces, over and over."""
    special_ids = tokenizer(template("hermes")).special_ids
    pieces, turn = [], 0
    for part in _SPECIAL.split(text):
        if part in special_ids:
            pieces.append((special_ids[part], ""))
            continue
        while part:
            length = cuts[turn % len(cuts)]
            pieces.append((-1, part[:length]))
            part, turn = part[length:], turn + 1
    return pieces


def divide(
    tool: str | None,
    text: str,
    *,
    reasoning: str | None = None,
    cuts: Sequence[int] = (3,),
    is_cut: bool = False,
    **options: Any,
) -> Divided:
    formats = ModelFormats(TOOL_FORMATS.get(tool or ""), REASONING_FORMATS.get(reasoning or ""))
    parser = AnswerParser(Markers(formats, tokenizer(template("hermes"))), schemas=SCHEMAS, **options)
    deltas = [parser.push(token_id, piece) for token_id, piece in pieces_of(text, cuts)]
    return Divided([*deltas, parser.flush("", is_cut=is_cut)])


FEW = settings(max_examples=tries(50), deadline=None)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
CASES = [(name, answer) for name, answers in ANSWERS.items() for answer in answers]


def test_every_name_has_a_table() -> None:
    assert {answer_formats.AUTO_FORMAT, answer_formats.NO_FORMAT, *TOOL_FORMATS} == {*answer_formats.TOOL_FORMATS}
    assert {answer_formats.AUTO_FORMAT, answer_formats.NO_FORMAT, *REASONING_FORMATS} == {
        *answer_formats.REASONING_FORMATS
    }


@pytest.mark.parametrize("holds_calls", [False, True])
@pytest.mark.parametrize("reasoning", [None, "think"])
@pytest.mark.parametrize(("name", "answer"), CASES)
@FEW
@given(cuts=CUTS)
def test_an_answer_divides_into_its_parts(name: str, answer: Any, reasoning: str, holds_calls: bool, cuts: Any) -> None:
    found = divide(name, answer.text, reasoning=reasoning, cuts=cuts, holds_calls=holds_calls)
    assert found.all == (answer.content or "", "", list(answer.calls))


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize(("name", "answer"), CASES)
@FEW
@given(cuts=CUTS)
def test_reasoning_comes_before_it(name: str, answer: Any, opens: bool, cuts: Any) -> None:
    text = f"{THOUGHTS}\n</think>\n\n{answer.text}"
    if not opens:
        text = f"\n<think>\n{text}"
    found = divide(name, text, reasoning="think", cuts=cuts, is_in_reasoning=opens)
    assert found.all == (answer.content or "", THOUGHTS, list(answer.calls))


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize("reasoning", [None, "think"])
@pytest.mark.parametrize("name", [None, *FORMATS])
@FEW
@given(cuts=CUTS)
def test_other_text_is_content_unchanged(name: str | None, reasoning: str | None, text: str, cuts: Any) -> None:
    assert divide(name, text, reasoning=reasoning, cuts=cuts).all == (text, "", [])


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
@FEW
@given(cuts=CUTS)
def test_a_malformed_call_is_content_in_a_whole_answer(name: str, text: str, cuts: Any) -> None:
    found = divide(name, text, cuts=cuts, holds_calls=True)
    assert found.all == (without_special(text), "", [])


@FEW
@given(cuts=CUTS)
def test_a_stream_goes_on_with_a_call_whose_arguments_it_has_sent(cuts: Any) -> None:
    found = divide("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1,}}\n</tool_call> ok', cuts=cuts)
    assert found.all == ("ok", "", [("f", '{"a": 1,}')])


@pytest.mark.parametrize("holds_calls", [False, True])
def test_a_call_that_the_length_has_cut_keeps_what_there_is(holds_calls: bool) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1, '
    assert divide("hermes", text, is_cut=True, holds_calls=holds_calls).all == ("", "", [("f", '{"a": [1, ')])


@pytest.mark.parametrize("holds_calls", [False, True])
@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ("", "{"),
        ("<parameter=ci", "{"),
        ("<parameter=city>", '{"city": "'),
        ('<parameter=city>\nPa"ris\n', '{"city": "Pa\\"ris'),
        ("<parameter=city>\nParis\n</param", '{"city": "Paris'),
        ("<parameter=city>\nParis\n</parameter>\n", '{"city": "Paris"'),
        ("<parameter=city>\nParis\n</parameter>\n<parameter=days>\n1", '{"city": "Paris", "days": 1'),
        ("<parameter=other>\n[1, 2", '{"other": "[1, 2'),
    ],
)
@FEW
@given(cuts=CUTS)
def test_a_tagged_call_that_the_length_has_cut_keeps_what_there_is(
    values: str, arguments: str, holds_calls: bool, cuts: Any
) -> None:
    text = f"<tool_call>\n<function=get_weather>\n{values}"
    found = divide("qwen3_xml", text, is_cut=True, holds_calls=holds_calls, cuts=cuts)
    assert found.all == ("", "", [("get_weather", arguments)])


@pytest.mark.parametrize("holds_calls", [False, True])
@pytest.mark.parametrize("length", range(4, len('<tool_call>\n{"name": "f", "arguments": ')))
def test_a_call_that_the_length_has_cut_before_its_arguments_is_left_out(length: int, holds_calls: bool) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = divide("hermes", f"{call}\n{call[:length]}", is_cut=True, holds_calls=holds_calls)
    assert found.all == ("", "", [("f", "{}")])


@pytest.mark.parametrize(("name", "answer"), CASES)
@FEW
@given(data=st.data())
def test_a_corrupted_answer_never_fails_and_loses_no_letter(name: str, answer: Any, data: st.DataObject) -> None:
    text = f"<think>hm</think>{answer.text}" if data.draw(st.booleans()) else answer.text
    place = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 5))
    junk = data.draw(
        st.sampled_from(["", "}", "]", '"', "<tool_call>", "</tool_call>", "<think>", "[TOOL_CALLS]", "x{", "\\"])
    )
    spoilt = text[:place] + junk + text[place + length :]
    found = divide(name, spoilt, reasoning="think", cuts=data.draw(CUTS), is_cut=data.draw(st.booleans()))
    shown = found.content + found.reasoning + "".join(map("".join, found.calls))
    orjson.dumps(shown)
    whole = divide(name, spoilt, reasoning="think", holds_calls=True)
    if not whole.calls and not whole.reasoning:
        # White space beside a marker may be left out; nothing else.
        assert "".join(whole.content.split()) == "".join(without_special(spoilt).split())
    for _, arguments in whole.calls:
        assert isinstance(orjson.loads(arguments), dict)


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        ({"type": "string"}, "3", '"3"'),
        ({}, "3", '"3"'),
        (None, "true", '"true"'),
        ({"type": "integer"}, "3", "3"),
        ({"type": "integer"}, "3.5", '"3.5"'),
        ({"type": "integer"}, "1" * 30, "1" * 30),
        ({"type": "number"}, "-1e400", "-1e400"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ({"type": "number"}, "3", "3"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "3", '"3"'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"$ref": "#/$defs/Place"}, '{"x": [1, 2]}', '{"x": [1, 2]}'),
        ({"$ref": "#/properties/a~1b%20c~0"}, "3", "3"),
        ({"$ref": "#/properties/either/anyOf/1"}, "[3]", "[3]"),
        ({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}, '{"x": 3}', '{"x": 3}'),
        ({"$ref": "#/properties/either/anyOf/2"}, "3", '"3"'),
        ({"$ref": "https://schemas.example/x"}, "3", '"3"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"const": True}, "true", "true"),
        ({"type": "array"}, "[1, 2", '"[1, 2"'),
        ({"type": "object"}, '{"a": "</parameter>\\""}', '{"a": "</parameter>\\""}'),
        ({"type": "object"}, '{\n "a": 1\n}', '{\n "a": 1\n}'),
    ],
)
def test_a_tagged_value_has_the_type_of_its_schema(declared: Any, value: str, expected: str) -> None:
    others = {"a/b c~": {"type": "integer"}, "either": {"anyOf": [{"type": "string"}, {"type": "array"}]}}
    schema = {"type": "object", "properties": {"x": declared, **others}, "$defs": {"Place": {"type": "object"}}}
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    parser = AnswerParser(
        Markers(ModelFormats(TOOL_FORMATS["qwen3_xml"]), tokenizer(template("hermes"))), schemas={"f": schema}
    )
    found = Divided([parser.push(-1, text), parser.flush("", is_cut=False)])
    assert found.calls == [("f", f'{{"x": {expected}}}')]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_part_of_the_marker_after_a_call_is_text_unless_the_length_has_cut_it(is_cut: bool) -> None:
    found = divide("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool', is_cut=is_cut)
    assert found.all == ("" if is_cut else "</tool", "", [("f", "{}")])


@pytest.mark.parametrize("arguments", ['{"a": 1e400}', '{"a": "\\ud800"}', '{"a": %s}' % ("9" * 30)])
@pytest.mark.parametrize("holds_calls", [False, True])
def test_arguments_are_json_also_where_few_programs_read_it(arguments: str, holds_calls: bool) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert divide("hermes", text, holds_calls=holds_calls).all == ("", "", [("f", arguments)])


@pytest.mark.parametrize("name", ['"\\ud800"', '""', "NaN"])
def test_a_name_that_is_no_text_makes_no_call(name: str) -> None:
    text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
    assert divide("hermes", text).all == (text, "", [])


LONG_ANSWERS: list[tuple[str, str, str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "abcd"),
    ("hermes", "", "    "),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "    "),
    ("llama3_json", "", "    "),
    ("llama3_json", '{"a": "', "abcd"),
    ("mistral", "[TOOL_CALLS]", "    "),
    ("mistral_args", "[TOOL_CALLS]", "abcd"),
    ("mistral_args", "[TOOL_CALLS]", "    "),
    ("qwen3_xml", "<tool_call>\n<function=", "abcd"),
    ("qwen3_xml", "<tool_call>\n<function=f>", "    "),
    ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=", "abcd"),
    ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=a>\n", "abcd"),
]


@pytest.mark.parametrize("holds_calls", [False, True])
@pytest.mark.parametrize(("name", "beginning", "more"), LONG_ANSWERS)
def test_no_answer_waits_for_text_that_grows_with_it(name: str, beginning: str, more: str, holds_calls: bool) -> None:
    # Each token would read all of that text again.
    formats = ModelFormats(TOOL_FORMATS[name], REASONING_FORMATS["think"])
    parser = AnswerParser(Markers(formats, tokenizer(template("hermes"))), holds_calls=holds_calls)
    for token_id, piece in pieces_of(beginning, (3,)):
        parser.push(token_id, piece)
    for _ in range(3000):
        parser.push(-1, more)
    assert len(parser._pending) <= 4096 + 4


@pytest.mark.parametrize("cuts", [(1,), (7,), (64, 1000, 3)])
def test_the_cuts_of_tokens_do_not_change_what_is_too_long(cuts: Sequence[int]) -> None:
    for length in (1023, 1024, 1025, 1030, 1031):
        for text in (f"[TOOL_CALLS]{'f' * length}{{}}", f"[TOOL_CALLS]{'f' * length}[ARGS]{{}}"):
            name, arguments = "mistral_args", [("f" * length, "{}")]
            found = divide(name, text, cuts=cuts)
            assert found.all == divide(name, text, cuts=(5000,)).all
            assert found.calls == (arguments if length <= 1024 else [])
    for length in (4096, 4097):
        text = " " * length + "<think>x</think>y"
        assert divide("hermes", text, reasoning="think", cuts=cuts).reasoning == ("x" if length == 4096 else "")


@pytest.mark.parametrize("text", ["f [ARGS]{}", 'f{"a":"[ARGS]{}"}', "f[A{}", "[ARGS]{}", "a b[ARGS]{}", "f[ARGS] {}"])
def test_a_name_ends_alike_however_its_tokens_are_cut(text: str) -> None:
    def read(length: int) -> tuple[str | None, str, bool]:
        reader, waiting = NamedCallReader(NamedCall(between="[ARGS]")), ""
        for place in range(0, len(text), length):
            waiting += text[place : place + length]
            waiting = waiting[reader.read(waiting) :]
            if reader.has_failed or reader.is_done:
                break
        return reader.name, reader.take_arguments(), reader.has_failed

    assert len({read(length) for length in range(1, 20)}) == 1


SPECIAL_ANSWERS: dict[str, Any] = {
    "<tool_call><function=f>\n<parameter=a>\nx<tool_call>y\n</parameter>\n</function></tool_call>": {"a": "xy"},
    "<tool_call><function=f>\n<parameter=n>\n1<tool_call>2\n</parameter>\n</function></tool_call>": {"n": 12},
    "<tool_call><function=f>\n<parameter=a<tool_call>b>\nx\n</parameter>\n</function></tool_call>": None,
    "<tool_call><function=f<tool_call>g>\n</function></tool_call>": None,
}


@pytest.mark.parametrize("text", SPECIAL_ANSWERS)
def test_a_special_token_inside_of_a_tagged_call_has_no_text(text: str) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    inner.add_special_tokens(["<tool_call>", "</tool_call>"])
    special = Tokenizer(inner, decoder={"type": "Fuse"}, named_special_tokens={})
    schemas = {"f": {"properties": {"n": {"type": "integer"}}}}
    parser = AnswerParser(Markers(ModelFormats(TOOL_FORMATS["qwen3_xml"]), special), schemas=schemas, holds_calls=True)
    deltas = [
        parser.push(special.special_ids.get(part, -1), "" if part in special.special_ids else part)
        for part in re.split("(</?tool_call>)", text)
    ]
    found = Divided([*deltas, parser.flush("", is_cut=False)])
    arguments = SPECIAL_ANSWERS[text]
    assert [orjson.loads(each) for _, each in found.calls] == ([] if arguments is None else [arguments])
    orjson.dumps(found.content)


@pytest.mark.parametrize("name", FORMATS)
def test_the_chat_template_tells_the_format(name: str) -> None:
    assert choose_formats(template(name)) == ModelFormats(TOOL_FORMATS[name])
    assert choose_formats(template(name, thinks=True)).reasoning_name == "think"
    assert choose_formats(template(name), tool_format="none").tool is None
    assert choose_formats(template(name), tool_format="mistral").tool_name == "mistral"
    assert choose_formats(None) == ModelFormats()


def test_templates_without_calls_have_no_format() -> None:
    names = {name: choose_formats(source).tool_name for name, source in CHAT_TEMPLATES.items()}
    assert {name for name, found in names.items() if found} <= {"qwen2.5", "mistral 0.3", "llama 3.1"}
