"""What one rank does with the steps of one epoch: take inputs, compute, pass on, sample.

Order of a step: its receive is posted before an earlier step computes, if its control message is here by then
(worker.messages.inbox), so that its activations arrive meanwhile; then state differences, fed tokens, activations,
computation; then the output is put on the link and the next step begins without waiting for it to arrive. One thread
does all of this, between computations and never during one: NCCL wants the calls on a link one at a time and in their
order, and control messages are a whole step ahead while the pipeline is full. No rank ever waits for a rank behind it,
and the only way back, from the last stage to the first, is read by the first stage before it runs a step that needs it,
never by the last one: so the waits form no circle. Where a device draws the tokens, the host orders a step and comes
back before it has run; its tokens are read when the next one has been ordered.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
from torch import Tensor

from orca.core.domain.step import StageTiming, Step, StepResult
from orca.core.process.line_file import LineFile
from orca.worker.parallel.process_groups import Groups, Inbound
from orca.worker.parallel.progress import Progress
from orca.worker.parallel.shard import Shard
from orca.worker.stage.sampling import Drawn
from orca.worker.stage.stage import Plan, Stage

_FEEDS_HELD = 64
"""Steps whose fed tokens the first stage may leave unread, because nothing has asked for them yet. Further back than
any master has steps in flight, so reading the oldest never waits."""
_DELAY_PIECE_S = 0.25


@dataclass(slots=True)
class Task:
    """A step on this rank, from its control message on."""

    step: Step
    received_ns: int  # of the control message, by the controller, or by the rank where that has a link to the master
    hidden: Inbound | None = None


@dataclass(slots=True)
class _Owed:
    """Tokens that a step sampled and the first stage has not taken yet, one for each handle."""

    handles: tuple[int, ...]
    tokens: Inbound | Tensor | Sequence[int]


@dataclass(slots=True)
class FedTokens:
    """The first stage's end of the way back (prefetch): tokens by step, taken in order and only when needed."""

    _owed: deque[_Owed] = field(default_factory=deque)

    def expect(self, handles: tuple[int, ...], tokens: Inbound | Tensor | Sequence[int]) -> None:
        self._owed.append(_Owed(handles, tokens))

    def settle(self, stage: Stage, step: Step) -> None:
        """Give `stage` what it needs to run `step`: the tokens of its rows that neither master nor prompt supply."""
        asking = {row.handle for row in step.rows if row.token is None}
        needed = 0
        for position, owed in enumerate(self._owed, start=1):
            if not asking.isdisjoint(owed.handles):
                needed = position
        for _ in range(max(needed, len(self._owed) - _FEEDS_HELD)):
            owed = self._owed.popleft()
            stage.feed(owed.handles, owed.tokens.wait() if isinstance(owed.tokens, Inbound) else owed.tokens)


@dataclass(frozen=True, slots=True)
class Ordered:
    """A step on the rank that samples. Its computation may be under way."""

    step: Step
    timing: StageTiming  # of a device: when it was ordered; the end is its own where that was waited for
    drawn: Drawn | None
    units: int  # of the bound that its computation has (progress.py)

    @property
    def is_there(self) -> bool:
        """Whether its tokens are."""
        return self.drawn is None or self.drawn.is_there


