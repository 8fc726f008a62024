"""Reads the formats of a checkpoint from its `response_template`, for a model that no table of ours fits.

A response template (`response_template` in tokenizer_config.json) tells transformers' `parse_response` how to divide an
answer: https://huggingface.co/docs/transformers/chat_response_parsing. Its markers are texts or regular expressions. A
field is read if it becomes a table: then streams, forced tool calls and reasoning work as with the tables of ours.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca.core.domain.text import Tokenizer
from orca.gateway.formats.tables import (
    RESPONSE_TEMPLATE,
    JsonCall,
    ModelFormats,
    NamedCall,
    ReasoningFormat,
    TaggedCall,
    ToolFormat,
)

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_CALL_FIELD = "tool_calls"


class _Unread(Exception):
    """A field has something that no table has; the text says what."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A named group of a pattern, with any text in it."""

    name: str


_Parts = Sequence[str | _Group]
"""A marker or a pattern. The parser skips white space around markers, so an expression for it has no part."""


@dataclass(frozen=True, slots=True)
class ReadFormats:
    """The formats of a response template.

    Fields:
        problems: names of the fields that are not read, and why.
    """

    formats: ModelFormats
    problems: tuple[str, ...] = ()


def read_response_template(template: Any, tokenizer: Tokenizer) -> ReadFormats:
    """Return the tables that a response template stands for. It never fails: what it cannot read is a problem.

    Args: template: JSON, which anybody may have written.
    """
    if template is None:
        return ReadFormats(ModelFormats())
    fields = template.get("fields") if isinstance(template, dict) else None
    if not isinstance(fields, dict):
        return ReadFormats(ModelFormats(), ("fields: must be an object",))
    content = fields.get("content")
    if isinstance(content, dict) and {"open", "open_pattern"} & content.keys():
        return ReadFormats(ModelFormats(), ("content: text outside of its markers would be lost",))
    tool: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    problems = []
    for name, declared in fields.items():
        try:
            if name in _REASONING_FIELDS:
                reasoning = _reasoning(_object(declared))
                _check_markers(tokenizer, reasoning.begin, reasoning.end)
            elif name == _CALL_FIELD:
                tool = _tool(_object(declared))
                _check_markers(tokenizer, tool.begin)
        except _Unread as problem:
            tool, reasoning = (tool, None) if name in _REASONING_FIELDS else (None, reasoning)
            problems.append(f"{name}: {problem}")
    return ReadFormats(ModelFormats(tool, reasoning), tuple(problems))


def _object(declared: Any) -> Mapping[str, Any]:
    if not isinstance(declared, dict):
        raise _Unread("must be an object")
    return declared


def _check_markers(tokenizer: Tokenizer, *markers: str) -> None:
    """Raises: _Unread for a marker with a special token behind text: no grammar finds where such a marker begins."""
    pattern = tokenizer.special_pattern
    for marker in markers:
        found = None if pattern is None else pattern.search(marker)
        if found is not None and found.start():
            raise _Unread(f"the marker {marker!r} has the special token {found[0]!r} behind text")


def _reasoning(declared: Mapping[str, Any]) -> ReasoningFormat:
    begin, end = _text(_parts(declared, "open")), _literal(_parts(declared, "close"))
    if not end.strip():
        raise _Unread("a marker is missing")
    if declared.get("content", "text") != "text" or declared.get("transform") is not None:
        raise _Unread("is no text")
    space = end[len(end.rstrip()) :] or "\n\n"
    return ReasoningFormat(name=RESPONSE_TEMPLATE, hints=(), begin=begin, end=end.strip(), space=space)


def _tool(declared: Mapping[str, Any]) -> ToolFormat:
    if declared.get("content_args") and declared.get("content") != "xml-inline":
        raise _Unread(f"content_args with {', '.join(sorted(_object(declared['content_args'])))}")
    opening, closing = _parts(declared, "open"), _parts(declared, "close")
    name, arguments = _transformed(declared.get("transform"))
    match declared.get("content"):
        case "json" if declared.get("transform_each") is True:
            body = JsonCall(name=_member(name, 0), arguments=(_member(arguments, 0),))
            return _table(opening, closing, body, is_list=True)
        case "json" if arguments == ("content",):
            match opening:
                case [*before, _Group() as group, str() as between] if name == (group.name,) and between.strip():
                    return _table(before, closing, NamedCall(between=between))
            raise _Unread("open_pattern does not end in the name and a text after it")
        case "json":
            return _table(opening, closing, JsonCall(name=_member(name, 1), arguments=(_member(arguments, 1),)))
        case "xml-inline" if arguments == ("content",):
            return _tagged(declared, opening, closing, name)
        case content:
            raise _Unread(f"content is {content!r}")


def _tagged(declared: Mapping[str, Any], opening: _Parts, closing: _Parts, name: tuple[str, ...]) -> ToolFormat:
    settings = _object(declared.get("content_args"))
    if set(settings) != {"tag_pattern"}:
        raise _Unread(f"content_args must be tag_pattern alone, not {', '.join(sorted(settings))}")
    tag = settings["tag_pattern"]
    match _words(opening), _words(closing), _words(_parts_of(tag)):
        case (
            [str() as begin, str() as function, _Group() as group, ">"],
            [str() as function_end, str() as end],
            [str() as parameter, _Group(name="key"), ">", _Group(name="value"), str() as parameter_end],
        ) if (group.name,) == name:
            if not _VALUE_OF_LINES.search(tag):
                raise _Unread("a value has no lines of its own")
            body = TaggedCall(
                function=function, function_end=function_end, parameter=parameter, parameter_end=parameter_end
            )
            return _table([begin + "\n"], ["\n" + end], body)
        case _:
            raise _Unread("its tags are not those of <function=NAME> and <parameter=KEY>")


