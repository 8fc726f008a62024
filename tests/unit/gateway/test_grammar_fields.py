"""`response_format` and `structured_outputs`: one grammar for each kind, and clear errors for all that is none."""

import asyncio
import threading
from typing import Any

import orjson
import pytest

from orca.core.domain.errors import InvalidRequest
from orca.core.domain.request import Request
from orca.core.grammars.matching import NO_FORCING
from orca.gateway.grammars import checker
from orca.gateway.grammars.fields import JSON_OPTIONS, NamedGrammar, ResponseFormat, StructuredOutputs, grammar_of
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import Rig, WallClock, error_of, rig

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


def of_format(**fields: Any) -> NamedGrammar | None:
    return grammar_of(ResponseFormat.model_validate(fields), None)


def of_structured(**fields: Any) -> NamedGrammar | None:
    return grammar_of(None, StructuredOutputs.model_validate(fields))


def text_of(grammar: NamedGrammar | None) -> str:
    assert grammar is not None
    text, _, last = grammar.text.rpartition("\n")
    assert last == NO_FORCING
    return text


def schema_text(schema: dict[str, Any]) -> str:
    return "start: %json " + orjson.dumps({"x-guidance": JSON_OPTIONS, **schema}).decode()


def test_each_kind_of_constraint_becomes_a_grammar() -> None:
    assert of_format(type="text") is None
    assert of_structured() is None
    assert of_structured(json_object=False) is None
    assert text_of(of_format(type="json_object")) == schema_text({"type": "object"})
    with_schema = of_format(type="json_schema", json_schema={"name": "person", "schema": SCHEMA, "strict": True})
    assert text_of(with_schema) == schema_text(SCHEMA)
    assert with_schema is not None
    assert with_schema.param == "response_format.json_schema.schema"
    assert text_of(of_structured(json=SCHEMA)) == schema_text(SCHEMA)
    assert text_of(of_structured(json=orjson.dumps(SCHEMA).decode())) == schema_text(SCHEMA)
    assert text_of(of_structured(json_object=True)) == schema_text({"type": "object"})
    assert text_of(of_structured(choice=["yes", 'no "x"', "yes"])) == 'start: "yes" | "no \\"x\\""'
    assert text_of(of_structured(grammar='start: "a"')) == 'start: "a"'


@pytest.mark.parametrize(
    ("regex", "body"),
    [
        (r"a/b", r"a\/b"),
        (r"^[ab]+$", r"[ab]+"),
        (r"a\$", r"a\$"),
        (r"a\\$", r"a\\"),
        ("a\nb\r", r"a\nb\r"),
        (r"\d{3}", "[0-9]{3}"),
    ],
)
def test_a_regular_expression_is_of_the_whole_answer(regex: str, body: str) -> None:
    assert text_of(of_structured(regex=regex)) == f"start: /{body}/"


def with_settings(**settings: Any) -> Any:
    return rig(settings=GatewaySettings(model="tiny", **settings))


