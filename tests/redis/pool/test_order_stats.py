"""Counts by order in `stats`: the same on the twin and on each Redis."""

from typing import Any

import pytest

from orca.pool.order.order_class import DeadlineKind, OrderClass, length_class
from orca.pool.order.order_rules import ClaimOrder, Drop, Order, OrderRules, RunEstimates, Utility
from orca.pool.order.order_stats import DUE_MS, OrderStats
from orca.pool.schemas import Schemas
from support.pool.beds import REVISION, Bed, RedisBed, Scheduler, submission

END, FIRST, NONE = DeadlineKind.END, DeadlineKind.FIRST_TOKEN, DeadlineKind.NONE


def order(least_step_ms: float = 0.0) -> ClaimOrder:
    """Return the order of a group with this fastest step."""
    estimates = RunEstimates(least_step_ms=least_step_ms)
    return ClaimOrder(rules=OrderRules(), estimates=estimates, free_prompt_tokens=512, total_prompt_tokens=512)


async def seated(bed: Bed, *groups: str) -> list[Scheduler]:
    await bed.pool.set_revision(REVISION, 1)
    schedulers = [Scheduler(bed, f"p-{group}", group) for group in groups or ("g",)]
    for scheduler in schedulers:
        await scheduler.enter()
    return schedulers


async def by_order(bed: Bed) -> OrderStats | None:
    found: OrderStats | None = (await bed.pool.stats()).by_order
    return found


async def least_step_ms(bed: Bed) -> float | None:
    """Return the fastest step; None without counts."""
    found = await by_order(bed)
    return None if found is None else found.least_step_ms


def a_class(kind: DeadlineKind, *, priority: int = 0, max_new_tokens: int = 12, goal: int = 0) -> OrderClass:
    """Return the class of requests that the beds submit."""
    return OrderClass(priority, length_class(4), length_class(max_new_tokens), kind, goal=goal)