def _table(
    opening: _Parts, closing: _Parts, body: JsonCall | NamedCall | TaggedCall, *, is_list: bool = False
) -> ToolFormat:
    begin, end = _literal(opening), _literal(closing)
    if not begin.strip():
        raise _Unread("there is no text with which a tool call begins")
    # White space around a marker is no part of it: forced calls have what the template has.
    after, before = begin[len(begin.rstrip()) :], end[: len(end) - len(end.lstrip())]
    return ToolFormat(
        name=RESPONSE_TEMPLATE,
        hints=(),
        body=body,
        begin=begin.strip(),
        end=end.strip(),
        space=after,
        end_space=before,
        is_list=is_list,
        separator=", " if is_list else after,
    )


def _parts(declared: Mapping[str, Any], key: str) -> _Parts:
    """Return the marker `open` or `close`, or the pattern instead of it, in its parts. Without either it has none."""
    pattern = declared.get(f"{key}_pattern")
    if pattern is not None:
        return _parts_of(pattern)
    marker = declared.get(key, [])
    markers = [marker] if isinstance(marker, str) else marker
    if not isinstance(markers, list) or not all(isinstance(each, str) for each in markers):
        raise _Unread(f"{key} must be text")
    if len(markers) > 1:
        raise _Unread(f"{key} has several texts")
    return markers


_ANY = r"(?: \[\^?(?:\\.|[^\]\\])+\] | \\w | \\S | \. )[*+]\??"
_PIECE = re.compile(
    rf"""
    (?P<space> (?:\\s|\\n|\s)[*+?] )
    | (?P<end> \\Z | \\z | \$ | \(\?=.*\)\Z )
    | \(\?P<(?P<name>\w+)> {_ANY} \)
    | \\(?P<escaped>\W)
    | (?P<newline>\\n)
    | (?P<text>[^\\.^$*+?{{}}\[\]|()])
    """,
    re.DOTALL | re.VERBOSE,
)
"""White space; the end of a text, or what follows it; a group; a character."""

_BREAK = r"(?: (?:\\s|\\n|\n)[*+?] | \\n | \n )"
_VALUE_OF_LINES = re.compile(
    rf"> {_BREAK} \(\?P<value> {_ANY} \) {_BREAK} (?= [^\s\\] | \\[^sn\s] )", re.DOTALL | re.VERBOSE
)
"""A value in a tag's pattern, with one line break before and after it that is no part of it."""


def _parts_of(pattern: Any) -> _Parts:
    """Return the parts of a regular expression. Raises: _Unread for one that is not a text with groups in it."""
    if not isinstance(pattern, str):
        raise _Unread("a pattern must be text")
    parts: list[str | _Group] = []
    place, is_joined = 0, False
    while place < len(pattern):
        found = _PIECE.match(pattern, place)
        if found is None:
            raise _Unread(f"the pattern {pattern!r} is more than text and names")
        place = found.end()
        character = "\n" if found["newline"] else found["escaped"] or found["text"]
        if found["name"]:
            parts.append(_Group(found["name"]))
        elif character and is_joined:
            parts[-1] = f"{parts[-1]}{character}"
        elif character:
            parts.append(character)
        is_joined = bool(character)
    return parts


def _text(parts: _Parts) -> str:
    """Return a marker, without white space at its ends. Raises: _Unread if there is none."""
    text = _literal(parts).strip()
    if not text:
        raise _Unread("a marker is missing")
    return text


def _literal(parts: _Parts) -> str:
    """Return the text of parts that are one text or nothing. Raises: _Unread for others."""
    match parts:
        case []:
            return ""
        case [str() as text]:
            return text
        case _:
            raise _Unread("a marker has a name or white space in it")


def _words(parts: _Parts) -> _Parts:
    """Return the texts between line breaks, and the groups. Raises: _Unread for other white space, and empty lines."""
    words: list[str | _Group] = []
    for part in parts:
        lines = [part] if isinstance(part, _Group) else part.split("\n")
        if "" in lines[1:-1] or any(isinstance(line, str) and line and line.split() != [line] for line in lines):
            raise _Unread("between its tags is white space that is no line break")
        words += [line for line in lines if line]
    return words


def _transformed(transform: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return where name and arguments of a tool call come from: a group, `content`, or a member of it."""
    match transform:
        case None | {"function": "{content}"} | "{content}":
            return ("content", "name"), ("content", "arguments")
        case {"function": {"name": name, "arguments": arguments}} | {"name": name, "arguments": arguments}:
            return _path(name), _path(arguments)
        case _:
            raise _Unread("transform has no name and arguments")


def _path(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str) or not re.fullmatch(r"\{\w+(\.\w+)*\}", value):
        raise _Unread(f"transform has {value!r}")
    return tuple(value.strip("{}").split("."))


def _member(path: tuple[str, ...], depth: int) -> str:
    """Return the member that a path names. Args: depth: 1 for a member of the content, 0 for one of each item."""
    if len(path) != depth + 1 or (depth and path[0] != "content"):
        raise _Unread(f"transform has {'.'.join(path)!r}")
    return path[-1]
