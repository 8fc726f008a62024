"""The formats in which models write tool calls, and their reasoning: a table for each, without code of its own.

A model learned one format from the chats of its training. Its chat template writes earlier calls in the same format, so
texts in the template tell which table is the model's.

A marker may be a special token of the tokenizer (Mistral's `[TOOL_CALLS]`) or ordinary text (Qwen's `<tool_call>`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import orjson

from orca.core.answer_formats import AUTO_FORMAT, NO_FORMAT
from orca.core.domain.text import Tokenizer

Table = TypeVar("Table", "ToolFormat", "ReasoningFormat")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """A call is an object: `{"name": "get_weather", "arguments": {"city": "Paris"}}`."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)  # names of the member; the first one is the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCall:
    """A call is a name and an object: `get_weather[ARGS]{"city": "Paris"}`."""

    between: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCall:
    """A call is a text of tags with one for each argument. A line break surrounds each value and each tag."""

    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The way in which a model writes its calls: `begin call end`, several times, or `begin [call, call] end`."""

    name: str
    hints: tuple[str, ...]  # texts that the chat template of such a model has, all of them
    body: JsonCall | NamedCall | TaggedCall
    begin: str
    end: str = ""
    space: str = ""  # after `begin`
    end_space: str | None = None  # before `end`; None if it is `space`
    is_list: bool = False  # one pair of markers encloses all calls, which are the items of a JSON array
    separator: str = ""  # between two calls
    # The model may leave `begin` out in an answer that is nothing but calls.
    may_omit_begin: bool = False
    short_ids: bool = False  # the template takes ids of nine letters and digits only


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The markers around the reasoning with which an answer begins. The prompt may already end in the first one."""

    name: str
    hints: tuple[str, ...]
    begin: str
    end: str
    space: str  # after `end`, as models write it
    is_exact: bool = False  # nothing but `space` is left out after `end`; otherwise all white space is
    is_open: bool = False  # the prompt ends in the middle of the reasoning

    def of_call(self, *, is_exact: bool, is_open: bool) -> "ReasoningFormat":
        """Return the table by which the answer of one call is read."""
        name = f"{self.name}{OPEN if is_open else ''}{EXACT if is_exact else ''}"
        return replace(self, name=name, is_exact=is_exact, is_open=is_open)


RESPONSE_TEMPLATE = "response_template"
"""Name of tables that a checkpoint has brought (response_template.py)."""

# The order counts: a template of Qwen3-Coder has the texts of `hermes`, too.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    table.name: table
    for table in (
        ToolFormat(
            name="qwen3_xml",
            hints=("<tool_call>", "<function=", "<parameter="),
            body=TaggedCall(),
            begin="<tool_call>",
            end="</tool_call>",
            space="\n",
            separator="\n",
        ),
        ToolFormat(
            name="hermes",
            hints=("<tool_call>", "</tool_call>"),
            body=JsonCall(),
            begin="<tool_call>",
            end="</tool_call>",
            space="\n",
            separator="\n",
        ),
        ToolFormat(
            name="mistral_args",
            hints=("[TOOL_CALLS]", "[ARGS]"),
            body=NamedCall(between="[ARGS]"),
            begin="[TOOL_CALLS]",
            short_ids=True,
        ),
        ToolFormat(
            name="mistral",
            hints=("[TOOL_CALLS]",),
            body=JsonCall(),
            begin="[TOOL_CALLS]",
            space=" ",
            is_list=True,
            separator=", ",
            short_ids=True,
        ),
        ToolFormat(
            name="llama3_json",
            hints=('"parameters": dictionary',),
            body=JsonCall(arguments=("parameters", "arguments")),
            begin="<|python_tag|>",
            separator="; ",
            may_omit_begin=True,
        ),
    )
}

EXACT, OPEN = "_exact", "_open"
"""Ends of the names of tables for one call (`ReasoningFormat.of_call`)."""

MARKED = "_marked"
"""End of the names of tables in which each call has its marker, although the model may leave it out."""

