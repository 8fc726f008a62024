"""Writes the tool calls as a grammar, in the model's own format.

The grammar describes the whole answer: reasoning first, without a constraint; then text, calls or an answer of another
grammar. One text of a request holds all of it (core/grammars/matching.py).

llguidance takes the longest lexeme that matches. So the text before a call is one lazy lexeme with the marker, and no
two lexemes that may begin at the same place match the same text.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from orca.core.domain.errors import InvalidRequest
from orca.core.domain.text import Tokenizer
from orca.gateway.errors import shown
from orca.gateway.formats.tables import JsonCall, ModelFormats, NamedCall, ReasoningFormat, TaggedCall, ToolFormat
from orca.gateway.formats.tagged_values import check_object, value_rule
from orca.gateway.formats.tools import CallTools, Function
from orca.gateway.grammars.fields import NamedGrammar, json_rule, literal
from orca.gateway.grammars.json_schema import check_keywords

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_BREAK = r"/\s{0,4}/"
"""Most white space between reasoning and what follows."""


@dataclass(slots=True)
class AnswerGrammar:
    """Collects the rules of one answer."""

    formats: ModelFormats
    tokenizer: Tokenizer  # whose special tokens may be markers
    is_in_reasoning: bool  # the prompt ends in the marker with which reasoning begins
    _rules: list[str] = field(default_factory=list)

    def of_answer(self, answer: NamedGrammar) -> NamedGrammar:
        """Return the grammar of an answer that comes after reasoning, without calls."""
        if self.formats.reasoning is None:
            return answer
        self._rules.append(f"answer: {_nested(answer)}")
        return self._whole(f"{self._thought(self.formats.reasoning)} answer", answer.param)

    def of_function(self, function: Function) -> NamedGrammar:
        """Return the grammar of one call, which tells whether the function's schema has one.

        Raises: InvalidRequest as `of_calls`.
        """
        assert self.formats.tool is not None, "the model has a format of calls"
        check_keywords(dict(function.schema), function.param)
        self._rules.append(f"call: {self._call(self.formats.tool, function, function.schema, 0)}")
        return self._whole("call", function.param)

    def of_calls(
        self, tools: CallTools, answer: NamedGrammar | None, *, loosened: Collection[str] = ()
    ) -> NamedGrammar:
        """Return the grammar of an answer that may call tools.

        Args:
            answer: of an answer without calls; None if that may be any text.
            loosened: names of functions whose arguments are any object; those of the others obey their schemas.
        Raises: InvalidRequest for a schema that has no grammar.
        """
        table = self.formats.tool
        assert table is not None, "the model has a format of calls"
        for i, function in enumerate(tools.functions):
            schema = _ANY_OBJECT if function.name in loosened else function.schema
            if schema is not _ANY_OBJECT:
                check_keywords(dict(schema), function.param)
            self._rules.append(f"call_{i}: {self._call(table, function, schema, i)}")
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools.functions))))
        if not tools.must_call and answer is None:
            return self._whole(self._text_with_calls(table, is_single=tools.is_single), tools.param)
        thought = "" if self.formats.reasoning is None else self._thought(self.formats.reasoning)
        if tools.must_call:
            return self._whole(f"{thought} {self._calls(table, is_single=tools.is_single)}", tools.param)
        assert answer is not None
        self._rules.append(f"answer: {_nested(answer)}")
        calls = self._calls(table, is_single=tools.is_single)
        if table.may_omit_begin:
            # Without its marker a call would begin as an answer does.
            calls = f"{self._marker(table.begin)} {self._opened(table, is_single=tools.is_single)}"
        return self._whole(f"{thought} (answer | {calls})", tools.param)

    def _whole(self, start: str, param: str) -> NamedGrammar:
        return NamedGrammar("\n".join([f"start: {start.strip()}", "TEXT: /(?s:.*)/", *self._rules]), param)

    def _marker(self, marker: str) -> str:
        """Return a marker as a rule has it: a special token is no text."""
        pattern = self.tokenizer.special_pattern
        if pattern is None:
            return literal(marker)
        texts, tokens = pattern.split(marker), pattern.findall(marker)
        rules = [literal(texts[0])] if texts[0] else []
        for token, text in zip(tokens, texts[1:], strict=True):
            rules += [f"<[{self.tokenizer.special_ids[token]}]>", *([literal(text)] if text else [])]
        return " ".join(rules)

    def _is_special(self, marker: str) -> bool:
        """Return whether a marker begins with a special token, as it does if it has one."""
        pattern = self.tokenizer.special_pattern
        return pattern is not None and pattern.match(marker) is not None

    def _thought(self, table: ReasoningFormat) -> str:
        """Return the reasoning before calls. It is left out only if the prompt has not begun it."""
        after = literal(table.space) if table.is_exact else _BREAK
        if self.is_in_reasoning:
            return f"{self._rest_of_thought(table)} {after}"
        return f"({self._marker(table.begin)} {self._rest_of_thought(table)} {after})?"

    def _rest_of_thought(self, table: ReasoningFormat) -> str:
        if self._is_special(table.end):
            return f"TEXT {self._marker(table.end)}"
        self._rules.append(f"thought[lazy]: TEXT {literal(table.end)}")
        return "thought"

    def _calls(self, table: ToolFormat, *, is_single: bool) -> str:
        """Return one or more calls, with all that the format has around them."""
        begin, opened = self._marker(table.begin), self._opened(table, is_single=is_single)
        if table.may_omit_begin:
            return f"{begin}? {opened}"
        if is_single or table.is_list:
            return f"{begin} {opened}"
        separator = literal(table.separator) if table.separator else ""
        return f"{begin} {opened} ({separator} {begin} {opened})*"

    def _opened(self, table: ToolFormat, *, is_single: bool) -> str:
        """Return what follows the marker before calls."""
        more = "" if is_single else f"({literal(table.separator or ' ')} call)*"
        if table.may_omit_begin:
            return f"call {more}"
        space = literal(table.space) if table.space else ""
        if table.is_list:
            return f'{space}? "[" call {more} "]"'
        end_space = space if table.end_space is None else literal(table.end_space) if table.end_space else ""
        return f"{space} call {end_space} {self._marker(table.end) if table.end else ''}"

    def _text_with_calls(self, table: ToolFormat, *, is_single: bool) -> str:
        """Return any text with calls in it: after a marker the rest of a call follows."""
        reasoning = self.formats.reasoning
        if table.may_omit_begin:
            thought, plain = "", r"PLAIN: /\s*[^{\s](?s:.*)/"
            if reasoning is not None and self.is_in_reasoning:
                thought = self._rest_of_thought(reasoning)
            elif reasoning is not None:
                # Text that begins as reasoning is reasoning: after it a call may come without a marker.
                thought = f"({self._begun_thought(reasoning)})?"
                plain += rf" & ~/\s*{_expression(reasoning.begin)}(?s:.*)/"
            self._rules.append(plain)
            opened = self._opened(table, is_single=is_single)
            return f"{thought} {_BREAK} ({opened} | PLAIN? ({self._marker(table.begin)} {opened})?)"
        if reasoning is None:
            return self._text_from("TEXT", table, is_single=is_single)
        after = self._text_from("TEXT", table, is_single=is_single)
        if self.is_in_reasoning:
            return f"{self._rest_of_thought(reasoning)} {after}"
        thought = self._begun_thought(reasoning)
        if self._is_special(reasoning.begin):
            return f"({thought})? {after}"
        self._rules.append(rf"PLAIN: /(?s:.*)/ & ~/\s*{_expression(reasoning.begin)}(?s:.*)/")
        return f"{thought} {after} | {self._text_from('PLAIN', table, is_single=is_single)}"

    def _begun_thought(self, table: ReasoningFormat) -> str:
        """Return reasoning that the answer begins, with white space before it."""
        if self._is_special(table.begin):
            return f"{self._marker(table.begin)} {self._rest_of_thought(table)}"
        begin = _expression(table.begin)
        if self._is_special(table.end):
            self._rules.append(rf"BEGIN: /\s*{begin}/")
            return f"BEGIN TEXT {self._marker(table.end)}"
        self._rules.append(rf"whole_thought[lazy]: /\s*{begin}(?s:.*)/ {literal(table.end)}")
        return "whole_thought"

    def _text_from(self, first: str, table: ToolFormat, *, is_single: bool) -> str:
        """Return text with calls in it. Args: first: terminal of the text before the first call."""
        begin, opened = self._marker(table.begin), self._opened(table, is_single=is_single)
        if self._is_special(table.begin):
            return f"{first} ({begin} {opened} TEXT){'?' if is_single else '*'}"
        head = f"head_{first.lower()}"
        self._rules.append(f"{head}[lazy]: {first} {begin}")
        if is_single:
            last = f"LAST_{first}"
            marker = _expression(table.begin)
            self._rules.append(rf"{last}: /(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/")
            return f"({head} {opened} {last} | {first})"
        if first == "TEXT":
            return f"({head} {opened})* TEXT"
        self._rules.append(f"head[lazy]: TEXT {begin}")
        return f"({head} {opened} (head {opened})* TEXT | {first})"

    def _call(self, table: ToolFormat, function: Function, schema: Mapping[str, Any], number: int) -> str:
        """Return one call of a function."""
        match table.body:
            case JsonCall() as body:
                arguments = json_rule(_of_object(schema, function))
                # A model has learned this spacing.
                opening = f'{{"{body.name}": "{function.name}", "{body.arguments[0]}": '
                return f'{literal(opening)} {arguments} "}}"'
            case NamedCall() as body:
                arguments = json_rule(_of_object(schema, function))
                return f"{literal(function.name)} {self._marker(body.between)} {arguments}"
            case TaggedCall() as body:
                opening = f"{body.function}{function.name}>\n"
                parameters = self._parameters(body, function, schema, number)
                return f"{literal(opening)} {parameters} {literal(body.function_end)}"

    def _parameters(self, body: TaggedCall, function: Function, schema: Mapping[str, Any], number: int) -> str:
        """Return the parameters of a tagged call, in the order of the schema."""
        closing = literal(f"\n{body.parameter_end}\n")
        # The parser takes the first closing tag for the end of a value.
        self._rules.append(f"free_{number}[lazy]: TEXT {literal(body.parameter_end)}")
        free = f"free_{number} {literal(chr(10))}"
        schema = _of_object(schema, function)
        check_object(schema, function)
        properties = schema.get("properties")
        if properties is None and schema.get("additionalProperties") is not False:
            name = r"/[a-zA-Z0-9_.-]{1,64}/"
            return f'({literal(body.parameter)} {name} ">\\n" {free})*'
        parts = []
        for name, declared in (properties or {}).items():
            value = value_rule(name, declared, schema, function, body)
            value = free if value is None else f"({value}) {closing}"
            part = f"{literal(f'{body.parameter}{name}>' + chr(10))} {value}"
            parts.append(part if name in schema.get("required", ()) else f"({part})?")
        return " ".join(parts)


def _of_object(schema: Mapping[str, Any], function: Function) -> Mapping[str, Any]:
    """Return a schema that allows objects only: arguments are nothing else."""
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        message = f"{function.param}: must be the schema of an object, not of the type {shown(types)}"
        raise InvalidRequest(message, param=function.param)
    return {**schema, "type": "object"}


def _expression(text: str) -> str:
    """Return a regular expression that matches a text."""
    return re.escape(text).replace("/", r"\/")


def _nested(answer: NamedGrammar) -> str:
    return f"%lark {{\n{answer.rules}\n}}"
