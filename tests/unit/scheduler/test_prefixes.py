"""Requests with common prefixes: the tokens that they compute, and the blocks that their steps name."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca.core.domain.engine import PrefixCharge
from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Epoch, PrefixBlocks, Step
from orca.scheduler.policy.admission import charged_slots
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, Policy
from orca.scheduler.policy.rra import RoundRobinPolicy
from orca.scheduler.policy.state import GroupState
from support.effort import tries
from support.scheduler.cycles import cycles
from support.scheduler.scheduler_simulation import a_request, older_ran_most, schedule_all, some_limits

POLICY = IterationPolicy()


def limits(**changes: Any) -> BatchLimits:
    return some_limits(**({"block_tokens": 4, "slots": 64, "shares_prefixes": True} | changes))


def computed(steps: list[Step]) -> dict[str, int]:
    """Return the tokens that each request computed, by its name."""
    names = {new.handle: new.request_id.removesuffix(".0") for step in steps for new in step.new}
    found = dict.fromkeys(names.values(), 0)
    for step in steps:
        for row in step.rows:
            found[names[row.handle]] += row.count
    return found


def prefixes(steps: list[Step]) -> dict[int, PrefixBlocks | None]:
    return {new.handle: new.prefix for step in steps for new in step.new}


def test_choices_of_one_prompt_compute_it_once_in_the_same_step() -> None:
    steps = schedule_all(POLICY, limits(), [a_request(name, prompt=10, new=1) for name in "ABC"])
    assert computed(steps) == {"A": 10, "B": 2, "C": 2}
    assert prefixes(steps) == {1: None, 2: (1, 2), 3: (1, 2)}
    assert len(steps[0].rows) == 3


def test_a_prompt_that_runs_in_chunks_is_shared_once_it_is_there() -> None:
    steps = schedule_all(POLICY, limits(max_batch_tokens=6), [a_request(name, prompt=10, new=1) for name in "ABC"])
    assert [[row.count for row in step.rows] for step in steps if step.rows] == [[6], [4, 2], [2]]


def test_without_the_cache_each_computes_its_prompt() -> None:
    plain = limits(shares_prefixes=False)
    steps = schedule_all(POLICY, plain, [a_request(name, prompt=10, new=1) for name in "AB"])
    assert computed(steps) == {"A": 10, "B": 10}
    assert not any(step.kept or step.evicted for step in steps)


def test_a_turn_begins_with_the_answer_before_it() -> None:
    first = a_request("A", prompt=6, new=4)
    # `schedule_all` draws the token 7. The keys and values of the last one are never computed.
    second = replace(a_request("B", prompt=1, new=1, arrival=2), prompt=(*first.prompt, 7, 7, 7, 7, 9))
    steps = schedule_all(POLICY, limits(), [first], late=[(100, second)])
    assert computed(steps) == {"A": 9, "B": 3}
    assert [step.kept for step in steps if step.kept] == [(1,)], "the second one owns no block of the index"
    assert [step.evicted for step in steps if step.evicted] == [((1, 2),)], "two of its three blocks are full"


def test_a_request_that_starts_again_meets_its_own_prompt() -> None:
    late = [(100, a_request("B", prompt=8, new=9, arrival=2))]
    steps = schedule_all(POLICY, limits(), [a_request("A", prompt=8, new=1)], late=late, logs={})
    assert computed(steps)["B"] == 4 + 8


@pytest.mark.parametrize("changes", [{"prompt_logprobs": 0}], ids=["log probabilities of the prompt"])
def test_some_requests_compute_all_and_others_may_use_it(changes: dict[str, Any]) -> None:
    requests = [a_request("A", prompt=10, new=1), a_request("B", prompt=10, new=1, **changes)]
    assert computed(schedule_all(POLICY, limits(), requests)) == {"A": 10, "B": 10}
    assert computed(schedule_all(POLICY, limits(), requests[::-1])) == {"A": 2, "B": 10}


def test_salts_separate_requests() -> None:
    requests = [
        replace(a_request(name, prompt=10, new=1), cache_salt=salt) for name, salt in zip("ABC", "xyx", strict=True)
    ]
    assert computed(schedule_all(POLICY, limits(), requests)) == {"A": 10, "B": 10, "C": 2}


def test_a_group_without_free_memory_evicts_what_was_used_least_recently() -> None:
    requests = [replace(a_request(name, new=4, arrival=at), prompt=(at,) * 8) for at, name in enumerate("ABCDE", 1)]
    steps = schedule_all(POLICY, limits(slots=32, max_batch_size=1), requests)
    # Each has two full blocks and one that is not full: that one goes at its end.
    at_ends = {handle: (handle, 2) for step in steps for handle in step.kept}
    evicted = [kept for step in steps for kept in step.evicted if kept != at_ends[kept.handle]]
    assert evicted == [(1, 1), (1, 0), (2, 1)]


def most_at_a_time(charge: PrefixCharge) -> int:
    """Return the largest batch of some requests with one prompt, each of which reserves 28 slots."""
    requests = [a_request(name, prompt=16, new=12) for name in "ABCDEFGH"]
    bounds = limits(slots=88, max_batch_size=8, prefix_charge=charge)
    return max(len(step.rows) for step in schedule_all(POLICY, bounds, requests))


def test_more_requests_run_if_shared_blocks_are_charged_once() -> None:
    """The first one takes 28 slots, and each of the others 16: it shares three blocks."""
    assert most_at_a_time(PrefixCharge.EACH) == 3
    # The fourth finds 28 slots free and keeps 16 of them. The fifth finds 12.
    assert most_at_a_time(PrefixCharge.ONCE) == 4


def test_a_group_of_requests_that_end_together_leaves_nothing_charged() -> None:
    state = GroupState(prefixes=limits(prefix_charge=PrefixCharge.ONCE).make_prefixes())
    entries = [
        state.add(replace(a_request(name, prompt=10, new=2), arrival=at), Claim(1, "g/1"))
        for at, name in enumerate("ABC")
    ]
    state.schedule(POLICY.select(state, limits(prefix_charge=PrefixCharge.ONCE)), Epoch(1, "g"))
    assert state.reserved == 3 * 12
    assert charged_slots(state) == 12 + 2 * 4
    assert [charged_slots(state, entries[:ended]) for ended in range(4)] == [20, 16, 12, 0]


policies = st.just(IterationPolicy()) | st.just(RoundRobinPolicy())


@st.composite
def some_worlds(draw: st.DrawFn) -> tuple[Policy, BatchLimits, list[Request]]:
    policy = draw(policies)
    stages, size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    is_chunked = isinstance(policy, IterationPolicy) and draw(st.booleans())
    found = limits(
        stages=stages,
        max_batch_size=size,
        block_tokens=draw(st.sampled_from([1, 2, 4])),
        slots=draw(st.integers(5, 12)) * 4,
        prefetch=draw(st.integers(0, 1)),
        max_batch_tokens=size + draw(st.integers(1, 5)) if is_chunked else None,
        cycle=draw(cycles(stages * size)),
        prefix_charge=draw(st.sampled_from(PrefixCharge)),
    )
    prompts = draw(
        st.lists(
            st.tuples(st.lists(st.sampled_from([7, 8]), min_size=1, max_size=9), st.integers(1, 6)),
            min_size=1,
            max_size=9,
        )
    )
    requests = [
        replace(a_request(chr(65 + i), new=new), prompt=tuple(tokens), cache_salt=draw(st.none() | st.just("s")))
        for i, (tokens, new) in enumerate(prompts)
    ]
    return policy, found, requests


@settings(max_examples=tries(300))
@given(world=some_worlds(), turns=st.lists(st.integers(0, 60), min_size=9, max_size=9))
def test_stages_always_have_the_blocks_and_the_tokens_that_a_step_names(
    world: tuple[Policy, BatchLimits, list[Request]], turns: list[int]
) -> None:
    policy, found, requests = world
    late = [
        (turn, replace(request, arrival=number))
        for number, (turn, request) in enumerate(zip(turns, requests, strict=False), 1)
    ]
    schedule_all(policy, found, [], late=sorted(late, key=lambda each: each[0]))


@settings(max_examples=tries(300))
@given(world=some_worlds())
def test_without_hits_the_batches_are_those_of_a_group_without_the_cache(
    world: tuple[Policy, BatchLimits, list[Request]],
) -> None:
    policy, found, requests = world
    # All prompts differ from their first token on.
    differing = [replace(each, prompt=(100 + i, *each.prompt), cache_salt=None) for i, each in enumerate(requests)]
    steps = schedule_all(policy, found, differing)
    plain = schedule_all(policy, replace(found, shares_prefixes=False), differing)
    assert [(step.new, step.rows) for step in steps] == [(step.new, step.rows) for step in plain]


@settings(max_examples=tries(300))
@given(world=some_worlds())
def test_an_earlier_request_has_run_at_least_as_many_iterations(
    world: tuple[Policy, BatchLimits, list[Request]],
) -> None:
    _, found, requests = world
    assert older_ran_most(schedule_all(IterationPolicy(), found, requests))
