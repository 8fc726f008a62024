"""The body of POST /v1/responses, and the chat that it stands for.

A call to the Responses API becomes a chat: its items become messages, its fields those of a chat. Everything behind it
(templates, grammars, submit, tool calls) is that of chats. Errors name the fields that the client has written.

Agents send fields and tools for services that only OpenAI has. Unknown fields are ignored, and tools of other types are
left out. Whatever would change the input of the model is refused by name.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, WithJsonSchema, field_validator

from orca.core.domain.errors import InvalidRequest
from orca.gateway.calls.bodies import Body, CacheSalt, ChatBody, DeadlineMs, Priority, whole_number
from orca.gateway.calls.text_parts import joined_text
from orca.gateway.errors import ApiError, shown, unsupported
from orca.gateway.http.receive import first_problem
from orca.gateway.responses.conversation import Item, kept_items, named_items

UNSUPPORTED: tuple[str, ...] = ("conversation", "prompt")
"""Fields that would change the answer."""
_LOGPROBS = "message.output_text.logprobs"
_METADATA_MAX, _METADATA_NAME_MAX, _METADATA_VALUE_MAX = 16, 64, 512
"""Names, characters of a name, and characters of a value."""

# The types of parts -> the field with their text.
_OUTPUT_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}
_MESSAGE_PARTS = {**_OUTPUT_PARTS, "refusal": "refusal"}
_REASONING_PARTS = {"reasoning_text": "text", "text": "text"}

_Input = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
            "description": "Text of the user, or items: message, function_call, function_call_output, reasoning.",
        }
    ),
]
_Any = Annotated[Any, WithJsonSchema({})]


class ResponseText(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    format: dict[str, Any] | None = Field(
        None, description="`text`, `json_object` or `json_schema`, as OpenAI has them."
    )


class ResponseReasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    effort: str | None = None


class ResponseBody(Body):
    """The fields that Orca reads; others are ignored."""

    input: _Input
    previous_response_id: str | None = Field(
        None, description="A stored response that has ended: its conversation goes on with the input."
    )
    instructions: str | None = Field(
        None, description="A system message before the input. A later response does not take it over."
    )
    tools: list[dict[str, Any]] | None = Field(None, description="Functions; tools of other types are left out.")
    tool_choice: _Any = Field(None, description="none, auto, required, a function, or allowed_tools.")
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    max_output_tokens: int | None = Field(None, ge=1, description="Most tokens to generate, reasoning included.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    metadata: dict[str, str] | None = Field(None, description="Comes back with the response; 16 names at most.")
    store: bool | None = Field(None, description="True by default: the response can be retrieved for a while.")
    stream: bool | None = None
    background: bool | None = Field(None, description="Answer at once; the response is retrieved later.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Log probabilities of the message's tokens, each with so many alternatives."
    )
    include: list[str] | None = Field(None, description=f"`{_LOGPROBS}`; others are ignored.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    deadline_ms: DeadlineMs = None
    priority: Priority = None
    cache_salt: CacheSalt = None

    _whole_number = field_validator(
        "max_output_tokens", "seed", "top_logprobs", "deadline_ms", "priority", mode="before"
    )(whole_number)


class ResponseChat(ChatBody):
    """The chat that a call to the Responses API stands for."""

    _echo_json: str = PrivateAttr("{}")
    _call: ResponseBody = PrivateAttr()
    _items_json: str | None = PrivateAttr(None)

    @property
    def call(self) -> ResponseBody:
        """The call as its client made it."""
        return self._call

    @property
    def items_json(self) -> str | None:
        """JSON: the items of the conversation up to the answer; None if the response is not stored."""
        return self._items_json

    @property
    def echo_json(self) -> str:
        """JSON: the fields of the call that its response repeats."""
        return self._echo_json


@dataclass(slots=True)
class Translation:
    """A chat, and the names that the client has for its parts."""

    chat: ResponseChat
    messages: Sequence[str]  # the field that each message was made from
    calls: Mapping[str, str]  # the item that each tool call of a message was made from
    tools: Sequence[int]  # the place that each tool had

    def error(self, error: ApiError | InvalidRequest) -> ApiError | InvalidRequest:
        """Return an error about the chat in terms of the client's call."""
        return _in_terms_of_call(error, self.messages, self.calls, self.tools)


