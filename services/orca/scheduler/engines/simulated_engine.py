"""A simulated engine: a cost model on the running loop's clock, a seeded source of tokens, and faults.

It stands behind the Engine seam, so the loop, the policies and `orca bench` cannot tell it from real stages. It is
strict where real stages may be lenient: a step that breaks the contract of `core.domain.step` fails an assertion, so
every simulated run also checks what the scheduler sends. Real time passes on a normal event loop, virtual time on
`virtual_time.VirtualTimeLoop`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol
from zlib import crc32

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError
from orca.core.domain.request import Token, slots_needed
from orca.core.domain.step import Epoch, NewRequest, Row, Sampled, StageTiming, Step, StepResult
from orca.scheduler.engines.step_timeout import StepTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Time that one stage takes for one step, in microseconds: a sum of three parts."""

    step_us: int = 1_000  # per step: weights read once
    token_us: int = 0  # per row of the flat tensor
    context_ns: int = 0  # per token of KV read by attention, in nanoseconds: it is far below a microsecond

    def stage_us(self, step: Step) -> int:
        if not step.rows:
            return 0
        context = sum(row.start + row.count for row in step.rows)
        return self.step_us + self.token_us * step.tokens + self.context_ns * context // 1_000


class StepFault(StrEnum):
    """What may go wrong with one step."""

    SLOW = "slow"  # stage 0 takes ten times as long
    LOST = "lost"  # its result never comes back: the engine's own bound ends the epoch
    DEATH = "death"  # a stage is killed from outside while it runs
    CRASH = "crash"  # a stage fails from inside while it runs


class TokenSource(Protocol):
    """The model: a token for a request and an index, the same in every epoch (counter-based sampling)."""

    def __call__(self, request_id: str, index: int) -> int: ...


def seeded_tokens(seed: int, vocab_size: int = 32_000) -> TokenSource:
    """Tokens that look random and depend on seed, request and index alone."""
    return lambda request_id, index: crc32(f"{seed}/{request_id}/{index}".encode()) % vocab_size


def no_faults(step: Step) -> StepFault | None:  # noqa: ARG001 - every fault plan has this shape
    return None


@dataclass(slots=True)
class _Held:
    """What the stages know of a request."""

    new: NewRequest
    slots: int
    computed: int = 0  # positions in its KV
    generated: int = 0  # its next token's index
    sampled_us: int = 0  # when the last stage drew its newest token
    newest: int | None = None


@dataclass(slots=True)
class _Life:
    """State of one epoch on the stages."""

    epoch: Epoch
    bound: StepTimeout
    results: asyncio.Queue[StepResult | EngineError]
    free_us: list[int]  # per stage: when it has done all its work
    coming: deque[tuple[int, StepResult | EngineError]] = field(default_factory=deque)  # with the time each is due
    held: dict[int, _Held] = field(default_factory=dict)
    last_step: int = 0
    last_handle: int = 0
    slots_in_use: int = 0
    error: EngineError | None = None
    is_watched: bool = False  # is an alarm set for the steps that are out?


