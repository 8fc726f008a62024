"""Start windows, and outcomes of deadlines: the same on the twin and on each Redis."""

from collections.abc import Awaitable, Callable
from math import floor

import pytest

from orca.core.domain.request import FinishReason
from orca.pool.length_bins import PERIOD_MS, PERIODS_KEPT
from orca.pool.order.deadline_outcome import DeadlineOutcome, deadline_outcome
from orca.pool.order.order_class import DeadlineKind, class_of
from orca.pool.order.order_rules import ClaimOrder, Drop, OrderRules, RunEstimates
from orca.pool.records import OnDisconnect, RequestStatus
from support.pool.beds import REVISION, Bed, RedisBed, Scheduler, entry, started, submission

DEADLINE_MS = 60_000
PATIENCE_MS = 30_000
KNOWN = RunEstimates(prompt_token_ms=2.0, step_ms=1000.0)
"""Estimates by which a request of the beds needs 13.5 s."""


def by(estimates: RunEstimates = KNOWN, drop: Drop = Drop.NEVER) -> ClaimOrder:
    rules = OrderRules(patience_ms=PATIENCE_MS, drop=drop)
    return ClaimOrder(rules=rules, estimates=estimates, free_prompt_tokens=512, total_prompt_tokens=512)


async def seated(bed: Bed) -> Scheduler:
    await bed.pool.set_revision(REVISION, 1)
    scheduler = Scheduler(bed)
    await scheduler.enter()
    return scheduler


async def pass_time(bed: Bed, ms: int) -> None:
    """Let wall time pass for all that the pool knows."""
    await bed.age_requests(ms)
    if isinstance(bed, RedisBed):
        await bed.pass_deadlines(ms)


async def status(bed: Bed, request_id: str = "a.0") -> RequestStatus:
    found: RequestStatus = await bed.pool.status(request_id)
    return found


async def counted(bed: Bed) -> tuple[int, int]:
    """Return the requests in time and the late ones, over all periods."""
    periods = (await bed.pool.deadline_counts(REVISION)).periods
    return sum(period.in_time for period in periods), sum(period.late for period in periods)


async def test_the_first_claim_by_an_order_notes_the_end_of_the_start_window(bed: Bed) -> None:
    scheduler = await seated(bed)
    await bed.pool.submit(submission("a", deadline_ms=DEADLINE_MS))
    await bed.pool.submit(submission("b"))
    await bed.pool.submit(submission("c", first_token_deadline_ms=DEADLINE_MS))
    assert (await status(bed)).starts_by_ms is None, "it waits"
    slacks = {claimed.request.id: claimed.slack_ms for claimed in (await scheduler.ask(order=by())).claimed}
    windows = {}
    for name, kind, end_ms in (
        ("a.0", DeadlineKind.END, DEADLINE_MS),
        ("b.0", DeadlineKind.NONE, PATIENCE_MS),
        ("c.0", DeadlineKind.FIRST_TOKEN, DEADLINE_MS),
    ):
        found = await status(bed, name)
        assert found.starts_by_ms is not None
        assert found.first_claimed_ms is not None
        assert slacks[name] == found.starts_by_ms - found.first_claimed_ms
        windows[name] = found.starts_by_ms - found.request.submitted_ms
        assert windows[name] == floor(end_ms - KNOWN.own_ms(class_of(found.request, kind)))
    assert windows["a.0"] < windows["c.0"], "a first token needs less time than an end"


async def test_a_later_claim_changes_no_window(bed: Bed) -> None:
    scheduler = await seated(bed)
    await bed.pool.submit(submission("a", deadline_ms=DEADLINE_MS))
    (claimed,) = (await scheduler.ask(order=by())).claimed
    window = (await status(bed)).starts_by_ms
    await bed.pool.give_back({"a.0": claimed.claim})
    (claimed,) = (await scheduler.ask(order=by(RunEstimates()))).claimed
    assert ((await status(bed)).starts_by_ms, claimed.slack_ms) == (window, None)