def is_stored(echo: str | None) -> bool:
    """Return whether a response may be retrieved. Args: echo: `ResponseChat.echo_json`."""
    return echo is not None and orjson.loads(echo)["store"] is True


def translate(body: ResponseBody, earlier: Sequence[Item] = ()) -> Translation:
    """Return the chat that a call stands for.

    Args: earlier: items of the conversation that the call continues.
    Raises: InvalidRequest, ApiError.
    """
    _check_supported(body)
    items = _Items()
    if body.instructions is not None:
        items.add_message("instructions", {"role": "system", "content": body.instructions})
    for item in earlier:
        items.add("previous_response_id", item)
    if isinstance(body.input, str):
        items.add_message("input", {"role": "user", "content": body.input})
    elif isinstance(body.input, list) and body.input:
        for i, item in enumerate(body.input):
            items.add(f"input[{i}]", item)
    else:
        raise InvalidRequest(f"input: must be text or a list of items, not {shown(body.input)}", param="input")
    for i, tool in enumerate(body.tools or []):
        if not isinstance(tool.get("type"), str):
            raise InvalidRequest(
                f"tools[{i}].type: must be text, not {shown(tool.get('type'))}", param=f"tools[{i}].type"
            )
    functions = [(i, tool) for i, tool in enumerate(body.tools or []) if tool.get("type") == "function"]
    format_of_text = None if body.text is None else body.text.format
    fields = {
        "model": body.model,
        "messages": items.messages,
        "tools": [_tool(tool) for _, tool in functions] or None,
        "tool_choice": _tool_choice(body.tool_choice, has_tools=bool(functions)),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if format_of_text is None else _response_format(format_of_text),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "logprobs": bool(body.top_logprobs) or _LOGPROBS in (body.include or []),
        "top_logprobs": body.top_logprobs,
        "stream": body.stream,
        "background": body.background,
        "chat_template_kwargs": body.chat_template_kwargs,
        "deadline_ms": body.deadline_ms,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
    }
    places = [i for i, _ in functions]
    try:
        chat = ResponseChat.model_validate(fields)
    except ValidationError as problem:
        raise _in_terms_of_call(first_problem(problem), items.names, items.calls, places) from problem
    chat._echo_json = orjson.dumps(_echo(body)).decode()
    chat._call = body
    if body.store is not False:
        text = {"role": "user", "content": body.input}
        kept = [*earlier, *kept_items([text] if isinstance(body.input, str) else body.input)]
        chat._items_json = orjson.dumps(named_items(kept, secrets.token_hex(16))).decode()
    return Translation(chat, items.names, items.calls, places)


def _in_terms_of_call(
    error: ApiError | InvalidRequest, messages: Sequence[str], calls: Mapping[str, str], tools: Sequence[int]
) -> ApiError | InvalidRequest:
    if isinstance(error, InvalidRequest) and type(error) is not InvalidRequest:
        return error
    names: list[tuple[str, Callable[[re.Match[str]], str]]] = [
        (r"(messages\[\d+\]\.tool_calls\[\d+\])(?:\.function)?", lambda found: calls[found[1]]),
        (r"messages\[(\d+)\]\.tool_call_id", lambda found: f"{messages[int(found[1])]}.call_id"),
        (r"messages\[(\d+)\](?:\.content|\.tool_calls)?", lambda found: messages[int(found[1])]),
        (r"tools\[(\d+)\](?:\.function)?", lambda found: f"tools[{tools[int(found[1])]}]"),
        (r"messages\b", lambda _: "input"),
        (r"tool_choice\.allowed_tools", lambda _: "tool_choice"),
        (r"response_format(?:\.json_schema)?", lambda _: "text.format"),
        (r"max_completion_tokens|max_tokens", lambda _: "max_output_tokens"),
    ]
    message, param = error.message if isinstance(error, ApiError) else str(error), error.param
    for pattern, name in names:
        message = re.sub(f"^(?:{pattern})", name, message)
        param = None if param is None else re.sub(f"^(?:{pattern})", name, param)
    if isinstance(error, InvalidRequest):
        return InvalidRequest(message, param=param)
    error.message, error.param = message, param
    return error


