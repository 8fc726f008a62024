"""The group's seat: enter, heartbeat, leave, and who is refused when."""

import pytest

from orca.pool.api import ProcessClosed, SeatLost, StaleCall
from orca.pool.contract import CLOSED_FOR_MS
from orca.pool.records import OwnershipState, SeatEntered, SeatHeld
from support.pool.beds import REVISION, SETTINGS, Bed, Scheduler, entry, started, submission


async def test_epochs_rise_above_the_pools_own_and_the_stages(bed: Bed) -> None:
    scheduler = Scheduler(bed)
    assert await scheduler.enter() == 1
    assert await scheduler.enter() == 2
    assert await scheduler.enter(reported_epoch=41) == 42
    assert await scheduler.enter(reported_epoch=7) == 43


async def test_the_same_enter_call_gets_the_same_epoch(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    again = await bed.pool.enter(scheduler.caller, 1, reported_epoch=0)
    assert isinstance(again, SeatEntered)
    assert again.epoch.number == 1
    # Nothing was given back by it.
    assert list(await scheduler.heartbeat()) == ["a.0"]


async def test_an_older_call_is_stale(bed: Bed) -> None:
    scheduler = Scheduler(bed)
    scheduler.calls = 10
    await scheduler.enter()
    with pytest.raises(StaleCall):
        await bed.pool.enter(scheduler.caller, 10, reported_epoch=0)
    with pytest.raises(StaleCall):
        await bed.pool.claim(scheduler.caller, 10, free_slots=9, total_slots=9, block_tokens=1, most=1)


async def test_another_process_waits_until_the_lease_has_expired(bed: Bed) -> None:
    await Scheduler(bed, "p1").enter()
    other = Scheduler(bed, "p2")
    answer = await bed.pool.enter(other.caller, 1, reported_epoch=0)
    assert isinstance(answer, SeatHeld)
    assert 0 < answer.lease_ms <= SETTINGS.seat_lease_ms
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    assert await other.enter() == 2


async def test_a_holder_seen_to_exit_is_replaced_at_once(bed: Bed) -> None:
    await Scheduler(bed, "p1").enter()
    assert await Scheduler(bed, "p2").enter(is_holder_dead=True) == 2


async def test_entering_gives_all_requests_of_the_group_back_with_raised_claims(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", "b")
    await scheduler.enter()
    assert await scheduler.heartbeat() == {}
    again = await scheduler.take()
    assert list(again) == ["a.0", "b.0"]
    assert again["a.0"].claim.number == owned["a.0"].claim.number + 2


async def test_entering_leaves_other_groups_alone(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    await Scheduler(bed, "p2", "g2").enter()
    assert list(await scheduler.heartbeat()) == ["a.0"]


async def test_a_heartbeat_renews_the_lease_also_after_it_expired(bed: Bed) -> None:
    scheduler = Scheduler(bed)
    await scheduler.enter()
    await bed.pass_awake(SETTINGS.seat_lease_ms * 2)
    await bed.pool.sweep()
    assert (await bed.pool.stats()).groups == ()
    await scheduler.heartbeat()
    assert (await bed.pool.stats()).groups == ("g1",)


async def test_a_heartbeat_without_the_seat_reports_that(bed: Bed) -> None:
    late, holder = Scheduler(bed, "p1"), Scheduler(bed, "p2")
    with pytest.raises(SeatLost):
        await late.heartbeat()
    await late.enter()
    await holder.enter(is_holder_dead=True)
    with pytest.raises(SeatLost):
        await late.heartbeat()


async def test_claims_need_the_seat_and_a_living_lease(bed: Bed) -> None:
    scheduler, _ = await started(bed)
    with pytest.raises(SeatLost):
        await Scheduler(bed, "p2").ask()
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    with pytest.raises(SeatLost):
        await scheduler.ask()


async def test_a_process_without_the_seat_may_not_commit(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await Scheduler(bed, "p2").enter(is_holder_dead=True)
    assert [str(answer) for answer in await bed.pool.commit([entry(owned["a.0"], 0, 5)])] == ["not yours"]
    assert (await bed.pool.read("a.0", 0)).tokens == ()


async def test_leaving_gives_back_frees_the_seat_and_closes_the_process(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    await bed.pool.leave(scheduler.caller)
    assert (await bed.pool.status("a.0")).state is OwnershipState.QUEUED
    for call in (scheduler.heartbeat(), scheduler.ask(), scheduler.enter()):
        with pytest.raises(ProcessClosed):
            await call
    assert await Scheduler(bed, "p2").enter() == 2


async def test_a_group_of_the_current_revision_is_counted_before_it_has_formed(bed: Bed) -> None:
    scheduler = Scheduler(bed)
    await scheduler.enter()
    await bed.pool.set_revision("r0", 1)
    assert (await bed.pool.stats()).groups_in_force == ()
    await bed.pool.promise_slots(REVISION, 64)
    await bed.pool.set_revision(REVISION, 2)
    assert (await bed.pool.stats()).groups_in_force == (scheduler.caller.group,)
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    assert (await bed.pool.stats()).groups_in_force == ()


async def test_a_group_counts_as_formed_while_its_seat_holder_reports_so(bed: Bed) -> None:
    scheduler = Scheduler(bed)
    group = scheduler.caller.group

    async def groups() -> tuple[tuple[str, ...], tuple[str, ...]]:
        stats = await bed.pool.stats()
        return stats.groups, stats.groups_formed

    await scheduler.enter()
    assert await groups() == ((group,), ())
    await scheduler.heartbeat(is_formed=False)
    assert await groups() == ((group,), ())
    await scheduler.heartbeat(is_formed=True)
    assert await groups() == ((group,), (group,))
    await scheduler.enter()
    assert await groups() == ((group,), ())
    await scheduler.heartbeat(is_formed=True)
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    assert await groups() == ((), ())


async def test_the_offer_of_all_formed_groups_is_the_smallest_offer(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    first, second = Scheduler(bed, "p1", "g1"), Scheduler(bed, "p2", "g2")
    other = Scheduler(bed, "p3", "g3", "r2")

    async def offered() -> int | None:
        found: int | None = (await bed.pool.stats()).offered_slots
        return found

    for each in (first, second, other):
        await each.enter()
    assert await offered() is None
    await other.heartbeat(offered_slots=16)
    await first.heartbeat(offered_slots=64)
    await second.heartbeat(is_formed=False, offered_slots=32)
    assert await offered() == 64
    await second.heartbeat(offered_slots=32)
    assert await offered() == 32
    await second.heartbeat()
    assert await offered() is None
    await bed.pool.leave(second.caller)
    assert await offered() == 64
    await first.enter()
    assert await offered() is None


async def test_leaving_without_the_seat_closes_only_the_caller(bed: Bed) -> None:
    holder, owned = await started(bed, "a")
    other = Scheduler(bed, "p2")
    await bed.pool.leave(other.caller)
    assert list(await holder.heartbeat()) == list(owned)
    with pytest.raises(ProcessClosed):
        await other.enter(is_holder_dead=True)


async def test_a_claim_that_arrives_after_the_drain_owns_nothing(bed: Bed) -> None:
    scheduler, _ = await started(bed)
    await bed.pool.leave(scheduler.caller)
    await bed.pool.submit(submission("a"))
    with pytest.raises(ProcessClosed):
        await scheduler.ask()
    assert (await bed.pool.status("a.0")).state is OwnershipState.QUEUED


async def test_a_process_that_left_is_remembered_while_a_late_call_may_arrive(bed: Bed) -> None:
    gone = Scheduler(bed, "gone")
    await bed.pool.leave(gone.caller)
    await bed.pass_awake(CLOSED_FOR_MS - 60_000)
    await bed.pool.sweep()
    with pytest.raises(ProcessClosed):
        await gone.enter()
    await bed.pass_awake(60_000)
    await bed.pool.sweep()
    with pytest.raises(SeatLost):
        await gone.heartbeat()


async def test_leaving_before_entering_succeeds(bed: Bed) -> None:
    await bed.pool.leave(Scheduler(bed).caller)
    with pytest.raises(ProcessClosed):
        await Scheduler(bed).enter()
