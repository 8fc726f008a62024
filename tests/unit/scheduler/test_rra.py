"""Round-robin allocation: the cycle, its skips and bubbles, and the adjustments of its encode batch."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import SettingError
from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Epoch, Part
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.batch import Batch, GroupRequest
from orca.scheduler.policy.cycle import CycleControls, CyclePhase, CyclePosition
from orca.scheduler.policy.policy import BatchBounds, BatchLimits, next_batch
from orca.scheduler.policy.rra import RoundRobinPolicy
from orca.scheduler.policy.state import GroupState
from support.effort import tries
from support.scheduler.cycles import a_random_cycle
from support.scheduler.scheduler_simulation import (
    Simulation,
    a_request,
    a_shape,
    a_simulation,
    batches,
    by_index,
    lengths,
    schedule_all,
    serving,
    some_limits,
    tokens_at_least,
    virtually,
)

RRA = RoundRobinPolicy()


def a_cycle(encode_batch: int = 2, decode_steps: int = 2, **planned: int) -> CycleControls:
    return CycleControls(encode_batch=encode_batch, decode_steps=decode_steps, **planned)


def limits_of(cycle: CycleControls, **changes: Any) -> BatchLimits:
    return some_limits(cycle=cycle, **changes)


def named(names: str, *, new: int = 4, **sizes: int) -> list[Request]:
    return [a_request(name, new=new, **sizes) for name in names]


def run(cycle: CycleControls, requests: Sequence[Request], **changes: Any) -> list[str]:
    """Return the names in each step, all requests being there from the beginning."""
    return batches(schedule_all(RRA, limits_of(cycle, **changes), requests))


class ByHand:
    """A group whose steps return when the test says so."""

    def __init__(self, limits: BatchLimits, requests: Sequence[Request] = ()) -> None:
        self.limits = limits
        self.state = GroupState()
        self.arrivals = 0
        for request in requests:
            self.add(request)

    def add(self, request: Request, **kinds: Any) -> GroupRequest:
        self.arrivals += 1
        return self.state.add(replace(request, arrival=self.arrivals), Claim(1, "c"), **kinds)

    def submit(self) -> str:
        """Submit all that can go out. Returns: the batches, such as `AB C`; empty if the next one must wait."""
        names = []
        while (batch := next_batch(RRA, self.state, self.limits)).rows:
            names.append("".join(row.request.request.parent for row in batch.rows))
            self.state.schedule(batch, Epoch(1, "test"))
            self.state.check(self.limits.block_tokens)
        return " ".join(names)

    def read(self) -> str:
        """Take the oldest result, whose tokens end nothing early, and submit again."""
        for row in self.state.read().rows:
            self.state.receive(row.request, 7)
        return self.submit()


# The cycle


@pytest.mark.parametrize("prefetch", [0, 1])
def test_with_one_stage_a_cycle_is_one_encode_and_then_the_decode_iterations(prefetch: int) -> None:
    found = run(a_cycle(), named("ABCD", new=5), max_batch_size=4, prefetch=prefetch)
    #                encode, decode twice    encode, decode twice       A and B have their fifth token
    assert found == ["AB", "AB", "AB", "CD", "ABCD", "ABCD", "CD", "CD"]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_with_two_stages_each_iteration_runs_in_two_micro_batches(prefetch: int) -> None:
    found = run(a_cycle(4, 1), named("ABCDEF", new=3), stages=2, prefetch=prefetch)
    assert found == ["AB", "CD", "AB", "CD", "E", "F", "ABE", "CDF", "E", "F"]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_with_three_stages_a_request_stays_in_its_micro_batch(prefetch: int) -> None:
    found = run(a_cycle(3, 2), named("ABCDE", new=4), stages=3, prefetch=prefetch)
    assert found == ["A", "B", "C", *"ABC" * 2, "D", "E", "AD", "BE", "C", "D", "E", "D", "E"]


@pytest.mark.parametrize("new", [1, 2, 5])
def test_the_encode_iteration_draws_the_first_token_of_an_answer(new: int) -> None:
    steps = schedule_all(RRA, limits_of(a_cycle()), [a_request("A", prompt=6, new=new)])
    assert lengths(steps) == [[6], *[[1]] * (new - 1)]
    assert [row.sample for step in steps for row in step.rows] == [True] * new


def test_a_decode_phase_without_requests_is_skipped() -> None:
    assert run(a_cycle(2, 9), named("ABCDE", new=1)) == ["AB", "CD", "E"]


def test_an_encode_phase_without_requests_is_skipped() -> None:
    assert run(a_cycle(2, 1), named("AB", new=4)) == ["AB"] * 4


def test_an_encode_phase_without_free_slots_is_skipped() -> None:
    # A and B have 7 slots each.
    assert run(a_cycle(2, 1), named("ABC", new=4), slots=14) == ["AB"] * 4 + ["C"] * 4


def test_a_request_that_does_not_fit_stops_those_after_it() -> None:
    requests = [a_request("A", new=4), a_request("B", prompt=9, new=1), a_request("C", prompt=1, new=1)]
    assert run(a_cycle(3, 9), requests, slots=12) == ["A", "A", "A", "A", "BC"]


def test_a_micro_batch_without_requests_is_skipped_and_the_smallest_one_gets_the_next() -> None:
    group = ByHand(limits_of(a_cycle(4, 1), stages=3, prefetch=0), named("A", new=9))
    assert group.submit() == "A"
    assert group.submit() == "", "its first decode iteration waits for its encode iteration"
    group.add(a_request("B", new=9))
    assert group.submit() == "B", "the encode iteration goes on with its second micro-batch"
    assert group.read() == "A"
    group.add(a_request("C", new=9))
    assert group.submit() == "", "the decode iteration has begun"
    # The decode iteration ends with B. Then C enters beside them, and the turn of A waits for nothing.
    assert group.read() == "B C"
    assert [entry.microbatch for entry in group.state.requests] == [0, 1, 2]


def test_no_request_waits_for_an_encode_batch_to_fill_up() -> None:
    group = ByHand(limits_of(a_cycle(4, 2), prefetch=0), named("A", new=9))
    assert [group.submit(), group.read(), group.read()] == ["A", "A", "A"]
    group.add(a_request("B", new=9))
    assert group.read() == "B", "one of four"


def test_the_micro_batch_whose_turn_it_is_makes_the_others_wait() -> None:
    group = ByHand(limits_of(a_cycle(2, 4), stages=2, prefetch=0), named("AB", new=9))
    assert group.submit() == "A B"
    assert group.read() == "A"
    assert group.submit() == "", "B has not returned"
    assert group.read() == "B"


def test_with_prefetch_the_oldest_step_counts_as_returned() -> None:
    group = ByHand(limits_of(a_cycle(2, 4), stages=2, prefetch=1), named("AB", new=9))
    assert group.submit() == "A B A"
    assert group.read() == "B"


def test_a_batch_that_is_dropped_changes_nothing() -> None:
    group = ByHand(limits_of(a_cycle(2, 1), stages=2), named("AB"))
    before = group.state.position
    first = RRA.select(group.state, group.limits)
    assert RRA.select(group.state, group.limits) == first
    assert group.state.position == before
    group.state.schedule(first, Epoch(1, "test"))
    assert group.state.position == CyclePosition(microbatch=1, entered=1, entered_tokens=3)
    group.submit()
    assert group.state.position == CyclePosition(phase=CyclePhase.DECODE)


def test_a_batch_of_frees_alone_leaves_the_cycle_where_it_is() -> None:
    group = ByHand(limits_of(a_cycle(1, 3), prefetch=0), named("A", new=1))
    assert group.submit() == "A"
    position = group.state.position
    group.read()
    batch = next_batch(RRA, group.state, group.limits)
    assert (len(batch.freed), batch.rows) == (1, ())
    group.state.schedule(batch, Epoch(1, "test"))
    assert group.state.position == position
    assert not group.state.requests


def test_an_idle_group_begins_with_an_encode_iteration_wherever_it_stopped() -> None:
    group = ByHand(limits_of(a_cycle(1, 5), stages=2, prefetch=0), named("A", new=2))
    group.submit()
    group.read()
    group.read()
    assert group.state.position.phase is CyclePhase.DECODE
    assert RRA.free_capacity(group.state, group.limits).requests == 1
    group.add(a_request("B"))
    assert group.submit() == "B"


def test_requests_enter_in_the_order_of_claims() -> None:
    """The order is that of `state.requests`, whatever made it."""
    group = ByHand(limits_of(a_cycle(1, 1), prefetch=0), named("ABC"))
    group.state.requests.reverse()
    assert RRA.select(group.state, group.limits).rows[0].request.request.parent == "C"


# The bounds


def test_a_micro_batch_has_at_most_the_largest_number_of_requests_of_a_step() -> None:
    found = run(a_cycle(4, 1), named("ABCDEFG", new=3), stages=2, max_batch_size=2)
    assert max(map(len, found)) == 2
    assert found[:4] == ["AB", "CD", "AB", "CD"]


def test_after_a_smaller_bound_the_oldest_of_a_micro_batch_go_on() -> None:
    group = ByHand(limits_of(a_cycle(4, 9), prefetch=0), named("ABCD", new=3))
    assert group.submit() == "ABCD"
    group.limits = replace(group.limits, max_batch_size=2, cycle=a_cycle(2, 9))
    assert [group.read() for _ in range(4)] == ["AB", "AB", "CD", "CD"]


def test_controls_that_change_in_the_middle_of_a_cycle_are_in_force_with_the_next_batch() -> None:
    group = ByHand(limits_of(a_cycle(1, 9), stages=2, prefetch=0), named("ABCDEF", new=30))
    assert group.submit() == "A"
    assert group.read() == "A"
    group.limits = replace(group.limits, cycle=a_cycle(4, 2))
    # The second decode iteration is the last one now. The next encode iteration has four places, and waits for nobody.
    assert group.read() == "A BC"
    assert group.read() == "DE"
    assert group.read() == "ABC"


def test_a_shorter_decode_phase_ends_after_the_iteration_that_has_begun() -> None:
    group = ByHand(limits_of(a_cycle(2, 9), stages=2, prefetch=0), named("AB", new=30))
    assert [group.submit(), group.read()] == ["A B", "A"]
    group.limits = replace(group.limits, cycle=a_cycle(2, 1))
    group.add(a_request("C"))
    assert group.read() == "B", "each micro-batch has its first decode iteration"
    assert group.read() == "C"


def test_a_longer_decode_phase_is_in_force_at_once() -> None:
    group = ByHand(limits_of(a_cycle(1, 1), prefetch=0), named("AB", new=30))
    assert [group.submit(), group.read()] == ["A", "A"]
    group.limits = replace(group.limits, cycle=a_cycle(1, 3))
    assert [group.read() for _ in range(4)] == ["A", "A", "B", "AB"]


class ChangingPolicy(RoundRobinPolicy):
    """The policy under bounds that change with every step."""

    def __init__(self, bounds: Sequence[BatchBounds]) -> None:
        object.__setattr__(self, "bounds", bounds)

    def select(self, state: GroupState, limits: BatchLimits) -> Batch:
        bounds: Sequence[BatchBounds] = object.__getattribute__(self, "bounds")
        return super().select(state, limits.with_bounds(bounds[state.submitted % len(bounds)]))


def test_every_request_ends_while_bounds_change_with_every_step() -> None:
    for seed in range(tries(150)):
        chance = random.Random(seed)
        sizes = [chance.randint(1, 4) for _ in range(chance.randint(1, 6))]
        bounds = [BatchBounds(max_batch_size=size, cycle=a_random_cycle(chance, size)) for size in sizes]
        requests = [a_request(name, prompt=chance.randint(1, 9), new=chance.randint(1, 6)) for name in "ABCDEFGHI"]
        limits = some_limits(stages=chance.randint(1, 3), slots=chance.choice([16, 64]), prefetch=chance.randint(0, 1))
        steps = schedule_all(ChangingPolicy(bounds), limits, requests)
        drawn = Counter(row.handle for step in steps for row in step.rows if row.sample)
        expected = {new.handle: new for step in steps for new in step.new}
        lengths_of = {request.id: request.max_new_tokens for request in requests}
        assert drawn == {handle: lengths_of[new.request_id] for handle, new in expected.items()}, f"seed {seed}"
        assert len(expected) == len(requests), f"seed {seed}"


# Slots and claims


def test_claims_are_for_the_next_encode_iteration_only() -> None:
    group = ByHand(limits_of(a_cycle(3, 2), stages=2, max_batch_size=4, slots=70, prefetch=0))
    assert RRA.free_capacity(group.state, group.limits).requests == 3
    group.add(a_request("A", new=7))
    capacity = RRA.free_capacity(group.state, group.limits)
    assert (capacity.requests, capacity.slots) == (2, 60), "one waits for ten slots"
    assert group.submit() == "A"
    assert RRA.free_capacity(group.state, group.limits).requests == 2, "this encode iteration has two more places"
    assert group.read() == "A"
    assert RRA.free_capacity(group.state, group.limits).requests <= 0, "another group may run it earlier"
    assert group.read() == "A"
    assert RRA.free_capacity(group.state, group.limits).requests == 3, "for the next one, from its last decode turn on"


def test_claims_stop_when_those_that_wait_fill_the_bound_of_tokens() -> None:
    group = ByHand(limits_of(a_cycle(4, 1, encode_tokens=10), prefetch=0), named("A", prompt=6))
    assert RRA.free_capacity(group.state, group.limits).requests == 3
    group.add(a_request("B", prompt=6))
    assert RRA.free_capacity(group.state, group.limits).requests <= 0
    assert [group.submit(), group.read()] == ["A", "A"]
    assert RRA.free_capacity(group.state, group.limits).requests == 2, "B leaves room in the next encode iteration"


def test_claims_leave_out_what_the_micro_batches_cannot_hold() -> None:
    group = ByHand(limits_of(a_cycle(4, 1), max_batch_size=4, prefetch=0), named("ABC", new=9))
    group.submit()
    group.read()
    assert RRA.free_capacity(group.state, group.limits).requests == 1


def test_a_request_that_has_drawn_its_last_token_leaves_its_place_before_the_result_is_there() -> None:
    group = ByHand(limits_of(a_cycle(1, 1), max_batch_size=1, prefetch=0), named("A", new=1))
    group.submit()
    assert group.state.steps
    assert RRA.free_capacity(group.state, group.limits).requests == 1


# A request that must run alone


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_request_that_must_run_alone_pauses_all_others_and_the_cycle(prefetch: int, stages: int) -> None:
    group = ByHand(limits_of(a_cycle(3, 9), stages=stages, prefetch=prefetch), named("AB", new=20))
    group.submit()
    for _ in range(5):
        group.read()
    suspect = group.add(a_request("S", new=9), is_alone=True)
    position = group.state.position
    for _ in range(len(group.state.steps) - 1):
        assert group.read() == "", "the steps in flight return first"
    assert [group.read(), group.read()] == ["S", "S"], "it goes on alone until it is acquitted"
    assert group.state.position == position
    group.state.acquit(suspect, group.limits.block_tokens)
    seen = [group.read() for _ in range(4)]
    assert {"A", "B", "S"} <= set("".join(seen)), "all of them go on"


def test_one_that_must_run_alone_and_has_no_slots_lets_the_others_end_first() -> None:
    group = ByHand(limits_of(a_cycle(3, 9), slots=12, prefetch=0), named("A", new=3))
    group.submit()
    group.add(a_request("S", prompt=9, new=3), is_alone=True)
    group.add(a_request("B", prompt=1, new=1))
    assert [group.read(), group.read(), group.read()] == ["A", "A", "S"]


# Dynamic adjustment (5.2)


def test_prompts_of_an_encode_iteration_stay_within_the_threshold_of_the_planned_tokens() -> None:
    # 10 tokens and 12 %: 11 fit, 12 do not.
    requests = [a_request(name, prompt=size, new=1) for name, size in zip("ABCDE", (5, 6, 5, 7, 3), strict=True)]
    assert run(a_cycle(4, 1, encode_tokens=10), requests) == ["AB", "C", "DE"]
    assert run(a_cycle(4, 1, encode_tokens=10, threshold_percent=20), requests) == ["AB", "CD", "E"]
    assert run(a_cycle(4, 1), requests) == ["ABCD", "E"]


def test_the_bound_of_tokens_is_for_all_micro_batches_together() -> None:
    requests = named("ABCD", prompt=5, new=1)
    assert run(a_cycle(4, 1, encode_tokens=10), requests, stages=2) == ["A", "B", "C", "D"]
    group = ByHand(limits_of(a_cycle(4, 1, encode_tokens=10), stages=2, prefetch=0), named("ABCD", prompt=5, new=9))
    assert group.submit() == "A B", "two prompts in the first iteration"
    assert group.read() == "A"


def test_a_prompt_above_the_bound_enters_alone() -> None:
    requests = [a_request("A", prompt=50, new=1), *named("BC", prompt=5, new=1)]
    assert run(a_cycle(4, 1, encode_tokens=10), requests) == ["A", "BC"]


def test_a_log_counts_for_the_bound_of_tokens() -> None:
    limits = limits_of(a_cycle(4, 1, encode_tokens=10))
    steps = schedule_all(RRA, limits, named("AB", prompt=5, new=9), logs={"A.0": 3})
    assert lengths(steps)[0] == [8], "prompt and log run whole"
    assert batches(steps)[1:3] == ["A", "B"]


@pytest.mark.parametrize(
    ("running", "encode_batch"),
    [
        (0, 8),  # 0 + 4 is below 20 - 12 %: up to twice 4
        (12, 8),  # 12 + 4 is below 17.6: up to 20
        (13, 7),  # 13 + 4 is below 17.6
        (14, 4),  # 18 is within the threshold
        (18, 4),  # 22 is within the threshold
        (19, 1),  # 23 is above 22.4: down to 20
        (20, 0),
        (30, 0),
    ],
)
def test_encode_batches_keep_the_decode_batch_near_its_plan(running: int, encode_batch: int) -> None:
    controls = a_cycle(4, 1, decode_batch=20)
    assert controls.places(decoding=running, entered=0) == encode_batch


def test_places_of_an_encode_iteration_are_the_same_in_all_of_its_turns() -> None:
    controls = a_cycle(4, 1, decode_batch=20)
    for running in range(25):
        whole = controls.places(decoding=running, entered=0)
        left = [whole - entered for entered in range(whole + 1)]
        assert [controls.places(decoding=running + done, entered=done) for done in range(whole + 1)] == left


def test_an_encode_batch_is_never_empty_while_nothing_decodes() -> None:
    assert a_cycle(4, 1, decode_batch=4, threshold_percent=0).places(decoding=0, entered=0) == 4
    assert a_cycle(4, 1).places(decoding=0, entered=0) == 4


def test_without_a_plan_nothing_is_adjusted() -> None:
    assert [a_cycle(4, 1).places(decoding=running, entered=0) for running in (0, 3, 300)] == [4, 4, 4]


def test_a_decode_batch_that_shrank_is_filled_up() -> None:
    requests = [*named("ABCD", new=9), *named("EF", new=2), *named("GHIJ", new=9)]
    found = run(a_cycle(3, 1, decode_batch=6, threshold_percent=0), requests, max_batch_size=8)
    assert found[:4] == ["ABCDEF", "ABCDEF", "GH", "ABCDGH"]


# Encoder-decoder models


def test_sources_run_whole_in_the_encode_iteration_with_the_known_targets() -> None:
    limits = limits_of(a_cycle(2, 1), is_encoder_decoder=True)
    requests = [a_request(name, prompt=6, prefix=2, new=4) for name in "AB"]
    steps = schedule_all(RRA, limits, requests, logs={"B.0": 1})
    first, second = steps[:2]
    assert [(row.part, row.count) for row in first.rows] == [
        (Part.SOURCE, 6),
        (Part.SOURCE, 6),
        (Part.TARGET, 2),
        (Part.TARGET, 3),
    ]
    assert [(row.part, row.count) for row in second.rows] == [(Part.TARGET, 1)] * 2


def test_a_step_has_no_more_sources_than_a_stage_has_room_for() -> None:
    limits = limits_of(a_cycle(4, 1), is_encoder_decoder=True, max_source_slots=10)
    requests = [a_request(name, prompt=6, prefix=1, new=1) for name in "ABC"] + [a_request("D", prompt=3, prefix=1)]
    assert batches(schedule_all(RRA, limits, requests))[:3] == ["aA", "bB", "cdCD"]


def test_source_tokens_count_for_the_bound_of_an_encode_iteration() -> None:
    limits = limits_of(a_cycle(4, 1, encode_tokens=10), is_encoder_decoder=True)
    requests = [a_request(name, prompt=5, prefix=3, new=1) for name in "ABC"]
    assert batches(schedule_all(RRA, limits, requests)) == ["abAB", "cC"]


# Contradictions


@pytest.mark.parametrize(
    ("control", "value", "why"),
    [
        ("encode_batch", 0, "encode_batch must be at least 1, not 0"),
        ("decode_steps", 0, "decode_steps must be at least 1, not 0"),
        ("decode_batch", 0, "decode_batch must be at least 1, not 0"),
        ("encode_tokens", 0, "encode_tokens must be at least 1, not 0"),
        ("threshold_percent", -1, "threshold_percent must be from 0 to 100, not -1"),
        ("threshold_percent", 101, "threshold_percent must be from 0 to 100, not 101"),
    ],
)
def test_a_control_that_makes_no_sense_is_refused_by_name(control: str, value: int, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        replace(a_cycle(), **{control: value})


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (some_limits(), "needs encode_batch and decode_steps"),
        (limits_of(a_cycle(), max_batch_tokens=64), "max_batch_tokens has no meaning under the policy rra"),
        (limits_of(a_cycle(9), stages=2), r"encode_batch \(9\) must be at most 8, the number of stages \(2\)"),
        (limits_of(a_cycle(2, 1, decode_batch=9), stages=2), r"decode_batch \(9\) must be at most 8"),
        (limits_of(a_cycle(4, 1, decode_batch=3)), r"encode_batch \(4\) must be at most decode_batch \(3\)"),
    ],
)
def test_limits_under_which_the_policy_cannot_work_are_refused(limits: BatchLimits, why: str) -> None:
    refusal = RRA.refuse(limits)
    assert refusal is not None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(refusal)


def test_limits_at_the_edge_are_accepted() -> None:
    for cycle in (a_cycle(8), a_cycle(8, 1, decode_batch=8), a_cycle(8, 1, decode_batch=8, threshold_percent=0)):
        assert RRA.refuse(limits_of(cycle, stages=2)) is None


def test_the_description_names_the_controls_in_force() -> None:
    assert RRA.describe(limits_of(a_cycle(8, 16))) == "rra(encode_batch 8, decode_steps 16)"
    planned = a_cycle(8, 16, decode_batch=40, encode_tokens=900, threshold_percent=5)
    assert RRA.describe(limits_of(planned)) == (
        "rra(encode_batch 8, decode_steps 16, decode_batch 40, encode_tokens 900, threshold_percent 5)"
    )


# In the real loop


@virtually
async def test_the_controls_change_in_a_running_scheduler() -> None:
    choices = SchedulingOptions(max_batch_size=8, cycle=a_cycle(1, 50))
    simulation = a_simulation(choices=choices, policy=RRA)
    group = simulation.add_group(a_shape(slots=1024), cost=LinearCost(step_us=10_000))
    scheduler = simulation.start(group)
    await serving(simulation, group)
    for number in range(4):
        await simulation.submit(a_request(f"r{number}", new=30))
    await tokens_at_least(simulation, "r0.0", 3)
    with pytest.raises(SettingError, match="encode_batch"):
        scheduler.set_batch_bounds(BatchBounds(max_batch_size=8, cycle=a_cycle(9, 1)))
    assert scheduler._options.cycle == a_cycle(1, 50)
    scheduler.set_batch_bounds(BatchBounds(max_batch_size=8, cycle=a_cycle(3, 1)))
    await tokens_at_least(simulation, "r3.0", 1)
    assert len((await simulation.log_of("r0.0"))[0]) < 10, "the phase of 50 iterations ended at once"
    await simulation.finish()


def pipeline(cost: LinearCost, requests: Sequence[Request], cycle: CycleControls) -> list[list[tuple[str, int, int]]]:
    """Run a pipeline of four stages. Returns: for each stage its work, as batch, start and end in milliseconds."""

    async def main() -> list[list[tuple[str, int, int]]]:
        choices = SchedulingOptions(max_batch_size=4, cycle=cycle)
        simulation = Simulation(tokens=by_index(lambda _: 1), choices=choices, policy=RRA)
        shape = EngineShape(stages=4, slots=512, block_tokens=1, max_model_len=64)
        group = simulation.add_group(shape, cost=cost)
        group.engine.stage_times = []
        await simulation.queue_up(requests)
        simulation.start(group)
        await simulation.finish()
        names = {record.step: "".join(row.request_id[0] for row in record.rows) for record in group.records}
        began = min(start for _, _, start, _ in group.engine.stage_times)
        work: list[list[tuple[str, int, int]]] = [[] for _ in range(4)]
        for step, stage, start, end in group.engine.stage_times:
            work[stage].append((names[step], (start - began) // 1000, (end - began) // 1000))
        return work

    return virtual_time.run(asyncio.wait_for(main(), 60))


def test_figure_4a_four_encode_micro_batches_are_followed_by_decode_iterations() -> None:
    """Mini-batches 1 to 4 encode, then decode N_D times, then 5 to 8 encode. Encoding takes three times as long here.

    Stage 1 is idle only where the figure shows it: until a mini-batch has come back from its encode iteration.
    """
    # Each stage takes 1 ms per token: 3 ms for a prompt.
    requests = named("1234", prompt=3, new=6) + named("5678", prompt=3, new=1)
    work = pipeline(LinearCost(step_us=0, token_us=1_000), requests, a_cycle(4, 2))
    assert work[0][:20] == [
        *(("1", 0, 3), ("2", 3, 6), ("3", 6, 9), ("4", 9, 12)),
        # 2 comes back from stage 4 at 15, 3 at 18, 4 at 21.
        *(("1", 12, 13), ("2", 15, 16), ("3", 18, 19), ("4", 21, 22)),
        *(("1", 22, 23), ("2", 23, 24), ("3", 24, 25), ("4", 25, 26)),
        *(("5", 26, 29), ("6", 29, 32), ("7", 32, 35), ("8", 35, 38)),
        *(("1", 38, 39), ("2", 41, 42), ("3", 44, 45), ("4", 47, 48)),
    ]
    assert work[1][:12] == [
        *(("1", 3, 6), ("2", 6, 9), ("3", 9, 12), ("4", 12, 15)),
        *(("1", 15, 16), ("2", 16, 17), ("3", 19, 20), ("4", 22, 23)),
        *(("1", 23, 24), ("2", 24, 25), ("3", 25, 26), ("4", 26, 27)),
    ]
    assert work[2][:12] == [
        *(("1", 6, 9), ("2", 9, 12), ("3", 12, 15), ("4", 15, 18)),
        *(("1", 18, 19), ("2", 19, 20), ("3", 20, 21), ("4", 23, 24)),
        *(("1", 24, 25), ("2", 25, 26), ("3", 26, 27), ("4", 27, 28)),
    ]
    # The last stage has no bubble between encode and decode iterations, but one before the next encode iteration.
    assert work[3][:16] == [
        *(("1", 9, 12), ("2", 12, 15), ("3", 15, 18), ("4", 18, 21)),
        *(("1", 21, 22), ("2", 22, 23), ("3", 23, 24), ("4", 24, 25)),
        *(("1", 25, 26), ("2", 26, 27), ("3", 27, 28), ("4", 28, 29)),
        *(("5", 35, 38), ("6", 38, 41), ("7", 41, 44), ("8", 44, 47)),
    ]