async def test_claims_by_arrival_know_no_window(bed: Bed) -> None:
    scheduler = await seated(bed)
    await bed.pool.submit(submission("a", deadline_ms=DEADLINE_MS))
    (claimed,) = (await scheduler.ask()).claimed
    await bed.pool.give_back({"a.0": claimed.claim})
    (again,) = (await scheduler.ask(order=by())).claimed
    assert ((await status(bed)).starts_by_ms, claimed.slack_ms, again.slack_ms) == (None, None, None)


async def test_the_slack_of_a_late_claim_is_negative(bed: Bed) -> None:
    scheduler = await seated(bed)
    await bed.pool.submit(submission("a", deadline_ms=DEADLINE_MS))
    await pass_time(bed, 50_000)
    (claimed,) = (await scheduler.ask(order=by())).claimed
    assert claimed.slack_ms is not None
    assert -14_000 < claimed.slack_ms < 0


async def test_a_waiting_request_knows_how_many_came_before_it(bed: Bed) -> None:
    scheduler = await seated(bed)
    for parent in "abc":
        await bed.pool.submit(submission(parent))
    assert [(await status(bed, f"{parent}.0")).older_waiting for parent in "abc"] == [0, 1, 2]
    await scheduler.ask(most=1)
    await bed.pool.cancel("b")
    assert [(await status(bed, f"{parent}.0")).older_waiting for parent in "abc"] == [None, None, 0]


async def _finish(bed: Bed, scheduler: Scheduler, order: ClaimOrder | None = None, *, after_ms: int = 0) -> None:
    (claimed,) = (await scheduler.ask(order=order)).claimed
    if after_ms:
        await pass_time(bed, after_ms)
    assert await bed.pool.commit([entry(claimed, 0, 5, 6, end=FinishReason.STOP)]) == [bed.applied]


async def in_time(bed: Bed, scheduler: Scheduler) -> None:
    await _finish(bed, scheduler, by())


async def at_an_end_after_the_deadline(bed: Bed, scheduler: Scheduler) -> None:
    await _finish(bed, scheduler, after_ms=DEADLINE_MS + 1)


async def dropped(_bed: Bed, scheduler: Scheduler) -> None:
    slow = RunEstimates(step_ms=DEADLINE_MS)
    assert (await scheduler.ask(order=by(slow, Drop.EXPECTED))).claimed == ()


async def never_claimed(bed: Bed, _scheduler: Scheduler) -> None:
    await pass_time(bed, DEADLINE_MS + 1)
    await bed.pool.sweep()


async def claimed_late(bed: Bed, scheduler: Scheduler) -> None:
    await pass_time(bed, 50_000)
    await scheduler.ask(order=by())
    await pass_time(bed, 20_000)
    await bed.pool.sweep()


async def claimed_in_its_window(bed: Bed, scheduler: Scheduler) -> None:
    await scheduler.ask(order=by())
    await pass_time(bed, DEADLINE_MS + 1)
    await bed.pool.sweep()


async def claimed_by_arrival(bed: Bed, scheduler: Scheduler) -> None:
    await scheduler.ask()
    await pass_time(bed, DEADLINE_MS + 1)
    await bed.pool.sweep()


async def cancelled(bed: Bed, scheduler: Scheduler) -> None:
    await scheduler.ask()
    await bed.pool.cancel("a")


IN_TIME, LATE = (1, 0), (0, 1)
Story = Callable[[Bed, Scheduler], Awaitable[None]]


