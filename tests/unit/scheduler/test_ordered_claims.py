"""The loop under another order of claims than arrival, on virtual time."""

import asyncio
import random
from dataclasses import dataclass, replace

import pytest

from orca.core.domain.request import End, FinishReason, Request
from orca.pool.order.order_rules import LATE, Drop, Order, OrderRules
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from support.effort import tries
from support.scheduler.scheduler_simulation import (
    Simulation,
    a_request,
    a_shape,
    a_simulation,
    serving,
    tokens_at_least,
    virtually,
)

STEP_US = 20_000


def a_loop(rules: OrderRules | None, *, places: int = 2, slots: int = 4096, prefetch: int = 0) -> Simulation:
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=places, prefetch=prefetch), rules=rules)
    simulation.add_group(a_shape(slots=slots, max_model_len=1024), cost=LinearCost(step_us=STEP_US))
    return simulation


def began(simulation: Simulation) -> list[str]:
    """Return the requests in the order of their first steps."""
    rows = [row for record in simulation.groups["g0"].records for row in record.rows]
    return list(dict.fromkeys(row.request_id.removesuffix(".0") for row in rows))


@virtually
async def test_waiting_requests_begin_by_deadline_and_utility() -> None:
    simulation = a_loop(OrderRules(order=Order.EDF), places=1)
    simulation.start(simulation.groups["g0"])
    await simulation.submit(a_request("first", new=20))
    await tokens_at_least(simulation, "first.0", 2)
    for name, deadline_ms in (("third", 30_000), ("second", 20_000), ("fourth", 40_000)):
        await simulation.submit(replace(a_request(name, new=3), deadline_ms=deadline_ms))
    await simulation.finish()
    assert began(simulation) == ["first", "second", "third", "fourth"]


@virtually
async def test_a_step_is_filled_with_prompts_in_the_order_of_the_claim() -> None:
    simulation = a_loop(OrderRules(order=Order.SJF), places=2)
    simulation.start(simulation.groups["g0"])
    await serving(simulation, simulation.groups["g0"])
    for name, new in zip("ABCD", (40, 3, 10, 20), strict=True):
        await simulation.submit(a_request(name, prompt=300, new=new))
    await simulation.finish()
    # 512 prompt tokens are claimed for a step that runs prompts whole, so one prompt of 300 enters at a time.
    assert began(simulation) == ["B", "C", "D", "A"]


@virtually
async def test_a_goal_for_the_first_token_orders_waiting_requests_and_ends_none() -> None:
    simulation = a_loop(OrderRules(drop=Drop.EXPECTED), places=1)
    simulation.start(simulation.groups["g0"])
    await simulation.submit(a_request("first", new=60))
    await tokens_at_least(simulation, "first.0", 40)
    for name, goal_ms in (("none", None), ("missed", 10), ("loose", 20_000), ("tight", 10_000)):
        await simulation.submit(replace(a_request(name, new=3), first_token_goal_ms=goal_ms))
    await simulation.finish()
    assert began(simulation) == ["first", "tight", "loose", "none", "missed"]
    for name in ("tight", "loose", "none", "missed"):
        assert (await simulation.pool.status(f"{name}.0")).end == End(FinishReason.LENGTH, 3)


@pytest.mark.parametrize("prefetch", [0, 1])
@virtually
async def test_a_request_that_is_too_late_ends_before_its_deadline(prefetch: int) -> None:
    simulation = a_loop(OrderRules(drop=Drop.EXPECTED), places=2, prefetch=prefetch)
    simulation.start(simulation.groups["g0"])
    await simulation.submit(a_request("long", new=400))
    await tokens_at_least(simulation, "long.0", 50)
    submitted = await simulation.submit(replace(a_request("late", new=300), deadline_ms=5_500))
    await simulation.finish()
    status = await simulation.pool.status("late.0")
    assert status.end == End(FinishReason.DEADLINE_EXCEEDED, 0, detail=LATE)
    assert status.ended_ms is not None
    assert status.ended_ms < submitted.submitted_ms + 1_000


@dataclass(frozen=True, slots=True)
class Waits:
    """Milliseconds from submission to the first claim of requests without a deadline, and the longest run of any."""

    by_name: dict[str, int]
    longest_run_ms: int


