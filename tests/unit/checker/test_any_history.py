"""Drawn histories: whatever connections broke, a good one passes; whatever single thing is spoilt, it is caught."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from checker.history.answers import DONE
from checker.history.records import Event, Record
from checker.rules.verdict import judge
from support.checker.history_builders import Break, decode, good_call, good_history
from support.effort import tries

# Different tokens, so that two events never have equal data by chance.
OUTPUTS = st.lists(st.integers(100, 999), min_size=2, max_size=24, unique=True).flatmap(
    lambda ids: st.integers(1, 3).map(lambda choices: [ids[choice::choices] for choice in range(choices)])
)
BREAKS = st.lists(st.builds(Break, after=st.integers(0, 12), rewind=st.integers(0, 3)), max_size=4)


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    calls = [
        good_call(
            name,
            outputs=[output for output in draw(OUTPUTS) if output] or [[7]],
            breaks=draw(BREAKS),
            has_usage=draw(st.booleans()),
            has_ids=draw(st.booleans()),
        )
        for name in ("c0", "c1")
    ]
    return good_history(*calls)


def spoil(draw: st.DrawFn, history: list[Record]) -> list[Record]:
    """One event dropped, told twice, moved, made another call's, or changed in one place."""
    places = [place for place, record in enumerate(history) if isinstance(record, Event)]
    place = draw(st.sampled_from(places))
    event = history[place]
    assert isinstance(event, Event)
    how = draw(st.sampled_from(["drop", "repeat", "swap", "cross", "change"]))
    if how == "drop" and _is_told_once(history, event):
        return history[:place] + history[place + 1 :]
    if how == "repeat":
        return history[: place + 1] + history[place:]
    if how == "swap" and (other := _next_of_choice(history, place)) is not None:
        swapped = list(history)
        swapped[place], swapped[other] = swapped[other], swapped[place]
        return swapped
    if how == "cross" and event.data != DONE:
        data = json.loads(event.data) | {"id": "cmpl-other"}
        return _with(history, place, replace(event, data=json.dumps(data)))
    return _with(history, place, replace(event, data=_changed(event)))


def _is_told_once(history: list[Record], event: Event) -> bool:
    """Return whether an event was sent once. A repeated one may be missing once: the client may not have read it."""
    return sum(isinstance(r, Event) and (r.call, r.data) == (event.call, event.data) for r in history) == 1


def _next_of_choice(history: list[Record], place: int) -> int | None:
    event = history[place]
    assert isinstance(event, Event)
    choice = (event.id or "").partition(".")[0]
    for other in range(place + 1, len(history)):
        record = history[other]
        if not isinstance(record, Event) or record.call != event.call or record.connection != event.connection:
            return None
        if (record.id or "").partition(".")[0] == choice:
            return other
    return None


def _with(history: list[Record], place: int, record: Record) -> list[Record]:
    return [*history[:place], record, *history[place + 1 :]]


def _changed(event: Event) -> str:
    if event.data == DONE:
        return json.dumps({"error": {"code": "failed"}})
    data: dict[str, Any] = json.loads(event.data)
    if not data["choices"]:
        data["usage"]["completion_tokens"] += 1
        return json.dumps(data)
    part = data["choices"][0]
    if part["finish_reason"] is not None:
        part["finish_reason"] = "length" if part["finish_reason"] == "stop" else "stop"
    elif "token_ids" in part:
        part["token_ids"][0] += 1000
    else:
        part["text"] = "<1>"
    return json.dumps(data)


@settings(max_examples=tries(60))
@given(history=histories())
def test_a_good_history_with_any_interruptions_has_no_violation(history: list[Record]) -> None:
    verdict = judge(history, decode)
    assert verdict.violations == ()


@settings(max_examples=tries(200))
@given(data=st.data())
def test_any_single_corruption_is_detected(data: st.DataObject) -> None:
    history = data.draw(histories())
    spoilt = data.draw(st.composite(spoil)(history))
    assert not judge(spoilt, decode).is_clean