@pytest.mark.parametrize(
    ("story", "outcome", "counts"),
    [
        (in_time, DeadlineOutcome.IN_TIME, IN_TIME),
        (at_an_end_after_the_deadline, DeadlineOutcome.RAN_SLOW, LATE),
        (dropped, DeadlineOutcome.DROPPED, LATE),
        (never_claimed, DeadlineOutcome.STARTED_LATE, LATE),
        (claimed_late, DeadlineOutcome.STARTED_LATE, LATE),
        (claimed_in_its_window, DeadlineOutcome.RAN_SLOW, LATE),
        (claimed_by_arrival, DeadlineOutcome.RAN_SLOW, LATE),
        (cancelled, None, (0, 0)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_an_end_is_counted_in_time_or_late(
    bed: Bed, story: Story, outcome: DeadlineOutcome | None, counts: tuple[int, int]
) -> None:
    scheduler = await seated(bed)
    await bed.pool.submit(submission("a", deadline_ms=DEADLINE_MS))
    await story(bed, scheduler)
    found = await status(bed)
    assert found.end is not None
    assert (deadline_outcome(found), await counted(bed)) == (outcome, counts)
    await bed.pool.forget("a")
    assert await counted(bed) == counts, "counts outlive their requests"


async def cancelled_while_it_waits(bed: Bed, _scheduler: Scheduler) -> None:
    await bed.pool.cancel("a")


@pytest.mark.parametrize(
    ("story", "unserved"),
    [
        (in_time, 0),
        (dropped, 1),
        (never_claimed, 1),
        (claimed_in_its_window, 0),
        (cancelled_while_it_waits, 1),
        (cancelled, 0),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_stats_count_the_requests_that_ended_while_they_waited(bed: Bed, story: Story, unserved: int) -> None:
    scheduler = await seated(bed)
    await bed.pool.submit(submission("a", deadline_ms=DEADLINE_MS))
    await story(bed, scheduler)
    stats = await bed.pool.stats()
    assert (stats.ended_ever, stats.unserved_ever) == (1, unserved)
    await bed.pool.forget("a")
    assert (await bed.pool.stats()).unserved_ever == unserved, "the count outlives the request"


@pytest.mark.parametrize(("waited_ms", "counts"), [(0, IN_TIME), (DEADLINE_MS + 1, LATE)])
@pytest.mark.parametrize("to_end", [{}, {"deadline_ms": 10 * DEADLINE_MS}], ids=["first token alone", "both"])
async def test_the_deadline_of_the_first_token_is_met_or_not_for_ever(
    bed: Bed, waited_ms: int, counts: tuple[int, int], to_end: dict[str, int]
) -> None:
    _, owned = await started(bed, "a", first_token_deadline_ms=DEADLINE_MS, **to_end)
    if waited_ms:
        await pass_time(bed, waited_ms)
    assert await bed.pool.commit([entry(owned["a.0"], 0, 5)]) == [bed.applied]
    await pass_time(bed, 2 * DEADLINE_MS)
    assert await bed.pool.commit([entry(owned["a.0"], 1, 6, end=FinishReason.STOP)]) == [bed.applied]
    outcome = DeadlineOutcome.IN_TIME if counts == IN_TIME else DeadlineOutcome.RAN_SLOW
    assert (deadline_outcome(await status(bed)), await counted(bed)) == (outcome, counts)


async def test_requests_without_a_deadline_are_not_counted(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    assert await bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)]) == [bed.applied]
    assert (deadline_outcome(await status(bed)), await counted(bed)) == (None, (0, 0))


async def test_counts_are_of_a_revision_and_its_periods(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b", deadline_ms=DEADLINE_MS, on_disconnect=OnDisconnect.KEEP)
    await bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)])
    await bed.pass_awake(PERIOD_MS)
    await pass_time(bed, DEADLINE_MS + 1)
    await bed.pool.sweep()
    found = await bed.pool.deadline_counts(REVISION)
    assert [(period.in_time, period.late) for period in found.periods] == [LATE, IN_TIME]
    assert found.newest(PERIOD_MS).in_time_percent == 0
    assert (found.requests, found.in_time_percent) == (2, 50)
    assert (await bed.pool.deadline_counts("r2")).requests == 0


async def test_counts_go_after_four_hours(redis_bed: RedisBed) -> None:
    _, owned = await started(redis_bed, "a", deadline_ms=DEADLINE_MS)
    await redis_bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)])
    assert await counted(redis_bed) == IN_TIME
    await redis_bed.pass_awake(PERIODS_KEPT * PERIOD_MS)
    await redis_bed.pool.sweep()
    assert await counted(redis_bed) == (0, 0)
    left = [key async for key in redis_bed.redis.scan_iter(redis_bed.keys.named("outcomes", "*"))]
    assert left == []
