"""A simulated engine: a step cost (step_cost.py) on the running loop's clock, a seeded source of tokens, and faults.

It implements `core.domain.engine.Engine`, so the loop, the policies and `orca bench` cannot distinguish it from real
stages. It is strict where real stages may be lenient: a step that breaks the contract of `core.domain.step` fails an
assertion. So every simulated run also checks the steps that the scheduler sends. Real time passes on a normal event
loop, virtual time on `virtual_time.VirtualTimeLoop`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol
from zlib import crc32

from orca.core.domain.encoder_decoder import SOURCE_SLOTS_MAX
from orca.core.domain.engine import EngineShape, PrefixCharge
from orca.core.domain.errors import EngineError
from orca.core.domain.request import Token, slots_needed
from orca.core.domain.step import Epoch, NewRequest, Part, Refused, Row, Sampled, StageTiming, Step, StepResult
from orca.scheduler.engines.simulated_blocks import SimulatedBlocks
from orca.scheduler.engines.step_cost import LinearCost, StepCost
from orca.scheduler.engines.step_timeout import StepTimeout

StageTime = tuple[int, int, int, int]
"""A step on a stage: number of the step, stage, start and end in microseconds of the loop's clock."""


class StepFault(StrEnum):
    """A fault of one step."""

    SLOW = "slow"  # stage 0 takes ten times as long
    LOST = "lost"  # its result never comes back: the engine's own bound ends the epoch
    DEATH = "death"  # a stage is killed from outside while it runs
    CRASH = "crash"  # a stage fails from inside while it runs


class TokenSource(Protocol):
    """The model: returns a token for a request and an index, the same in every epoch (counter-based sampling)."""

    def __call__(self, request_id: str, index: int) -> int: ...


def seeded_tokens(seed: int, vocab_size: int = 32_000) -> TokenSource:
    """Return a source of tokens that look random and depend only on seed, request and index."""
    return lambda request_id, index: crc32(f"{seed}/{request_id}/{index}".encode()) % vocab_size


class RefusalSource(Protocol):
    """Returns the reason why the stages refuse a request when it would draw the token of an index, otherwise None."""

    def __call__(self, request_id: str, index: int) -> str | None: ...


def no_refusals(request_id: str, index: int) -> str | None:  # noqa: ARG001 - every source has this shape
    return None


def no_faults(step: Step) -> StepFault | None:  # noqa: ARG001 - every fault plan has this shape
    return None


@dataclass(slots=True)
class _HeldRequest:
    """A request as the stages hold it."""

    new: NewRequest
    slots: int
    known: int  # tokens that the stages have of what the decoder runs
    computed: int = 0  # positions in its KV, not those of its source
    has_run_source: bool = False
    generated: int = 0  # its next token's index
    sampled_us: int = 0  # time at which the last stage drew its newest token
    newest: int | None = None
    refusal: str | None = None  # why the stages refuse it


@dataclass(slots=True)
class _StageState:
    """The state of one epoch on the stages."""

    epoch: Epoch
    timeout: StepTimeout
    results: asyncio.Queue[StepResult | EngineError]
    free_us: list[int]  # per stage: time at which it has done all its work
    coming: deque[tuple[int, StepResult | EngineError]] = field(default_factory=deque)  # items with their due times
    held: dict[int, _HeldRequest] = field(default_factory=dict)
    blocks: SimulatedBlocks | None = None
    last_step: int = 0
    last_handle: int = 0
    slots_in_use: int = 0
    error: EngineError | None = None
    is_watched: bool = False  # a timer is set for the oldest step in flight

    def check_slots(self, shape: EngineShape, prefixes: PrefixCharge | None) -> None:
        """Raises: AssertionError for more slots than there are."""
        more = self.slots_in_use - shape.slots
        if more > 0 and prefixes is PrefixCharge.ONCE and self.blocks is not None:
            more -= self.blocks.shared * shape.block_tokens
        assert more <= 0, "more slots are in use than there are"


