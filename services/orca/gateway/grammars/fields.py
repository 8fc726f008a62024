"""The fields of a body that constrain the text of its answers, and their translation to one grammar.

`response_format` is OpenAI's, `structured_outputs` is vLLM's. A call has at most one constraint. Every kind of it
becomes a grammar in llguidance's dialect of Lark (core/grammars/matching.py), which is all that the pool stores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from llguidance import regex_to_lark
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from orca.core.domain.errors import InvalidRequest
from orca.core.grammars.matching import NO_FORCING
from orca.gateway.grammars.json_schema import check_keywords

JSON_OPTIONS = {"whitespace_pattern": r"( |\r?\n( {0,64}|\t{0,32}))"}
"""Options of llguidance for JSON: between two parts there is at most one space, or a new line with its indentation.

Without a bound a model may write spaces until its answer is cut by length.
"""

_Schema = Annotated[Any, WithJsonSchema({"type": "object", "description": "A JSON Schema; {} allows any JSON."})]
_SchemaOrText = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}],
            "description": "A JSON Schema, as an object or as its text: the answer is JSON that it allows.",
        }
    ),
]


class JsonSchemaFormat(BaseModel):
    """OpenAI's object around a schema."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$", description="Any name; it is not used.")
    description: str | None = None
    # Pydantic has a method `schema`.
    of_answer: _Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="Not used: the schema always holds.")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """One of its fields may be set."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Pydantic has a method `json`.
    of_schema: _SchemaOrText = Field(None, alias="json")
    json_object: bool | None = Field(None, description="The answer is any JSON object.")
    regex: str | None = Field(
        None,
        min_length=1,
        description="The whole answer matches this expression, in the syntax of Rust's regex crate without looking "
        r"around. `\d`, `\w` and `\s` are ASCII.",
    )
    choice: list[str] | None = Field(None, min_length=1, description="The answer is one of these texts.")
    grammar: str | None = Field(
        None, min_length=1, description="The answer matches this grammar, in llguidance's dialect of Lark."
    )

    @property
    def may_have_space_around(self) -> bool:
        """Return whether an answer may begin or end with white space, which JSON never does."""
        return any(text is not None for text in (self.regex, self.choice, self.grammar))


@dataclass(frozen=True, slots=True)
class NamedGrammar:
    """A grammar, and the field that it was made from."""

    rules: str
    param: str

    @property
    def text(self) -> str:
        return f"{self.rules}\n{NO_FORCING}"


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> NamedGrammar | None:
    """Return the grammar of a call's answers; None if any text is allowed. Raises: InvalidRequest."""
    from_format = None if response_format is None else _of_format(response_format)
    from_structured = None if structured is None else _of_structured(structured)
    if from_format is not None and from_structured is not None:
        raise InvalidRequest(
            "structured_outputs: cannot be combined with response_format, which constrains the answer too",
            param="structured_outputs",
        )
    return from_format or from_structured


def _of_format(response_format: ResponseFormat) -> NamedGrammar | None:
    param = "response_format.json_schema"
    if response_format.json_schema is not None and response_format.type != "json_schema":
        raise InvalidRequest(f"{param}: needs the type json_schema, not {response_format.type}", param=param)
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return _of_schema({"type": "object"}, "response_format")
        case "json_schema":
            if response_format.json_schema is None:
                raise InvalidRequest(f"{param}: is required with the type json_schema", param=param)
            param = f"{param}.schema"
            return _of_schema(_object(response_format.json_schema.of_answer, param), param)


def _of_structured(structured: StructuredOutputs) -> NamedGrammar | None:
    where = "structured_outputs"
    found = [
        grammar
        for grammar in (
            None if structured.of_schema is None else _of_schema(structured.of_schema, f"{where}.json"),
            _of_schema({"type": "object"}, f"{where}.json_object") if structured.json_object else None,
            None if structured.regex is None else _of_regex(structured.regex, f"{where}.regex"),
            None if structured.choice is None else _of_choice(structured.choice, f"{where}.choice"),
            None if structured.grammar is None else NamedGrammar(structured.grammar, f"{where}.grammar"),
        )
        if grammar is not None
    ]
    if len(found) > 1:
        names = " and ".join(grammar.param.removeprefix(f"{where}.") for grammar in found)
        raise InvalidRequest(f"{where}: has {names}, and only one of them may be set", param=where)
    return found[0] if found else None


def parse_schema(text: str, param: str) -> dict[str, Any]:
    """Return the schema of a text. Raises: InvalidRequest if it is none."""
    try:
        return _object(orjson.loads(text), param)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{param}: is not JSON: {error}", param=param) from error


def _object(schema: Any, param: str) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: must be an object", param=param)
    return schema


def _of_schema(schema: Any, param: str) -> NamedGrammar:
    """Args: schema: nested no deeper than a body, which `orjson` can write."""
    schema = parse_schema(schema, param) if isinstance(schema, str) else _object(schema, param)
    check_keywords(schema, param)
    return NamedGrammar(f"start: {json_rule(schema)}", param)


def _of_regex(regex: str, param: str) -> NamedGrammar:
    # The whole answer matches anyway. A Lark grammar has no line breaks inside an expression.
    body = regex.removeprefix("^").replace("\r", r"\r").replace("\n", r"\n")
    backslashes = len(body) - len(body.rstrip("$").rstrip("\\")) - 1
    if body.endswith("$") and backslashes % 2 == 0:
        body = body[:-1]
    if (len(body) - len(body.rstrip("\\"))) % 2:
        raise InvalidRequest(f"{param}: ends in a backslash that escapes nothing", param=param)
    return NamedGrammar(f"start: /{regex_to_lark(body, 'dws')}/", param)


def _of_choice(choice: list[str], param: str) -> NamedGrammar:
    if "" in choice:
        raise InvalidRequest(f"{param}: has an empty text", param=param)
    texts = " | ".join(map(literal, dict.fromkeys(choice)))
    return NamedGrammar(f"start: {texts}", param)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the part of a rule that matches the JSON of a schema."""
    return f"%json {orjson.dumps({'x-guidance': JSON_OPTIONS, **schema}).decode()}"


def literal(text: str) -> str:
    """Return the part of a rule that matches a text."""
    return orjson.dumps(text).decode()