def waits(requests: list[tuple[float, Request]], rules: OrderRules | None, places: int) -> Waits:
    """Run requests that arrive at their times, in seconds, and measure."""
    return virtual_time.run(_waits(requests, rules, places))


async def _waits(requests: list[tuple[float, Request]], rules: OrderRules | None, places: int) -> Waits:
    simulation = a_loop(rules, places=places)
    simulation.start(simulation.groups["g0"])
    await serving(simulation, simulation.groups["g0"])
    start_s = asyncio.get_running_loop().time()
    for due_s, request in requests:
        await asyncio.sleep(max(0.0, start_s + due_s - asyncio.get_running_loop().time()))
        await simulation.submit(request)
    await simulation.finish()
    found, longest = {}, 0
    for request_id, request in simulation.submitted.items():
        status = await simulation.pool.status(request_id)
        if status.first_claimed_ms is None:
            continue
        assert status.ended_ms is not None
        longest = max(longest, status.ended_ms - status.first_claimed_ms)
        if request.first_deadline_wall_ms is None:
            found[request_id] = status.first_claimed_ms - request.submitted_ms
    return Waits(found, longest)


def overload(seed: int, places: int) -> list[tuple[float, Request]]:
    """Draw requests at some three times the capacity; one in ten has no deadline, one in twenty is long.

    Half of those without a deadline have a goal for their first token, which may be too short, or longer than patience.
    """
    numbers = random.Random(seed)
    now_s, drawn = 0.0, []
    for number in range(120):
        new = numbers.choice((60, *range(1, 20)))
        now_s += numbers.expovariate(3 * places / (10 * STEP_US / 1e6))
        deadline_ms = None if numbers.random() < 0.1 else numbers.randint(300, 8_000)
        goal_ms = None if number % 2 else (5, 150, 800, 5_000)[number // 2 % 4]
        request = replace(a_request(f"r{number}", new=new, ignore_eos=True), deadline_ms=deadline_ms)
        drawn.append((now_s, replace(request, first_token_goal_ms=goal_ms)))
    return drawn


PATIENCE_MS = 1_000


@pytest.mark.parametrize("order", [Order.DEADLINE, Order.EDF, Order.SJF])
@pytest.mark.parametrize("places", [1, 4])
def test_nobody_waits_longer_than_by_arrival_plus_patience(order: Order, places: int) -> None:
    for seed in range(tries(10)):
        drawn = overload(seed, places)
        by_arrival = waits(drawn, None, places)
        by_order = waits(drawn, OrderRules(order=order, patience_ms=PATIENCE_MS), places)
        assert by_order.by_name.keys() == by_arrival.by_name.keys(), "nobody without a deadline is dropped"
        for name, wait_ms in by_order.by_name.items():
            # Running requests are not preempted: one that has just begun runs to its end first.
            bound_ms = by_arrival.by_name[name] + PATIENCE_MS + by_order.longest_run_ms
            assert wait_ms <= bound_ms, f"seed {seed}, {name}"


def test_more_answers_are_in_time_than_by_arrival_under_overload() -> None:
    in_time = dict.fromkeys((None, Order.DEADLINE), 0)
    for seed in range(3):
        for order in in_time:
            rules = None if order is None else OrderRules(order=order, patience_ms=PATIENCE_MS)
            in_time[order] += virtual_time.run(_in_time(overload(seed, 4), rules))
    assert in_time[Order.DEADLINE] > 1.1 * in_time[None], in_time


async def _in_time(requests: list[tuple[float, Request]], rules: OrderRules | None) -> int:
    simulation = a_loop(rules, places=4)
    simulation.start(simulation.groups["g0"])
    await serving(simulation, simulation.groups["g0"])
    start_s = asyncio.get_running_loop().time()
    for due_s, request in requests:
        await asyncio.sleep(max(0.0, start_s + due_s - asyncio.get_running_loop().time()))
        await simulation.submit(request)
    await simulation.finish()
    ends = [(await simulation.pool.status(request_id)).end for request_id in simulation.submitted]
    return sum(end is not None and end.reason is FinishReason.LENGTH for end in ends)
