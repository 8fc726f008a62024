"""A checkpoint without a table of ours is read by its own `response_template`, as transformers reads it."""

import itertools
import logging
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from orca.core.grammars.matching import GrammarVocabulary
from orca.gateway.formats.grammar import AnswerGrammar
from orca.gateway.formats.response_template import read_response_template
from orca.gateway.formats.tables import ModelFormats, stored_formats, stored_name
from orca.gateway.formats.tools import tools_of
from support.effort import tries
from support.gateway.gateway_rig import events
from support.gateway.tool_rig import CITY, TOOLS, served, tokenizer, tool_rig

CHAT_TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ m.tool_call_id }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
REASONING = {"open": "[ARGS]thought\n", "close": "<|python_tag|>", "content": "text"}
TAGS = "<call>\n<fn=get_weather>\n<arg=city>\nPa<ris>\n</arg>\n<arg=days>\n3\n</arg>\n</fn>\n</call>"
TOOL_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "an object": (
        {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        f'<call>{{"name": "get_weather", "arguments": {CITY}}}</call><call>{{"name": "now", "arguments": {{}}}}</call>',
    ),
    "members of other names": (
        {
            "open": "<call>\n",
            "close": ["\n</call>"],
            "repeats": True,
            "content": "json",
            "transform": {"name": "{content.tool}", "arguments": "{content.args}"},
        },
        f'<call>\n{{"tool": "get_weather", "args": {CITY}}}\n</call>',
    ),
    "a list": (
        {
            "open_pattern": r"\[TOOL_CALLS\]",
            "close_pattern": r"\Z",
            "content": "json",
            "transform_each": True,
            "transform": {"name": "{tool}", "arguments": "{args}"},
        },
        f'[TOOL_CALLS][{{"tool": "get_weather", "args": {CITY}}}, {{"tool": "now", "args": {{}}}}]',
    ),
    "a name and an object, with special tokens": (
        {
            "open_pattern": r"\[TOOL_CALLS\]function<tool_call>(?P<name>[^\n]+)\n```json\n",
            "close": "\n```[ARGS]",
            "repeats": True,
            "content": "json",
            "transform": CALL,
        },
        "".join(
            f"[TOOL_CALLS]function<tool_call>{name}\n```json\n{arguments}\n```[ARGS]"
            for name, arguments in (("get_weather", CITY), ("now", "{}"))
        ),
    ),
    "tags": (
        {
            "open_pattern": r"<call>\s*<fn=(?P<name>[^>\n]+)>",
            "close_pattern": r"</fn>\s*</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg=(?P<key>[^>]+)>\n(?P<value>.*?)\n</arg>"},
            "transform": CALL,
        },
        f"{TAGS}\n<call>\n<fn=now>\n</fn>\n</call>",
    ),
}


def response_template(name: str) -> dict[str, Any]:
    fields = {"content": {"optional": True}, "reasoning_content": REASONING, "tool_calls": TOOL_CALLS[name][0]}
    return {"start_anchor": "<|assistant|>", "defaults": {"role": "assistant"}, "fields": fields}


