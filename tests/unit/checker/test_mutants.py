"""The judge judged: histories that went well have no violation, and each way to spoil one is told by its own rule."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checker.history.records import Answered, Claimed, Closed, Event, Expected, Left, PoolLog, Record, Sent
from checker.rules.evidence import Harm
from checker.rules.verdict import judge
from support.checker.history_builders import Break, decode, good_call, good_history

Mutant = Callable[[list[Record]], list[Record]]

BROKEN = (Break(after=4),)


def events(records: list[Record]) -> list[int]:
    return [place for place, record in enumerate(records) if isinstance(record, Event)]


def event_at(records: list[Record], event_id: str) -> int:
    return next(place for place in events(records) if _event(records, place).id == event_id)


def _event(records: list[Record], place: int) -> Event:
    record = records[place]
    assert isinstance(record, Event)
    return record


def without(event_id: str) -> Mutant:
    return lambda records: [r for r in records if not (isinstance(r, Event) and r.id == event_id)]


def twice(event_id: str) -> Mutant:
    def mutate(records: list[Record]) -> list[Record]:
        place = event_at(records, event_id)
        return [*records[: place + 1], *records[place:]]

    return mutate


def swapped(first: str, second: str) -> Mutant:
    def mutate(records: list[Record]) -> list[Record]:
        one, other = event_at(records, first), event_at(records, second)
        mutated = list(records)
        mutated[one], mutated[other] = mutated[other], mutated[one]
        return mutated

    return mutate


def moved_before(event_id: str, other_id: str) -> Mutant:
    def mutate(records: list[Record]) -> list[Record]:
        event = _event(records, event_at(records, event_id))
        rest = [record for record in records if record is not event]
        place = event_at(rest, other_id)
        return [*rest[:place], event, *rest[place:]]

    return mutate


def edited(event_id: str | None, edit: Callable[[dict[str, Any]], object], *, last: bool = False) -> Mutant:
    """Change the data of an event; of the last one with that id where it was told twice."""

    def mutate(records: list[Record]) -> list[Record]:
        places = [place for place in events(records) if _event(records, place).id == event_id]
        event = _event(records, places[-1 if last else 0])
        data = json.loads(event.data)
        edit(data)
        return [replace(event, data=json.dumps(data)) if record is event else record for record in records]

    return mutate


def of_kind(kind: type[Record], **changes: Any) -> Mutant:
    """Change the first record of a kind."""

    def mutate(records: list[Record]) -> list[Record]:
        place = next(place for place, record in enumerate(records) if isinstance(record, kind))
        return [*records[:place], replace(records[place], **changes), *records[place + 1 :]]

    return mutate


def late_append(records: list[Record]) -> list[Record]:
    """The request was claimed again, and after the new owner's first token the old one wrote another."""
    log = next(record for record in records if isinstance(record, PoolLog))
    again = Claimed(at=2.0, request=log.request, claim=3, logged=2)
    return [*of_kind(PoolLog, claims=(1, 1, 3, 1, 3))(records), again]


def failed(event_id: str, code: str) -> Mutant:
    def edit(data: dict[str, Any]) -> None:
        data.clear()
        data["error"] = {"code": code}

    return lambda records: without("end")(edited(event_id, edit)(records))


def cut_behind(event_id: str) -> Mutant:
    """The stream ends there and nobody comes back."""

    def mutate(records: list[Record]) -> list[Record]:
        at = _event(records, event_at(records, event_id)).at
        return [record for record in records if not (isinstance(record, Event) and record.at > at)]

    return mutate


def text_changed(data: dict[str, Any]) -> None:
    data["choices"][0]["text"] = "<99>"


def token_changed(data: dict[str, Any]) -> None:
    data["choices"][0]["token_ids"] = [99]
    data["choices"][0]["text"] = "<99>"


