"""The model's scheduler side: a group's processes, and the messages between them, their stage and the pool.

They follow the protocol's "what each side does with the answers"; see pool_model.py for the simulation around them.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orca.core.domain.request import End, FinishReason, Request, Token, slots_needed
from orca.core.domain.step import Claim, Epoch
from orca.pool.api import ProcessClosed, SeatLost
from orca.pool.records import Caller, ClaimAnswer, CommitAnswer, CommitEntry, Heartbeat, SeatEntered
from support.pool.beds import REVISION
from support.pool.protocol.stages import Stage, Step

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation

BLOCK = 16
RESEND_MS = 400
STEP_BOUND_MS = 3_000


def now(call: Awaitable[Any]) -> Any:
    """The answer of a coroutine that never waits."""
    try:
        call.__await__().send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a transition of the in-memory pool never waits")


@dataclass
class Message:
    """A call on its way, and what its sender waits for."""

    run: Callable[[], Any]
    sender: "Process"
    kind: str
    tag: int
    is_for_pool: bool = True
    due: int = 0  # when it can arrive at the earliest


@dataclass
class Sequence:
    """A request as a scheduler process sees it under its claim."""

    request: Request
    claim: Claim
    start: list[int]  # the log when it was claimed
    taken: int = 0  # tokens that results brought
    asked: int = 0  # tokens that steps were sent for
    is_alone: bool = False  # nothing else may run in a step with it until its first commit
    is_on_stage: bool = False
    is_over: bool = False

    @property
    def slots(self) -> int:
        return slots_needed(self.request.max_total_tokens, BLOCK)


@dataclass
class Group:
    """A group with its stages and the processes of its scheduler."""

    name: str
    slots: int
    stage: Stage
    processes: list["Process"] = field(default_factory=list)
    is_gone: bool = False  # scaled away for good
    revision: str = REVISION

    @property
    def alive(self) -> list["Process"]:
        return [process for process in self.processes if process.is_alive]


class Process:
    """A scheduler process: enters, forms, claims, runs steps, commits one call at a time, gives back what it must."""

    def __init__(self, simulation: "Simulation", group: Group) -> None:
        self.simulation, self.group = simulation, group
        self.word = f"{group.name}-{len(group.processes) + 1}"
        self.caller = Caller(group=group.name, process=self.word, revision=group.revision)
        self.is_alive, self.is_leaving, self.has_left = True, False, False
        self.frozen_until = 0
        self.calls = 0
        self.open: dict[str, tuple[Message, int]] = {}  # kind -> what is not answered, and when it was sent
        self.next_enter = self.next_beat = 0
        self.blamed: dict[str, Claim] = {}  # requests that ran when the stage broke, until the pool knows
        self._drop_all()

    def _drop_all(self) -> None:
        self.epoch: Epoch | None = None
        self.is_formed = False
        self.own: dict[str, Sequence] = {}
        self.freed: list[tuple[str, Claim]] = []
        self.entries: list[CommitEntry] = []
        self.steps: dict[int, Step] = {}  # sent, results not taken
        self.results: dict[int, list[tuple[str, Claim, int]]] = {}
        self.sent = self.taken = 0
        self.change = 0  # of `own`; a heartbeat is compared only with the list it was sent for
        self.open.clear()

    # acting

    def tick(self) -> None:
        simulation = self.simulation
        if not self.is_alive or simulation.time < self.frozen_until:
            return
        for message, sent_at in list(self.open.values()):
            if simulation.time - sent_at >= RESEND_MS:
                self._send(message)
        if simulation.time >= self.next_beat:
            self.next_beat = simulation.time + 500
            self._beat()
        if self.is_leaving:
            self._call("leave", lambda: simulation.pool.leave(self.caller))
        elif self.epoch is None:
            self._enter()
        elif not self.is_formed:
            epoch, word = self.epoch, self.group.stage.word  # as the stage has just told
            self._ask_stage("join", lambda: self.group.stage.join(epoch, word))
        else:
            self._claim()
            self._step()
            self._commit()

    def _enter(self) -> None:
        if self.simulation.time >= self.next_enter and "enter" not in self.open:
            self.next_enter = self.simulation.time + 200
            self.calls += 1
            number, stage = self.calls, self.group.stage.epoch
            reported = stage.number if stage else 0
            blamed = dict(self.blamed)
            others = [other for other in self.group.processes if other is not self]
            is_dead = not any(other.is_alive for other in others)
            self._call(
                "enter",
                lambda: self.simulation.calls.enter(
                    self.caller, number, reported_epoch=reported, is_holder_dead=is_dead, blamed=blamed
                ),
            )

    def _beat(self) -> None:
        if self.simulation.is_pool_up:
            now(self.simulation.pool.sweep())
        if self.epoch is not None and "heartbeat" not in self.open:
            change = self.change

            async def beat() -> tuple[Heartbeat, int]:
                return await self.simulation.calls.heartbeat(self.caller), change

            self._call("heartbeat", beat)

    def _claim(self) -> None:
        if "claim" in self.open or self.simulation.random.random() < 0.5:
            return
        self.calls += 1
        number = self.calls
        held = sum(sequence.slots for sequence in self.own.values())
        slots = {"free_slots": max(0, self.group.slots - held), "total_slots": self.group.slots, "block_tokens": BLOCK}
        order = self.simulation.orders.draw(self.group.name)
        self._call("claim", lambda: self.simulation.calls.claim(self.caller, number, most=4, order=order, **slots))

    def _step(self) -> None:
        assert self.epoch is not None
        if self.steps and self.simulation.time - self.step_sent_at > STEP_BOUND_MS:
            self._reenter()
            return
        ready = [s for s in self.own.values() if not s.is_over and s.asked < s.request.max_new_tokens - len(s.start)]
        if len(self.steps) >= 2 or not ready:
            return
        rows = ready[:3]
        if "suspects run alone" not in self.simulation.without:
            if self.steps and any(s.is_alone for s in self.own.values()):
                return
            rows = [s for s in ready if s.is_alone][:1] or rows
        new = [s for s in rows if not s.is_on_stage]
        for sequence in rows:
            sequence.asked += 1
            sequence.is_on_stage = True
        self.sent += 1
        step = Step(
            self.epoch,
            self.sent,
            [(s.request.id, s.claim, [*s.request.prompt, *s.start]) for s in new],
            self.freed,
            [(s.request.id, s.claim) for s in rows],
        )
        self.freed = []
        self.steps[step.number] = step
        self.step_sent_at = self.simulation.time
        self._ask_stage(f"step {step.number}", lambda: self.group.stage.run(step))

    def _commit(self) -> None:
        if self.entries and "commit" not in self.open:
            entries, self.entries = self.entries, []

            async def commit() -> list[tuple[CommitEntry, CommitAnswer]]:
                return list(zip(entries, await self.simulation.calls.commit(entries), strict=True))

            self._call("commit", commit)

    def _reenter(self) -> None:
        self._drop_all()

    # answers

    def take(self, message: Message, answer: Any) -> None:
        """An answer arrives; one that nobody waits for any more is dropped."""
        if not self.is_alive or self.simulation.time < self.frozen_until:
            return
        waiting = self.open.get(message.kind)
        if waiting is None or waiting[0].tag != message.tag:
            return
        if answer is None:
            return
        del self.open[message.kind]
        if isinstance(answer, ProcessClosed):
            self.is_alive = False
        elif isinstance(answer, SeatLost):
            self._reenter()
        elif message.kind == "leave":
            self.is_alive, self.has_left = False, True
        elif message.kind == "enter" and isinstance(answer, SeatEntered):
            self._drop_all()
            self.blamed = {}
            self.epoch = answer.epoch
            self.next_beat = 0  # what does the pool believe it owns?
        elif message.kind == "join":
            self.is_formed = answer == "joined"
            if not self.is_formed:
                self._reenter()
        elif isinstance(answer, ClaimAnswer):
            self._take_claim(answer)
        elif message.kind == "heartbeat" and not isinstance(answer, Exception):
            self._take_heartbeat(*answer)
        elif message.kind == "commit" and not isinstance(answer, Exception):
            self._take_commit(answer)
        elif message.kind.startswith("step"):
            self._take_result(answer)

    def _take_claim(self, answer: ClaimAnswer) -> None:
        for claimed in answer.claimed:
            log = [token.id for token in claimed.log]
            self.own[claimed.request.id] = Sequence(claimed.request, claimed.claim, log, is_alone=claimed.is_alone)
            self.change += 1

    def _take_heartbeat(self, answer: Heartbeat, change: int) -> None:
        if change != self.change or "claim" in self.open:
            return
        for request_id, sequence in list(self.own.items()):
            if answer.owned.get(request_id) != sequence.claim:
                self._drop(request_id)
        unknown = {i: claim for i, claim in answer.owned.items() if i not in self.own}
        if not unknown:
            return
        if "never adopt" in self.simulation.without:
            for request_id, claim in unknown.items():
                record = self.simulation.pool.state.records[request_id]
                log = [token.id for token in record.log]
                self.own[request_id] = Sequence(record.request, claim, log)
        else:
            self._call("give back", lambda: self.simulation.pool.give_back(unknown))

    def _take_result(self, answer: Any) -> None:
        if answer == "broke":
            self.blamed = dict(row for step in self.steps.values() for row in step.rows)
        elif answer == "refused" and "outside is innocent" in self.simulation.without:
            self.blamed = {request_id: sequence.claim for request_id, sequence in self.own.items()}
        if answer in ("broke", "refused"):
            self._reenter()
            return
        epoch, number, rows = answer
        if epoch != self.epoch or number not in self.steps:
            return
        self.results[number] = rows
        in_order = "results in order" not in self.simulation.without
        while self.results:
            number = self.taken + 1 if in_order else max(self.results)
            if number not in self.results:
                return
            self.taken += 1
            del self.steps[number]
            for request_id, claim, token in self.results.pop(number):
                self._take_token(request_id, claim, token)

    def _take_token(self, request_id: str, claim: Claim, token: int) -> None:
        sequence = self.own.get(request_id)
        if sequence is None or sequence.claim != claim or sequence.is_over:
            return
        index = len(sequence.start) + sequence.taken
        sequence.taken += 1
        end = None
        if index + 1 == sequence.request.max_new_tokens:
            end = End(FinishReason.LENGTH, index + 1)
        elif token % 11 == 0:
            end = End(FinishReason.STOP, index + 1)
        sequence.is_over = end is not None
        self.entries.append(
            CommitEntry(request_id=request_id, claim=claim, index=index, tokens=(Token(token),), end=end)
        )

    def _take_commit(self, answers: list[tuple[CommitEntry, CommitAnswer]]) -> None:
        for entry, answer in answers:
            sequence = self.own.get(entry.request_id)
            if sequence is not None and sequence.claim == entry.claim:
                sequence.is_alone = False
            is_gone = answer in (CommitAnswer.ENDED, CommitAnswer.NOT_YOURS) or entry.end is not None
            if is_gone and sequence is not None and sequence.claim == entry.claim:
                self._drop(entry.request_id)

    def _drop(self, request_id: str) -> None:
        sequence = self.own.pop(request_id)
        self.entries = [entry for entry in self.entries if entry.request_id != request_id]
        self.freed.append((request_id, sequence.claim))
        self.change += 1

    # sending

    def _call(self, kind: str, run: Callable[[], Awaitable[Any]]) -> None:
        if kind not in self.open:
            self._send(Message(lambda: now(run()), self, kind, self.simulation.next_tag()))

    def _ask_stage(self, kind: str, run: Callable[[], Any]) -> None:
        if kind not in self.open:
            self._send(Message(run, self, kind, self.simulation.next_tag(), is_for_pool=False))

    def _send(self, message: Message) -> None:
        self.open[message.kind] = (message, self.simulation.time)
        self.simulation.network.append(message)
