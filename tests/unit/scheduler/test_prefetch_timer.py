"""A prefetched step is sent at an estimated time: from measured steps, and on the real loop in virtual time."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from orca.core.domain.step import Claim
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.epoch.prefetch_timer import PrefetchTimer
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.batch import NOTHING, Batch, BatchRow
from orca.scheduler.policy.state import GroupState, StepInFlight
from support.scheduler.scheduler_simulation import (
    Group,
    Simulation,
    a_request,
    a_shape,
    a_simulation,
    serving,
    steps_of,
    tokens_at_least,
    virtually,
)

MS = 1_000_000


def a_step(submitted_ms: int, *counts: int) -> StepInFlight:
    """Return a step with that many tokens of each request."""
    state = GroupState()
    entries = [state.add(a_request(arrival=i), Claim(1, "p/1")) for i in range(len(counts))]
    rows = tuple(BatchRow(entry, 0, count, sample=True) for entry, count in zip(entries, counts, strict=True))
    return StepInFlight(1, Batch(rows=rows) if rows else NOTHING, submitted_ms * MS)


def after(*taken_ms: int) -> PrefetchTimer:
    """Steps of two tokens that took so long, the last of which was read at 100 ms."""
    pace, now_ms = PrefetchTimer(), 100 - sum(taken_ms)
    for each in taken_ms:
        now_ms += each
        pace.read(a_step(now_ms - each, 1, 1), now_ms * MS)
    return pace


def test_a_step_is_due_before_the_previous_result_by_the_travel_time_to_the_stage() -> None:
    assert after(10).due_ns(a_step(120, 1)) == (120 + 10 - 2) * MS


def test_a_step_sent_early_began_when_the_step_before_it_was_read() -> None:
    assert after(10).due_ns(a_step(95, 1)) == (100 + 10 - 2) * MS


def test_no_estimate_exists_before_the_first_result_and_none_of_prompts_after_it() -> None:
    assert PrefetchTimer().due_ns(a_step(10, 1)) == 0
    assert after(10).due_ns(a_step(120, 1, 8)) == 0


def test_a_source_counts_as_further_tokens() -> None:
    step = a_step(120, 1)
    entry = GroupState().add(a_request(prompt=8, prefix=1), Claim(1, "p/1"))
    step.batch = replace(step.batch, sources=(entry,))
    timer = after(10)
    assert timer.due_ns(step) == 0, "nothing is known about the tokens of prompts and sources"
    timer.read(step, (120 + 10 + 8) * MS)
    later = a_step(140, 1)
    later.batch = replace(later.batch, sources=(entry,))
    assert timer.due_ns(later) == (140 + 10 + 8 - 2) * MS


def test_after_a_step_that_computes_nothing_the_next_one_is_due_at_once() -> None:
    assert after(10).due_ns(a_step(120)) == 0


def test_prompts_take_longer_in_proportion_to_their_tokens() -> None:
    pace = after(10)
    pace.read(a_step(100, 1, 41), 130 * MS)  # 20 ms for 40 tokens more
    assert pace.due_ns(a_step(200, 1, 1, 21)) == (200 + 10 + 10 - 2) * MS


def test_estimates_follow_shorter_steps_at_once_and_longer_ones_slowly() -> None:
    shorter, longer = after(10, 10, 4, 4, 4, 4, 4, 4), after(10, 10, 40)
    assert shorter.due_ns(a_step(200, 1)) < (200 + 4.2 - 2) * MS
    assert longer.due_ns(a_step(200, 1)) < (200 + 12 - 2) * MS


def test_the_travel_time_is_measured_by_steps_that_compute_nothing() -> None:
    pace = after(10)
    for at_ms in range(200, 260, 10):
        pace.read(a_step(at_ms), (at_ms + 5) * MS)
    assert pace.due_ns(a_step(300, 1)) == pytest.approx((300 + 10 - 5) * MS, abs=0.1 * MS)


async def two_running(choices: SchedulingOptions) -> tuple[Simulation, Group]:
    """Steps of 50 ms, of two requests, which have run for some."""
    simulation = a_simulation(choices=choices)
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=50_000, token_us=0))
    simulation.start(group)
    await serving(simulation, group)
    for name in "AB":
        await simulation.submit(a_request(name, new=20))
    await tokens_at_least(simulation, "B.0", 6)
    return simulation, group


@virtually
async def test_a_request_that_arrives_while_a_step_runs_is_in_the_next_one_and_no_stage_waits() -> None:
    simulation, group = await two_running(SchedulingOptions(prefetch=1))
    await asyncio.sleep(0.020)
    running = group.records[-1].step + 1
    await simulation.submit(a_request("C", new=1))
    await simulation.finish()
    assert steps_of(group, "C.0") == [running + 1]
    records = [record for record in group.records if record.rows]
    ends = [record.returned_ns for record in records]
    assert all(later - earlier <= 51 * MS for earlier, later in pairwise(ends[2:])), "a stage had to wait"
    early = [record.submitted_ns < end for end, record in zip(ends[5:], records[6:], strict=False)]
    assert all(early), "a step went out when its predecessor had come back"


@virtually
async def test_a_full_batch_is_prefetched_at_once() -> None:
    simulation, group = await two_running(SchedulingOptions(prefetch=1, max_batch_size=2))
    await simulation.finish()
    records = [record for record in group.records if record.rows]
    out = [earlier.returned_ns == later.submitted_ns for earlier, later in zip(records[4:], records[6:], strict=False)]
    assert out
    assert all(out), "two steps are in flight all the time"