MUTANTS: dict[str, tuple[Mutant, str, Harm]] = {
    "a token dropped": (without("0.2"), "index_rises", Harm.SKIPPED),
    "a token dropped where the connection broke": (without("1.1"), "union_is_whole", Harm.SKIPPED),
    "the last token dropped": (without("1.2"), "equals_log", Harm.SKIPPED),
    "a token told twice": (twice("0.2"), "index_rises", Harm.REPEATED),
    "two tokens swapped": (swapped("0.2", "0.3"), "index_rises", Harm.SKIPPED),
    "a token revised": (edited("0.2", token_changed), "equals_log", Harm.REVISED),
    "a token not the oracle's": (of_kind(Expected, tokens=(11, 12, 13, 99)), "equals_oracle", Harm.WRONG),
    "an event of another request": (
        edited("0.2", lambda data: data.update(id="cmpl-c1")),
        "is_of_own_request",
        Harm.CROSSED,
    ),
    "an event of another choice": (
        edited("0.2", lambda data: data["choices"][0].update(index=1)),
        "is_of_own_request",
        Harm.CROSSED,
    ),
    "[DONE] before an end": (moved_before("end", "0.end"), "done_is_last", Harm.MISSTATED),
    "no [DONE]": (without("end"), "done_is_last", Harm.MISSTATED),
    "[DONE] twice": (twice("end"), "done_is_last", Harm.MISSTATED),
    "no end": (without("0.end"), "ends_once", Harm.LOST),
    "an end twice": (twice("1.end"), "ends_once", Harm.REPEATED),
    "a token behind the end": (moved_before("1.end", "1.2"), "ends_once", Harm.REPEATED),
    "a stream that stops": (cut_behind("0.2"), "ends_once", Harm.LOST),
    "an end with an error": (failed("1.end", "failed"), "has_no_error", Harm.LOST),
    "usage of one token more": (
        edited(None, lambda data: data["usage"].update(completion_tokens=8, total_tokens=10)),
        "usage_fits",
        Harm.MISSTATED,
    ),
    "usage whose sum is wrong": (
        edited(None, lambda data: data["usage"].update(total_tokens=8)),
        "usage_fits",
        Harm.MISSTATED,
    ),
    "usage twice": (lambda rs: _twice_usage(rs), "usage_fits", Harm.MISSTATED),
    "usage that nobody asked for": (
        lambda rs: of_kind(Sent, body=_sent_body(rs) | {"stream_options": {}})(rs),
        "usage_fits",
        Harm.MISSTATED,
    ),
    "a text that is not its token's": (edited("0.2", text_changed), "text_is_join", Harm.MISSTATED),
    "length before max_tokens": (
        edited("1.end", lambda data: data["choices"][0].update(finish_reason="length")),
        "reason_fits",
        Harm.SKIPPED,
    ),
    "a finish reason that there is not": (
        edited("1.end", lambda data: data["choices"][0].update(finish_reason="cancelled")),
        "reason_fits",
        Harm.MISSTATED,
    ),
    "a stop that nobody asked for": (
        edited("1.end", lambda data: data["choices"][0].update(stop_reason="<23>")),
        "reason_fits",
        Harm.MISSTATED,
    ),
    "a log without an end": (of_kind(PoolLog, reason=None, count=None), "equals_log", Harm.LOST),
    "a log with a gap": (of_kind(PoolLog, is_dense=False), "equals_log", Harm.LOST),
    "a late append by an old claim": (late_append, "appends_in_order", Harm.REVISED),
    "an append by a claim that nobody had": (
        of_kind(PoolLog, claims=(1, 1, 2, 2, 2)),
        "appends_in_order",
        Harm.REVISED,
    ),
    "a log that is gone": (lambda rs: [r for r in rs if r != _first_log(rs)], "equals_log", Harm.LOST),
}


def _twice_usage(records: list[Record]) -> list[Record]:
    place = next(place for place in events(records) if _event(records, place).id is None)
    return [*records[: place + 1], *records[place:]]


def _sent_body(records: list[Record]) -> dict[str, Any]:
    return next(record.body for record in records if isinstance(record, Sent))


def _first_log(records: list[Record]) -> Record:
    return next(record for record in records if isinstance(record, PoolLog))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_corrupted_history_violates_the_right_rule(name: str) -> None:
    mutate, rule, harm = MUTANTS[name]
    verdict = judge(mutate(good_history(good_call(breaks=BROKEN))), decode)
    assert (rule, harm) in {(found.rule, found.harm) for found in verdict.violations}
    assert verdict.harms[harm] >= 1


@pytest.mark.parametrize("mutant", [lambda data: text_changed(data), lambda data: token_changed(data)])
def test_a_different_token_on_a_later_connection_is_a_revision(mutant: Callable[[dict[str, Any]], object]) -> None:
    history = good_history(good_call(breaks=(Break(after=6, rewind=2),)))
    verdict = judge(edited("0.2", mutant, last=True)(history), decode)
    assert [found.harm for found in verdict.violations if found.rule == "retelling_is_equal"] == [Harm.REVISED]


def test_a_resumed_stream_that_begins_before_its_cursor_repeats() -> None:
    history = good_history(good_call(breaks=(Break(after=6, rewind=2),)))
    resumed = [record for record in history if isinstance(record, Answered)][1]
    told_more = [replace(r, cursor="0.2,1.1") if r is resumed else r for r in history]
    rules = {(found.rule, found.harm) for found in judge(told_more, decode).violations}
    assert rules == {("index_rises", Harm.REPEATED)}