async def call(one: Rig, path: str = "/v1/completions", **fields: Any) -> Any:
    return await one.post(path, **{**PATHS[path], "max_tokens": 4, **fields})


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema.name",
        "",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}},
        "response_format.json_schema.name",
        "",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": [1]}}},
        "response_format.json_schema.schema",
        "object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "is required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}},
        "response_format.json_schema.schema",
        "must be an object",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": SCHEMA}}},
        "response_format.json_schema",
        "needs the type json_schema, not text",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"json": '{"items":' * 500 + "{}" + "}" * 500}}, "structured_outputs.json", "JSON"),
    (
        {"structured_outputs": {"json": orjson.dumps({"enum": [{}] * 10_001}).decode()}},
        "structured_outputs.json",
        "more than 10000 objects and lists",
    ),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "object"),
    ({"structured_outputs": {"json": {"x-guidance": {"lenient": True}}}}, "structured_outputs.json", "x-guidance"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", ""),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", ""),
    ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex", "escapes nothing"),
    ({"structured_outputs": {"regex": "a\\\\\\"}}, "structured_outputs.regex", "escapes nothing"),
    ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices", "is not known"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ""),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "empty"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", ""),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar", ""),
    ({"structured_outputs": {"grammar": "start: <nowhere>"}}, "structured_outputs.grammar", "<nowhere>"),
    ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs", "json_object and regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structural_tag"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "response_format",
    ),
    ({"guided_json": SCHEMA}, "guided_json", "guided_json"),
    ({"ebnf": "root ::= 'a'"}, "ebnf", "ebnf"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_bad_constraint_is_refused_by_name(
    one: Rig, accepted: list[Request], path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    status, error = error_of(await call(one, path, **fields))
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]
    assert not accepted


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}, "contains"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "string", "format": "no-such-format"}, "no-such-format"),
        ({"type": "string", "minLenght": 3}, "minLenght"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_keyword_that_is_not_supported_is_never_ignored(one: Rig, schema: dict[str, Any], keyword: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    status, error = error_of(await call(one, response_format=wanted))
    assert (status, error["param"]) == (400, "response_format.json_schema.schema")
    assert keyword in error["message"]


async def test_neutral_values_constrain_nothing(one: Rig, accepted: list[Request]) -> None:
    for fields in (
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_any_whitespace": False}},
    ):
        answer = await call(one, **fields)
        assert answer.status_code == 200, answer.text
    assert all(request.sampling.grammar is None for request in accepted)


async def test_all_choices_of_a_call_have_the_grammar(one: Rig, accepted: list[Request]) -> None:
    answer = await call(one, n=3, response_format={"type": "json_object"})
    assert answer.status_code == 200, answer.text
    grammars = {request.sampling.grammar for request in accepted}
    assert grammars == {f"{schema_text({'type': 'object'})}\n{NO_FORCING}"}


async def test_a_large_grammar_is_refused() -> None:
    async with with_settings(grammar_bytes_max=1000) as one:
        wide = {"type": "object", "properties": {f"p{i}": {} for i in range(100)}}
        status, error = error_of(await call(one, structured_outputs={"json": wide}))
        assert (status, error["param"]) == (400, "structured_outputs.json")
        assert "more than 1000" in error["message"]


async def test_a_grammar_that_takes_too_long_is_refused_and_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow checks keep their threads. While they hold all of them, further checks are answered 503."""
    release, real = threading.Event(), checker._complaint

    def slow(vocabulary: Any, text: str) -> str | None:
        if "slow" in text:
            release.wait(60)
        return real(vocabulary, text)

    monkeypatch.setattr(checker, "_complaint", slow)
    async with with_settings(grammar_seconds_max=0.05) as one:
        try:
            for word in ("slow1", "slow2"):
                status, error = error_of(await call(one, structured_outputs={"choice": [word]}))
                assert (status, error["param"]) == (400, "structured_outputs.choice")
                assert "0.05 s" in error["message"]
            status, error = error_of(await call(one, structured_outputs={"choice": ["other"]}))
            assert (status, error["code"]) == (503, "busy")
        finally:
            release.set()
        # A busy machine may take longer than the limit for this one, too, and a refusal for time is not kept.
        async with asyncio.timeout(60):
            while (await call(one, structured_outputs={"choice": ["other"]})).status_code != 200:
                await asyncio.sleep(0.01)


async def test_a_checked_grammar_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, real = list[str](), checker._complaint

    def counted(vocabulary: Any, text: str) -> str | None:
        checked.append(text)
        return real(vocabulary, text)

    monkeypatch.setattr(checker, "_complaint", counted)
    async with rig() as one:
        for fields, status in (({"choice": ["a"]}, 200), ({"grammar": "start: ("}, 400)) * 3:
            answer = await call(one, structured_outputs=fields)
            assert answer.status_code == status
    assert len(checked) == 2


def test_both_constraints_are_an_error() -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        grammar_of(
            ResponseFormat.model_validate({"type": "json_object"}), StructuredOutputs.model_validate({"regex": "a"})
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
async def test_while_an_older_schema_is_in_force_a_constraint_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    pool = MemoryPool(WallClock())
    await pool.set_schema(2)
    async with rig(pool=pool) as one:
        status, error = error_of(await call(one, **fields))
        assert (status, error["param"]) == (400, param)
        assert f"{param}: not available while schema 2 of the release before is in force" in error["message"]
        assert (await call(one)).status_code == 200
