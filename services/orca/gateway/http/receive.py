"""Receives a JSON body: bounded in bytes, time and depth, then checked against its model.

Starlette and uvicorn bound none of these. Every problem is an ApiError: 400, 408, 413, 415 or 503.
"""

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from orca.gateway.errors import UNAVAILABLE, ApiError, shown
from orca.gateway.settings import GatewaySettings

BodyType = TypeVar("BodyType", bound=BaseModel)


class BodyBudget:
    """Bounds the bytes of all bodies that a process holds at a time: many calls may send theirs slowly at once."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held_bytes = 0

    @contextlib.contextmanager
    def for_call(self) -> Iterator["CallBudget"]:
        """Open the budget of one call. Its bytes are released at the end of the context."""
        budget = CallBudget(self)
        try:
            yield budget
        finally:
            self.held_bytes -= budget.total_bytes

    def take(self, count: int) -> None:
        """Take bytes for a body. Raises: ApiError 503 if there is no room for them."""
        if self.held_bytes + count > self._bytes_max:
            message = f"the bodies of other calls fill the {self._bytes_max} bytes that there are for them"
            raise ApiError(503, message, kind=UNAVAILABLE, code="too_many_bodies", retry_after_s=1, closes=True)
        self.held_bytes += count


class CallBudget:
    """The bytes that one call holds of a `BodyBudget`."""

    def __init__(self, body_budget: BodyBudget) -> None:
        self._body_budget = body_budget
        self.total_bytes = 0

    def take(self, count: int) -> None:
        """Take bytes for the call's body. Raises: ApiError 503."""
        self._body_budget.take(count)
        self.total_bytes += count


@dataclass(frozen=True, slots=True)
class UnreadBody:
    """A body that was not received yet, and the headers that describe it."""

    content_type: str
    content_encoding: str
    content_length: str  # empty if the body comes in chunks
    chunks: AsyncIterator[bytes]

    @classmethod
    def of(cls, request: Request) -> "UnreadBody":
        headers = request.headers
        return cls(
            content_type=headers.get("content-type", ""),
            content_encoding=headers.get("content-encoding", "identity"),
            content_length=headers.get("content-length", ""),
            chunks=request.stream(),
        )


async def receive_body(
    unread: UnreadBody, body_type: type[BodyType], settings: GatewaySettings, budget: CallBudget
) -> BodyType:
    """Read a body and check it. Raises: ApiError; starlette's ClientDisconnect when the client went away."""
    _check_headers(unread)
    raw = await _read(unread, settings, budget)
    if len(raw) > settings.inline_body_bytes_max:
        return await asyncio.to_thread(_checked, raw, body_type, settings)
    return _checked(raw, body_type, settings)


def _checked(raw: bytes, body_type: type[BodyType], settings: GatewaySettings) -> BodyType:
    """Raises: ApiError."""
    document = _parse(raw)
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    check_shape(document, settings)
    _check_names(raw, document)
    try:
        return body_type.model_validate(document)
    except ValidationError as error:
        raise first_problem(error) from error


def _check_headers(unread: UnreadBody) -> None:
    """Refuse all but JSON: browsers send other kinds for any web page, without asking this server first (CORS)."""
    kind = unread.content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"Content-Type: must be application/json, not {kind[:64]!r}"
        raise ApiError(415, message, param="Content-Type", code="unsupported_media_type", closes=True)
    encoding = unread.content_encoding.strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding: must be identity, not {encoding[:64]!r}; bodies must not be encoded"
        raise ApiError(415, message, param="Content-Encoding", code="unsupported_media_type", closes=True)


async def _read(unread: UnreadBody, settings: GatewaySettings, budget: CallBudget) -> bytes:
    length = unread.content_length
    if length.isdecimal() and int(length) > settings.body_bytes_max:
        raise _too_large(settings)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds_max):
            async for chunk in unread.chunks:
                if len(body) + len(chunk) > settings.body_bytes_max:
                    raise _too_large(settings)
                budget.take(len(chunk))
                body += chunk
    except TimeoutError as error:
        message = f"the body did not arrive within {settings.body_seconds_max:g} seconds"
        raise ApiError(408, message, kind="timeout_error", code="body_timeout", closes=True) from error
    return bytes(body)


def _too_large(settings: GatewaySettings) -> ApiError:
    message = f"the body is larger than {settings.body_bytes_max} bytes"
    return ApiError(413, message, code="body_too_large", closes=True)