async def test_waiting_requests_are_counted_by_class(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a", n=3, deadline_ms=60_000))
    await scheduler.ask(most=0, order=order())
    await bed.pool.submit(submission("b", n=2, weight=4.0))
    await bed.pool.submit(submission("c", first_token_deadline_ms=60_000, max_new_tokens=64))
    found = await by_order(bed)
    assert found is not None
    first = a_class(FIRST, max_new_tokens=64)
    assert found.classes == {a_class(END): 3, a_class(NONE, priority=-2): 2, first: 1}
    await scheduler.ask(most=2, order=order())
    await bed.pool.cancel("c")
    found = await by_order(bed)
    assert found is not None
    assert found.classes == {a_class(END): 3}


async def test_goals_for_first_tokens_are_counted_by_class_and_are_no_deadlines(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a", n=2, first_token_goal_ms=1_100))
    await scheduler.ask(most=0, order=order())
    await bed.pool.submit(submission("b", first_token_goal_ms=1_200))
    await bed.pool.submit(submission("c", first_token_goal_ms=1_600))
    found = await by_order(bed)
    assert found is not None
    assert found.classes == {a_class(NONE, goal=20): 3, a_class(NONE, goal=21): 1}
    assert found.due == (0,) * len(DUE_MS)


async def test_deadlines_are_counted_by_time_also_of_running_requests(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    # Not at the bounds: time passes in Redis.
    for parent, deadline_ms in (("a", 60_000), ("b", 120_000), ("c", 10**8)):
        await bed.pool.submit(submission(parent, deadline_ms=deadline_ms))
    await bed.pool.submit(submission("none"))
    await scheduler.ask(most=1, order=order())
    found = await by_order(bed)
    assert found is not None
    assert found.due == tuple((ms > 60_000) + (ms > 120_000) for ms in DUE_MS)
    await bed.pass_deadlines(90_000)
    found = await by_order(bed)
    assert found is not None
    # The first one is over, though no sweep has ended it yet.
    assert found.due == tuple(int(ms > 30_000) for ms in DUE_MS)


async def test_there_are_no_counts_while_claims_go_by_arrival(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a"))
    assert await by_order(bed) is None
    await scheduler.ask(most=0)
    assert await by_order(bed) is None
    await scheduler.ask(most=0, order=order())
    assert await by_order(bed) is not None
    # The index stays, but nobody claims by it.
    await scheduler.ask(most=0)
    assert await by_order(bed) is None


async def test_the_counts_are_those_of_the_current_revision(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.promise_slots("r2", 4096)
    await bed.pool.submit(submission("a"))
    await scheduler.ask(most=0, order=order())
    await bed.pool.set_revision("r2", 2)
    assert await by_order(bed) is None
    other = Scheduler(bed, "p-2", "g2", "r2")
    await other.enter()
    await bed.pool.submit(submission("b", revision="r2", max_new_tokens=64))
    await other.ask(most=0, order=order())
    found = await by_order(bed)
    assert found is not None
    assert found.classes == {a_class(NONE, max_new_tokens=64): 1}


async def test_a_new_holder_of_the_seat_has_claimed_nothing_yet(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await scheduler.ask(most=0, order=order(2.5))
    assert await least_step_ms(bed) == 2.5
    await scheduler.enter()
    assert await least_step_ms(bed) is None
    await scheduler.ask(most=0, order=order(2.5))
    await Scheduler(bed, "p-2", "g").enter(is_holder_dead=True)
    assert await least_step_ms(bed) is None


@pytest.mark.parametrize(
    ("first", "second", "least"),
    [
        (order(7.25), order(3.1), 3.1),
        (order(7.25), order(0.0), 0.0),
        (order(7.25), None, 0.0),
        (None, None, None),
    ],
    ids=["both known", "one unknown", "one by arrival", "all by arrival"],
)
async def test_the_fastest_step_is_known_if_all_groups_report_theirs(
    bed: Bed, first: ClaimOrder | None, second: ClaimOrder | None, least: float | None
) -> None:
    for scheduler, of_group in zip(await seated(bed, "g", "h"), (first, second), strict=True):
        await scheduler.ask(most=0, order=of_group)
    assert await least_step_ms(bed) == least


async def test_there_are_no_counts_under_an_older_schema(make_bed: Any) -> None:
    bed = make_bed(schemas=Schemas(2, 3))
    (scheduler,) = await seated(bed)
    await scheduler.ask(most=0, order=order())
    assert await by_order(bed) is not None
    assert await bed.pool.set_schema(2) == 2
    assert await by_order(bed) is None
    await scheduler.ask(most=0, order=order())
    assert await by_order(bed) is None


@pytest.mark.parametrize("order", list(Order)[1:])
async def test_the_rules_and_estimates_of_the_first_group_are_told(bed: Bed, order: Order) -> None:
    first, second, by_arrival = await seated(bed, "h", "i", "g")
    await by_arrival.ask(most=0)
    for step_ms, scheduler in ((1.5, second), (2.5, first), (3.25, first)):
        rules = OrderRules(order=order, utility=Utility.INVERSE_LENGTH, eta=0.25, patience_ms=7000, drop=Drop.NEVER)
        estimates = RunEstimates(
            prompt_token_ms=0.125, step_ms=step_ms, least_step_ms=1.25, prompt_cost=0.5, outputs=((4, 3.5), (6, 9.0))
        )
        claim = ClaimOrder(rules=rules, estimates=estimates, free_prompt_tokens=3, total_prompt_tokens=512)
        await scheduler.ask(most=0, order=claim)
    found = await by_order(bed)
    assert found is not None
    assert found.order == claim
    await first.ask(most=0)
    found = await by_order(bed)
    assert found is not None
    assert found.order is not None
    assert found.order.estimates.step_ms == 1.5, "the first group claims by arrival now"


@pytest.mark.parametrize("arguments", ["", "0.5 equal 7000", "0.5 another_utility 7000 never 1 1 1 1 0.5 1 1"])
async def test_rules_of_another_release_are_not_told(redis_bed: RedisBed, arguments: str) -> None:
    (scheduler,) = await seated(redis_bed)
    await scheduler.ask(most=0, order=order())
    seat = redis_bed.keys.named("seat", scheduler.caller.group)
    await redis_bed.redis.hset(seat, "order", f"{scheduler.caller.process} {arguments}")
    found = await by_order(redis_bed)
    assert found is not None
    assert found.order is None
