"""Claims by another order than arrival: the same on the twin and on each Redis."""

import asyncio
from typing import Any

import pytest

from orca.core.domain.request import End, FinishReason, SamplingParams
from orca.pool.order.order_class import length_class
from orca.pool.order.order_rules import (
    DROPS_MAX,
    INDEXED_AT_ONCE,
    LATE,
    ClaimOrder,
    Drop,
    Order,
    OrderRules,
    RunEstimates,
    Utility,
)
from orca.pool.records import OwnershipState
from orca.pool.redis.pool import RedisPool
from orca.pool.schemas import Schemas
from support.pool.beds import REVISION, Bed, RedisBed, Scheduler, entry, submission

PATIENCE_MS = 30_000


def by(
    order: Order = Order.DEADLINE, *, tokens: int = 512, estimates: RunEstimates | None = None, **rules: Any
) -> ClaimOrder:
    """Return the order of a claim into a row with so many prompt tokens."""
    return ClaimOrder(
        rules=OrderRules(order=order, **{"patience_ms": PATIENCE_MS, **rules}),
        estimates=estimates or RunEstimates(),
        free_prompt_tokens=tokens,
        total_prompt_tokens=tokens,
    )


async def seated(bed: Bed, *groups: str) -> list[Scheduler]:
    await bed.pool.set_revision(REVISION, 1)
    schedulers = [Scheduler(bed, f"p-{group}", group) for group in groups or ("g",)]
    for scheduler in schedulers:
        await scheduler.enter()
    return schedulers


async def names(scheduler: Scheduler, **options: Any) -> list[str]:
    """Claim, and return the parents in the order of the claim."""
    return [claimed.request.parent for claimed in (await scheduler.ask(**options)).claimed]


async def test_short_answers_go_first_by_utility_and_the_next_by_deadline(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("long", max_new_tokens=64, deadline_ms=60_000))
    await bed.pool.submit(submission("later", max_new_tokens=16, deadline_ms=90_000))
    await bed.pool.submit(submission("sooner", max_new_tokens=16, deadline_ms=80_000))
    await bed.pool.submit(submission("short", max_new_tokens=4, deadline_ms=99_000))
    # The prefix by utility has short, sooner and later. U has two of these, and D goes by deadline alone.
    assert await names(scheduler, most=3, order=by(eta=0.5)) == ["short", "sooner", "long"]