def formats_of(name: str) -> ModelFormats:
    found = read_response_template(response_template(name), tokenizer(CHAT_TEMPLATE))
    assert not found.problems
    return found.formats


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", TOOL_CALLS)
async def test_an_answer_divides_as_parse_response_divides_it(name: str, thinks: bool) -> None:
    text = ("[ARGS]thought\nLet me see {.\n<|python_tag|>" if thinks else "") + TOOL_CALLS[name][1]
    theirs = parse_response(text, response_template(name), prefix="<|assistant|>", tools=TOOLS)
    calls = [call.get("function", call) for call in theirs["tool_calls"]]
    async with tool_rig(CHAT_TEMPLATE, text, response_template=response_template(name)) as one:
        message = (await one.chat(tools=TOOLS, max_tokens=900))["choices"][0]["message"]
        stream = await one.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            tools=TOOLS,
            max_tokens=900,
            stream=True,
        )
    found = [call["function"] for call in message["tool_calls"]]
    assert [(each["name"], orjson.loads(each["arguments"])) for each in found] == [
        (each["name"], each["arguments"]) for each in calls
    ]
    assert message["content"] == (theirs.get("content") or None)
    assert message["reasoning_content"] == theirs.get("reasoning_content")
    deltas = [
        event["choices"][0]["delta"] for _, event in events(stream.text) if event != "[DONE]" and event["choices"]
    ]
    pieces = itertools.chain.from_iterable(delta.get("tool_calls", ()) for delta in deltas)
    assert "".join(each["function"]["arguments"] for each in pieces) == "".join(each["arguments"] for each in found)


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_an_answer_that_must_call_has_the_form_of_the_template(name: str) -> None:
    own, formats = tokenizer(CHAT_TEMPLATE), formats_of(name)
    tools = tools_of(TOOLS, "required", None)
    assert tools is not None
    grammar = AnswerGrammar(formats, own, False).of_calls(tools, None)
    thought = own.encode("[ARGS]thought\nso\n<|python_tag|>")
    allowed = []
    for text in (thought + own.encode(TOOL_CALLS[name][1]), own.encode("Hello")):
        matcher = GrammarVocabulary(own, own.vocab_size, [0]).matcher(grammar.text)
        matcher.consume(text)
        allowed.append(matcher.failure is None and bool(matcher.mask()[0] & 1))
    assert allowed == [True, False]


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_a_stored_table_is_whole(name: str) -> None:
    formats = formats_of(name)
    stored = formats.stored_tool_name(is_constrained=False), stored_name(formats.reasoning)
    assert stored_formats(*stored) == formats
    assert formats.tool_name == formats.reasoning_name == "response_template"
    for broken in ("{", "[]", "{}", '{"body": 5}', '{"name": "x", "kind": "JsonCall", "body": {"a": 1}}'):
        assert stored_formats(broken, broken) == ModelFormats()


def test_a_table_of_ours_comes_first() -> None:
    template = CHAT_TEMPLATE + "{# <tool_call> </tool_call> </think> #}"
    formats = served(template, response_template=response_template("tags")).formats
    assert (formats.tool_name, formats.reasoning_name) == ("hermes", "think")
    formats = served(CHAT_TEMPLATE, response_template=response_template("tags"), tool_format="none").formats
    assert (formats.tool_name, formats.reasoning_name) == (None, "response_template")


def tagged(tag_pattern: str, **markers: str) -> dict[str, Any]:
    """A field like that of the tags above."""
    return TOOL_CALLS["tags"][0] | {"content_args": {"tag_pattern": tag_pattern}} | markers


VALUE = r"(?P<value>.*?)"
BEFORE = r"<arg=(?P<key>[^>]+)>"


@pytest.mark.parametrize(
    ("tag_pattern", "city"),
    [
        (rf"{BEFORE}\n{VALUE}\n</arg>", "Paris"),
        (f"{BEFORE}\n{VALUE}\n</arg>", "Paris"),
        (rf"{BEFORE}\s*{VALUE}\s*</arg>", "Paris"),
        (rf"{BEFORE}\n?{VALUE}\n?</arg>", "Paris"),
        (rf"{BEFORE}\s*(?P<value>[^<]+?)\n\</arg>", "Paris"),
        (f"{BEFORE}{VALUE}</arg>", None),
        (rf"{BEFORE}\n{VALUE}</arg>", None),
        (rf"{BEFORE}{VALUE}\n</arg>", None),
        (rf"{BEFORE} *{VALUE} *</arg>", None),
        (rf"{BEFORE}\n\s*{VALUE}\n</arg>", None),
        (rf"{BEFORE}\n{VALUE}\n\n</arg>", None),
        (rf"{BEFORE}\n{VALUE}\n\s*</arg>", None),
        (rf"{BEFORE} {VALUE} </arg>", None),
    ],
)
async def test_a_value_in_tags_is_that_of_parse_response_or_not_read(tag_pattern: str, city: str | None) -> None:
    text = "<call>\n<fn=get_weather>\n<arg=city>\nParis\n</arg>\n</fn>\n</call>"
    template = response_template("tags")
    template["fields"]["tool_calls"] = tagged(tag_pattern)
    found = read_response_template(template, tokenizer(CHAT_TEMPLATE))
    assert bool(found.problems) == (city is None) == (found.formats.tool is None)
    if city is None:
        return
    (call,) = parse_response(text, template, prefix="<|assistant|>", tools=TOOLS)["tool_calls"]
    async with tool_rig(CHAT_TEMPLATE, text, response_template=template) as one:
        message = (await one.chat(tools=TOOLS, max_tokens=900))["choices"][0]["message"]
    arguments = orjson.loads(message["tool_calls"][0]["function"]["arguments"])
    assert arguments == call["function"]["arguments"] == {"city": city}


