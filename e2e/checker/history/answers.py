"""The server's events as data, and everything that one call received, by choice. It judges nothing."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from checker.history.records import Answered, Closed, Event, Left, Record, Refused, Sent

DONE = "[DONE]"
WHOLE = "whole"
"""Event id of an answer that is not a stream, in the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedEvent:
    """The content of one event; fields without a value are None."""

    record: Event
    name: str | None = None  # the id in the data
    choice: int | None = None  # from its event id
    index: int | None = None  # from its event id; None except for tokens
    is_end: bool = False  # the end of a choice
    is_done: bool = False
    chunk_choice: int | None = None  # the choice in the data
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: dict[str, int] | None = None
    error: str | None = None  # code of an error, or its type


@dataclass(slots=True)
class Connection:
    """The answer to one HTTP call."""

    number: int
    answered: Answered | None = None
    events: list[ParsedEvent] = field(default_factory=list)
    closed: Closed | None = None

    @property
    def cursor(self) -> dict[int, int | None]:
        """Last index of each choice when the client opened this connection; None after the end of the choice."""
        return parse_cursor(self.answered.cursor or "") if self.answered else {}


@dataclass(slots=True)
class Choice:
    """One choice as a call received it, over all its connections."""

    number: int
    tokens: dict[int, ParsedEvent] = field(default_factory=dict)  # first event of each index
    ends: list[ParsedEvent] = field(default_factory=list)

    @property
    def end(self) -> ParsedEvent | None:
        return self.ends[0] if self.ends else None

    @property
    def ordered(self) -> list[ParsedEvent]:
        return [self.tokens[index] for index in sorted(self.tokens)]

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Ids of all tokens; None if the call did not request them."""
        parts = [event.token_ids for event in self.ordered]
        if any(part is None for part in parts):
            return None
        return tuple(token for part in parts if part for token in part)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.ordered) + (self.end.text if self.end else "")


@dataclass(slots=True)
class Call:
    """A call with all its records."""

    name: str
    sent: list[Sent] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    connections: dict[int, Connection] = field(default_factory=dict)
    left: Left | None = None

    @property
    def body(self) -> dict[str, Any]:
        return self.sent[0].body

    @property
    def intent(self) -> str:
        return self.sent[0].intent

    @property
    def is_accepted(self) -> bool:
        return self.request_id is not None

    @property
    def is_abandoned(self) -> bool:
        """Was the last attempt neither accepted nor refused when the client gave up? It counts as lost."""
        return self.left is not None and self.intent != "cancel" and len(self.refused) < len(self.sent)

    @property
    def request_id(self) -> str | None:
        """The server's id of the call, from its first good answer."""
        for connection in self.connections.values():
            if connection.answered is not None and connection.answered.request_id is not None:
                return connection.answered.request_id
        return None

    @property
    def events(self) -> list[ParsedEvent]:
        return [event for connection in self.connections.values() for event in connection.events]

    def choices(self) -> list[Choice]:
        """Return all requested choices, including those without any event."""
        found = {number: Choice(number) for number in range(requested_choices(self.body))}
        for event in self.events:
            if event.choice is None:
                continue
            choice = found.setdefault(event.choice, Choice(event.choice))
            if event.is_end:
                choice.ends.append(event)
            elif event.index is not None:
                choice.tokens.setdefault(event.index, event)
        return [found[number] for number in sorted(found)]


def gather_calls(records: Iterable[Record]) -> list[Call]:
    """Return the calls of a history in the order of sending, with their connections and events."""
    calls: dict[str, Call] = {}
    for record in records:
        match record:
            case Sent():
                calls.setdefault(record.call, Call(record.call)).sent.append(record)
            case Refused():
                calls[record.call].refused.append(record)
            case Left():
                calls[record.call].left = record
            case Answered() | Event() | Closed():
                _note(calls[record.call], record)
    return list(calls.values())