class SimulatedEngine:
    """Stages that take time and compute nothing.

    Args:
        shape: what it says it can do, and is held to.
        cost: time per stage and step.
        tokens: what it "samples".
        faults: asked once for each step with rows.
        refuses: asked at each `form`; a reason makes it fail.
        step_timeout_us: a step that is out for so long is lost if no stage has been at work for so long either.
        form_us: time that forming takes.
    """

    def __init__(
        self,
        shape: EngineShape,
        *,
        cost: CostModel | None = None,
        tokens: TokenSource | None = None,
        faults: Callable[[Step], StepFault | None] = no_faults,
        refuses: Callable[[Epoch], str | None] = lambda epoch: None,  # noqa: ARG005 - shape of the argument
        step_timeout_us: int = 5_000_000,
        form_us: int = 0,
    ) -> None:
        self.shape = shape
        self._cost = CostModel() if cost is None else cost
        self._tokens = seeded_tokens(0) if tokens is None else tokens
        self._faults = faults
        self._refuses = refuses
        self._step_timeout_us = step_timeout_us
        self._form_us = form_us
        self._life: _Life | None = None
        self.slots_in_use_max = 0  # over all epochs
        self.stage_times: list[tuple[int, int, int, int]] | None = None  # (step, stage, start, end) in us, when a list

    async def form(self, epoch: Epoch) -> EngineShape:
        if self._form_us:
            await asyncio.sleep(self._form_us / 1e6)
        if reason := self._refuses(epoch):
            raise EngineError(reason)
        last = 0 if self._life is None else self._life.epoch.number
        if epoch.number <= last:
            raise EngineError(f"stage 0 has been in epoch {last}, and {epoch.number} is not above it")
        bound = StepTimeout(self._step_timeout_us)
        self._life = _Life(epoch, bound, asyncio.Queue(), [self._now_us()] * self.shape.stages)
        return self.shape

    async def submit(self, step: Step) -> None:
        life = self._life
        if life is None or life.epoch != step.epoch:
            raise EngineError("the epoch is over")
        if life.error is not None:
            raise life.error
        assert step.number == life.last_step + 1, "a step number is missing"
        life.last_step = step.number
        self._take_differences(life, step)
        for row in step.rows:
            _check_row(life.held[row.handle], row)
        fault = self._faults(step) if step.rows else None
        start_us, end_us = self._run_stages(life, step, fault)
        life.bound.submit(step.number, now_us=self._now_us())
        self._watch(life)
        sampled = tuple(self._sample(life.held[row.handle], row, end_us) for row in step.rows if row.sample)
        if fault in (StepFault.DEATH, StepFault.CRASH):
            is_from_inside = fault is StepFault.CRASH
            error = EngineError(f"a stage died in step {step.number}", is_from_inside=is_from_inside)
            self._at(end_us, life, error)
        elif fault is not StepFault.LOST:
            timing = StageTiming(
                stage=self.shape.stages - 1,
                received_ns=self._now_us() * 1_000,
                start_ns=start_us * 1_000,
                end_ns=end_us * 1_000,
            )
            result = StepResult(epoch=step.epoch, number=step.number, sampled=sampled, timing=timing)
            self._at(end_us, life, result)

    async def results(self) -> AsyncIterator[StepResult]:
        life = self._life
        assert life is not None, "results are asked for before an epoch was formed"
        while True:
            item = await life.results.get()
            if isinstance(item, EngineError):
                raise item
            yield item

    async def close(self) -> None:
        self._life = None

    @property
    def slots_in_use(self) -> int:
        """Slots of all requests that the stages hold."""
        return 0 if self._life is None else self._life.slots_in_use

    def _take_differences(self, life: _Life, step: Step) -> None:
        for handle in step.freed:
            life.slots_in_use -= life.held.pop(handle).slots
        for new in step.new:
            assert new.handle > life.last_handle, "a handle is used twice"
            life.last_handle = new.handle
            held = _Held(new, slots_needed(new.max_total_tokens, self.shape.block_tokens))
            held.generated = len(new.tokens) - new.prompt_length
            life.held[new.handle] = held
            life.slots_in_use += held.slots
        assert life.slots_in_use <= self.shape.slots, "more slots are in use than there are"
        self.slots_in_use_max = max(self.slots_in_use_max, life.slots_in_use)

    def _run_stages(self, life: _Life, step: Step, fault: StepFault | None) -> tuple[int, int]:
        """Pass the step through the stages; a stage runs one step at a time. Returns start and end on the last one."""
        cost_us = self._cost.stage_us(step)
        fed = [held.sampled_us for row in step.rows if _is_fed(held := life.held[row.handle], row)]
        start_us = end_us = max([self._now_us(), *fed])
        for stage in range(self.shape.stages):
            start_us = max(end_us, life.free_us[stage])
            end_us = start_us + (cost_us * 10 if fault is StepFault.SLOW and stage == 0 else cost_us)
            life.free_us[stage] = end_us
            if self.stage_times is not None and step.rows:
                self.stage_times.append((step.number, stage, start_us, end_us))
        return start_us, end_us

    def _sample(self, held: _Held, row: Row, end_us: int) -> Sampled:
        index, held.generated = held.generated, held.generated + 1
        held.newest = self._tokens(held.new.request_id, index)
        held.sampled_us = end_us
        return Sampled(row.handle, index, Token(held.newest))

    def _at(self, due_us: int, life: _Life, item: StepResult | EngineError) -> None:
        """Tell it when it is due, which is never before those told of earlier."""
        life.coming.append((due_us, item))
        if len(life.coming) == 1:
            self._deliver(life)

    def _deliver(self, life: _Life) -> None:
        # All that is due, in order: a loop that comes late may see a later step due before the timer of an earlier one.
        while life.coming and life.coming[0][0] <= self._now_us():
            _tell(life, life.coming.popleft()[1])
        if life.coming:
            asyncio.get_running_loop().call_at(life.coming[0][0] / 1e6, self._deliver, life)

    def _watch(self, life: _Life) -> None:
        """Set the alarm for the oldest step, where none is set; at its time it is lost, or the alarm is set anew."""
        if life.is_watched or life.bound.oldest is None or life.error is not None:
            return
        still_us = max(0, min(self._now_us() - free_us for free_us in life.free_us))
        left_us = life.bound.left_us(now_us=self._now_us(), still_us=still_us)
        if left_us <= 0:
            detail = f"step {life.bound.oldest} did not come back within its bound"
            _tell(life, EngineError(detail, is_from_inside=True))
            return

        def ring() -> None:
            life.is_watched = False
            self._watch(life)

        life.is_watched = True
        asyncio.get_running_loop().call_later(left_us / 1e6, ring)

    def _now_us(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e6)


def _tell(life: _Life, item: StepResult | EngineError) -> None:
    # An error ends all that follows. Behind a lost result nothing is told any more, as a master that reads them by
    # number would not take it.
    if life.error is not None or (isinstance(item, StepResult) and item.number != life.bound.oldest):
        return
    if isinstance(item, EngineError):
        life.error = item
    else:
        life.bound.take()
    life.results.put_nowait(item)


def _is_fed(held: _Held, row: Row) -> bool:
    """Does the row wait for a token on its way from the last stage to the first?"""
    return row.token is None and row.start >= len(held.new.tokens)


def _check_row(held: _Held, row: Row) -> None:
    """Hold the scheduler to the contract of `core.domain.step`. Raises: AssertionError."""
    known, end = len(held.new.tokens), row.start + row.count
    is_repeat = row.count == 1 and not row.sample and end == held.computed  # request-level: an ended request
    assert row.count >= 1, "a row without tokens"
    assert row.start == held.computed or is_repeat, "a row leaves a gap"
    assert end <= held.new.max_total_tokens, "a row past the slots reserved"
    assert end <= known or row.count == 1, "more than one token in the increment phase"
    assert is_repeat or row.sample == (end >= known), "a token is drawn too early, or not drawn"
    assert row.token is None or is_repeat or row.token == held.newest, "the input token is not the one drawn before"
    held.computed = end
