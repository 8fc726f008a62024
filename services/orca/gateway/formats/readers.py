"""Readers of one call: they take its text as the model writes it, and give its name and the pieces of its arguments.

A reader takes no more than its call. It is done at the last character of the call, and it fails at the first character
that cannot be a part of one. The arguments of JSON calls are exactly the model's text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import unquote

import orjson

from orca.gateway.formats.tables import JsonCall, NamedCall, TaggedCall

_SPACE = " \t\r\n"
NAME_CHARACTERS_MAX = 1024
"""Most characters of a function's or parameter's name: no answer is searched for the end of a longer one."""


class ToolCallReader(Protocol):
    """One call that is being read."""

    is_done: bool
    has_failed: bool

    @property
    def name(self) -> str | None:
        """The name of the function; None until it is known that this is a call."""
        ...

    def read(self, text: str) -> int:
        """Take the next text. Returns: the number of its characters that the reader has taken for good.

        Args: text: begins after the characters that were taken before.
        """
        ...

    def cut(self) -> None:
        """Note that the call ends here, in the middle. What is known of its arguments belongs to them."""
        ...

    def take_arguments(self) -> str:
        """Return the arguments' text since the last time."""
        ...


class _Nesting:
    """Follows the brackets of a JSON text; those in its strings do not count."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_in_string = False
        self._is_escaped = False

    def push(self, character: str) -> None:
        if self.is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self.is_in_string = False
        elif character == '"':
            self.is_in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class _Arguments:
    """A JSON object that is handed on while it is read."""

    def __init__(self) -> None:
        self._nesting = _Nesting()
        self._new: list[str] = []
        self._all: list[str] = []
        self.is_done = False
        self.has_failed = False

    @property
    def has_begun(self) -> bool:
        return bool(self._all)

    def push(self, character: str) -> None:
        """Take a character; white space before the object is no part of it."""
        if not self._all and character != "{":
            self.has_failed = character not in _SPACE
            return
        self._nesting.push(character)
        self._new.append(character)
        self._all.append(character)
        if not self._nesting.depth:
            self.is_done = True
            self.has_failed = not isinstance(_json("".join(self._all)), dict)

    def take(self) -> str:
        text = "".join(self._new)
        self._new.clear()
        return text


class JsonCallReader:
    """Reads an object with a name and arguments. Other members are passed over."""

    def __init__(self, body: JsonCall) -> None:
        self._body = body
        self._nesting = _Nesting()
        self._text: list[str] = []
        self._member: list[str] = []  # of the outer object, up to its colon or its end
        self._key: Any = None
        self._arguments: _Arguments | None = None
        self._found: str | None = None
        self.is_done = False
        self.has_failed = False

    @property
    def name(self) -> str | None:
        """The name, when the arguments have begun."""
        return self._found if self._arguments is not None and self._arguments.has_begun else None

    def read(self, text: str) -> int:
        for count, character in enumerate(text, 1):
            self._push(character)
            if self.is_done or self.has_failed:
                return count
        return len(text)

    def cut(self) -> None:
        pass  # all of the arguments was handed on

    def take_arguments(self) -> str:
        return "" if self.name is None or self._arguments is None else self._arguments.take()

    def _push(self, character: str) -> None:
        if not self._text and character != "{":
            self.has_failed = character not in _SPACE
            return
        self._text.append(character)
        was_in_string, depth = self._nesting.is_in_string, self._nesting.depth
        self._nesting.push(character)
        if self._is_in_arguments:
            assert self._arguments is not None
            self._arguments.push(character)
            # Arguments that are no JSON may have been handed on: the rest of the object belongs to them.
            self.has_failed = self._arguments.has_failed and not self._arguments.has_begun
        elif depth == 1 and not was_in_string and character in ":,}":
            self._end_of_part(character)
        elif depth:
            self._member.append(character)
        if not self._nesting.depth:
            self.is_done = True
            is_call = self.name is not None and isinstance(_json("".join(self._text)), dict)
            self.has_failed = self.has_failed or not is_call

    @property
    def _is_in_arguments(self) -> bool:
        return self._arguments is not None and not self._arguments.is_done

    def _end_of_part(self, character: str) -> None:
        """Take the part of a member that a colon, a comma or the last bracket has ended."""
        part = "".join(self._member)
        self._member.clear()
        if character == ":":
            self._key = _json(part)
            if self._key in self._body.arguments:
                self.has_failed = self._arguments is not None
                self._arguments = _Arguments()
        elif self._key == self._body.name:
            name = _json(part)
            if isinstance(name, str) and _is_visible(name) and self._found is None:
                self._found = name
            else:
                self.has_failed = True
            self._key = None


class NamedCallReader:
    """Reads a name and an object. The marker between them may be missing, as in older releases of the format."""

    def __init__(self, body: NamedCall) -> None:
        self._between = body.between
        self._arguments = _Arguments()
        self._found: str | None = None
        self.is_done = False
        self.has_failed = False

    @property
    def name(self) -> str | None:
        """The name, when the arguments have begun."""
        return self._found if self._arguments.has_begun else None

    def read(self, text: str) -> int:
        taken = 0
        if self._found is None:
            taken = self._read_name(text)
            if self._found is None:
                return taken
        for count, character in enumerate(text[taken:], taken + 1):
            self._arguments.push(character)
            self.is_done, self.has_failed = self._arguments.is_done, self._arguments.has_failed
            if self.is_done or self.has_failed:
                return count
        return len(text)

    def cut(self) -> None:
        pass  # all of the arguments was handed on

    def take_arguments(self) -> str:
        return self._arguments.take()

    def _read_name(self, text: str) -> int:
        """Read up to the arguments. Returns: 0 until the whole name is there, but for white space before it."""
        if space := len(text) - len(text.lstrip(_SPACE)):
            return space
        most = NAME_CHARACTERS_MAX + len(self._between)
        text = text[:most]
        ends = [(text.find(end), end) for end in (self._between, "{") if end in text]
        place, end = min(ends, default=(len(text) - overlap(text, self._between), ""))
        name = text[:place].rstrip(_SPACE)
        is_too_long = len(name) > NAME_CHARACTERS_MAX or (not end and len(text) == most)
        if is_too_long or any(character in _SPACE for character in name) or (end and not _is_visible(name)):
            self.has_failed = True
        elif end:
            self._found = name
            return place + (0 if end == "{" else len(end))
        return 0


class TaggedCallReader:
    """Reads tags, and writes a JSON member when a parameter closes, typed by the schema of the tool."""

    def __init__(self, body: TaggedCall, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Args: schemas: of the parameters, by the name of the tool."""
        self._body = body
        self._schemas = schemas
        self._new = ""
        self._members: set[str] = set()
        self._open: str | None = None  # name of the parameter whose value is read
        self._value: list[str] = []
        self._nesting: _Nesting | None = None  # of the value, if it is JSON
        self._found: str | None = None
        self.is_done = False
        self.has_failed = False

    @property
    def name(self) -> str | None:
        return self._found

    def read(self, text: str) -> int:
        taken = 0
        while not (self.is_done or self.has_failed):
            step = self._read(text[taken:])
            if not step:
                return taken
            taken += step
        return taken

    def cut(self) -> None:
        """Write the member whose value is open as far as it goes. A part of the closing tag does not belong to it."""
        if self._open is None:
            return
        value, types = _without_breaks(_visible("".join(self._value))), self._types_of(self._open)
        is_text = not types or "string" in types
        self._add_member(self._open, orjson.dumps(value).decode()[:-1] if is_text else value)

    def take_arguments(self) -> str:
        text, self._new = self._new, ""
        return text

    def _read(self, text: str) -> int:
        """Return the number of characters that are taken for good; 0 while more are needed."""
        if self._open is not None:
            return self._read_value(self._open, text)
        if space := len(text) - len(text.lstrip(_SPACE)):
            return space
        return self._read_function(text) if self._found is None else self._read_parameter(text)

    def _read_function(self, text: str) -> int:
        """Return the length of the opening tag; 0 while it is not whole."""
        if not self._begins(text, self._body.function):
            return 0
        name = self._read_name(text.removeprefix(self._body.function))
        if name is None:
            return 0
        self._found = name
        self._new = "{"
        return len(self._body.function) + len(name) + 1

    def _read_parameter(self, text: str) -> int:
        """Return the length of a parameter's opening tag, or of the closing tag; 0 while neither is whole."""
        if text.startswith(self._body.function_end):
            self._new += "}"
            self.is_done = True
            return len(self._body.function_end)
        if not self._begins(text, self._body.parameter, self._body.function_end):
            return 0
        name = self._read_name(text.removeprefix(self._body.parameter))
        if name is None or name in self._members:
            self.has_failed |= name is not None
            return 0
        self._members.add(name)
        self._open = name
        types = self._types_of(name)
        self._nesting = _Nesting() if types and "string" not in types else None
        return len(self._body.parameter) + len(name) + 1

    def _read_value(self, name: str, text: str) -> int:
        """Take more of a parameter's value, and its closing tag."""
        value, found, _ = text.partition(self._body.parameter_end)
        if not found:
            value = text[: len(text) - overlap(text, self._body.parameter_end)]
            self._add(value)
            return len(value)
        self._add(value)
        if self._nesting is not None and self._nesting.is_in_string:
            # The tag is a part of a string in the JSON.
            self._add(found)
            return len(value) + len(found)
        whole = _without_breaks(_visible("".join(self._value)))
        self._open = None
        self._value.clear()
        self._add_member(name, _typed_text(whole, self._types_of(name)))
        return len(value) + len(found)

    def _add_member(self, name: str, value: str) -> None:
        self._new += ", " if len(self._members) > 1 else ""
        self._new += f"{orjson.dumps(name).decode()}: {value}"

    def _add(self, value: str) -> None:
        self._value.append(value)
        if self._nesting is not None:
            for character in value:
                self._nesting.push(character)

    def _read_name(self, text: str) -> str | None:
        """Return the name in a tag; None while it is not whole. It fails if it never will be one."""
        name, found, _ = text[: NAME_CHARACTERS_MAX + 1].partition(">")
        is_too_long = len(name) > NAME_CHARACTERS_MAX
        self.has_failed = "\n" in name or is_too_long or (bool(found) and not _is_visible(name))
        return name if found and not self.has_failed else None

    def _begins(self, rest: str, *tags: str) -> bool:
        """Return whether a text begins with one of the tags. It fails if it never will."""
        if any(rest.startswith(tag) for tag in tags):
            return True
        self.has_failed = not any(tag.startswith(rest) for tag in tags)
        return False

    def _types_of(self, name: str) -> set[str]:
        """Return the types that the schema of the tool allows for a parameter."""
        schema = self._schemas.get(self._found or "", {})
        properties = schema.get("properties")
        return types_of(properties.get(name) if isinstance(properties, dict) else None, schema)


