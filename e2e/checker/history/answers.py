"""The server's events as data, and all that one call was told, put together choice by choice. Judges nothing."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from checker.history.records import Answered, Closed, Event, Left, Record, Refused, Sent

DONE = "[DONE]"
WHOLE = "whole"
"""Event id under which the recorder keeps an answer that is not a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One event, read. What it does not say is None."""

    event: Event
    name: str | None = None  # the id inside the data
    choice: int | None = None  # by its event id
    index: int | None = None  # by its event id; None for all but tokens
    is_end: bool = False  # of a choice
    is_done: bool = False
    chunk_choice: int | None = None  # the choice inside the data
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: dict[str, int] | None = None
    error: str | None = None  # code, or type, of an error


@dataclass(slots=True)
class Connection:
    """One answer to one HTTP call."""

    number: int
    answered: Answered | None = None
    said: list[Said] = field(default_factory=list)
    closed: Closed | None = None

    @property
    def cursor(self) -> dict[int, int | None]:
        """Last index per choice that the client had when it opened this connection; None: it had the end."""
        return parse_cursor(self.answered.cursor or "") if self.answered else {}


@dataclass(slots=True)
class Choice:
    """What a call was told of one choice, over all its connections."""

    number: int
    tokens: dict[int, Said] = field(default_factory=dict)  # first telling of each index
    ends: list[Said] = field(default_factory=list)

    @property
    def end(self) -> Said | None:
        return self.ends[0] if self.ends else None

    @property
    def ordered(self) -> list[Said]:
        return [self.tokens[index] for index in sorted(self.tokens)]

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """None where the call did not ask for ids."""
        parts = [said.token_ids for said in self.ordered]
        if any(part is None for part in parts):
            return None
        return tuple(token for part in parts if part for token in part)

    @property
    def text(self) -> str:
        return "".join(said.text for said in self.ordered) + (self.end.text if self.end else "")


@dataclass(slots=True)
class Call:
    """A call with everything that happened to it."""

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
    def is_let_down(self) -> bool:
        """Its last attempt was neither accepted nor refused when the client gave up: for all it knows, it is lost."""
        return self.left is not None and self.intent != "cancel" and len(self.refused) < len(self.sent)

    @property
    def request_id(self) -> str | None:
        """The server's name of the call: that of its first good answer."""
        for connection in self.connections.values():
            if connection.answered is not None and connection.answered.request_id is not None:
                return connection.answered.request_id
        return None

    @property
    def said(self) -> list[Said]:
        return [said for connection in self.connections.values() for said in connection.said]

    def choices(self) -> list[Choice]:
        """All choices that the body asked for, also those of which nothing was heard."""
        found = {number: Choice(number) for number in range(choices_asked(self.body))}
        for said in self.said:
            if said.choice is None:
                continue
            choice = found.setdefault(said.choice, Choice(said.choice))
            if said.is_end:
                choice.ends.append(said)
            elif said.index is not None:
                choice.tokens.setdefault(said.index, said)
        return [found[number] for number in sorted(found)]


def gather_calls(records: Iterable[Record]) -> list[Call]:
    """The calls of a history in order of sending, with their connections and events."""
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
            connection.said.extend(read_whole(record))
        case Event():
            connection.said.append(read_event(record))


def read_event(event: Event) -> Said:
    """One event of a stream."""
    choice, index, is_end = _parse_id(event.id)
    if event.data == DONE:
        return Said(event=event, is_done=True)
    try:
        data = json.loads(event.data)
    except ValueError:
        return Said(event=event, choice=choice, index=index, is_end=is_end, error="no JSON")
    if "error" in data:
        return Said(event=event, choice=choice, is_end=is_end, error=_error_of(data))
    parts = data.get("choices") or []
    part = parts[0] if parts else {}
    tokens = part.get("token_ids")
    return Said(
        event=event,
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


def read_whole(event: Event) -> list[Said]:
    """An answer that is not a stream, as the events that a stream of it would have had."""
    try:
        data = json.loads(event.data)
    except ValueError:
        return [Said(event=event, error="no JSON")]
    if "error" in data:
        return [Said(event=event, error=_error_of(data))]
    heard = []
    for part in data["choices"]:
        text = part["text"] if "text" in part else part["message"]["content"]
        tokens = tuple(part.get("token_ids") or ())
        choice, name = part["index"], data["id"]
        for index, token in enumerate(tokens):
            heard.append(Said(event=event, name=name, choice=choice, index=index, token_ids=(token,)))
        # A whole answer has one text; it stands at the end, so that tokens and end still join to it.
        heard.append(
            Said(
                event=event,
                name=name,
                choice=choice,
                is_end=True,
                text=text,
                finish_reason=part["finish_reason"],
                stop_reason=part.get("stop_reason"),
            )
        )
    return [*heard, Said(event=event, name=data["id"], usage=data["usage"]), Said(event=event, is_done=True)]


def choices_asked(body: dict[str, Any]) -> int:
    prompt = body.get("prompt", "")
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (body.get("n") or 1) * (len(prompt) if is_list else 1)


def max_tokens_of(body: dict[str, Any]) -> int | None:
    asked: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
    return asked


def parse_cursor(cursor: str) -> dict[int, int | None]:
    """`0.12,1.end,2.start` -> {0: 12, 1: None}."""
    found: dict[int, int | None] = {}
    for word in cursor.split(",") if cursor else []:
        if word.endswith(".start"):
            continue
        choice, index, is_end = _parse_id(word)
        assert choice is not None, cursor
        found[choice] = None if is_end else index
    return found


def _parse_id(name: str | None) -> tuple[int | None, int | None, bool]:
    """`2.17` -> (2, 17, False), `2.end` -> (2, None, True), all else -> (None, None, False)."""
    choice, dot, rest = (name or "").partition(".")
    if not dot or not choice.isdigit() or not (rest.isdigit() or rest == "end"):
        return None, None, False
    return int(choice), int(rest) if rest.isdigit() else None, rest == "end"


def _error_of(data: dict[str, Any]) -> str:
    error = data["error"] if isinstance(data["error"], dict) else {}
    return error.get("code") or error.get("type") or "error"