class SimulatedEngine:
    """Stages that take time and compute nothing.

    Args:
        shape: the shape that it reports; a step beyond its slots fails an assertion.
        cost: time per stage and step; one for every stage, or one for each, stage 0 first.
        host_us: time of a result's way to the master, which no stage spends.
        tokens: the source of "sampled" tokens.
        faults: called once for each step with rows.
        refusals: called for each row of a request until it is refused.
        refuses: called at each `form`; a reason makes it fail.
        step_timeout_us: a step that is out for so long is lost if no stage has been at work for so long either.
        form_us: time that forming takes.
        prefixes: requests may begin with KV blocks of others, which are charged so; the stages check what these hold.
    """

    def __init__(
        self,
        shape: EngineShape,
        *,
        cost: StepCost | Sequence[StepCost] | None = None,
        host_us: int = 0,
        tokens: TokenSource | None = None,
        faults: Callable[[Step], StepFault | None] = no_faults,
        refusals: RefusalSource = no_refusals,
        refuses: Callable[[Epoch], str | None] = lambda epoch: None,  # noqa: ARG005 - shape of the argument
        step_timeout_us: int = 5_000_000,
        form_us: int = 0,
        prefixes: PrefixCharge | None = None,
    ) -> None:
        self.shape = shape
        chosen: StepCost | Sequence[StepCost] = LinearCost() if cost is None else cost
        self._costs = tuple(chosen) if isinstance(chosen, Sequence) else (chosen,) * shape.stages
        assert len(self._costs) == shape.stages, "each stage has a cost"
        self._host_us = host_us
        self._tokens = seeded_tokens(0) if tokens is None else tokens
        self._faults = faults
        self._refusals = refusals
        self._refuses = refuses
        self._step_timeout_us = step_timeout_us
        self._form_us = form_us
        self._prefixes = prefixes
        self._state: _StageState | None = None
        self.slots_in_use_max = 0  # over all epochs
        self.stage_times: list[StageTime] | None = None  # recorded if it is a list

    async def form(self, epoch: Epoch) -> EngineShape:
        if self._form_us:
            await asyncio.sleep(self._form_us / 1e6)
        if reason := self._refuses(epoch):
            raise EngineError(reason)
        last = 0 if self._state is None else self._state.epoch.number
        if epoch.number <= last:
            raise EngineError(f"stage 0 has been in epoch {last}, and {epoch.number} is not above it")
        timeout = StepTimeout(self._step_timeout_us)
        self._state = _StageState(epoch, timeout, asyncio.Queue(), [self._now_us()] * self.shape.stages)
        if self._prefixes is not None:
            self._state.blocks = SimulatedBlocks(self.shape.slots // self.shape.block_tokens, self.shape.block_tokens)
        return self.shape

    async def submit(self, step: Step) -> None:
        state = self._state
        if state is None or state.epoch != step.epoch:
            raise EngineError("the epoch is over")
        if state.error is not None:
            raise state.error
        assert step.number == state.last_step + 1, "a step number is missing"
        state.last_step = step.number
        self._take_differences(state, step)
        _check_rows(state.held, step, self.shape.block_tokens)
        if state.blocks is not None:
            state.blocks.take(step)
        state.check_slots(self.shape, self._prefixes)
        fault = self._faults(step) if step.rows else None
        start_us, end_us = self._run_stages(state, step, fault)
        state.timeout.submit(step.number, now_us=self._now_us())
        self._watch(state)
        refused = self._refuse(state, step)
        sampled = tuple(self._sample(state.held[row.handle], row, end_us) for row in step.rows if row.sample)
        if state.blocks is not None:
            for each in sampled:
                state.blocks.draw(each.handle, each.token.id)
        if fault in (StepFault.DEATH, StepFault.CRASH):
            is_from_inside = fault is StepFault.CRASH
            error = EngineError(f"a stage died in step {step.number}", is_from_inside=is_from_inside)
            self._deliver_at(end_us + self._host_us, state, error)
        elif fault is not StepFault.LOST:
            timing = StageTiming(
                stage=self.shape.stages - 1,
                received_ns=self._now_us() * 1_000,
                start_ns=start_us * 1_000,
                end_ns=end_us * 1_000,
            )
            result = StepResult(
                epoch=step.epoch,
                number=step.number,
                sampled=tuple(each for each in sampled if state.held[each.handle].refusal is None),
                refused=refused,
                timing=timing,
            )
            self._deliver_at(end_us + self._host_us, state, result)

    async def results(self) -> AsyncIterator[StepResult]:
        state = self._state
        assert state is not None, "results are read before an epoch was formed"
        while True:
            item = await state.results.get()
            if isinstance(item, EngineError):
                raise item
            yield item

    async def close(self) -> None:
        self._state = None

    @property
    def slots_in_use(self) -> int:
        """The slots of all requests that the stages hold."""
        return 0 if self._state is None else self._state.slots_in_use

    def _take_differences(self, state: _StageState, step: Step) -> None:
        assert state.blocks is not None or not step.kept, "blocks are kept, and nobody shares any"
        for handle in (*step.freed, *step.kept):
            state.slots_in_use -= state.held.pop(handle).slots
        for new in step.new:
            assert new.handle > state.last_handle, "a handle is used twice"
            state.last_handle = new.handle
            _check_new(new)
            held = _HeldRequest(new, new.slots(self.shape.block_tokens), len(new.target))
            held.generated = len(new.tokens) - new.prompt_length
            if new.prefix is not None:
                assert state.blocks is not None, "a request begins with blocks of another one, and nobody shares any"
                held.computed = new.prefix.blocks * self.shape.block_tokens
            state.held[new.handle] = held
            state.slots_in_use += held.slots
        self.slots_in_use_max = max(self.slots_in_use_max, state.slots_in_use)

    def _run_stages(self, state: _StageState, step: Step, fault: StepFault | None) -> tuple[int, int]:
        """Pass the step through the stages, which run one step at a time. Returns: start and end on the last stage."""
        fed = [held.sampled_us for row in step.rows if _is_fed(held := state.held[row.handle], row)]
        start_us = end_us = max([self._now_us(), *fed])
        for stage, cost in enumerate(self._costs):
            cost_us = cost.stage_us(step)
            start_us = max(end_us, state.free_us[stage])
            end_us = start_us + (cost_us * 10 if fault is StepFault.SLOW and stage == 0 else cost_us)
            state.free_us[stage] = end_us
            if self.stage_times is not None and step.rows:
                self.stage_times.append((step.number, stage, start_us, end_us))
        return start_us, end_us

    def _refuse(self, state: _StageState, step: Step) -> tuple[Refused, ...]:
        """Return the rows of requests that are refused, from now on or since an earlier step."""
        refused = []
        for row in step.rows:
            held = state.held[row.handle]
            if held.refusal is None:
                held.refusal = self._refusals(held.new.request_id, held.generated)
            if held.refusal is not None:
                refused.append(Refused(row.handle, held.refusal))
        return tuple(refused)

    def _sample(self, held: _HeldRequest, row: Row, end_us: int) -> Sampled:
        index, held.generated = held.generated, held.generated + 1
        held.newest = self._tokens(held.new.request_id, index)
        held.sampled_us = end_us
        return Sampled(row.handle, index, Token(held.newest))

    def _deliver_at(self, due_us: int, state: _StageState, item: StepResult | EngineError) -> None:
        """Deliver the item when it is due, which is never before an earlier item."""
        state.coming.append((due_us, item))
        if len(state.coming) == 1:
            self._deliver(state)

    def _deliver(self, state: _StageState) -> None:
        # Everything that is due, in order: a late loop may see a later step due before the timer of an earlier one.
        while state.coming and state.coming[0][0] <= self._now_us():
            _put(state, state.coming.popleft()[1])
        if state.coming:
            asyncio.get_running_loop().call_at(state.coming[0][0] / 1e6, self._deliver, state)

    def _watch(self, state: _StageState) -> None:
        """Set a timer for the oldest step if none is set. When it fires, the step is lost, or the timer is set
        again."""
        if state.is_watched or state.timeout.oldest is None or state.error is not None:
            return
        still_us = max(0, min(self._now_us() - free_us for free_us in state.free_us))
        left_us = state.timeout.left_us(now_us=self._now_us(), still_us=still_us)
        if left_us <= 0:
            detail = f"step {state.timeout.oldest} did not come back within its bound"
            _put(state, EngineError(detail, is_from_inside=True))
            return

        def watch_again() -> None:
            state.is_watched = False
            self._watch(state)

        state.is_watched = True
        asyncio.get_running_loop().call_later(left_us / 1e6, watch_again)

    def _now_us(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e6)


def _put(state: _StageState, item: StepResult | EngineError) -> None:
    # Nothing follows an error. Nothing follows a lost result either: a master that reads results by number would refuse
    # it.
    if state.error is not None or (isinstance(item, StepResult) and item.number != state.timeout.oldest):
        return
    if isinstance(item, EngineError):
        state.error = item
    else:
        state.timeout.take()
    state.results.put_nowait(item)


def _is_fed(held: _HeldRequest, row: Row) -> bool:
    """Return true if the row waits for a token on its way from the last stage to the first."""
    return row.token is None and row.part is not Part.SOURCE and row.start >= held.known


# The contract of `core.domain.step`. All these functions raise AssertionError.


def _check_new(new: NewRequest) -> None:
    assert 0 < new.prompt_length <= len(new.tokens), "a request without a prompt"
    assert all(tokens > 0 for tokens in new.table_tokens), "a block table without tokens"
    assert (new.max_new_tokens is None) == (not new.decoder_prefix), "the length of a log is given for targets alone"
    if new.max_new_tokens is not None:
        needed = len(new.decoder_prefix) + new.max_new_tokens
        assert needed <= new.table_tokens[0], "more target tokens than reserved"


def _check_rows(requests: Mapping[int, _HeldRequest], step: Step, block_tokens: int) -> None:
    entering = [requests[row.handle] for row in step.rows if row.part is Part.SOURCE]
    sources = step.rows[: len(entering)]
    assert all(row.part is Part.SOURCE for row in sources), "a source row after a target row"
    targets = step.rows[len(entering) :]
    for rows in (sources, targets):
        assert len({row.handle for row in rows}) == len(rows), "two rows of one request"
    slots = sum(slots_needed(row.count, block_tokens) for row in sources)
    assert len(sources) <= 1 or slots <= SOURCE_SLOTS_MAX, "more sources than a stage has room for"
    for row in sources:
        _check_source(requests[row.handle], row)
    for row in targets:
        _check_row(requests[row.handle], row)
    assert all(held.computed > 0 for held in entering), "a source without the first row of its target"


def _check_source(held: _HeldRequest, row: Row) -> None:
    assert held.new.decoder_prefix, "a source row with a decoder-only model"
    assert not held.has_run_source, "a source runs twice"
    assert held.computed == 0, "a source after its target"
    assert (row.start, row.count) == (0, held.new.prompt_length), "a source that is not whole"
    assert not row.sample, "a source draws a token"
    assert row.token is None, "a source has an input token"
    held.has_run_source = True


def _check_row(held: _HeldRequest, row: Row) -> None:
    known, end = held.known, row.start + row.count
    assert row.part is (Part.TARGET if held.new.decoder_prefix else Part.UNSPECIFIED), "a row of another part"
    assert held.has_run_source == bool(held.new.decoder_prefix), "a target without its source"
    is_repeat = row.count == 1 and not row.sample and end == held.computed  # request-level: an ended request
    assert row.count >= 1, "a row without tokens"
    assert row.start == held.computed or is_repeat, "a row leaves a gap"
    assert end <= held.new.table_tokens[0], "a row past the slots reserved"
    assert end <= known or row.count == 1, "more than one token in the increment phase"
    assert is_repeat or row.sample == (end >= known), "a token is drawn too early, or not drawn"
    assert row.token is None or is_repeat or row.token == held.newest, "the input token is not the one drawn before"
    held.computed = end
