"""Rules about the events of one accepted call: order, completeness, framing. Pure; each yields its violations.

A rule checks one property and ignores what another rule reports, so that each fault is reported once, by its own name.
"""

from collections.abc import Callable, Iterator

from checker.history.answers import WHOLE, Call, Choice, Connection, ParsedEvent
from checker.rules.evidence import Harm, Violation, violation_in

CallRule = Callable[[Call], Iterator[Violation]]

EXCUSED_ERRORS = {"cancel": {"cancelled"}, "deadline": {"deadline_exceeded"}, "poison": {"failed"}}
"""Errors that a call's own intent allows; with any other error it counts as lost."""


def ends_once(call: Call) -> Iterator[Violation]:
    """Check that each choice has one end, sent once per connection, and that nothing follows it."""
    for choice in call.choices():
        if choice.end is None and not _may_stay_open(call):
            found = f"{len(choice.tokens)} tokens and no end{_leave_reason(call)}"
            yield violation_in("ends_once", Harm.LOST, call, choice, "one end", found)
        for connection in call.connections.values():
            ends = [event for event in choice.ends if event.record.connection == connection.number]
            count = len(ends) + (choice.number in connection.cursor and connection.cursor[choice.number] is None)
            if ends and count > 1:
                yield violation_in("ends_once", Harm.REPEATED, call, choice, "one end", f"{count} ends", at=ends[-1])
            yield from _events_after_end(call, choice, connection)


def _events_after_end(call: Call, choice: Choice, connection: Connection) -> Iterator[Violation]:
    is_over = False
    for event in connection.events:
        if event.choice != choice.number:
            continue
        if is_over and event.index is not None:
            expected, found = "nothing after the end", f"token {event.index}"
            yield violation_in("ends_once", Harm.REPEATED, call, choice, expected, found, at=event)
        is_over = is_over or event.is_end


def index_rises(call: Call) -> Iterator[Violation]:
    """Check that on each connection the indices of a choice start after its cursor and rise by one up to the end."""
    totals = {choice.number: max(choice.tokens, default=-1) + 1 for choice in call.choices()}
    for connection in call.connections.values():
        next_index = {number: None if last is None else last + 1 for number, last in connection.cursor.items()}
        for event in connection.events:
            if event.choice is None or (event.index is None and not event.is_end):
                continue
            wanted = next_index.get(event.choice, 0)
            # An end has the index after that of the last token.
            index = totals[event.choice] if event.index is None else event.index
            if wanted is not None and index != wanted and (event.error is None or not event.is_end):
                yield _unexpected_index(call, event, wanted=wanted, index=index)
            next_index[event.choice] = index + 1


def _unexpected_index(call: Call, event: ParsedEvent, *, wanted: int, index: int) -> Violation:
    harm, count = (Harm.SKIPPED, index - wanted) if index > wanted else (Harm.REPEATED, 1)
    expected = f"token {wanted} on connection {event.record.connection}"
    found = f"the end after {index} tokens" if event.is_end else f"token {index}"
    return violation_in("index_rises", harm, call, Choice(event.choice or 0), expected, found, count=count, at=event)


def union_is_whole(call: Call) -> Iterator[Violation]:
    """Check that over all connections a choice's tokens are 0 .. n-1: a cursor must not hide a missing token."""
    for choice in call.choices():
        missing = [index for index in range(max(choice.tokens, default=-1) + 1) if index not in choice.tokens]
        if missing:
            expected = f"tokens 0 to {max(choice.tokens)}"
            found = f"none at {missing[0]}"
            yield violation_in("union_is_whole", Harm.SKIPPED, call, choice, expected, found, count=len(missing))


def retelling_is_equal(call: Call) -> Iterator[Violation]:
    """Check that an event that is sent twice has equal bytes."""
    first: dict[str, ParsedEvent] = {}
    for event in call.events:
        if event.record.id is None or event.record.id == WHOLE:
            continue
        known = first.setdefault(event.record.id, event)
        if known.record.data != event.record.data:
            choice = None if event.choice is None else Choice(event.choice)
            yield violation_in(
                "retelling_is_equal", Harm.REVISED, call, choice, known.record.data, event.record.data, at=event
            )


