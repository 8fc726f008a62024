"""A changed promise of slots for a revision, and the requests that its writer waits for."""

import pytest

from orca.core.domain.errors import NeverFits
from orca.core.domain.request import FinishReason
from orca.pool.records import LargerRequests, OnDisconnect, OwnershipState
from support.pool.beds import REVISION, SETTINGS, Bed, RedisBed, Scheduler, entry, started, state, submission

LARGE, SMALL = 60, 12
"""New tokens behind a prompt of 4."""


async def promised(bed: Bed) -> int | None:
    found: int | None = (await bed.pool.stats()).promised_slots
    return found


async def test_a_lowered_promise_refuses_larger_requests_and_ends_none(bed: Bed) -> None:
    scheduler, _ = await started(bed, "runs", max_new_tokens=LARGE)
    await bed.pool.promise_slots(REVISION, 64)
    await bed.pool.submit(submission("waits", max_new_tokens=LARGE))
    assert await bed.pool.set_promise(REVISION, 32, expected=64) == 32
    with pytest.raises(NeverFits, match="64 slots, the engine has 32"):
        await bed.pool.submit(submission("refused", max_new_tokens=LARGE))
    await bed.pool.submit(submission("small", max_new_tokens=SMALL))
    assert await state(bed, "runs.0") is OwnershipState.OWNED
    assert list(await scheduler.take()) == ["waits.0", "small.0"]
    assert await promised(bed) == 32


async def test_a_repeated_submit_is_answered_as_before_the_promise_changed(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.promise_slots(REVISION, 64)
    stored = await bed.pool.submit(submission("a", max_new_tokens=LARGE))
    await bed.pool.set_promise(REVISION, 32, expected=64)
    assert await bed.pool.submit(submission("a", max_new_tokens=LARGE)) == stored


async def test_a_raised_promise_admits_larger_requests(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.promise_slots(REVISION, 32)
    assert await bed.pool.set_promise(REVISION, 64, expected=32) == 64
    await bed.pool.submit(submission("a", max_new_tokens=LARGE))
    # Groups that form go by it too.
    assert await bed.pool.promise_slots(REVISION, 32) == 64


async def test_an_outdated_promise_changes_nothing(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.promise_slots(REVISION, 64)
    assert await bed.pool.set_promise(REVISION, 32, expected=64) == 32
    assert await bed.pool.set_promise(REVISION, 128, expected=64) == 32  # decided before, and sent after it
    assert await bed.pool.set_promise(REVISION, 32, expected=64) == 32  # once more, for a lost answer
    assert await promised(bed) == 32


async def test_a_promise_cannot_be_changed_before_a_group_has_formed(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    assert await bed.pool.set_promise(REVISION, 32, expected=64) is None
    assert await promised(bed) is None
    assert await bed.pool.promise_slots(REVISION, 64) == 64


async def test_larger_requests_are_counted_while_they_wait_or_run(bed: Bed) -> None:
    await bed.pool.promise_slots(REVISION, 1000)
    _, owned = await started(bed, "runs", "over", max_new_tokens=LARGE)
    await bed.pool.submit(submission("waits", n=2, max_new_tokens=LARGE + 5))
    await bed.pool.submit(submission("small", max_new_tokens=SMALL))
    await bed.pool.commit([entry(owned["over.0"], 0, 5, end=FinishReason.STOP)])
    await bed.pool.set_promise(REVISION, 32, expected=1000)

    async def larger(slots: int) -> LargerRequests:
        found: LargerRequests = await bed.pool.larger_requests(REVISION, slots)
        return found

    assert await larger(32) == LargerRequests(promised_slots=32, unfinished=3, smallest=LARGE + 4, largest=LARGE + 9)
    assert await larger(LARGE + 4) == LargerRequests(
        promised_slots=32, unfinished=2, smallest=LARGE + 9, largest=LARGE + 9
    )
    await bed.pool.cancel("waits")
    assert await larger(32) == LargerRequests(promised_slots=32, unfinished=1, smallest=LARGE + 4, largest=LARGE + 4)
    await bed.pool.commit([entry(owned["runs.0"], 0, 5, end=FinishReason.STOP)])
    assert await larger(32) == LargerRequests(promised_slots=32, unfinished=0, smallest=0, largest=0)


async def test_larger_requests_of_other_revisions_are_not_counted(bed: Bed) -> None:
    await bed.pool.promise_slots("r2", 1000)
    await started(bed, "a", max_new_tokens=LARGE)
    assert await bed.pool.larger_requests("r2", 16) == LargerRequests(
        promised_slots=1000, unfinished=0, smallest=0, largest=0
    )
    assert (await bed.pool.larger_requests(REVISION, 16)).promised_slots is None
    assert (await bed.pool.larger_requests(REVISION, 16)).unfinished == 1


async def test_a_request_of_a_group_whose_lease_ran_out_is_waited_for_too(bed: Bed) -> None:
    await started(bed, "a", max_new_tokens=LARGE, on_disconnect=OnDisconnect.KEEP)
    for _ in range(2):
        await bed.pass_awake(SETTINGS.seat_lease_ms)
        assert (await bed.pool.larger_requests(REVISION, 16)).unfinished == 1
        await bed.pool.sweep()


async def test_a_promise_of_a_replaced_model_without_requests_binds_no_group(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    for revision in (REVISION, "r2"):
        await bed.pool.promise_slots(revision, 64)
    await bed.pool.submit(submission("a", max_new_tokens=LARGE, on_disconnect=OnDisconnect.KEEP))
    await bed.pool.set_revision("r2", 2)
    assert await bed.pool.promise_slots(REVISION, 32) == 64  # one of its requests has not ended
    await bed.pool.cancel("a")
    assert await bed.pool.promise_slots(REVISION, 32) == 32
    assert await bed.pool.promise_slots(REVISION, 64) == 32
    assert await bed.pool.promise_slots("r2", 32) == 64  # it is in force
    await bed.pool.set_revision(REVISION, 3)
    assert await promised(bed) == 32


async def test_a_changed_promise_outlives_a_restart_of_the_scheduler(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.promise_slots(REVISION, 64)
    await bed.pool.set_promise(REVISION, 32, expected=64)
    await Scheduler(bed).enter()
    assert await bed.pool.promise_slots(REVISION, 64) == 32


async def test_a_previous_holders_offer_is_not_used_for_a_release_that_makes_no_offer(
    redis_bed: RedisBed,
) -> None:
    await redis_bed.pool.set_revision(REVISION, 1)
    scheduler = Scheduler(redis_bed)
    await scheduler.enter()
    await scheduler.heartbeat(offered_slots=64)
    seat = redis_bed.keys.named("seat", scheduler.caller.group)
    await redis_bed.redis.hset(seat, "holder", "of-the-release-before")
    assert (await redis_bed.pool.stats()).offered_slots is None


async def test_an_offer_of_the_previous_release_is_ignored_because_memory_may_have_decided_it(
    redis_bed: RedisBed,
) -> None:
    await redis_bed.pool.set_revision(REVISION, 1)
    scheduler = Scheduler(redis_bed)
    await scheduler.enter()
    await scheduler.heartbeat()
    seat = redis_bed.keys.named("seat", scheduler.caller.group)
    await redis_bed.redis.hset(seat, "offer", f"{scheduler.caller.process} 64")
    assert (await redis_bed.pool.stats()).offered_slots is None
