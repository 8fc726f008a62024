"""Properties of every schedule of requests with sources, over random requests, limits and early ends.

The engine is played by hand, and a simulated one checks all steps afterwards.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from orca.core.domain.engine import EngineShape
from orca.core.domain.request import Request, slots_needed
from orca.core.domain.step import Epoch, NewRequest, Part, Step
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import SimulatedEngine
from orca.scheduler.policy.batch import Batch
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, Policy
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy
from orca.scheduler.policy.state import GroupState
from support.effort import tries
from support.scheduler.cycles import cycles
from support.scheduler.scheduler_simulation import a_request, by_index, schedule_all

EXAMPLES = tries(200)
NAMES = "ABCDEFGHI"


@dataclass(frozen=True)
class Load:
    """Requests, and the tokens that earlier claims of each have logged."""

    requests: list[Request]
    logs: dict[str, int]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    requests, logs = [], {}
    for name in NAMES[: draw(st.integers(1, len(NAMES)))]:
        new = draw(st.integers(1, 6))
        request = a_request(name, prompt=draw(st.integers(1, 9)), prefix=draw(st.integers(1, 3)), new=new)
        requests.append(request)
        logs[request.id] = draw(st.sampled_from([0, 0, draw(st.integers(0, new - 1))]))
    return Load(requests, logs)


@st.composite
def limits_for(draw: st.DrawFn, *, has_bound: bool | None = None) -> BatchLimits:
    max_batch_size, stages = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    is_bounded = draw(st.booleans()) if has_bound is None else has_bound
    return BatchLimits(
        stages=stages,
        max_batch_size=max_batch_size,
        slots=draw(st.integers(6, 14)) * 4,
        block_tokens=draw(st.sampled_from([1, 4])),
        max_model_len=18,
        prefetch=draw(st.integers(0, 1)),
        max_batch_tokens=max_batch_size + draw(st.integers(1, 15)) if is_bounded else None,
        max_source_slots=draw(st.integers(3, 20)),
        is_encoder_decoder=True,
        cycle=draw(cycles(stages * max_batch_size)),
    )


baselines = st.builds(
    RequestLevelPolicy,
    microbatch_size=st.none() | st.integers(1, 2),
    habits=st.builds(Habits, **{name: st.booleans() for name in Habits.__dataclass_fields__}),
)


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[Policy, BatchLimits]:
    policy: Policy = draw(st.just(IterationPolicy()) | st.just(RoundRobinPolicy()) | baselines)
    return policy, draw(limits_for(has_bound=None if isinstance(policy, IterationPolicy) else False))


def replay(steps: Sequence[Step], limits: BatchLimits) -> None:
    """Run the steps on a simulated engine, which checks each of them."""
    shape = EngineShape(
        stages=limits.stages,
        slots=limits.slots,
        block_tokens=limits.block_tokens,
        max_model_len=limits.max_model_len,
    )

    async def run() -> None:
        engine = SimulatedEngine(shape, tokens=by_index(lambda _: 7))
        await engine.form(Epoch(1, "test"))
        for step in steps:
            await engine.submit(step)

    virtual_time.run(run())


def ends_early(request: Request, index: int) -> bool:
    return (ord(request.parent) + index) % 5 == 0


@settings(max_examples=EXAMPLES)
@given(load=loads(), chosen=settings_of(), is_early=st.booleans())
def test_every_request_runs_to_its_end_and_every_step_keeps_the_contract(
    load: Load, chosen: tuple[Policy, BatchLimits], is_early: bool
) -> None:
    policy, limits = chosen
    kinds = {"ends": ends_early} if is_early else {}
    steps = schedule_all(policy, limits, load.requests, logs=load.logs, **kinds)
    replay(steps, limits)
    started = {new.handle: new for step in steps for new in step.new}
    assert sorted(new.request_id for new in started.values()) == sorted(load.logs)
    assert Counter(row.handle for step in steps for row in step.rows if row.part is Part.SOURCE) == dict.fromkeys(
        started, 1
    )
    drawn = Counter(row.handle for step in steps for row in step.rows if row.sample)
    for handle, new in started.items():
        left = (new.max_new_tokens or 0) - load.logs[new.request_id]
        assert 1 <= drawn[handle] <= left
        assert is_early or drawn[handle] == left
    assert sorted(handle for step in steps for handle in step.freed) == sorted(started)


@settings(max_examples=EXAMPLES)
@given(load=loads(), chosen=settings_of())
def test_no_limit_is_exceeded_but_by_a_single_source_that_does_not_fit(
    load: Load, chosen: tuple[Policy, BatchLimits]
) -> None:
    policy, limits = chosen
    steps = schedule_all(policy, limits, load.requests, logs=load.logs)
    slots: dict[int, int] = {}
    news: dict[int, NewRequest] = {}
    for step in steps:
        sources = [row for row in step.rows if row.part is Part.SOURCE]
        assert len(step.rows) - len(sources) <= limits.max_batch_size
        held = sum(slots_needed(row.count, limits.block_tokens) for row in sources)
        assert len(sources) <= 1 or held <= limits.max_source_slots
        news |= {new.handle: new for new in step.new}
        if limits.max_batch_tokens is not None and step.tokens > limits.max_batch_tokens:
            (source,) = sources
            own = source.count + len(news[source.handle].target)
            assert step.tokens < max(limits.max_batch_tokens, own) + limits.max_batch_size
        for handle in step.freed:
            del slots[handle]
        slots |= {new.handle: new.slots(limits.block_tokens) for new in step.new}
        assert sum(slots.values()) <= limits.slots


@settings(max_examples=EXAMPLES)
@given(load=loads(), chosen=settings_of())
def test_without_early_ends_prefetch_does_not_change_the_sequence_of_batches(
    load: Load, chosen: tuple[Policy, BatchLimits]
) -> None:
    def shape(steps: list[Step]) -> list[object]:
        return [[(row.handle, row.start, row.count, row.part) for row in step.rows] for step in steps if step.rows]

    policy, limits = chosen
    plain = schedule_all(policy, replace(limits, prefetch=0), load.requests, logs=load.logs)
    assert shape(schedule_all(policy, replace(limits, prefetch=1), load.requests, logs=load.logs)) == shape(plain)


@settings(max_examples=EXAMPLES)
@given(load=loads(), limits=limits_for())
def test_an_earlier_request_has_run_at_least_as_many_iterations(load: Load, limits: BatchLimits) -> None:
    steps = schedule_all(IterationPolicy(), limits, load.requests, logs=load.logs, ends=ends_early)
    runs: Counter[int] = Counter()
    last = {row.handle: step.number for step in steps for row in step.rows}
    for step in steps:
        runs.update(row.handle for row in step.rows if row.part is Part.TARGET)
        alive = [handle for handle in sorted(last) if last[handle] >= step.number]
        assert [runs[handle] for handle in alive] == sorted((runs[handle] for handle in alive), reverse=True)


class WatchedPolicy(IterationPolicy):
    """Algorithm 1, with a check of the reason for which each request waits."""

    def select(self, state: GroupState, limits: BatchLimits) -> Batch:
        batch = super().select(state, limits)
        entering = [admission.request for admission in batch.admitted]
        waiting = [entry for entry in state.requests if not entry.is_admitted and entry not in entering]
        if entering and waiting:
            assert entering[-1].request.arrival < waiting[0].request.arrival, (
                "a younger one entered before an older one"
            )
        if waiting:
            self._check_reason(state, limits, batch)
        return batch

    def _check_reason(self, state: GroupState, limits: BatchLimits, batch: Batch) -> None:
        """Raises: AssertionError if the oldest waiting request could have entered."""
        entering = [admission.request for admission in batch.admitted]
        oldest = next(entry for entry in state.requests if not entry.is_admitted and entry not in entering)
        freed, admitted = sum(entry.slots for entry in batch.freed), sum(each.slots for each in batch.admitted)
        has_slots = oldest.request.slots(limits.block_tokens) <= limits.slots - state.reserved + freed - admitted
        if len(batch.rows) == limits.max_batch_size or not has_slots:
            return
        sources = sum(entry.source_tokens for entry in entering)
        own = oldest.source_tokens + len(oldest.known)
        block_tokens = limits.block_tokens
        held = sum(slots_needed(entry.source_tokens, block_tokens) for entry in entering)
        if sources and held + slots_needed(oldest.source_tokens, block_tokens) > limits.max_source_slots:
            return
        assert entering, "the oldest waits for tokens"
        assert limits.max_batch_tokens is not None, "it waits for nothing"
        used = sources + sum(row.count for row in batch.rows)
        assert used + own > limits.max_batch_tokens, "the step has tokens for it"


@settings(max_examples=EXAMPLES)
@given(
    load=loads(),
    turns=st.lists(st.integers(0, 20), min_size=9, max_size=9),
    order=st.permutations(range(1, 10)),
    limits=limits_for(),
)
def test_the_oldest_moves_on_and_no_younger_one_passes_it(
    load: Load, turns: list[int], order: list[int], limits: BatchLimits
) -> None:
    """Requests arrive at any turn, older ones after younger ones too, as after the death of a group."""
    late = [(turns[i], replace(request, arrival=order[i])) for i, request in enumerate(load.requests)]
    steps = schedule_all(WatchedPolicy(), limits, [], late=late)
    replay(steps, limits)
    assert sorted(new.request_id for step in steps for new in step.new) == sorted(load.logs)