def reader_of(body: JsonCall | NamedCall | TaggedCall, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCallReader:
    """Return the reader of a tool call. Args: schemas: of the parameters of each tool, for formats without types."""
    match body:
        case JsonCall():
            return JsonCallReader(body)
        case NamedCall():
            return NamedCallReader(body)
        case TaggedCall():
            return TaggedCallReader(body, schemas)


_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Words of Python that models write for JSON's."""

_INTEGER = re.compile("-?[0-9]+")
_INDEX = re.compile("[0-9]{1,9}")

_NOTHING = object()


def _json(text: str) -> Any:
    """Return the value of a JSON text, or an object of no JSON type."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        # JSON has numbers and halves of characters that `orjson` refuses: 1e400, "\\ud800".
        return json.loads(_checked(text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _checked(text: str) -> str:
    """Return a text without special tokens. Raises: ValueError if it has one."""
    text.encode()
    return text


def _refuse(word: str) -> None:
    """Raises: ValueError for a number that Python knows and JSON does not."""
    raise ValueError(word)


def typed_value(value: str, types: set[str]) -> Any:
    """Return what the value of a parameter stands for. Args: types: that the schema allows (`types_of`)."""
    return _json(_typed_text(value, types))


def closes_early(value: str, body: TaggedCall) -> bool:
    """Return whether the closing tag of a parameter is found inside its value."""
    return body.parameter_end in value


def _typed_text(value: str, types: set[str]) -> str:
    """Return a value as JSON: the text itself if the schema allows what it means, otherwise a string."""
    text = value.strip()
    found = _json(_PYTHON.get(text, text))
    kind = _kind(found)
    if kind == "number" and _INTEGER.fullmatch(text):
        kind = "integer"  # which was too large for one
    if kind == "integer" and "number" in types:
        kind = "number"
    is_meant = kind in types and not ("string" in types and kind != "null")
    return _PYTHON.get(text, text) if is_meant else orjson.dumps(value).decode()


def _kind(value: Any) -> str:
    """Return the name of a value's type in JSON Schema."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return "null" if value is None else kinds.get(type(value), "")


_TYPES_MAX = 16
"""Alternatives and references that are followed to find the types of a parameter."""


def types_of(declared: Any, schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a parameter's schema allows. Without any, a value is a string.

    Args: schema: of all parameters, with the definitions that a reference may name.
    """
    types: set[str] = set()
    waiting = [declared]
    for _ in range(_TYPES_MAX):
        found = waiting.pop() if waiting else None
        if not isinstance(found, dict):
            continue
        named = found.get("type")
        types.update(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
        values = found.get("enum")
        types.update(map(_kind, values if isinstance(values, list) else []))
        if "const" in found:
            types.add(_kind(found["const"]))
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += found[name] if isinstance(found.get(name), list) else []
        reference = found.get("$ref")
        if isinstance(reference, str):
            waiting.append(referenced(reference, schema))
    return types


def referenced(reference: str, schema: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a reference names, as JSON pointers do; None if it has none."""
    found: Any = schema
    if reference != "#" and not reference.startswith("#/"):
        return None
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if _INDEX.fullmatch(name) and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text with which the marker begins."""
    return next(
        (length for length in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-length:])), 0
    )


def _visible(text: str) -> str:
    """Return a text without the marks of special tokens, which no JSON can have."""
    return text.encode(errors="ignore").decode()


def _is_visible(name: str) -> bool:
    """Return whether a name has letters, and no special token in it."""
    return bool(name) and name == _visible(name)


def _without_breaks(value: str) -> str:
    """Remove the line breaks that the format puts around a value."""
    return value.removeprefix("\n").removesuffix("\n")