STORED_FORMATS: Mapping[str, ToolFormat] = {
    **TOOL_FORMATS,
    **{
        f"{table.name}{MARKED}": replace(table, name=f"{table.name}{MARKED}", may_omit_begin=False)
        for table in TOOL_FORMATS.values()
        if table.may_omit_begin
    },
}
"""All tables by the names that are stored with a call.

Where an answer may also be JSON of another form, only a marker tells a call from it.
"""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    table.name: table
    for table in (ReasoningFormat(name="think", hints=("</think>",), begin="<think>", end="</think>", space="\n\n"),)
}

STORED_REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    stored.name: stored
    for table in REASONING_FORMATS.values()
    for stored in (
        table.of_call(is_exact=is_exact, is_open=is_open) for is_exact in (False, True) for is_open in (False, True)
    )
}
"""All tables by the names that are stored with a call."""


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The tables of one model."""

    tool: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def stored_tool_name(self, *, is_constrained: bool) -> str | None:
        """Return the name of the table by which an answer is read.

        Args: is_constrained: an answer without tool calls has a form of its own.
        """
        if self.tool is not None and self.tool.may_omit_begin and is_constrained:
            return f"{self.tool.name}{MARKED}"
        return stored_name(self.tool)

    @property
    def tool_name(self) -> str | None:
        return None if self.tool is None else self.tool.name

    @property
    def reasoning_name(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.name


def choose_formats(
    chat_template: str | None,
    *,
    tool_format: str = AUTO_FORMAT,
    reasoning_format: str = AUTO_FORMAT,
    own: ModelFormats | None = None,
) -> ModelFormats:
    """Return the tables of a model.

    Args:
        chat_template: Jinja source; None for a model without one.
        tool_format: one of `core.answer_formats.TOOL_FORMATS`.
        reasoning_format: one of `REASONING_FORMATS` there.
        own: tables that the checkpoint has brought, for what no table of ours fits.
    """
    source = chat_template or ""
    own = own or ModelFormats()
    return ModelFormats(
        _chosen(TOOL_FORMATS, source, tool_format, own.tool),
        _chosen(REASONING_FORMATS, source, reasoning_format, own.reasoning),
    )


def stored_formats(tool_format: str | None, reasoning_format: str | None) -> ModelFormats:
    """Return the tables by the names that are stored with a call. Names of a later release are ignored."""
    tool, reasoning = tool_format or "", reasoning_format or ""
    return ModelFormats(
        STORED_FORMATS.get(tool) or _brought_tool(tool),
        STORED_REASONING_FORMATS.get(reasoning) or _brought_reasoning(reasoning),
    )


_BODIES = {kind.__name__: kind for kind in (JsonCall, NamedCall, TaggedCall)}


def stored_name(table: ToolFormat | ReasoningFormat | None) -> str | None:
    """Return the name that is stored for a table. One that a checkpoint has brought is stored as a whole, as JSON."""
    if table is None or not table.name.startswith(RESPONSE_TEMPLATE):
        return None if table is None else table.name
    fields = asdict(table)
    if isinstance(table, ToolFormat):
        fields["kind"] = type(table.body).__name__
    return orjson.dumps(fields).decode()


def _brought_tool(text: str) -> ToolFormat | None:
    """Return the table that `stored_name` has written; None for other text."""
    try:
        fields = orjson.loads(text)
        kind, members = _BODIES[fields.pop("kind")], fields.pop("body")
        body: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in members.items()
        }
        return ToolFormat(**{**fields, "hints": (), "body": kind(**body)})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _brought_reasoning(text: str) -> ReasoningFormat | None:
    try:
        return ReasoningFormat(**{**orjson.loads(text), "hints": ()})
    except (ValueError, TypeError):
        return None


_LAST_TOKENS = 16
"""Tokens at the end of a prompt that hold a marker and white space after it."""


def begins_reasoning(table: ReasoningFormat, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends in the marker with which reasoning begins, or in the middle of reasoning."""
    return table.is_open or tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False).rstrip().endswith(
        table.begin
    )


def _chosen(tables: Mapping[str, Table], source: str, name: str, own: Table | None) -> Table | None:
    if name != AUTO_FORMAT:
        return None if name == NO_FORMAT else tables[name]
    return next((table for table in tables.values() if all(hint in source for hint in table.hints)), own)