def _parse(body: bytes) -> Any:
    """Parse JSON by orjson, which refuses what Python's own parser accepts: NaN, lone surrogates, endless nesting."""
    if not body:
        raise ApiError(400, "the body is empty: it must be a JSON object", code="invalid_json")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if (place := _bad_utf8(body)) is not None:
            message = f"the body is not valid UTF-8, which JSON must be, at byte {place + 1}"
            raise ApiError(400, message, code="invalid_json") from error
        found = next((word for word in ("NaN", "Infinity") if error.doc.startswith(word, error.pos)), None)
        reason = error if found is None else f"it has {found}, which is not JSON, at {_place(error)}"
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from error


def _bad_utf8(body: bytes) -> int | None:
    """Return the index of the first byte that is no UTF-8; None if all are. orjson names another place."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _check_names(body: bytes, document: Any) -> None:
    """Refuse two fields of one name: parsers disagree on which one counts, so a proxy could see another call than this.

    orjson silently keeps one of them, so the names in the text are counted too. That takes a tenth of the time of
    parsing. The text is parsed again only to find the name.
    """
    # The JSON is valid, so a backslash is inside a string and in front of the character that it escapes.
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if sum(1 for string in _STRING.finditer(without_escapes) if string[1]) == _count_names(document):
        return
    try:
        json.loads(body, object_pairs_hook=_check_unique)
    except _RepeatedName as error:
        name = str(error)
        raise ApiError(400, f"{name}: occurs twice in one object", param=name, code="invalid_json") from error


_STRING = re.compile(rb'"[^"]*+"[ \t\r\n]*+(:?)')
"""A string without escapes; it is a name if a colon follows."""


def _count_names(value: Any) -> int:
    """Count the names in all objects of a document."""
    own = len(value) if isinstance(value, dict) else 0
    return own + sum(map(_count_names, _containers_in(value)))


class _RepeatedName(Exception):
    """A name that an object has twice."""


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _RepeatedName(next(name for name, count in counts.items() if count > 1)[:64])


def _place(error: orjson.JSONDecodeError) -> str:
    return f"line {error.lineno} column {error.colno}"


def check_shape(document: Any, settings: GatewaySettings, what: str = "the body", param: str | None = None) -> None:
    """Refuse too many levels, or too many objects and lists.

    Args:
        document: an object or a list.
        what: subject of the error's message.
    Raises: ApiError.
    """
    level, count = [document], 0
    for _ in range(settings.nesting_max):
        count += len(level)
        if count > settings.containers_max:
            message = f"{what} has more than {settings.containers_max} objects and lists"
            raise ApiError(400, message, param=param, code="invalid_json")
        level = [child for parent in level for child in _containers_in(parent)]
        if not level:
            return
    message = f"{what} is nested deeper than {settings.nesting_max} levels"
    raise ApiError(400, message, param=param, code="invalid_json")


def _containers_in(value: Any) -> list[Any]:
    """Return the objects and lists that an object or a list contains directly."""
    children = value.values() if isinstance(value, dict) else value
    # This skips a million token ids without a step of the interpreter for each.
    if _CONTAINERS.isdisjoint(map(type, children)):
        return []
    return [child for child in children if type(child) in _CONTAINERS]


_CONTAINERS = frozenset((dict, list))


def first_problem(error: ValidationError) -> ApiError:
    """Return the first problem as a sentence that begins with the field, written as in JavaScript."""
    problem = error.errors(include_url=False)[0]
    field = ""
    for part in problem["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return ApiError(400, f"{field}: {_describe(problem)}", param=field, code="invalid_value")


_WORDS = {
    "missing": "is required",
    "literal_error": "must be {expected}, not {given}",
    "list_type": "must be a list, not {given}",
    "dict_type": "must be an object, not {given}",
    "model_type": "must be an object, not {given}",
    "int_type": "must be a whole number, not {given}",
    "float_type": "must be a number, not {given}",
    "bool_type": "must be true or false, not {given}",
    "string_type": "must be text, not {given}",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}, not {given}",
    "greater_than": "must be above {gt}, not {given}",
    "less_than_equal": "must be at most {le}, not {given}",
}
"""Descriptions of pydantic's kinds of problems for people who know JSON and not pydantic."""


def _describe(problem: ErrorDetails) -> str:
    given = problem["input"]
    # orjson turns whole numbers beyond 64 bits into floats.
    if problem["type"] == "int_type" and isinstance(given, float) and abs(given) >= 2**63:
        return "is too large a number"
    bounds = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        for name, bound in problem.get("ctx", {}).items()
    }
    words = _WORDS.get(problem["type"])
    return problem["msg"] if words is None else words.format(**bounds, given=shown(given))