class Executor:
    """Runs the steps of one epoch on one rank, in the order of their numbers."""

    def __init__(
        self,
        shard: Shard,
        stage: Stage,
        groups: Groups,
        *,
        feeds_tokens: bool,
        progress: Progress,
        iteration_log: "IterationLog | None",
        delay_ms: float,
    ) -> None:
        self._shard = shard
        self._samples = shard.is_last and shard.rank == 0
        self._stage = stage
        self._groups = groups
        self._feeds_tokens = feeds_tokens
        self._fed = FedTokens()
        self._progress = progress
        self._log = iteration_log
        self._delay_s = delay_ms / 1000
        self._is_watching = False

    def take(self, step: Step, received_ns: int) -> Task:
        """Take up a control message: post the receive of the step's activations, whose size it tells."""
        has_input = not self._shard.is_first and step.tokens > 0
        return Task(step, received_ns, self._groups.receive_hidden(step.tokens) if has_input else None)

    def run(self, task: Task) -> "Ordered | None":
        """Run a step, or order it from a device. Returns: what became of it on the rank that samples, else None.

        Raises: whatever breaks the epoch: a link's RuntimeError, or a broken invariant of the stage.
        """
        step = task.step
        self._progress.begin_step(step)
        plan = self._stage.begin(step)
        if self._shard.is_first and self._feeds_tokens:
            self._progress.at(f"step {step.number}: waits for fed tokens", is_waiting=True)
            self._fed.settle(self._stage, step)
        self._progress.at(f"step {step.number}: waits for activations", is_waiting=True)
        hidden = task.hidden.wait() if task.hidden is not None else None
        start_ns = time.monotonic_ns()
        self._progress.at(f"step {step.number}: computes")
        drawn = self._compute(plan, hidden) if step.tokens else None
        timing = StageTiming(
            stage=self._shard.stage,
            received_ns=task.received_ns,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
        )
        self._pass_back(step, drawn)
        if self._log is not None:
            self._log.write(step, timing)
        self._progress.end_step(step)
        if not self._samples:
            return None
        return Ordered(step, timing, drawn, self._progress.units)

    def watch(self, ordered: Ordered) -> None:
        """Say that a device computes a step: until its result, no progress is a hang."""
        self._is_watching = True
        self._progress.units = ordered.units
        self._progress.at(f"step {ordered.step.number}: computes")

    def result(self, ordered: Ordered) -> StepResult:
        """What goes to the master, once the step's tokens are there."""
        timing = ordered.timing
        if not ordered.is_there:
            self.watch(ordered)
        sampled = [] if ordered.drawn is None else ordered.drawn.read()
        if self._is_watching:
            self._is_watching = False
            self._progress.end_step(ordered.step)
            timing = replace(timing, end_ns=time.monotonic_ns())
        return StepResult(epoch=ordered.step.epoch, number=ordered.step.number, sampled=tuple(sampled), timing=timing)

    def _compute(self, plan: Plan, hidden: Tensor | None) -> Drawn | None:
        output = self._stage.forward(plan, hidden)
        self._linger()
        if not self._shard.is_last:
            self._groups.send_hidden(output)
            return None
        return self._stage.draw(plan, output) if self._samples else None

    def _linger(self) -> None:
        """The test setting delay_ms: as a long computation does, it moves the mark all the time."""
        until = time.monotonic() + self._delay_s
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _DELAY_PIECE_S))
            self._progress.move()

    def _pass_back(self, step: Step, drawn: Drawn | None) -> None:
        """Prefetch: the sampled tokens go to every rank of the first stage, which notes that they will come."""
        handles = tuple(row.handle for row in step.rows if row.sample)
        if not self._feeds_tokens or not handles:
            return
        if drawn is not None:
            self._groups.send_fed(drawn.tokens)
        if self._shard.is_first and not (drawn is not None and drawn.is_fed):
            self._fed.expect(handles, self._groups.receive_fed(len(handles)) if drawn is None else drawn.tokens)


class IterationLog:
    """One JSON line per step of one stage: who ran, and when; the source of pipeline pictures (ORCA, Figure 8)."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, step: Step, timing: StageTiming) -> None:
        line = {
            "stage": timing.stage,
            "epoch": step.epoch.number,
            "step": step.number,
            "handles": [row.handle for row in step.rows],
            "new": [new.request_id for new in step.new],
            "freed": list(step.freed),
            "tokens": step.tokens,
            "received_ns": timing.received_ns,
            "start_ns": timing.start_ns,
            "end_ns": timing.end_ns,
        }
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._file.close()