@pytest.mark.parametrize(
    "call",
    [
        good_call(),
        good_call(breaks=BROKEN),
        good_call(breaks=(Break(after=0), Break(after=3), Break(after=8, rewind=1))),
        good_call(breaks=(Break(after=9),)),
        good_call(has_ids=False),
        good_call(has_usage=False, outputs=((1,),)),
        good_call(is_stream=False),
        good_call(outputs=((1, 2, 3, 4), (7, 8, 9)), stop="<9>"),
        good_call(outputs=((1, 2, 3, 4), (7, 8, 9)), stop="<9>", is_stream=False),
    ],
    ids=["plain", "broken", "often", "before [DONE]", "no ids", "no usage", "whole", "stop string", "whole, stopped"],
)
def test_a_good_history_has_no_violation(call: list[Record]) -> None:
    verdict = judge(good_history(call), decode)
    assert verdict.violations == ()
    assert verdict.requests >= 1


@pytest.mark.parametrize(
    ("prompt", "prefix", "is_right"), [([5], [6], True), ([5, 6], [7], False), ([5, 6], [], True), ([5], "<6>", True)]
)
def test_the_prefix_of_a_target_counts_as_prompt(prompt: list[int], prefix: Any, is_right: bool) -> None:
    """The answer says two tokens of prompt. Those of a text are not counted here."""
    sent, *rest = good_call()
    assert isinstance(sent, Sent)
    sent = replace(sent, body=sent.body | {"prompt": prompt, "decoder_prefix": prefix})
    rules = {found.rule for found in judge(good_history([sent, *rest]), decode).violations}
    assert rules == (set() if is_right else {"usage_fits"})


@pytest.mark.parametrize(("intent", "code"), [("deadline", "deadline_exceeded"), ("poison", "failed")])
def test_an_end_with_an_expected_error_is_no_loss(intent: str, code: str) -> None:
    history = failed("1.end", code)(good_history(good_call(outputs=((1, 2), (3,)), has_usage=False)))
    sent = next(record for record in history if isinstance(record, Sent))
    body = sent.body | {"deadline_ms": 10}
    asked = [replace(r, intent=intent, body=body) if r is sent else r for r in history]
    assert judge([r for r in asked if not isinstance(r, Expected)], decode).violations == ()
    assert judge(history, decode).harms["lost"] == 1


def test_a_deadline_that_strikes_early_is_a_lost_request() -> None:
    history = failed("1.end", "deadline_exceeded")(good_history(good_call(outputs=((1, 2), (3,)), has_usage=False)))
    sent = next(record for record in history if isinstance(record, Sent))
    asked = [
        replace(r, intent="deadline", body=sent.body | {"deadline_ms": 9_000}) if r is sent else r for r in history
    ]
    assert judge(asked, decode).error_ends == 1


def test_a_client_that_left_on_purpose_lost_nothing_but_one_that_gave_up_did() -> None:
    history = cut_behind("0.2")(good_history(good_call(has_usage=False)))
    left = [*history, Left(at=9.0, call="c0", reason="cancel")]
    assert judge(left, decode).harms["lost"] == 2
    sent = next(record for record in history if isinstance(record, Sent))
    meant = [replace(r, intent="cancel") if r is sent else r for r in left]
    assert judge(meant, decode).violations == ()


def test_a_failed_answer_that_is_no_refusal_is_a_lost_request() -> None:
    sent = good_call(is_stream=False)[0]
    error = json.dumps({"error": {"code": "failed", "type": "server_error"}})
    answered = Answered(at=2.0, call="c0", connection=0, status=500, request_id=None)
    history = [sent, answered, Event(at=2.0, call="c0", connection=0, id="whole", data=error)]
    verdict = judge(good_history([*history, Closed(at=2.0, call="c0", connection=0)]), decode)
    assert (verdict.error_ends, verdict.harms["lost"]) == (1, 1)


def test_a_violation_shows_the_records_around_it() -> None:
    history = good_history(without("0.2")(good_call()), good_call("c1"))
    [found] = [found for found in judge(history, decode).violations if found.rule == "index_rises"]
    assert any('"id":"0.3"' in line for line in found.story)
    assert not any('"call":"c1"' in line for line in found.story)


SCHEMA = {"json_schema": {"name": "n", "schema": {"type": "integer"}}, "type": "json_schema"}


@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        ({"structured_outputs": {"regex": "(<2[0-9]>)+"}}, True),
        ({"structured_outputs": {"regex": "<21>"}}, False),
        ({"structured_outputs": {"choice": ["a", "<21><22><23>"]}}, True),
        ({"structured_outputs": {"choice": ["<21>"]}}, False),
        ({"response_format": SCHEMA}, False),
        ({}, True),
    ],
)
def test_a_whole_answer_outside_its_grammar_is_misstated(constraint: dict[str, Any], is_right: bool) -> None:
    """The second choice ended by EOS. The first one was cut by its length, which is no violation."""
    sent, *rest = good_call()
    assert isinstance(sent, Sent)
    sent = replace(sent, body=sent.body | constraint)
    found = [(each.rule, each.choice) for each in judge(good_history([sent, *rest]), decode).violations]
    assert found == ([] if is_right else [("matches_grammar", 1)])
