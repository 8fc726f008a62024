"""Rules about what one accepted call was told: order, wholeness, framing. Pure; each yields what it finds.

A rule reads one thing and is silent about what another rule reports, so that a fault is told once and by its name.
"""

from collections.abc import Callable, Iterator

from checker.history.answers import WHOLE, Call, Choice, Connection, Said
from checker.rules.evidence import Harm, Violation, violation_in

CallRule = Callable[[Call], Iterator[Violation]]

EXCUSED_ERRORS = {"cancel": {"cancelled"}, "deadline": {"deadline_exceeded"}, "poison": {"failed"}}
"""Errors that a call's own intent allows; with any other it counts as lost."""


def ends_once(call: Call) -> Iterator[Violation]:
    """Each choice has one end, told once per connection, and nothing follows it."""
    for choice in call.choices():
        if choice.end is None and not _may_stay_open(call):
            found = f"{len(choice.tokens)} tokens and no end{_why_left(call)}"
            yield violation_in("ends_once", Harm.LOST, call, choice, "one end", found)
        for connection in call.connections.values():
            ends = [said for said in choice.ends if said.event.connection == connection.number]
            told = len(ends) + (choice.number in connection.cursor and connection.cursor[choice.number] is None)
            if ends and told > 1:
                yield violation_in("ends_once", Harm.REPEATED, call, choice, "one end", f"{told} ends", at=ends[-1])
            yield from _behind_end(call, choice, connection)


def _behind_end(call: Call, choice: Choice, connection: Connection) -> Iterator[Violation]:
    is_over = False
    for said in connection.said:
        if said.choice != choice.number:
            continue
        if is_over and said.index is not None:
            expected, found = "nothing behind the end", f"token {said.index}"
            yield violation_in("ends_once", Harm.REPEATED, call, choice, expected, found, at=said)
        is_over = is_over or said.is_end


def index_rises(call: Call) -> Iterator[Violation]:
    """On a connection the indices of a choice begin behind its cursor and rise by one up to the end."""
    totals = {choice.number: max(choice.tokens, default=-1) + 1 for choice in call.choices()}
    for connection in call.connections.values():
        next_index = {number: None if last is None else last + 1 for number, last in connection.cursor.items()}
        for said in connection.said:
            if said.choice is None or (said.index is None and not said.is_end):
                continue
            wanted = next_index.get(said.choice, 0)
            # An end stands where one token more than all of them would.
            index = totals[said.choice] if said.index is None else said.index
            if wanted is not None and index != wanted and (said.error is None or not said.is_end):
                yield _unexpected_index(call, said, wanted=wanted, index=index)
            next_index[said.choice] = index + 1


def _unexpected_index(call: Call, said: Said, *, wanted: int, index: int) -> Violation:
    harm, count = (Harm.SKIPPED, index - wanted) if index > wanted else (Harm.REPEATED, 1)
    expected = f"token {wanted} on connection {said.event.connection}"
    found = f"the end behind {index} tokens" if said.is_end else f"token {index}"
    return violation_in("index_rises", harm, call, Choice(said.choice or 0), expected, found, count=count, at=said)


def union_is_whole(call: Call) -> Iterator[Violation]:
    """Over all connections a choice's tokens are 0 .. n-1: a cursor does not hide what never came."""
    for choice in call.choices():
        missing = [index for index in range(max(choice.tokens, default=-1) + 1) if index not in choice.tokens]
        if missing:
            expected = f"tokens 0 to {max(choice.tokens)}"
            found = f"none at {missing[0]}"
            yield violation_in("union_is_whole", Harm.SKIPPED, call, choice, expected, found, count=len(missing))


def retelling_is_equal(call: Call) -> Iterator[Violation]:
    """An event told twice has equal bytes."""
    first: dict[str, Said] = {}
    for said in call.said:
        if said.event.id is None or said.event.id == WHOLE:
            continue
        known = first.setdefault(said.event.id, said)
        if known.event.data != said.event.data:
            choice = None if said.choice is None else Choice(said.choice)
            yield violation_in(
                "retelling_is_equal", Harm.REVISED, call, choice, known.event.data, said.event.data, at=said
            )


def is_of_own_request(call: Call) -> Iterator[Violation]:
    """Every event names this call's request, and the choice that its id names; every connection the same request."""
    for connection in call.connections.values():
        answered = connection.answered
        if answered and answered.request_id not in (None, call.request_id):
            yield _crossed(call, f"request {call.request_id}", f"an answer to {answered.request_id}", None)
    for said in call.said:
        if said.name is not None and said.name != call.request_id:
            yield _crossed(call, f"an event of {call.request_id}", f"one of {said.name}", said)
        if said.chunk_choice is not None and said.chunk_choice != said.choice and said.choice is not None:
            yield _crossed(call, f"choice {said.choice}", f"choice {said.chunk_choice}", said)


def _crossed(call: Call, expected: str, found: str, said: Said | None) -> Violation:
    choice = None if said is None or said.choice is None else Choice(said.choice)
    return violation_in("is_of_own_request", Harm.CROSSED, call, choice, expected, found, at=said)


def has_no_error(call: Call) -> Iterator[Violation]:
    """An accepted call does not fail, unless it asked for it: its own deadline, its own cancel, poison."""
    for said in call.said:
        if said.error is None or _is_excused(call, said):
            continue
        choice = None if said.choice is None else Choice(said.choice)
        yield violation_in("has_no_error", Harm.LOST, call, choice, "an end of its own", f"error {said.error}", at=said)


def _is_excused(call: Call, said: Said) -> bool:
    """A deadline excuses only from its own moment on."""
    waited_ms = (said.event.at - call.sent[-1].at) * 1e3
    is_early = call.intent == "deadline" and waited_ms < call.body["deadline_ms"]
    return said.error in EXCUSED_ERRORS.get(call.intent, set()) and not is_early


def done_is_last(call: Call) -> Iterator[Violation]:
    """`[DONE]` comes once per connection, behind all ends, never beside an error, and nothing follows it."""
    choices = call.choices()
    is_whole = all(choice.end for choice in choices) and not any(said.error for said in call.said)
    dones = [said for said in call.said if said.is_done]
    if is_whole and not dones and call.left is None:
        yield violation_in("done_is_last", Harm.MISSTATED, call, None, "[DONE] behind the last end", "none")
    for done in dones:
        connection = call.connections[done.event.connection]
        # What this connection told, and what its cursor says was told before.
        place = connection.said.index(done)
        ended = {said.choice for said in connection.said[:place] if said.is_end}
        ended |= {number for number, last in connection.cursor.items() if last is None}
        if missing := {choice.number for choice in choices} - ended:
            found = f"[DONE] before the end of choice {min(missing)}"
            yield violation_in("done_is_last", Harm.MISSTATED, call, None, "all ends first", found, at=done)
        if any(said.error for said in connection.said):
            yield violation_in("done_is_last", Harm.MISSTATED, call, None, "no [DONE] with an error", "[DONE]", at=done)
        if place + 1 < len(connection.said):
            found = f"{len(connection.said) - place - 1} more"
            yield violation_in("done_is_last", Harm.MISSTATED, call, None, "nothing behind [DONE]", found, at=done)


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
    """A client that meant to leave hears no end; a failed call is told by `has_no_error`."""
    is_leaving = call.intent == "cancel" and call.left is not None
    return is_leaving or any(said.error is not None for said in call.said)


def _why_left(call: Call) -> str:
    return f"; the client gave up: {call.left.reason}" if call.left else ""
