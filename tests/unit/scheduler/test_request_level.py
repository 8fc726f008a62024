"""The paper's baseline: each habit as the paper shows it, and each one taken away."""

import asyncio
from dataclasses import replace

import pytest

from orca.core.domain.engine import EngineShape
from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Epoch, Step
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, Policy
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.state import GroupState
from support.scheduler.scheduler_simulation import (
    Simulation,
    a_request,
    batches,
    by_index,
    lengths,
    schedule_all,
    some_limits,
)

ALL = Habits()


def baseline(microbatch_size: int | None = None, **off: bool) -> RequestLevelPolicy:
    return RequestLevelPolicy(microbatch_size=microbatch_size, habits=replace(ALL, **off))


def draws(steps: list[Step]) -> list[list[bool]]:
    return [[row.sample for row in step.rows] for step in steps if step.rows]


# "I think" -> "this is great" and "I love" -> "you", each with its end of text: Figures 2 and 3.
FIGURE_3 = [a_request("1", prompt=2, new=4), a_request("2", prompt=2, new=2)]


def test_figure_3_computes_the_ended_request_in_iterations_3_and_4() -> None:
    steps = schedule_all(baseline(), some_limits(max_batch_size=2), FIGURE_3)
    assert batches(steps) == ["12", "12", "12", "12"]
    assert draws(steps) == [[True, True], [True, True], [True, False], [True, False]]


def test_without_computing_ended_requests_one_leaves_the_batch_of_figure_3_but_none_joins() -> None:
    requests = [*FIGURE_3, a_request("3", prompt=2, new=1)]
    steps = schedule_all(baseline(computes_ended=False), some_limits(max_batch_size=2), requests)
    assert batches(steps) == ["12", "12", "1", "1", "3"]


def test_a_waiting_request_joins_only_after_the_whole_batch() -> None:
    requests = [a_request("A", new=1), a_request("B", new=3), a_request("C", new=1)]
    assert batches(schedule_all(baseline(), some_limits(max_batch_size=2), requests)) == ["AB", "AB", "AB", "C"]


def test_the_first_iteration_runs_at_the_shortest_prompt_and_the_rest_of_longer_ones_token_by_token() -> None:
    requests = [a_request("A", prompt=2, new=2), a_request("B", prompt=4, new=1)]
    steps = schedule_all(baseline(), some_limits(max_batch_size=2), requests)
    assert lengths(steps) == [[2, 2], [1, 1], [1, 1]]
    assert draws(steps) == [[True, False], [True, False], [False, True]]


def test_without_that_habit_prompts_of_any_length_run_whole() -> None:
    requests = [a_request("A", prompt=2, new=2), a_request("B", prompt=4, new=1)]
    steps = schedule_all(baseline(starts_at_shortest=False), some_limits(max_batch_size=2), requests)
    assert lengths(steps) == [[2, 4], [1, 1]]


def test_memory_is_reserved_for_the_longest_sequence_of_the_model() -> None:
    limits = some_limits(slots=100, max_model_len=50)
    requests = [a_request(name, prompt=2, new=1) for name in "ABC"]
    assert batches(schedule_all(baseline(), limits, requests)) == ["AB", "C"]
    assert batches(schedule_all(baseline(reserves_full_length=False), limits, requests)) == ["ABC"]


def test_a_group_too_small_for_one_full_length_is_refused_with_both_numbers() -> None:
    refusal = baseline().refuse(some_limits(slots=40, max_model_len=50))
    assert refusal is not None
    assert "50" in refusal
    assert "40" in refusal


def test_microbatches_take_turns_in_a_fixed_order() -> None:
    limits = some_limits(stages=3, max_batch_size=4)
    requests = [a_request(name, new=2) for name in "ABCDE"]
    assert batches(schedule_all(baseline(2), limits, requests)) == ["AB", "CD", "AB", "CD", "E", "E"]


def test_without_microbatches_whole_batches_follow_each_other_through_the_pipeline() -> None:
    limits = some_limits(stages=2, max_batch_size=2)
    requests = [a_request(name, new=2) for name in "ABCD"]
    assert batches(schedule_all(baseline(splits_batch=False), limits, requests)) == ["AB", "CD", "AB", "CD"]


def test_the_result_names_the_habits_in_force() -> None:
    assert "computes_ended" in baseline().describe(some_limits())
    assert "computes_ended" not in baseline(computes_ended=False).describe(some_limits())
    assert "microbatch=2" in baseline(2).describe(some_limits())