def _note(call: Call, record: Answered | Event | Closed) -> None:
    connection = call.connections.setdefault(record.connection, Connection(record.connection))
    match record:
        case Answered():
            connection.answered = record
        case Closed():
            connection.closed = record
        case Event(id=str(name)) if name == WHOLE:
            connection.events.extend(read_whole(record))
        case Event():
            connection.events.append(read_event(record))


def read_event(event: Event) -> ParsedEvent:
    """Parse one event of a stream."""
    choice, index, is_end = _parse_id(event.id)
    if event.data == DONE:
        return ParsedEvent(record=event, is_done=True)
    try:
        data = json.loads(event.data)
    except ValueError:
        return ParsedEvent(record=event, choice=choice, index=index, is_end=is_end, error="no JSON")
    if "error" in data:
        return ParsedEvent(record=event, choice=choice, is_end=is_end, error=_error_of(data))
    parts = data.get("choices") or []
    part = parts[0] if parts else {}
    tokens = part.get("token_ids")
    return ParsedEvent(
        record=event,
        name=data.get("id"),
        choice=choice,
        index=index,
        is_end=is_end,
        chunk_choice=part.get("index"),
        text=part.get("text") or (part.get("delta") or {}).get("content") or "",
        token_ids=None if tokens is None else tuple(tokens),
        finish_reason=part.get("finish_reason"),
        stop_reason=part.get("stop_reason"),
        usage=data.get("usage"),
    )


def read_whole(event: Event) -> list[ParsedEvent]:
    """Parse an answer that is not a stream into the events that a stream would have had."""
    try:
        data = json.loads(event.data)
    except ValueError:
        return [ParsedEvent(record=event, error="no JSON")]
    if "error" in data:
        return [ParsedEvent(record=event, error=_error_of(data))]
    parsed = []
    for part in data["choices"]:
        text = part["text"] if "text" in part else part["message"]["content"]
        tokens = tuple(part.get("token_ids") or ())
        choice, name = part["index"], data["id"]
        for index, token in enumerate(tokens):
            parsed.append(ParsedEvent(record=event, name=name, choice=choice, index=index, token_ids=(token,)))
        # A whole answer has one text. The end gets it, so that tokens and end still join to the whole text.
        parsed.append(
            ParsedEvent(
                record=event,
                name=name,
                choice=choice,
                is_end=True,
                text=text,
                finish_reason=part["finish_reason"],
                stop_reason=part.get("stop_reason"),
            )
        )
    usage = ParsedEvent(record=event, name=data["id"], usage=data["usage"])
    return [*parsed, usage, ParsedEvent(record=event, is_done=True)]


def requested_choices(body: dict[str, Any]) -> int:
    prompt = body.get("prompt", "")
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (body.get("n") or 1) * (len(prompt) if is_list else 1)


def max_tokens_of(body: dict[str, Any]) -> int | None:
    asked: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
    return asked


def has_grammar(body: dict[str, Any]) -> bool:
    """Must the answers of a call match a grammar?"""
    return "structured_outputs" in body or "response_format" in body


def parse_cursor(cursor: str) -> dict[int, int | None]:
    """Parse a cursor: `0.12,1.end,2.start` -> {0: 12, 1: None}."""
    found: dict[int, int | None] = {}
    for word in cursor.split(",") if cursor else []:
        if word.endswith(".start"):
            continue
        choice, index, is_end = _parse_id(word)
        assert choice is not None, cursor
        found[choice] = None if is_end else index
    return found


def _parse_id(name: str | None) -> tuple[int | None, int | None, bool]:
    """Parse an event id: `2.17` -> (2, 17, False), `2.end` -> (2, None, True), others -> (None, None, False)."""
    choice, dot, rest = (name or "").partition(".")
    if not dot or not choice.isdigit() or not (rest.isdigit() or rest == "end"):
        return None, None, False
    return int(choice), int(rest) if rest.isdigit() else None, rest == "end"


def _error_of(data: dict[str, Any]) -> str:
    error = data["error"] if isinstance(data["error"], dict) else {}
    return error.get("code") or error.get("type") or "error"
