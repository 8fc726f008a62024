"""Properties of every schedule, over random requests, limits and early ends; the engine is played by hand.

They hold with a prefix cache, too: many prompts begin alike, and some of them with tokens that others have drawn.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from zlib import crc32

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from orca.core.domain.request import Request, slots_needed
from orca.core.domain.step import Step
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, Policy
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy
from support.effort import tries
from support.scheduler.cycles import cycles
from support.scheduler.scheduler_simulation import a_request, older_ran_most, schedule_all, some_limits

EXAMPLES = tries(300)


with_and_without_cache = pytest.mark.parametrize("shares", [False, True], ids=["no cache", "cache"])


@st.composite
def some_requests(draw: st.DrawFn) -> list[Request]:
    """Prompts of up to 9 tokens that begin alike for some length; 7 is the token that the engine draws."""
    common = draw(st.lists(st.sampled_from([7, 8]), min_size=9, max_size=9))
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=9))
    return [
        replace(a_request(chr(65 + i), new=new), prompt=tuple((common[:alike] + [9] * 9)[:length]))
        for i, (length, alike, new) in enumerate(sizes)
    ]


def shared_tokens(steps: Sequence[Step], limits: BatchLimits) -> dict[int, int]:
    """Return the tokens that each request begins with and does not compute, by its handle."""
    new = chain.from_iterable(step.new for step in steps)
    return {each.handle: each.prefix.blocks * limits.block_tokens if each.prefix else 0 for each in new}


def names(steps: Sequence[Step]) -> list[list[int]]:
    return [[row.handle for row in step.rows] for step in steps if step.rows]


@st.composite
def limits_for(draw: st.DrawFn, *, chunks: bool = False) -> BatchLimits:
    block_tokens = draw(st.sampled_from([1, 4]))
    max_batch_size = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 3))
    return BatchLimits(
        stages=stages,
        max_batch_size=max_batch_size,
        slots=draw(st.integers(4, 12)) * 4,
        block_tokens=block_tokens,
        max_model_len=15,
        prefetch=draw(st.integers(0, 1)),
        max_batch_tokens=max_batch_size + draw(st.integers(1, 5)) if chunks else None,
        cycle=draw(cycles(stages * max_batch_size)),
    )


policies = st.one_of(
    st.just(IterationPolicy()),
    st.just(RoundRobinPolicy()),
    st.builds(
        RequestLevelPolicy,
        microbatch_size=st.none() | st.integers(1, 2),
        habits=st.builds(Habits, **{name: st.booleans() for name in Habits.__dataclass_fields__}),
    ),
)


def early_ends(seed: int) -> Callable[[Request, int], bool]:
    return lambda request, index: crc32(f"{seed}/{request.parent}/{index}".encode()) % 5 == 0


@with_and_without_cache
@settings(max_examples=EXAMPLES)
@given(requests=some_requests(), limits=limits_for(), policy=policies, seed=st.integers(0, 99), ends=st.booleans())
def test_every_request_runs_to_its_end_and_no_limit_is_exceeded(
    shares: bool, requests: list[Request], limits: BatchLimits, policy: Policy, seed: int, ends: bool
) -> None:
    limits = replace(limits, shares_prefixes=shares)
    steps = schedule_all(policy, limits, requests, **({"ends": early_ends(seed)} if ends else {}))
    drawn = Counter(row.handle for step in steps for row in step.rows if row.sample)
    started = {new.handle: new for step in steps for new in step.new}
    assert len(started) == len(requests)
    for new in started.values():
        length = new.max_total_tokens if ends else next(r for r in requests if r.id == new.request_id).max_new_tokens
        assert 1 <= drawn[new.handle] <= length
        assert ends or drawn[new.handle] == length
    assert all(len(step.rows) <= limits.max_batch_size for step in steps)
    assert sorted(handle for step in steps for handle in (*step.freed, *step.kept)) == sorted(started)


@with_and_without_cache
@settings(max_examples=EXAMPLES)
@given(requests=some_requests(), limits=limits_for(), policy=policies)
def test_without_early_ends_prefetch_does_not_change_the_sequence_of_batches(
    shares: bool, requests: list[Request], limits: BatchLimits, policy: Policy
) -> None:
    """A drawn token is in the cache a step later with prefetch, so a request may compute more of its own."""
    limits = replace(limits, shares_prefixes=shares)

    def shape(steps: list[Step]) -> list[object]:
        if shares:
            return [*names(steps)]
        return [[(row.handle, row.start, row.count) for row in step.rows] for step in steps if step.rows]

    plain = schedule_all(policy, replace(limits, prefetch=0), requests)
    assert shape(schedule_all(policy, replace(limits, prefetch=1), requests)) == shape(plain)


@settings(max_examples=EXAMPLES)
@given(requests=some_requests(), limits=limits_for(), policy=policies, seed=st.integers(0, 99))
def test_a_hit_moves_no_request(requests: list[Request], limits: BatchLimits, policy: Policy, seed: int) -> None:
    """Each batch has the requests that it has without the cache, if prompts run whole."""
    steps, plain = (
        schedule_all(policy, replace(limits, shares_prefixes=shares), requests, ends=early_ends(seed))
        for shares in (True, False)
    )
    assert names(steps) == names(plain)


def test_requests_of_these_tests_begin_with_blocks_of_others() -> None:
    def has_hits(world: tuple[list[Request], BatchLimits]) -> bool:
        limits = replace(world[1], shares_prefixes=True)
        return sum(map(bool, shared_tokens(schedule_all(IterationPolicy(), limits, world[0]), limits).values())) > 2

    find(st.tuples(some_requests(), limits_for()), has_hits, settings=settings(phases=[Phase.generate]))


@with_and_without_cache
@settings(max_examples=EXAMPLES)
@given(requests=some_requests(), limits=limits_for(), seed=st.integers(0, 99))
def test_an_earlier_request_has_run_at_least_as_many_iterations(
    shares: bool, requests: list[Request], limits: BatchLimits, seed: int
) -> None:
    limits = replace(limits, shares_prefixes=shares)
    assert older_ran_most(schedule_all(IterationPolicy(), limits, requests, ends=early_ends(seed)))


@with_and_without_cache
@settings(max_examples=EXAMPLES)
@given(
    requests=some_requests(),
    turns=st.lists(st.integers(0, 20), min_size=9, max_size=9),
    order=st.permutations(range(1, 10)),
    limits=limits_for() | limits_for(chunks=True),
    policy=st.just(IterationPolicy()) | st.just(RoundRobinPolicy()),
)
def test_older_requests_that_arrive_late_cause_no_deadlock_and_precede_younger_waiting_ones(
    shares: bool, requests: list[Request], turns: list[int], order: list[int], limits: BatchLimits, policy: Policy
) -> None:
    limits = replace(limits, shares_prefixes=shares)
    if isinstance(policy, RoundRobinPolicy):
        limits = replace(limits, max_batch_tokens=None)
    arrivals = {request.id: arrival for request, arrival in zip(requests, order, strict=False)}
    late = [(turns[i], replace(request, arrival=order[i])) for i, request in enumerate(requests)]
    steps = schedule_all(policy, limits, [], late=late)
    admitted = [[arrivals[new.request_id] for new in step.new] for step in steps]
    assert sorted(chain.from_iterable(admitted)) == sorted(arrivals.values())
    assert all(ages == sorted(ages) for ages in admitted)


@with_and_without_cache
@settings(max_examples=EXAMPLES)
@given(requests=some_requests(), limits=limits_for(), ends=st.booleans(), seed=st.integers(0, 99))
def test_round_robin_allocation_never_mixes_prompts_with_increments(
    shares: bool, requests: list[Request], limits: BatchLimits, ends: bool, seed: int
) -> None:
    limits = replace(limits, shares_prefixes=shares)
    steps = schedule_all(RoundRobinPolicy(), limits, requests, **({"ends": early_ends(seed)} if ends else {}))
    lengths = {new.handle: len(new.tokens) for step in steps for new in step.new}
    shared = shared_tokens(steps, limits)
    assert limits.cycle is not None
    for step in steps:
        known = [row for row in step.rows if row.start < lengths[row.handle]]
        whole = [(shared[row.handle], lengths[row.handle] - shared[row.handle]) for row in known]
        assert [(row.start, row.count) for row in known] == whole, "a prompt did not run whole"
        assert len(known) in (0, len(step.rows)), "an encode and a decode iteration in one step"
        assert all(row.sample for row in step.rows)


@with_and_without_cache
@settings(max_examples=EXAMPLES)
@given(requests=some_requests(), limits=limits_for(chunks=True))
def test_chunks_keep_to_the_bound_and_draw_once_at_the_end_of_the_prompt(
    shares: bool, requests: list[Request], limits: BatchLimits
) -> None:
    limits = replace(limits, shares_prefixes=shares)
    steps = schedule_all(IterationPolicy(), limits, requests)
    shared = shared_tokens(steps, limits)
    assert limits.max_batch_tokens is not None
    assert all(step.tokens <= limits.max_batch_tokens for step in steps)
    lengths = {new.handle: len(new.tokens) for step in steps for new in step.new}
    for handle, length in lengths.items():
        rows = [row for step in steps for row in step.rows if row.handle == handle and row.start < length]
        done = [shared[handle] + sum(row.count for row in rows[:i]) for i in range(len(rows) + 1)]
        assert [*(row.start for row in rows), length] == done
        assert [row.sample for row in rows] == [False] * (len(rows) - 1) + [True]


@with_and_without_cache
@settings(max_examples=EXAMPLES)
@given(requests=some_requests(), limits=limits_for(), policy=policies)
def test_no_step_holds_more_slots_than_the_group_has(
    shares: bool, requests: list[Request], limits: BatchLimits, policy: Policy
) -> None:
    limits = replace(limits, shares_prefixes=shares)
    held: dict[int, int] = {}
    for step in schedule_all(policy, limits, requests):
        for handle in (*step.freed, *step.kept):
            del held[handle]
        held |= {new.handle: slots_needed(new.max_total_tokens, limits.block_tokens) for new in step.new}
        assert sum(held.values()) <= limits.slots


@with_and_without_cache
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_request_is_in_at_most_one_batch_in_flight_and_with_prefetch_in_two(prefetch: int, shares: bool) -> None:
    limits = some_limits(
        stages=2, max_batch_size=2, slots=64, max_model_len=15, prefetch=prefetch, shares_prefixes=shares
    )
    steps = schedule_all(IterationPolicy(), limits, [a_request(name, new=5) for name in "ABC"])
    in_flight = limits.stages + prefetch
    windows = [steps[i : i + in_flight] for i in range(len(steps))]
    together = max(sum(row.handle == 1 for step in window for row in step.rows) for window in windows)
    assert together == 1 + prefetch
