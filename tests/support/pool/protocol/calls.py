"""Guarantees of each call of a scheduler in the model's simulations, checked while it runs.

The parts around the pool forgive much: what a scheduler was given and does not know, it gives back at its next
heartbeat, and a commit compares claims. So a claim that runs twice, or a seat that two processes speak for, costs time
and no token, and no log ever shows it. These promises are the table's own: what a call does that comes again, and who
is served (waiting_queue.py). Each of them is seen at the call that breaks it.
"""

import copy
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orca.core.domain.step import Claim
from orca.pool.api import StaleCall
from orca.pool.memory.state import RequestRecord
from orca.pool.order.order_rules import ClaimOrder
from orca.pool.records import (
    Caller,
    ClaimAnswer,
    CommitAnswer,
    CommitEntry,
    Heartbeat,
    OwnershipState,
    SeatEntered,
    SeatHeld,
)
from orca.pool.schemas import SCHEMA_OF_ORDERS
from support.pool.protocol.stages import Violation
from support.pool.protocol.waiting_queue import ClaimBounds, WaitingQueue

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation


@dataclass
class Served:
    """The process that had the last word in a group, and what its last calls were told."""

    process: str
    call: int  # highest that has run
    entered: tuple[int, SeatEntered]
    claimed: tuple[int, ClaimAnswer] | None = None


class CallGuarantees:
    """Stands between the model's schedulers and the pool, and passes each call on. Its methods raise: Violation."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.served: dict[str, Served] = {}  # group -> its last word
        self.served_by_replica: dict[str, Served] = {}  # the same, as far as the pool's replica has it

    def keep_for_replica(self) -> None:
        self.served_by_replica = copy.deepcopy(self.served)

    def forget_lost(self) -> None:
        """The pool has failed over: a call that its replica never heard of runs when it comes again."""
        self.served = copy.deepcopy(self.served_by_replica)

    async def enter(self, caller: Caller, call: int, **arguments: Any) -> SeatEntered | SeatHeld:
        answer: SeatEntered | SeatHeld = await self._run(
            caller, call, self.simulation.pool.enter(caller, call, **arguments)
        )
        if isinstance(answer, SeatEntered) and not self._has_run(caller, call):
            self.served[caller.group] = Served(caller.process, call, (call, answer))
        elif isinstance(answer, SeatEntered) and (call, answer) != self.served[caller.group].entered:
            raise Violation(f"{caller.process}: enter call {call} came again and was answered {answer}")
        return answer

    async def claim(
        self,
        caller: Caller,
        call: int,
        *,
        free_slots: int,
        total_slots: int,
        block_tokens: int,
        most: int,
        order: ClaimOrder | None,
    ) -> ClaimAnswer:
        slots = {"free_slots": free_slots, "total_slots": total_slots, "block_tokens": block_tokens}
        queue = WaitingQueue(self.simulation, caller)
        run = self.simulation.pool.claim(caller, call, most=most, order=order, **slots)
        answer: ClaimAnswer = await self._run(caller, call, run)
        if self._has_run(caller, call):
            self._check_repeated(caller, call, answer)
        else:
            has_orders = self.simulation.pool.state.schema >= SCHEMA_OF_ORDERS
            queue.check_claim(answer, ClaimBounds(most, **slots), order if has_orders else None)
            served = self.served[caller.group]
            served.call, served.claimed = call, (call, answer)
        return answer

    async def heartbeat(self, caller: Caller) -> Heartbeat:
        answer = await self.simulation.pool.heartbeat(caller)
        if self.simulation.pool.state.seats[caller.group].holder != caller.process:
            raise Violation(f"{caller.process} has not the seat and was told what group {caller.group} owns")
        return answer

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        answers = await self.simulation.pool.commit(entries)
        for entry, answer in zip(entries, answers, strict=True):
            record = self.simulation.pool.state.records.get(entry.request_id)
            if answer is CommitAnswer.NOT_YOURS and record is not None and _is_owned(record, entry.claim):
                raise Violation(f"{entry.request_id} is not its owner's by the answer, and its owner's by the record")
        return answers

    # a call that comes again

    def _has_run(self, caller: Caller, call: int) -> bool:
        """Has the group heard this call, or a later one, of the process that had the last word there?"""
        served = self.served.get(caller.group)
        return served is not None and served.process == caller.process and call <= served.call

    async def _run(self, caller: Caller, call: int, run: Awaitable[Any]) -> Any:
        before = self._ownership(caller)
        try:
            answer = await run
        except StaleCall:
            if self._is_last_of_its_kind(caller, call):
                raise Violation(f"{caller.process}: call {call} came again and its answer is not kept") from None
            raise
        if self._has_run(caller, call) and self._ownership(caller) != before:
            raise Violation(f"{caller.process}: call {call} has run, came again and moved the seat or a request")
        return answer

    def _is_last_of_its_kind(self, caller: Caller, call: int) -> bool:
        served = self.served.get(caller.group)
        kept = (served.entered, served.claimed) if served and served.process == caller.process else ()
        return call in [answered[0] for answered in kept if answered]

    def _ownership(self, caller: Caller) -> tuple[Any, ...]:
        pool = self.simulation.pool
        seat = pool.state.seats.get(caller.group)
        claims = {request_id: (record.state, record.number) for request_id, record in pool.state.records.items()}
        return (seat.holder, seat.epoch) if seat else None, claims

    def _check_repeated(self, caller: Caller, call: int, answer: ClaimAnswer) -> None:
        claimed = self.served[caller.group].claimed
        if claimed is None or claimed[0] != call:
            raise Violation(f"{caller.process}: claim call {call} is over and was answered")
        first = [(given.request.id, given.claim) for given in claimed[1].claimed]
        kept = [given for given in first if given[0] in self.simulation.pool.state.records]
        if [(given.request.id, given.claim) for given in answer.claimed] != kept:
            raise Violation(f"{caller.process}: claim call {call} came again and was answered {answer}, not {first}")


def _is_owned(record: RequestRecord, claim: Claim) -> bool:
    return record.state is OwnershipState.OWNED and Claim(record.number, record.call) == claim