def is_of_own_request(call: Call) -> Iterator[Violation]:
    """Check that all events and connections name this call's request, and each event the choice of its event id."""
    for connection in call.connections.values():
        answered = connection.answered
        if answered and answered.request_id not in (None, call.request_id):
            yield _crossed(call, f"request {call.request_id}", f"an answer to {answered.request_id}", None)
    for event in call.events:
        if event.name is not None and event.name != call.request_id:
            yield _crossed(call, f"an event of {call.request_id}", f"one of {event.name}", event)
        if event.chunk_choice is not None and event.chunk_choice != event.choice and event.choice is not None:
            yield _crossed(call, f"choice {event.choice}", f"choice {event.chunk_choice}", event)


def _crossed(call: Call, expected: str, found: str, event: ParsedEvent | None) -> Violation:
    choice = None if event is None or event.choice is None else Choice(event.choice)
    return violation_in("is_of_own_request", Harm.CROSSED, call, choice, expected, found, at=event)


def has_no_error(call: Call) -> Iterator[Violation]:
    """Check that no accepted call fails, except by its own intent: its deadline, its cancel, or poison."""
    for event in call.events:
        if event.error is None or _is_excused(call, event):
            continue
        choice = None if event.choice is None else Choice(event.choice)
        yield violation_in(
            "has_no_error", Harm.LOST, call, choice, "an end of its own", f"error {event.error}", at=event
        )


def _is_excused(call: Call, event: ParsedEvent) -> bool:
    """Does the call's intent allow this error? A deadline allows it only after its own time."""
    waited_ms = (event.record.at - call.sent[-1].at) * 1e3
    is_early = call.intent == "deadline" and waited_ms < call.body["deadline_ms"]
    return event.error in EXCUSED_ERRORS.get(call.intent, set()) and not is_early


def done_is_last(call: Call) -> Iterator[Violation]:
    """Check that `[DONE]` comes once per connection, after all ends and without an error, and that nothing follows."""
    choices = call.choices()
    is_whole = all(choice.end for choice in choices) and not any(event.error for event in call.events)
    dones = [event for event in call.events if event.is_done]
    if is_whole and not dones and call.left is None:
        yield violation_in("done_is_last", Harm.MISSTATED, call, None, "[DONE] after the last end", "none")
    for done in dones:
        connection = call.connections[done.record.connection]
        # Ends on this connection, and earlier ends according to its cursor.
        place = connection.events.index(done)
        ended = {event.choice for event in connection.events[:place] if event.is_end}
        ended |= {number for number, last in connection.cursor.items() if last is None}
        if missing := {choice.number for choice in choices} - ended:
            found = f"[DONE] before the end of choice {min(missing)}"
            yield violation_in("done_is_last", Harm.MISSTATED, call, None, "all ends first", found, at=done)
        if any(event.error for event in connection.events):
            yield violation_in("done_is_last", Harm.MISSTATED, call, None, "no [DONE] with an error", "[DONE]", at=done)
        if place + 1 < len(connection.events):
            found = f"{len(connection.events) - place - 1} more"
            yield violation_in("done_is_last", Harm.MISSTATED, call, None, "nothing after [DONE]", found, at=done)


STREAM_RULES: tuple[CallRule, ...] = (
    ends_once,
    index_rises,
    union_is_whole,
    retelling_is_equal,
    is_of_own_request,
    has_no_error,
    done_is_last,
)


def _may_stay_open(call: Call) -> bool:
    """Is it right that this call has no end? A client that left gets none; `has_no_error` reports a failed call."""
    is_leaving = call.intent == "cancel" and call.left is not None
    return is_leaving or any(event.error is not None for event in call.events)


def _leave_reason(call: Call) -> str:
    return f"; the client gave up: {call.left.reason}" if call.left else ""
