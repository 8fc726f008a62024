"""The messages of a chat as templates expect them: one text each, and earlier tool calls with their arguments.

Clients send the arguments of a call as a text, as the answer had them. Templates expect an object.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import orjson

from orca.core.domain.errors import InvalidRequest
from orca.gateway.calls.bodies import Message
from orca.gateway.calls.text_parts import joined_text
from orca.gateway.calls.unsupported_fields import MESSAGE, refuse_unsupported
from orca.gateway.errors import shown, unsupported

_CALLS, _CALL_ID, _REASONING = "tool_calls", "tool_call_id", "reasoning_content"
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


def plain_messages(messages: Sequence[Message], *, short_ids: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a chat as templates expect them.

    Args: short_ids: the template takes ids of calls with nine letters and digits only.
    Raises: InvalidRequest, ApiError.
    """
    plain = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if short_ids:
        for message in plain:
            _shorten_ids(message)
    return plain


def character_count(messages: Sequence[Message]) -> int:
    """Return the length of the texts and tool calls of a chat, which are checked later."""
    count = 0
    for message in messages:
        parts = message.content if isinstance(message.content, list) else [message.content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            count += len(text) if isinstance(text, str) else 0
        extra = message.model_extra or {}
        count += sum(len(orjson.dumps(extra[name])) for name in (_CALLS, _REASONING, "reasoning") if extra.get(name))
    return count


def content_text(message: Message, param: str = "content") -> str:
    """Return the text of a message; empty if it has none. Raises: InvalidRequest, ApiError, which name the field."""
    return "" if message.content is None else joined_text(message.content, param, {"text": "text"})


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    extra = message.model_extra or {}
    refuse_unsupported(extra, MESSAGE, f"{where}.")
    if message.role == "user" and message.content is None:
        raise InvalidRequest(f"{where}.content: is required in a user's message", param=f"{where}.content")
    given = {key: value for key, value in extra.items() if key not in MESSAGE and value is not None}
    plain = {"role": message.role, "content": content_text(message, f"{where}.content"), **given}
    for name in (_REASONING, "reasoning", "name", "refusal"):
        _check_text(plain.get(name), f"{where}.{name}")
    if plain.get(_CALLS) in (None, []):
        plain.pop(_CALLS, None)
    elif message.role != "assistant":
        param = f"{where}.{_CALLS}"
        raise InvalidRequest(f"{param}: only a message of the assistant has tool calls", param=param)
    else:
        plain[_CALLS] = _plain_calls(plain[_CALLS], f"{where}.{_CALLS}")
    if _CALL_ID in plain:
        _text(plain[_CALL_ID], f"{where}.{_CALL_ID}")
    reasoning = plain.pop("reasoning", None)
    if message.role == "assistant" and reasoning is not None:
        # Both names stand in our answers.
        plain.setdefault(_REASONING, reasoning)
    return plain


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}: must be a list, not {shown(calls)}", param=where)
    return [_plain_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    kind = call.get("type", "function") if isinstance(call, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{where}.type", f"must be function, not {shown(kind)}: no other calls are supported")
    function = call.get("function") if isinstance(call, dict) else None
    if kind != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{where}: must be an object with type function and a function", param=where)
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object_of(arguments)
    elif arguments is not None and not isinstance(arguments, dict):
        param = f"{where}.function.arguments"
        raise InvalidRequest(f"{param}: must be the text of a JSON object, not {shown(arguments)}", param=param)
    plain = {"type": "function", "function": {"name": name, "arguments": {} if arguments is None else arguments}}
    return plain if call.get("id") is None else {"id": _text(call["id"], f"{where}.id"), **plain}


def _object_of(arguments: str) -> Any:
    """Return the object of a text. A model may have written a text that is none: it stays a text."""
    if not arguments.strip():
        return {}
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: must be a text, not {shown(value)}", param=param)
    return value


def _check_text(value: Any, param: str) -> None:
    """Raises: InvalidRequest for a value that is no text; null is none."""
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{param}: must be text, not {shown(value)}", param=param)


def _shorten_ids(message: dict[str, Any]) -> None:
    for call in message.get(_CALLS, ()):
        if "id" in call:
            call["id"] = _short_id(call["id"])
    if _CALL_ID in message:
        message[_CALL_ID] = _short_id(message[_CALL_ID])


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, the same for the same id."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