async def test_earliest_deadline_first_and_shortest_job_first(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    await bed.pool.submit(submission("long", max_new_tokens=64, deadline_ms=60_000))
    await bed.pool.submit(submission("short", max_new_tokens=4, deadline_ms=99_000))
    await bed.pool.submit(submission("middle", max_new_tokens=16, deadline_ms=80_000))
    assert await names(first, most=1, order=by(Order.EDF)) == ["long"]
    assert await names(second, order=by(Order.SJF)) == ["short", "middle"]


async def test_arrival_keeps_the_order_of_arrival_beside_another_order(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    for parent, tokens in (("a", 64), ("b", 4), ("c", 16)):
        await bed.pool.submit(submission(parent, max_new_tokens=tokens))
    answer = await first.ask(most=1, order=by())
    assert ([claimed.request.parent for claimed in answer.claimed], answer.is_by_order) == (["b"], True)
    answer = await second.ask()
    assert ([claimed.request.parent for claimed in answer.claimed], answer.is_by_order) == (["a", "c"], False)


async def test_a_weight_goes_before_a_length(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("light", max_new_tokens=12))
    await bed.pool.submit(submission("heavy", max_new_tokens=12, weight=4.0))
    await bed.pool.submit(submission("feather", max_new_tokens=12, weight=0.25))
    assert await names(scheduler, order=by(Order.SJF)) == ["heavy", "light", "feather"]


async def test_a_request_with_too_little_utility_waits_for_those_with_more(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("feather", weight=0.25, deadline_ms=60_000))
    for number in range(4):
        await bed.pool.submit(submission(f"r{number}", deadline_ms=90_000 + number))
    # q times the mean utility of U is 1/2: D has no request of utility 1/4, however soon its deadline is.
    assert await names(scheduler, most=4, order=by(eta=0.5)) == ["r0", "r1", "r2", "r3"]


async def test_inverse_lengths_are_utilities_too(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("long", max_new_tokens=256, deadline_ms=10_000))
    for number in range(4):
        await bed.pool.submit(submission(f"r{number}", max_new_tokens=12, deadline_ms=90_000 + number))
    order = by(utility=Utility.INVERSE_LENGTH)
    assert await names(scheduler, most=4, order=order) == ["r0", "r1", "r2", "r3"]


async def test_what_does_not_fit_is_passed_over_and_reserves_nothing(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("large", max_new_tokens=60, deadline_ms=60_000))  # 64 slots
    await bed.pool.submit(submission("small", max_new_tokens=12, deadline_ms=90_000))  # 16 slots
    answer = await scheduler.ask(free_slots=32, order=by(Order.EDF))
    assert [claimed.request.parent for claimed in answer.claimed] == ["small"]
    assert (answer.waiting, answer.is_blocked) == (1, False)


async def test_prompts_fill_a_step_and_no_more(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    for number in range(4):
        await bed.pool.submit(submission(f"r{number}", prompt=(1,) * 10, deadline_ms=60_000 + number))
    assert await names(scheduler, most=3, order=by(tokens=25)) == ["r0", "r1"]
    # A prompt that is longer than a step takes all of it.
    assert await names(scheduler, most=1, order=by(tokens=7)) == ["r2"]


async def test_prompts_need_not_share_a_step_if_all_that_waits_has_a_place(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    for number in range(4):
        await bed.pool.submit(submission(f"r{number}", prompt=(1,) * 10, deadline_ms=60_000 + number))
    assert await names(scheduler, most=4, order=by(tokens=25)) == ["r0", "r1", "r2", "r3"]


async def test_patience_is_not_bound_by_the_prompts_of_a_step(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    for number in range(3):
        await bed.pool.submit(submission(f"r{number}", prompt=(1,) * 10))
    await bed.age_requests(PATIENCE_MS)
    await bed.pool.submit(submission("young", prompt=(1,) * 10, deadline_ms=60_000))
    assert await names(scheduler, most=3, order=by(tokens=15)) == ["r0", "r1", "r2"]


async def test_the_first_alone_does_not_fit_so_the_others_go_by_deadline(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("wide", prompt=(1,) * 40, max_new_tokens=4, weight=16.0, deadline_ms=60_000))
    await bed.pool.submit(submission("short", max_new_tokens=4, deadline_ms=90_000))
    await bed.pool.submit(submission("urgent", max_new_tokens=12, deadline_ms=70_000))
    assert await names(scheduler, free_slots=32, order=by()) == ["urgent", "short"]


async def test_after_their_patience_the_oldest_go_first_and_reserve_the_group(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    await bed.pool.submit(submission("old", max_new_tokens=60))  # 64 slots
    await bed.pool.submit(submission("older_than_patience", max_new_tokens=60))
    await bed.age_requests(PATIENCE_MS)
    for number in range(3):
        await bed.pool.submit(submission(f"r{number}", max_new_tokens=12, deadline_ms=60_000))
    assert await names(first, most=1, order=by()) == ["old"]
    answer = await first.ask(free_slots=32, order=by())
    assert (answer.claimed, answer.is_blocked, answer.waiting) == ((), True, 4)
    # It is reserved for that group: another one goes on with others.
    assert await names(second, free_slots=32, order=by()) == ["r0", "r1"]
    assert await names(first, free_slots=64, order=by()) == ["older_than_patience"]


async def test_before_its_patience_has_passed_a_request_reserves_nothing(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("large", max_new_tokens=60))
    await bed.age_requests(PATIENCE_MS - 5_000)
    await bed.pool.submit(submission("small"))
    answer = await scheduler.ask(free_slots=32, order=by())
    assert ([claimed.request.parent for claimed in answer.claimed], answer.is_blocked) == (["small"], False)


SLOW = RunEstimates(step_ms=1000.0, least_step_ms=100.0)
"""A second between two tokens, and at least a tenth of one."""


async def test_a_request_whose_start_window_is_over_goes_last(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("late", max_new_tokens=12, deadline_ms=5_000))
    await bed.pool.submit(submission("in_time", max_new_tokens=12, deadline_ms=60_000))
    order = by(Order.EDF, estimates=SLOW, drop=Drop.NEVER)
    assert await names(scheduler, order=order) == ["in_time", "late"]


async def test_a_start_window_counts_the_outputs_that_the_pool_has_seen(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("r", max_new_tokens=12, deadline_ms=5_000))
    await bed.pool.submit(submission("s", max_new_tokens=12, deadline_ms=60_000))
    seen = RunEstimates(step_ms=1000.0, outputs=((length_class(4), 3.0),))
    assert await names(scheduler, order=by(Order.EDF, estimates=seen, drop=Drop.NEVER)) == ["r", "s"]


async def test_a_first_token_needs_one_step(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("end", max_new_tokens=12, deadline_ms=5_000))
    await bed.pool.submit(submission("first", max_new_tokens=12, first_token_deadline_ms=5_000, deadline_ms=90_000))
    order = by(Order.EDF, estimates=SLOW, drop=Drop.NEVER)
    assert await names(scheduler, order=order) == ["first", "end"]


ENDLESS = SamplingParams(ignore_eos=True)


@pytest.mark.parametrize(
    ("drop", "sampling", "is_dropped"),
    [
        (Drop.CERTAIN, ENDLESS, True),  # 64 steps of a tenth of a second
        (Drop.CERTAIN, SamplingParams(), False),  # its first token may end it
        (Drop.CERTAIN, SamplingParams(min_tokens=60), True),
        (Drop.CERTAIN, SamplingParams(min_tokens=60, grammar="start: /a+/"), False),  # it ends where its text is whole
        (Drop.EXPECTED, SamplingParams(), True),
        (Drop.NEVER, ENDLESS, False),
    ],
)
async def test_what_is_too_late_ends_before_its_deadline(
    bed: Bed, drop: Drop, sampling: SamplingParams, *, is_dropped: bool
) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("late", max_new_tokens=64, sampling=sampling, deadline_ms=5_000))
    answer = await scheduler.ask(order=by(estimates=SLOW, drop=drop))
    status = await bed.pool.status("late.0")
    if is_dropped:
        assert (answer.claimed, answer.waiting) == ((), 0)
        assert status.end == End(FinishReason.DEADLINE_EXCEEDED, 0, detail=LATE)
        log = await bed.pool.read("late.0", 0)
        assert log.end == status.end
    else:
        assert [claimed.request.parent for claimed in answer.claimed] == ["late"]
        assert status.state is OwnershipState.OWNED


async def test_a_slow_group_ends_nothing_that_a_faster_one_could_finish(bed: Bed) -> None:
    slow, fast = await seated(bed, "g", "h")
    await fast.ask(most=0, order=by(estimates=RunEstimates(step_ms=20.0, least_step_ms=10.0)))
    await bed.pool.submit(submission("r", max_new_tokens=64, sampling=ENDLESS, deadline_ms=5_000))
    await slow.ask(most=0, order=by(estimates=SLOW))
    assert (await bed.pool.status("r.0")).state is OwnershipState.QUEUED
    assert await names(fast, order=by(estimates=RunEstimates(step_ms=20.0, least_step_ms=10.0))) == ["r"]


@pytest.mark.parametrize("drop", [Drop.CERTAIN, Drop.EXPECTED])
async def test_a_request_that_came_back_needs_only_what_it_has_not_got(bed: Bed, drop: Drop) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("half", max_new_tokens=24, sampling=ENDLESS, deadline_ms=9_000))
    (taken,) = (await scheduler.ask(order=by())).claimed
    await bed.pool.commit([entry(taken, 0, *range(20))])
    await bed.pool.give_back({taken.request.id: taken.claim})
    await bed.pool.submit(submission("new", max_new_tokens=24, sampling=ENDLESS, deadline_ms=9_000))
    # Four steps of a second are in time, and 24 are not, not even at half a second each.
    estimates = RunEstimates(step_ms=1000.0, least_step_ms=500.0)
    assert await names(scheduler, order=by(estimates=estimates, drop=drop)) == ["half"]
    assert (await bed.pool.status("new.0")).end == End(FinishReason.DEADLINE_EXCEEDED, 0, detail=LATE)


async def test_an_index_that_has_missed_something_is_built_again(redis_bed: RedisBed) -> None:
    (scheduler,) = await seated(redis_bed)
    await redis_bed.pool.submit(submission("a", deadline_ms=60_000))
    await redis_bed.pool.submit(submission("b", deadline_ms=70_000))
    await scheduler.ask(most=0, order=by())
    # As a part does that knows no index: one request is queued, and one is taken away.
    classes = redis_bed.keys.named("classes", REVISION)
    (of,) = [name.decode() for name in await redis_bed.redis.hgetall(classes) if name]
    waiting = redis_bed.keys.named("waiting", f"{REVISION}/{of}")
    members = await redis_bed.redis.zrange(waiting, 0, -1)
    await redis_bed.redis.zrem(waiting, members[0])
    await redis_bed.redis.zadd(waiting, {b"0000000000000009 gone.0": 9**15})
    assert await names(scheduler, most=1, order=by()) == ["b"]
    assert await names(scheduler, order=by()) == []
    assert await names(scheduler, order=by()) == ["a"], "what was gone has left the index, so its count was wrong"


async def test_claims_build_the_index_in_steps_from_the_oldest_on(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("old", n=INDEXED_AT_ONCE, max_new_tokens=64))
    await bed.pool.submit(submission("short", max_new_tokens=12))
    assert await names(scheduler, most=1, order=by()) == ["old"], "the index has the oldest"
    await bed.pool.submit(submission("shorter", max_new_tokens=4))
    assert await names(scheduler, most=3, order=by()) == ["shorter", "short", "old"]


async def test_classes_are_counted_when_the_index_is_whole_and_the_order_is_known_before(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a", n=INDEXED_AT_ONCE + 1, deadline_ms=10**6))
    await scheduler.ask(most=0, order=by(Order.SJF))
    built = (await bed.pool.stats()).by_order
    assert (built.classes, built.order, built.due[-1]) == (None, by(Order.SJF), INDEXED_AT_ONCE + 1)
    await scheduler.ask(most=0, order=by())
    assert sum((await bed.pool.stats()).by_order.classes.values()) == INDEXED_AT_ONCE + 1


async def test_a_newer_release_claims_what_the_builder_of_the_index_could_not_read(redis_bed: RedisBed) -> None:
    (scheduler,) = await seated(redis_bed)
    await redis_bed.pool.submit(submission("newer"))
    await redis_bed.pool.submit(submission("known"))
    await redis_bed.set_record_schema("newer", 4)
    assert await names(scheduler, order=by()) == ["known"]
    redis_bed.pool = RedisPool(redis_bed.url, redis_bed.deployment, redis_bed.settings, Schemas(2, 4))
    try:
        assert await names(scheduler, order=by()) == ["newer"]
    finally:
        await redis_bed.pool.close()


async def test_no_class_keeps_another_from_ending_what_is_too_late(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    # More short ones than a claim looks at: they may be late, but not for certain.
    await bed.pool.submit(submission("short", n=DROPS_MAX + 1, max_new_tokens=16, deadline_ms=4_000))
    await bed.pool.submit(submission("late", max_new_tokens=64, sampling=ENDLESS, deadline_ms=5_000))
    await scheduler.ask(most=0, order=by(estimates=SLOW))
    assert (await bed.pool.status("late.0")).end == End(FinishReason.DEADLINE_EXCEEDED, 0, detail=LATE)
    assert (await bed.pool.status("short.0")).state is OwnershipState.QUEUED


async def test_the_soonest_deadlines_of_all_classes_end_first(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("many", n=DROPS_MAX, max_new_tokens=64, sampling=ENDLESS, deadline_ms=5_000))
    await bed.pool.submit(submission("sooner", max_new_tokens=128, sampling=ENDLESS, deadline_ms=4_000))
    answer = await scheduler.ask(most=0, order=by(estimates=SLOW))
    assert answer.waiting == 1
    assert (await bed.pool.status("sooner.0")).state is OwnershipState.ENDED


@pytest.mark.parametrize("order", [Order.EDF, Order.DEADLINE])
async def test_a_goal_for_the_first_token_is_a_soft_deadline(bed: Bed, order: Order) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("none"))
    await bed.pool.submit(submission("deadline", deadline_ms=15_000))
    await bed.pool.submit(submission("loose", first_token_goal_ms=20_000))
    await bed.pool.submit(submission("tight", first_token_goal_ms=10_000))
    assert await names(scheduler, order=by(order)) == ["tight", "deadline", "loose", "none"]


async def test_a_goal_counts_as_the_lower_bound_of_its_class(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a", first_token_goal_ms=12_287))  # 8192 ms, as all from there on
    await bed.pool.submit(submission("b", first_token_goal_ms=8_192))
    await bed.pool.submit(submission("c", first_token_goal_ms=12_288))  # 1.5 times as long
    await bed.pool.submit(submission("d", deadline_ms=11_000))
    assert await names(scheduler, order=by(Order.EDF)) == ["a", "b", "d", "c"]


async def test_a_goal_is_reached_after_a_step(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("end", max_new_tokens=12, deadline_ms=25_000))  # 11 s of its own
    await bed.pool.submit(submission("first", max_new_tokens=12, first_token_goal_ms=16_384))
    await bed.pool.submit(submission("sooner", max_new_tokens=12, first_token_goal_ms=12_288))
    order = by(Order.EDF, estimates=SLOW, drop=Drop.NEVER)
    assert await names(scheduler, order=order) == ["sooner", "end", "first"]


async def test_a_goal_that_cannot_be_met_any_more_decides_nothing(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("none"))
    await bed.pool.submit(submission("passed", first_token_goal_ms=4_096))
    await bed.pool.submit(submission("too_short", first_token_goal_ms=900))
    await bed.age_requests(3_500)  # a step of a second would end too late for the second one
    await bed.pool.submit(submission("young", first_token_goal_ms=25_000))
    order = by(Order.EDF, estimates=SLOW)
    assert await names(scheduler, order=order) == ["young", "none", "passed", "too_short"]


async def test_a_goal_beyond_patience_does_not_lengthen_it(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("none"))
    await bed.pool.submit(submission("day", first_token_goal_ms=86_400_000))
    await bed.pool.submit(submission("deadline", deadline_ms=PATIENCE_MS + 60_000))
    assert await names(scheduler, order=by(Order.EDF)) == ["none", "day", "deadline"]


async def test_after_their_patience_the_oldest_go_first_whatever_their_goals_are(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("passed", first_token_goal_ms=2_000))
    await bed.pool.submit(submission("none"))
    await bed.pool.submit(submission("loose", first_token_goal_ms=86_400_000))
    await bed.age_requests(PATIENCE_MS)
    await bed.pool.submit(submission("urgent", max_new_tokens=1, first_token_goal_ms=2_000))
    await bed.pool.submit(submission("deadline", max_new_tokens=1, deadline_ms=2_000))
    assert await names(scheduler, most=3, order=by()) == ["passed", "none", "loose"]


async def test_a_request_with_a_goal_reserves_the_group_after_its_patience(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("large", max_new_tokens=60, first_token_goal_ms=20_000))
    await bed.age_requests(PATIENCE_MS)
    await bed.pool.submit(submission("small"))
    answer = await scheduler.ask(free_slots=32, order=by())
    assert (answer.claimed, answer.is_blocked) == ((), True)


async def test_a_deadline_decides_alone(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("end", deadline_ms=25_000, first_token_goal_ms=2_000))
    await bed.pool.submit(submission("first", first_token_deadline_ms=20_000, first_token_goal_ms=2_000))
    await bed.pool.submit(submission("goal", first_token_goal_ms=16_384))
    assert await names(scheduler, order=by(Order.EDF)) == ["goal", "first", "end"]


@pytest.mark.parametrize("drop", Drop)
async def test_a_goal_ends_nothing_and_is_never_late(bed: Bed, drop: Drop) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("late", max_new_tokens=12, deadline_ms=5_000, sampling=SamplingParams()))
    await bed.pool.submit(submission("missed", max_new_tokens=12, first_token_goal_ms=1))
    order = by(Order.EDF, estimates=SLOW, drop=drop)
    expected = ["missed"] if drop is Drop.EXPECTED else ["missed", "late"]
    assert await names(scheduler, order=order) == expected
    await bed.recount()


async def test_after_the_first_token_its_goal_decides_nothing(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("begun", first_token_goal_ms=4_096))
    (taken,) = (await scheduler.ask(order=by())).claimed
    await bed.pool.commit([entry(taken, 0, 7)])
    await bed.pool.give_back({taken.request.id: taken.claim})
    await bed.pool.submit(submission("goal", first_token_goal_ms=16_384))
    assert await names(scheduler, most=1, order=by(Order.EDF)) == ["goal"]
    await bed.recount()
    await bed.pool.cancel("begun")
    assert await names(scheduler, order=by()) == []


async def test_a_request_with_a_goal_that_came_back_has_it_again(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("none"))
    await bed.pool.submit(submission("goal", first_token_goal_ms=4_096))
    taken = (await scheduler.ask(most=1, order=by(Order.EDF))).claimed
    await bed.pool.give_back({each.request.id: each.claim for each in taken})
    assert await names(scheduler, order=by(Order.EDF)) == ["goal", "none"]


async def test_in_the_order_of_arrival_a_goal_decides_nothing(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("none"))
    await bed.pool.submit(submission("goal", first_token_goal_ms=2_000))
    assert await names(scheduler) == ["none", "goal"]


@pytest.mark.parametrize("name", [b"0/4/7/0/end/25/3", b"0/4/7/0/soon", b"0/4/7", b"0/4/7/0/none7", b"0/4/7/0/none/"])
async def test_an_index_with_classes_of_another_release_is_built_again(redis_bed: RedisBed, name: bytes) -> None:
    (scheduler,) = await seated(redis_bed)
    await redis_bed.pool.submit(submission("a"))
    await redis_bed.pool.submit(submission("b", first_token_goal_ms=4_096))
    await scheduler.ask(most=0, order=by())
    classes = redis_bed.keys.named("classes", REVISION)
    (of,) = [name for name in await redis_bed.redis.hgetall(classes) if name.endswith(b"none")]
    waiting = redis_bed.keys.named("waiting", f"{REVISION}/")
    await redis_bed.redis.rename(waiting + of.decode(), waiting + name.decode())
    await redis_bed.redis.hdel(classes, of)
    await redis_bed.redis.hset(classes, name, 1)
    stats = (await redis_bed.pool.stats()).by_order
    assert stats is not None
    assert [str(known) for known in stats.classes] == [f"{of.decode()}/24"], "others are left out"
    assert await names(scheduler, most=1, order=by(Order.EDF)) == ["b"]
    await redis_bed.recount()
    assert await names(scheduler, order=by(Order.EDF)) == ["a"]
    assert not await redis_bed.redis.exists(waiting + name.decode())


async def test_no_deadline_and_no_estimate_drop_nothing(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a", sampling=ENDLESS, max_new_tokens=64))
    await bed.pool.submit(submission("b", sampling=ENDLESS, max_new_tokens=64, deadline_ms=5_000))
    assert sorted(await names(scheduler, order=by(drop=Drop.EXPECTED))) == ["a", "b"]


async def test_after_its_deadline_a_request_is_not_claimed(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a", deadline_ms=5_000))
    await bed.pool.submit(submission("b", deadline_ms=60_000))
    await bed.pass_deadlines(5_000)
    assert await names(scheduler, order=by()) == ["b"]


async def test_a_request_that_came_back_is_in_its_class_again(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    for parent, ms in (("a", 60_000), ("b", 70_000), ("c", 80_000)):
        await bed.pool.submit(submission(parent, deadline_ms=ms))
    taken = (await scheduler.ask(most=1, order=by())).claimed
    await bed.pool.give_back({each.request.id: each.claim for each in taken})
    await bed.pool.cancel("b")
    assert await names(scheduler, order=by()) == ["a", "c"]


async def test_a_repeated_claim_is_answered_as_before(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("a"))
    await bed.pool.submit(submission("b", max_new_tokens=4))
    answer = await scheduler.ask(most=1, order=by())
    again = await bed.pool.claim(
        scheduler.caller, scheduler.calls, free_slots=0, total_slots=0, block_tokens=16, most=0, order=by()
    )
    assert again == answer
    assert [claimed.request.parent for claimed in again.claimed] == ["b"]


async def test_under_an_older_schema_claims_go_by_arrival(make_bed: Any) -> None:
    bed = make_bed(schemas=Schemas(2, 3))
    (scheduler,) = await seated(bed)
    await bed.pool.submit(submission("long", max_new_tokens=64))
    await bed.pool.submit(submission("short", max_new_tokens=4))
    assert await names(scheduler, most=1, order=by()) == ["short"]
    assert await bed.pool.set_schema(2) == 2
    await bed.pool.submit(submission("shorter", max_new_tokens=2))
    answer = await scheduler.ask(most=1, order=by())
    assert ([claimed.request.parent for claimed in answer.claimed], answer.is_by_order) == (["long"], False)
    # The index was not kept meanwhile: the first claim under the new number builds it again.
    await bed.pool.submit(submission("later", max_new_tokens=64))
    assert await bed.pool.set_schema(3) == 3
    assert await names(scheduler, most=2, order=by()) == ["shorter", "later"]


async def test_each_revision_has_an_index_of_its_own(bed: Bed) -> None:
    (scheduler,) = await seated(bed)
    await bed.pool.promise_slots("r2", 4096)
    await bed.pool.submit(submission("a", max_new_tokens=64))
    await bed.pool.submit(submission("b"))
    assert await names(scheduler, most=1, order=by()) == ["b"]
    await bed.pool.set_revision("r2", 2)
    other = Scheduler(bed, "p-2", "g2", "r2")
    await other.enter()
    await bed.pool.submit(submission("c", revision="r2"))
    assert await names(other, order=by()) == ["c"]
    assert await names(scheduler, order=by()) == ["a"]


async def test_two_groups_never_claim_the_same_request(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    for number in range(40):
        await bed.pool.submit(submission(f"r{number}", max_new_tokens=4 + number, deadline_ms=60_000 - number))
    answers = [
        await asyncio.gather(names(first, most=5, order=by()), names(second, most=5, order=by())) for _ in range(4)
    ]
    taken = [name for pair in answers for found in pair for name in found]
    assert sorted(taken) == sorted(f"r{number}" for number in range(40))
