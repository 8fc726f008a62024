"""The tools of a call, and its choice among them: OpenAI's fields `tools`, `tool_choice` and `parallel_tool_calls`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import orjson
from pydantic import WithJsonSchema

from orca.core.domain.errors import InvalidRequest
from orca.gateway.errors import shown, unsupported

_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
                "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}], "description": "A JSON Schema."},
                "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED}},
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}

# The template gets each tool as the client wrote it. So the names and types are checked here and not by Pydantic.
Tools = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"type": "array", "items": _FUNCTION}, {"type": "null"}],
            "description": "Functions that the model may call. The model's chat template writes them into the prompt.",
        }
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED, {"type": "null"}],
            "description": "Which tools the answer calls: none of them, those that the model likes (auto), at least "
            "one (required), or one function by name. allowed_tools names some of them.",
        }
    ),
]

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """One tool."""

    name: str
    schema: Mapping[str, Any]  # of the parameters
    is_strict: bool  # the arguments of every call obey the schema
    param: str  # the field with the schema


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTools:
    """The tools of one call, of which at least one may be called."""

    given: Sequence[Mapping[str, Any]]  # for the template: all of them, as the client wrote them
    functions: tuple[Function, ...]  # those that may be called
    must_call: bool = False  # the answer has at least one call
    is_single: bool = False  # it has at most one
    param: str = "tools"  # the field that constrains the answer

    def schemas_json(self) -> str:
        """Return the schemas of the parameters as JSON, by the name of the function."""
        return orjson.dumps({function.name: function.schema for function in self.functions}).decode()

    @property
    def constrains(self) -> bool:
        """Return whether the calls of an answer need a grammar."""
        is_limited = self.is_single or len(self.functions) < len(self.given)
        return self.must_call or is_limited or any(function.is_strict for function in self.functions)


def tools_of(tools: Any, choice: Any, parallel: bool | None) -> CallTools | None:
    """Return the tools of a call; None if its answer calls none.

    Args: the fields `tools`, `tool_choice` and `parallel_tool_calls` of a body.
    Raises: InvalidRequest, ApiError.
    """
    functions = _functions(tools)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: needs tools, and the call has none", param="tool_choice")
        return None
    found = _chosen(CallTools(given=tools, functions=functions, is_single=parallel is False), choice)
    if parallel is False and found is not None and not found.must_call:
        return replace(found, param="parallel_tool_calls")
    return found


def _functions(tools: Any) -> tuple[Function, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools: must be a list, not {shown(tools)}", param="tools")
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names: set[str] = set()
    for i, function in enumerate(functions):
        if function.name in names:
            param = f"tools[{i}].function.name"
            raise InvalidRequest(f"{param}: two functions have the name {function.name!r}", param=param)
        names.add(function.name)
    return functions


def _function(tool: Any, where: str) -> Function:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{where}.type", f"must be function, not {shown(kind)}: no other tools are supported")
    function = tool.get("function") if isinstance(tool, dict) else None
    if kind != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{where}: must be an object with type function and a function", param=where)
    where = f"{where}.function"
    _typed(function.get("description"), str, "text", f"{where}.description")
    schema = _typed(function.get("parameters"), dict, "an object", f"{where}.parameters")
    return Function(
        name=_name(function.get("name"), f"{where}.name"),
        schema=_NO_PARAMETERS if schema is None else schema,
        is_strict=bool(_typed(function.get("strict"), bool, "true or false", f"{where}.strict")),
        param=f"{where}.parameters",
    )


def _name(name: Any, param: str) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        message = f"{param}: must be 1 to 64 letters, digits, underscores, points and dashes, not {shown(name)}"
        raise InvalidRequest(message, param=param)
    return name


def _typed(value: Any, kind: type, what: str, param: str) -> Any:
    """Return a value; null stands for none. Raises: InvalidRequest for a value of another type."""
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{param}: must be {what}, not {shown(value)}", param=param)
    return value


def _chosen(tools: CallTools, choice: Any) -> CallTools | None:
    """Apply `tool_choice`."""
    match choice:
        case None | "auto":
            return tools
        case "none":
            return None
        case "required":
            return replace(tools, must_call=True, param="tool_choice")
        case {"type": "function"}:
            functions = (_called(_by_name(tools), choice, "tool_choice"),)
            return replace(tools, functions=functions, must_call=True, is_single=True, param="tool_choice")
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as some},
        }:
            where = "tool_choice.allowed_tools.tools"
            by_name = _by_name(tools)
            named = [_called(by_name, tool, f"{where}[{i}]") for i, tool in enumerate(some)]
            allowed = {function.name: function for function in named}
            return replace(tools, functions=(*allowed.values(),), must_call=mode == "required", param="tool_choice")
        case {"type": "allowed_tools"}:
            param = "tool_choice.allowed_tools"
            message = f"{param}: must be an object with a mode, which is auto or required, and a list of tools"
            raise InvalidRequest(message, param=param)
        case {"type": str() as kind} if kind not in ("function", "allowed_tools"):
            raise unsupported("tool_choice", f"must name a function, not {shown(kind)}: no other tools are supported")
    raise InvalidRequest(
        "tool_choice: must be none, auto or required; or an object with type function and a function's name; or one "
        f"with type allowed_tools, a mode of auto or required, and tools; not {shown(choice)}",
        param="tool_choice",
    )


def _by_name(tools: CallTools) -> Mapping[str, Function]:
    return {function.name: function for function in tools.functions}


def _called(functions: Mapping[str, Function], named: Any, where: str) -> Function:
    """Return the function that a choice names."""
    if isinstance(named, dict) and named.get("type", "function") != "function":
        message = f"must be function, not {shown(named['type'])}: no other tools are supported"
        raise unsupported(f"{where}.type", message)
    function = named.get("function") if isinstance(named, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    found = functions.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(functions)
        raise InvalidRequest(f"{where}: names no function of tools ({known}): {shown(name)}", param=where)
    return found
