"""Histories of calls that went well, however often their connections broke; token 17 is the text `<17>`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checker.history.records import Answered, Claimed, Closed, Event, Expected, Opening, PoolLog, Ran, Record, Sent


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids, one word per token."""
    return "".join(f"<{token}>" for token in ids)


@dataclass(frozen=True, kw_only=True)
class Break:
    """The connection ends behind so many of its events; the client comes back."""

    after: int
    rewind: int = 0  # tokens of each choice that it asks for again


def good_call(
    name: str = "c0",
    *,
    outputs: Sequence[Sequence[int]] = ((11, 12, 13, 14), (21, 22, 23)),
    stop: str | None = None,
    breaks: Sequence[Break] = (),
    has_ids: bool = True,
    has_usage: bool = True,
    is_stream: bool = True,
    started: float = 1.0,
) -> list[Record]:
    """A call of as many choices as outputs; those shorter than the longest ended by the stop string, or by EOS."""
    longest = max(map(len, outputs))
    body: dict[str, Any] = {"prompt": [5, 6], "max_tokens": longest, "n": len(outputs), "stream": is_stream}
    body |= {"return_token_ids": has_ids, "stop": [] if stop is None else [stop]}
    if has_usage and is_stream:
        body["stream_options"] = {"include_usage": True}
    request = f"cmpl-{name}"
    records: list[Record] = [Sent(at=started, call=name, attempt=0, path="/v1/completions", body=body)]
    if is_stream:
        events = _stream(request, outputs, longest, stop, has_ids, has_usage)
        records += _told(name, request, events, breaks, started)
    else:
        records += _whole(name, request, outputs, longest, stop, started)
    for choice, tokens in enumerate(outputs):
        reason = _reason(tokens, longest)
        at, count = started + 50, len(tokens)
        log = PoolLog(
            at=at,
            request=f"{request}.{choice}",
            tokens=tuple(tokens),
            reason=reason,
            count=count,
            claims=(1,) * (count + 1),
        )
        records.append(log)
        records.append(Claimed(at=started, request=f"{request}.{choice}", claim=1, logged=0))
        records.append(Expected(at=0.0, call=name, choice=choice, tokens=tuple(tokens), finish_reason=reason))
    return [*records, Ran(at=started + 60, requests=tuple(f"{request}.{choice}" for choice in range(len(outputs))))]


def good_history(*calls: Sequence[Record]) -> list[Record]:
    """Return the history of a run without violations, with the records of these calls."""
    opening = Opening(at=0.0, seed=7, wall_s=1_000.0)
    return [opening, *(record for call in calls for record in call)]


def _reason(tokens: Sequence[int], longest: int) -> str:
    return "length" if len(tokens) == longest else "stop"


def _text(tokens: Sequence[int], longest: int, stop: str | None) -> str:
    is_stopped = stop is not None and _reason(tokens, longest) == "stop"
    return decode(tokens).partition(stop)[0] if is_stopped and stop else decode(tokens)


def _stream(
    request: str, outputs: Sequence[Sequence[int]], longest: int, stop: str | None, has_ids: bool, has_usage: bool
) -> list[tuple[str | None, str]]:
    """The events of all choices, side by side."""
    events: list[tuple[str | None, str]] = []
    for index in range(longest + 1):
        for choice, tokens in enumerate(outputs):
            if index < len(tokens):
                text = _text(tokens, longest, stop)
                piece = decode(tokens[index : index + 1])
                # The token that completes the stop string has no text.
                shown = piece if len(decode(tokens[: index + 1])) <= len(text) else ""
                part: dict[str, Any] = {"index": choice, "text": shown, "finish_reason": None}
                part |= {"token_ids": [tokens[index]]} if has_ids else {}
                events.append((f"{choice}.{index}", _data(request, part)))
            elif index == len(tokens):
                reason = _reason(tokens, longest)
                part = {"index": choice, "text": "", "finish_reason": reason}
                part |= {"stop_reason": stop if reason == "stop" else None}
                part |= {"token_ids": []} if has_ids else {}
                events.append((f"{choice}.end", _data(request, part)))
    if has_usage:
        events.append((None, json.dumps({"id": request, "choices": [], "usage": _usage(outputs)})))
    return [*events, ("end", "[DONE]")]


def _data(request: str, part: dict[str, Any]) -> str:
    return json.dumps({"id": request, "choices": [part]})


def _usage(outputs: Sequence[Sequence[int]]) -> dict[str, int]:
    count = sum(map(len, outputs))
    return {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": count + 2}


def _whole(
    name: str, request: str, outputs: Sequence[Sequence[int]], longest: int, stop: str | None, started: float
) -> list[Record]:
    choices = [
        {
            "index": choice,
            "text": _text(tokens, longest, stop),
            "finish_reason": _reason(tokens, longest),
            "stop_reason": stop if _reason(tokens, longest) == "stop" else None,
            "token_ids": list(tokens),
        }
        for choice, tokens in enumerate(outputs)
    ]
    data = json.dumps({"id": request, "choices": choices, "usage": _usage(outputs)})
    return [
        Answered(at=started + 1, call=name, connection=0, status=200, request_id=request),
        Event(at=started + 1, call=name, connection=0, id="whole", data=data),
        Closed(at=started + 1, call=name, connection=0),
    ]


def _told(
    name: str, request: str, events: Sequence[tuple[str | None, str]], breaks: Sequence[Break], started: float
) -> list[Record]:
    """The same events over connections that break; each begins where its cursor says."""
    records: list[Record] = []
    received: dict[int, int | None] = {}
    cursor: str | None = None
    at = started
    for number in range(len(breaks) + 1):
        plan = breaks[number] if number < len(breaks) else None
        records.append(Answered(at=at, call=name, connection=number, status=200, request_id=request, cursor=cursor))
        told = [event for event in events if _is_behind(event[0], received)]
        told = told if plan is None else told[: plan.after]
        for event_id, data in told:
            at += 0.01
            records.append(Event(at=at, call=name, connection=number, id=event_id, data=data))
            _note(received, event_id)
        is_over = bool(told) and told[-1][1] == "[DONE]"
        error = None if is_over else "ReadError('broken')"
        records.append(Closed(at=at, call=name, connection=number, error=error))
        if is_over or plan is None:
            break
        received = _rewound(received, plan.rewind)
        cursor = ",".join(f"{choice}.{'end' if last is None else last}" for choice, last in sorted(received.items()))
    return records


def _is_behind(event_id: str | None, received: dict[int, int | None]) -> bool:
    choice, dot, place = (event_id or "").partition(".")
    if not dot or int(choice) not in received:
        return True
    last = received[int(choice)]
    return last is not None and (place == "end" or int(place) > last)


def _note(received: dict[int, int | None], event_id: str | None) -> None:
    choice, dot, place = (event_id or "").partition(".")
    if dot:
        received[int(choice)] = None if place == "end" else int(place)


def _rewound(received: dict[int, int | None], rewind: int) -> dict[int, int | None]:
    if not rewind:
        return received
    back = {choice: last - rewind for choice, last in received.items() if last is not None}
    kept: dict[int, int | None] = {choice: last for choice, last in back.items() if last >= 0}
    return kept | {choice: None for choice, last in received.items() if last is None}