def _check_supported(body: ResponseBody) -> None:
    for name in UNSUPPORTED:
        if (body.model_extra or {}).get(name) not in (None, 0):
            raise unsupported(name, "is not supported")
    if body.background and body.store is False:
        raise InvalidRequest("store: a background response must be stored", param="store")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Check OpenAI's bounds. Raises: InvalidRequest."""
    if len(metadata) > _METADATA_MAX:
        raise InvalidRequest(f"metadata: has {len(metadata)} names, more than {_METADATA_MAX}", param="metadata")
    for name, value in metadata.items():
        if len(name) > _METADATA_NAME_MAX or len(value) > _METADATA_VALUE_MAX:
            message = (
                f"metadata: {shown(name)} may have {_METADATA_NAME_MAX} characters, its value {_METADATA_VALUE_MAX}"
            )
            raise InvalidRequest(message, param="metadata")


def _echo(body: ResponseBody) -> dict[str, Any]:
    """Return the fields that a response repeats."""
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if body.text is None or body.text.format is None else body.text.format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    } | ({} if body.previous_response_id is None else {"previous_response_id": body.previous_response_id})


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any, *, has_tools: bool) -> Any:
    match choice:
        case {"type": "function", **rest} if "function" not in rest:
            return {"type": "function", "function": {"name": rest.get("name")}}
        case {"type": "allowed_tools", "mode": mode, "tools": list() as tools}:
            named = [{"function": {"name": tool.get("name") if isinstance(tool, dict) else None}} for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        case {"type": str() as kind} if kind not in ("function", "allowed_tools"):
            raise unsupported("tool_choice", f"must name a function, not {shown(kind)}: no other tools are supported")
    return choice if has_tools or choice != "auto" else None


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


@dataclass(slots=True)
class _Items:
    """Collects messages. What the assistant did in one turn becomes one message."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    calls: dict[str, str] = field(default_factory=dict)  # name of a tool call in the chat -> name of its item
    _is_open: bool = False  # the last message is the assistant's, and more of its turn may follow

    def add_message(self, name: str, message: dict[str, Any]) -> None:
        self._is_open = False
        self.messages.append(message)
        self.names.append(name)

    def add(self, name: str, item: Any) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                self._add_text(name, item)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                calls = self._turn(name).setdefault("tool_calls", [])
                self.calls[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = name
                calls.append(call)
            case "function_call_output":
                if item.get("call_id") is None:
                    raise InvalidRequest(f"{name}.call_id: is required", param=f"{name}.call_id")
                content = joined_text(item.get("output"), f"{name}.output", _OUTPUT_PARTS)
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                self.add_message(name, message)
            case "reasoning":
                parts = item.get("content") or []
                text = joined_text(parts, f"{name}.content", _REASONING_PARTS)
                if text:
                    self._turn(name)["reasoning_content"] = text
            case str():
                raise unsupported(f"{name}.type", f"items of type {shown(kind)} are not supported")
            case _:
                raise InvalidRequest(f"{name}: must be an item, which is an object with a type", param=name)

    def _add_text(self, name: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            message = f"{name}.role: must be user, assistant, system or developer, not {shown(role)}"
            raise InvalidRequest(message, param=f"{name}.role")
        text = joined_text(item.get("content"), f"{name}.content", _MESSAGE_PARTS)
        if role != "assistant":
            self.add_message(name, {"role": role, "content": text})
        elif self._is_open and not self.messages[-1]["content"] and "tool_calls" not in self.messages[-1]:
            self.messages[-1]["content"] = text
        else:
            self.add_message(name, {"role": role, "content": text})
            self._is_open = True

    def _turn(self, name: str) -> dict[str, Any]:
        """Return the assistant's message to which an item belongs."""
        if not self._is_open:
            self.add_message(name, {"role": "assistant", "content": ""})
            self._is_open = True
        return self.messages[-1]
