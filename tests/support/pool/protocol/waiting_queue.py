"""Guarantees about whom a claim serves, in the model's simulations: by the queue as it was before the claim.

They follow from the records alone, not from the index of the pool: a dead request is never claimed, nobody is overtaken
who may not be, and nobody starves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orca.core.domain.request import FinishReason, Request, slots_needed
from orca.pool.memory.state import RequestRecord
from orca.pool.order.order_class import DeadlineKind, class_of, length_class, lower_bound
from orca.pool.order.order_rules import LATE, ClaimOrder, Drop, Order
from orca.pool.records import Caller, ClaimAnswer, OwnershipState
from support.pool.protocol.stages import Violation

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation


@dataclass(frozen=True)
class ClaimBounds:
    """The most that a claim may take."""

    most: int
    free_slots: int
    total_slots: int
    block_tokens: int

    def slots(self, request: Request) -> int:
        return slots_needed(request.max_total_tokens, self.block_tokens)


@dataclass(frozen=True)
class Waiting:
    """A request that waits before a claim."""

    request: Request
    record: RequestRecord  # as it is now
    deadline: int | None  # in force, wall clock
    mark: tuple[int, str] | None  # epoch and group of the seat that it is reserved for
    is_readable: bool


class WaitingQueue:
    """The requests that wait for the revision of a group before it claims. Its methods raise: Violation."""

    def __init__(self, simulation: "Simulation", caller: Caller) -> None:
        self.simulation, self.caller = simulation, caller
        state = simulation.pool.state
        self.requests = {
            record.request.id: Waiting(
                record.request, record, _deadline(record), record.mark, state.is_readable(record)
            )
            for record in sorted(state.records.values(), key=lambda record: record.request.arrival)
            if record.state is OwnershipState.QUEUED and record.request.revision == caller.revision
        }

    def check_claim(self, answer: ClaimAnswer, row: ClaimBounds, order: ClaimOrder | None) -> None:
        """Check the answer to a claim that has just run. Args: order: None for arrival."""
        if answer.is_by_order != (order is not None):
            raise Violation(f"group {self.caller.group} claimed by {order} and was answered {answer}")
        given = [claimed.request.id for claimed in answer.claimed]
        for request_id in given:
            waiting = self.requests.get(request_id)
            if waiting is None or not self._is_living(waiting):
                raise Violation(f"{request_id} is dead and was claimed")
        self._check_ends(order)
        if order is None:
            self._check_arrival(given, row)
        else:
            self._check_row(given, row, order)
            self._check_patience(given, row, order, is_blocked=answer.is_blocked)
            self._check_windows(given, order)

    def _is_living(self, waiting: Waiting) -> bool:
        is_over = waiting.deadline is not None and waiting.deadline <= self.simulation.clock.wall
        return waiting.is_readable and not is_over

    def _is_reserved(self, waiting: Waiting) -> bool:
        """Is it reserved for another group, whose seat lives and is the one that it was reserved for?"""
        epoch, group = waiting.mark or (0, self.caller.group)
        state = self.simulation.pool.state
        lease = state.leases.get(group)
        is_held = lease is not None and lease > state.awake and state.seats[group].epoch == epoch
        return group != self.caller.group and is_held

    def _check_arrival(self, given: Sequence[str], row: ClaimBounds) -> None:
        """Check that requests older than the youngest claimed one did not fit, or were reserved for another group."""
        youngest = max((self.requests[request_id].request.arrival for request_id in given), default=0)
        free_slots = row.free_slots
        for request_id, waiting in self.requests.items():
            slots = row.slots(waiting.request)
            if request_id in given:
                free_slots -= slots
                continue
            is_passed = waiting.request.arrival < youngest and self._is_living(waiting)
            is_its_turn = slots <= free_slots or not self._is_reserved(waiting)
            if is_passed and is_its_turn and slots <= row.total_slots:
                raise Violation(f"{request_id} waits for group {self.caller.group}, which was given {list(given)}")

    def _check_ends(self, order: ClaimOrder | None) -> None:
        """Check that the claim has ended only requests with a deadline, and only by an order that drops."""
        for request_id, waiting in self.requests.items():
            end = waiting.record.end
            if end is None:
                continue
            may_drop = order is not None and order.rules.drop is not Drop.NEVER and order.estimates.step_ms > 0
            if not may_drop or waiting.deadline is None or not self._is_living(waiting):
                raise Violation(f"{request_id} was ended by a claim that may not end it")
            if (end.reason, end.detail) != (FinishReason.DEADLINE_EXCEEDED, LATE):
                raise Violation(f"{request_id} was ended by a claim as {end}")

    def _check_row(self, given: Sequence[str], row: ClaimBounds, order: ClaimOrder) -> None:
        needs = [self._need(self.requests[request_id].request, row) for request_id in given]
        total = [sum(dimension) for dimension in zip((0, 0), *needs, strict=True)]
        if not _fits(total, (row.most, row.free_slots)):
            raise Violation(f"group {self.caller.group} was given {given}, which need {total} of {row}")
        patient = {waiting.request.id for waiting in self._patient(order)}
        free = order.free_prompt_tokens - sum(self._prompt(each, order) for each in given if each in patient)
        prompts = sum(self._prompt(request_id, order) for request_id in given if request_id not in patient)
        # If all that waits has a place, prompts bound nothing.
        left = sum(waiting.record.end is None for waiting in self.requests.values())
        if left > row.most and prompts > max(free, 0):
            raise Violation(f"group {self.caller.group} was given {given}, with {prompts} prompt tokens of {free}")

    def _prompt(self, request_id: str, order: ClaimOrder) -> int:
        """Return the tokens of the step that a request takes: its prompt, and what it has got before."""
        record = self.requests[request_id].record
        return min(len(record.request.prompt) + len(record.log), order.total_prompt_tokens)

    def _check_patience(self, given: Sequence[str], row: ClaimBounds, order: ClaimOrder, *, is_blocked: bool) -> None:
        """Check that those whose patience has passed come first, the oldest before the others, and only they reserve.

        So none of them starves: whoever the group could hold is claimed, or waits for room that nobody else gets.
        """
        room, blocker, others = [row.most, row.free_slots], None, set(given)
        for waiting in self._patient(order):
            request_id, need = waiting.request.id, self._need(waiting.request, row)
            is_fitting = _fits(need, room)
            if request_id in others:
                others.remove(request_id)
                room = [free - needed for free, needed in zip(room, need, strict=True)]
            elif is_fitting:
                raise Violation(f"{request_id} fits, its patience has passed, and others were claimed: {given}")
            elif min(room) <= 0:
                break
            elif row.slots(waiting.request) <= row.total_slots and not self._is_reserved(waiting):
                blocker = request_id
                break
        if blocker is not None and others:
            raise Violation(f"{blocker} does not fit, its patience has passed, and it was overtaken by {others}")
        if is_blocked != (blocker is not None):
            raise Violation(f"group {self.caller.group} is reserved for {blocker} and was told {is_blocked}")
        self._check_marks(blocker)

    def _check_windows(self, given: Sequence[str], order: ClaimOrder) -> None:
        """Check that nobody whose start window is over goes before somebody whose window is open.

        Under `edf` those with an open window go by its end. A goal that cannot be met any more decides nothing.
        """
        now_ms, patient = self.simulation.clock.wall, {waiting.request.id for waiting in self._patient(order)}
        ends = [self._window_end(self.requests[name], order) for name in given if name not in patient]
        are_late = [end < now_ms for end in ends]
        if are_late != sorted(are_late):
            raise Violation(f"group {self.caller.group} was given {list(given)}, and some of the first ones are late")
        open_until = [end for end in ends if end >= now_ms]
        if order.rules.order is Order.EDF and open_until != sorted(open_until):
            raise Violation(f"{list(given)} were claimed by edf, and their windows end at {open_until}")

    def _window_end(self, waiting: Waiting, order: ClaimOrder) -> float:
        """Return the end of a start window, on the wall clock."""
        request, logged = waiting.request, len(waiting.record.log)
        of = class_of(request, _kind(waiting), logged)
        own_ms = order.estimates.own_ms(of)
        if waiting.deadline is not None:
            return waiting.deadline - own_ms
        patience_end = request.submitted_ms + order.rules.patience_ms
        if request.first_token_goal_ms is None or logged:
            return patience_end
        goal_end = request.submitted_ms + (lower_bound(length_class(request.first_token_goal_ms)) - own_ms)
        return min(goal_end, patience_end) if goal_end >= self.simulation.clock.wall else patience_end

    def _check_marks(self, blocker: str | None) -> None:
        """Check that the claim has reserved its group for `blocker` and for no other request."""
        group = self.caller.group
        for request_id, waiting in self.requests.items():
            is_waiting = waiting.record.state is OwnershipState.QUEUED
            wanted = (self.simulation.pool.state.seats[group].epoch, group) if request_id == blocker else waiting.mark
            if is_waiting and waiting.record.mark != wanted:
                raise Violation(f"{request_id} has the mark {waiting.record.mark} and not {wanted}")

    def _patient(self, order: ClaimOrder) -> list[Waiting]:
        """Return those without a deadline whose patience has passed, in the order in which it has.

        While the index is built, a claim does not know what came later than its part.
        """
        built_to = self.simulation.pool.state.waiting.of(self.caller.revision).built_to
        since = self.simulation.clock.wall - order.rules.patience_ms
        found = [
            waiting
            for waiting in self.requests.values()
            if waiting.is_readable and waiting.deadline is None and waiting.request.submitted_ms <= since
            if waiting.request.arrival <= built_to
        ]
        return sorted(found, key=lambda waiting: (waiting.request.submitted_ms, waiting.request.arrival))

    def _need(self, request: Request, row: ClaimBounds) -> list[int]:
        """Return the places and the slots that a request needs."""
        return [1, row.slots(request)]


def _fits(need: Sequence[int], room: Sequence[int]) -> bool:
    return all(needed <= free for needed, free in zip(need, room, strict=True))


def _kind(waiting: Waiting) -> DeadlineKind:
    if waiting.deadline is None:
        return DeadlineKind.NONE
    is_of_end = waiting.deadline == waiting.request.deadline_wall_ms
    return DeadlineKind.END if is_of_end else DeadlineKind.FIRST_TOKEN


def _deadline(record: RequestRecord) -> int | None:
    """Return the deadline in force: without a token the sooner of both, then the one of the end."""
    return record.request.deadline_wall_ms if record.log else record.request.first_deadline_wall_ms