@pytest.mark.parametrize("prefetch", [0, 1])
def test_prefetch_does_not_change_the_batches(prefetch: int) -> None:
    limits = some_limits(stages=2, max_batch_size=4, prefetch=prefetch)
    requests = [a_request(name, prompt=2 + i % 3, new=1 + i % 4) for i, name in enumerate("ABCDEFG")]
    expected = schedule_all(baseline(2), replace(limits, prefetch=0), requests)
    assert batches(schedule_all(baseline(2), limits, requests)) == batches(expected)


def test_each_batch_of_an_epoch_gets_a_new_number() -> None:
    state, limits = GroupState(), some_limits()
    numbers = []
    for arrival in (1, 2, 3):
        entry = state.add(a_request(str(arrival), new=1, arrival=arrival), Claim(1, "test/1"))
        batch = baseline().select(state, limits)
        numbers += [admission.batch for admission in batch.admitted]
        state.schedule(batch, Epoch(1, "test"))
        state.read()
        state.end(entry)
        state.schedule(baseline().select(state, limits), Epoch(1, "test"))
        state.read()
        assert not state.requests, "nothing of the batch is left"
    assert numbers == [1, 2, 3]


def worker_chart(policy: Policy, limits: BatchLimits, requests: list[Request]) -> list[str]:
    """Return the work of each worker of a simulated pipeline per time unit: batches by name, "." while it is idle."""

    async def main() -> list[str]:
        choices = SchedulingOptions(max_batch_size=limits.max_batch_size)
        simulation = Simulation(tokens=by_index(lambda _: 1), choices=choices, policy=policy)
        shape = EngineShape(stages=3, slots=64, block_tokens=1, max_model_len=16)
        group = simulation.add_group(shape, cost=LinearCost(step_us=1000))
        group.engine.stage_times = []
        await simulation.pool.set_revision("r1", 1)
        await simulation.pool.promise_slots("r1", 64)
        for request in requests:
            await simulation.submit(request)
        simulation.start(group)
        await simulation.finish()
        names = {
            record.step: "".join(row.request_id[0] for row in record.rows) for record in group.records if record.rows
        }
        began = min(start for _, _, start, _ in group.engine.stage_times)
        chart = [["."] * 9 for _ in range(3)]
        for step, stage, start, _ in group.engine.stage_times:
            if (unit := (start - began) // 1000) < 9:
                chart[stage][unit] = names[step]
        return [" ".join(row) for row in chart]

    return virtual_time.run(asyncio.wait_for(main(), 60))


def test_figure_8a_orca_keeps_three_workers_busy_with_batches_of_two() -> None:
    requests = [a_request(name, new=4) for name in "ABCDEF"]
    assert worker_chart(IterationPolicy(), some_limits(stages=3, max_batch_size=2), requests) == [
        "AB CD EF AB CD EF AB CD EF",
        ". AB CD EF AB CD EF AB CD",
        ". . AB CD EF AB CD EF AB",
    ]


def test_figure_8b_fastertransformer_leaves_bubbles_between_the_microbatches_a_and_b() -> None:
    requests = [a_request(name, new=3) for name in "ABCD"]
    assert worker_chart(baseline(1), some_limits(stages=3, max_batch_size=2), requests) == [
        "A B . A B . A B .",
        ". A B . A B . A B",
        ". . A B . A B . A",
    ]


def test_results_reach_the_pool_only_when_the_whole_batch_has_ended() -> None:
    async def main(holds_results: bool) -> int:
        policy = baseline(holds_results=holds_results, reserves_full_length=False)
        simulation = Simulation(
            tokens=by_index(lambda _: 1), policy=policy, choices=SchedulingOptions(max_batch_size=2)
        )
        shape = EngineShape(stages=1, slots=64, block_tokens=1, max_model_len=64)
        group = simulation.add_group(shape, cost=LinearCost(step_us=100_000))
        simulation.start(group)
        await simulation.submit(a_request("A", new=2))
        await simulation.submit(a_request("B", new=9))
        await asyncio.sleep(0.75)
        early = len((await simulation.log_of("A.0"))[0])
        await simulation.finish()
        assert (await simulation.log_of("A.0"))[0] == [1, 1]
        assert (await simulation.log_of("B.0"))[0] == [1] * 9
        return early

    assert virtual_time.run(main(holds_results=True)) == 0
    assert virtual_time.run(main(holds_results=False)) == 2