PROBLEMS: list[tuple[Any, str]] = [
    (5, "fields: must be an object"),
    ({"fields": {"content": {"open": "<a>"}}}, "content: text outside of its markers"),
    ({"fields": {"tool_calls": 5}}, "tool_calls: must be an object"),
    ({"fields": {"tool_calls": {"content": "json"}}}, "tool_calls: there is no text with which"),
    ({"fields": {"tool_calls": {"open": "<a>", "content": "kv-lines"}}}, "tool_calls: content is 'kv-lines'"),
    ({"fields": {"tool_calls": {"open": ["<a>", "<b>"], "content": "json"}}}, "tool_calls: open has several texts"),
    ({"fields": {"tool_calls": {"open": [5], "content": "json"}}}, "tool_calls: open must be text"),
    ({"fields": {"tool_calls": {"open": "<a>", "content": "json", "transform": 5}}}, "transform has no name"),
    (
        {"fields": {"tool_calls": {"open": "<a>", "content": "json", "content_args": {"unquoted_keys": True}}}},
        "tool_calls: content_args with unquoted_keys",
    ),
    ({"fields": {"tool_calls": {"open_pattern": "<a|b>", "content": "json"}}}, "is more than text and names"),
    ({"fields": {"tool_calls": {"open_pattern": "(", "content": "json"}}}, "is more than text and names"),
    ({"fields": {"tool_calls": {"open": "x[ARGS]", "content": "json"}}}, "special token '[ARGS]' behind text"),
    ({"fields": {"reasoning": {"open": "<a>"}}}, "reasoning: a marker is missing"),
    ({"fields": {"thinking": {"open": "<a>", "close": "</a>", "content": "json"}}}, "thinking: is no text"),
    (
        {"fields": {"tool_calls": {"open_pattern": "<a>(?P<name>.*)", "content": "json", "transform": CALL}}},
        "open_pattern does not end",
    ),
    ({"fields": {"tool_calls": tagged(f"{BEFORE}{VALUE}</arg>")}}, "tool_calls: a value has no lines of its own"),
    (
        {"fields": {"tool_calls": tagged(rf"{BEFORE}\n{VALUE}\n</arg>", close_pattern="</fn> </call>")}},
        "tool_calls: between its tags is white space that is no line break",
    ),
]


@pytest.mark.parametrize(("template", "problem"), PROBLEMS)
def test_what_is_not_read_is_named_once(template: Any, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert served(CHAT_TEMPLATE, response_template=template).formats == ModelFormats()
    (line,) = caplog.messages
    assert problem in line
    assert "tokenizer_config.json: response_template is not read" in line


JSON = st.recursive(
    st.sampled_from([None, True, 5, "", "x", "json", "xml-inline", "{content}", "{name}", "(?P<name>.*)", "<a>", ">"]),
    lambda values: (
        st.lists(values, max_size=2)
        | st.dictionaries(
            st.sampled_from(["function", "name", "arguments", "tag_pattern", "unquoted_keys", "x"]), values, max_size=3
        )
    ),
    max_leaves=6,
)
KEYS = ("open", "open_pattern", "close", "close_pattern", "content", "content_args", "transform", "transform_each")
FIELDS = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6) | JSON


@settings(max_examples=tries(200), deadline=None)
@given(
    template=JSON
    | st.fixed_dictionaries(
        {"fields": st.dictionaries(st.sampled_from(["tool_calls", "reasoning", "content"]), FIELDS)}
    )
)
def test_any_json_gives_tables_or_problems(template: Any) -> None:
    formats = read_response_template(template, tokenizer(CHAT_TEMPLATE)).formats
    stored = formats.stored_tool_name(is_constrained=False), stored_name(formats.reasoning)
    assert stored_formats(*stored) == formats
