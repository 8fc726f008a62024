"""An internal engine failure blames requests: some run alone after it, and some end (poison.py)."""

import pytest

from orca.core.domain.request import End, FinishReason
from orca.pool.poison import FAILURES_IN_COMPANY, FAILURES_MAX
from orca.pool.records import Claimed, CommitAnswer, OnDisconnect, OwnershipState, SeatEntered
from support.pool.beds import SETTINGS, Bed, RedisBed, Scheduler, entry, started, submission


async def fails(scheduler: Scheduler, times: int) -> SeatEntered:
    """The engine fails from inside so often, while all that the group can claim runs. Returns: the last answer."""
    for _ in range(times):
        answer = await scheduler.fail(*(await scheduler.take()).values())
    return answer


async def test_a_request_that_ran_at_an_internal_engine_failure_counts_a_failure_and_waits_again(bed: Bed) -> None:
    scheduler, claimed = await started(bed, "a", "b")
    answer = await scheduler.fail(*claimed.values())
    assert (answer.failed, answer.poisoned) == (("a.0", "b.0"), ())
    assert list(await scheduler.take()) == ["a.0", "b.0"]


async def test_after_two_failures_a_request_is_claimed_alone(bed: Bed) -> None:
    scheduler, claimed = await started(bed, "a")
    assert [claimed["a.0"].is_alone, FAILURES_IN_COMPANY] == [False, 2]
    await scheduler.fail(claimed["a.0"])
    again = await scheduler.take()
    assert not again["a.0"].is_alone
    await scheduler.fail(again["a.0"])
    assert (await scheduler.take())["a.0"].is_alone


async def test_requests_that_must_run_alone_are_claimed_with_others_and_need_their_own_slots_only(bed: Bed) -> None:
    scheduler, _ = await started(bed)
    for parent in "ab":
        await bed.pool.submit(submission(parent))
    await fails(scheduler, 2)
    await bed.pool.submit(submission("c"))
    claimed = await scheduler.take(free_slots=9_984)
    assert {name: one.is_alone for name, one in claimed.items()} == {"a.0": True, "b.0": True, "c.0": False}


async def test_the_third_failure_alone_ends_a_request_with_an_error_in_the_same_call(bed: Bed) -> None:
    scheduler, _ = await started(bed)
    await bed.pool.submit(submission("a"))
    assert (await fails(scheduler, FAILURES_MAX - 1)).poisoned == ()
    answer = await fails(scheduler, 1)
    assert (answer.failed, answer.poisoned) == ((), ("a.0",))
    status = await bed.pool.status("a.0")
    assert (status.state, status.end) == (OwnershipState.ENDED, End(FinishReason.ERROR, 0))


async def test_tokens_of_earlier_claims_stay_in_the_log_of_a_request_that_ends_as_poison(bed: Bed) -> None:
    scheduler, claimed = await started(bed, "a")
    await bed.pool.commit([entry(claimed["a.0"], 0, 7, 8)])
    await fails(scheduler, FAILURES_MAX + 1)
    log = await bed.pool.read("a.0", 0)
    assert ([token.id for token in log.tokens], log.end) == ([7, 8], End(FinishReason.ERROR, 2))


async def test_the_first_commit_of_a_claim_acquits_the_request(bed: Bed) -> None:
    scheduler, _ = await started(bed)
    await bed.pool.submit(submission("a"))
    await fails(scheduler, FAILURES_MAX - 1)
    claimed = await scheduler.take()
    assert await bed.pool.commit([entry(claimed["a.0"], 0, 7)]) == [bed.applied]
    assert (await scheduler.fail(claimed["a.0"])).failed == ()
    assert not (await scheduler.take())["a.0"].is_alone


@pytest.mark.parametrize("way", ["give back", "leave", "lease", "enter from outside", "gap"])
async def test_an_innocent_return_clears_the_mark_and_keeps_the_failures(bed: Bed, way: str) -> None:
    scheduler, _ = await started(bed)
    await bed.pool.submit(submission("a", on_disconnect=OnDisconnect.KEEP))
    await fails(scheduler, FAILURES_IN_COMPANY)
    claimed = (await scheduler.take())["a.0"]
    scheduler = await return_innocent(bed, scheduler, claimed, way)
    assert (await scheduler.fail(claimed)).failed == (), "its claim is over"
    again = (await scheduler.take())["a.0"]
    assert again.is_alone
    answer = await scheduler.fail(again)
    assert (answer.failed, answer.poisoned) == (("a.0",), ()), "the third failure and not the fourth"


async def return_innocent(bed: Bed, scheduler: Scheduler, claimed: Claimed, way: str) -> Scheduler:
    """Let a claimed request go back to the queue without blame. Returns: who holds the seat then."""
    if way == "give back":
        await bed.pool.give_back({claimed.request.id: claimed.claim})
    elif way == "gap":
        assert await bed.pool.commit([entry(claimed, 5, 7)]) == [CommitAnswer.NOT_YOURS]
    elif way == "lease":
        await bed.pass_awake(SETTINGS.seat_lease_ms)
        await bed.pool.sweep()
    elif way == "leave":
        await bed.pool.leave(scheduler.caller)
        scheduler = Scheduler(bed, "p2")
    await scheduler.enter()
    return scheduler


async def test_only_the_requests_that_are_named_under_their_present_claim_are_blamed(bed: Bed) -> None:
    scheduler, first = await started(bed, "a", "b", "c")
    await bed.pool.give_back({"c.0": first["c.0"].claim})
    again = await scheduler.take()
    answer = await scheduler.fail(first["a.0"], first["c.0"])
    assert answer.failed == ("a.0",)
    assert list(again) == ["c.0"], "claimed again, and what ran was its earlier claim"


async def test_a_request_of_another_group_is_not_blamed(bed: Bed) -> None:
    _, claimed = await started(bed, "a")
    other = Scheduler(bed, "p2", "g2")
    await other.enter()
    assert (await other.fail(claimed["a.0"])).failed == ()
    assert (await bed.pool.status("a.0")).owner == "p1"


async def test_another_process_that_enters_gets_no_stored_answer_of_its_predecessor(bed: Bed) -> None:
    scheduler, claimed = await started(bed, "a")
    assert (await scheduler.fail(claimed["a.0"])).failed == ("a.0",)
    second = Scheduler(bed, "p2")
    answer = await bed.pool.enter(second.caller, 1, reported_epoch=0, is_holder_dead=True)
    assert (answer.failed, answer.poisoned) == ((), ())


async def test_a_cancelled_request_is_not_blamed_for_the_failed_step(bed: Bed) -> None:
    scheduler, claimed = await started(bed, "a")
    await bed.pool.cancel("a")
    answer = await scheduler.fail(claimed["a.0"])
    assert (answer.failed, answer.poisoned) == ((), ())


async def test_records_of_a_release_that_counted_no_failures_have_none(redis_bed: RedisBed) -> None:
    scheduler, claimed = await started(redis_bed, "a")
    record = redis_bed.keys.named("req", "a.0")
    await redis_bed.redis.hdel(record, "trial", "failures")
    assert (await scheduler.fail(claimed["a.0"])).failed == (), "claimed by the older release, without a mark"
    await redis_bed.redis.hdel(record, "trial", "failures")
    again = await scheduler.take()
    assert (await scheduler.fail(again["a.0"])).failed == ("a.0",)
    await redis_bed.redis.hdel(redis_bed.keys.named("seat", "g1"), "failed", "poisoned")
    await scheduler.enter()
