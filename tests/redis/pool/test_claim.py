"""Claim and give back: order, slots, reservations of the head, and repeated calls."""

import pytest

from orca.core.domain.errors import UnknownRequest
from orca.pool.api import StaleCall
from orca.pool.records import OwnershipState
from support.pool.beds import REVISION, SETTINGS, Bed, Scheduler, entry, started, submission


async def seated(bed: Bed, *names: str) -> list[Scheduler]:
    """Schedulers p-x of groups x, all seated."""
    await bed.pool.set_revision(REVISION, 1)
    schedulers = [Scheduler(bed, f"p-{name}", name) for name in names]
    for scheduler in schedulers:
        await scheduler.enter()
    return schedulers


async def test_the_oldest_requests_that_fit_are_claimed_in_order_of_arrival(bed: Bed) -> None:
    (scheduler,) = await seated(bed, "g")
    for parent in "abc":
        await bed.pool.submit(submission(parent))  # 16 slots each
    answer = await scheduler.ask(free_slots=47)
    assert [claimed.request.id for claimed in answer.claimed] == ["a.0", "b.0"]
    assert (answer.waiting, answer.is_blocked) == (1, True)
    status = await bed.pool.status("a.0")
    assert (status.state, status.owner) == (OwnershipState.OWNED, "p-g")
    assert status.claim == answer.claimed[0].claim


async def test_a_claim_returns_at_most_the_asked_number_without_a_reservation(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    for parent in "abc":
        await bed.pool.submit(submission(parent))
    answer = await first.ask(most=2)
    assert ([c.request.id for c in answer.claimed], answer.is_blocked, answer.waiting) == (["a.0", "b.0"], False, 1)
    assert (await first.ask(most=0)).claimed == ()
    assert list(await second.take()) == ["c.0"]


async def test_needs_are_rounded_up_to_whole_blocks(bed: Bed) -> None:
    (scheduler,) = await seated(bed, "g")
    await bed.pool.submit(submission("a", max_new_tokens=13))  # 17 tokens, 32 slots
    assert await scheduler.take(free_slots=31) == {}
    assert list(await scheduler.take(free_slots=32)) == ["a.0"]


async def test_a_claim_returns_the_index_to_continue_at(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 7)])
    await bed.pool.commit([entry(owned["a.0"], 1, 8)])
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    again = (await scheduler.take())["a.0"]
    assert [token.id for token in again.log] == [7, 8]
    assert again.request == owned["a.0"].request


async def test_a_repeated_claim_call_gets_the_stored_answer(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pool.submit(submission("b"))
    slots = {"free_slots": 0, "total_slots": 0, "block_tokens": 16, "most": 0}
    again = await bed.pool.claim(scheduler.caller, scheduler.calls, **slots)
    assert (again.claimed, again.waiting) == ((owned["a.0"],), 0)


async def test_a_stored_answer_that_is_out_of_date_is_refused_at_commit(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    await bed.pool.sweep()
    slots = {"free_slots": 0, "total_slots": 0, "block_tokens": 16, "most": 0}
    again = await bed.pool.claim(scheduler.caller, scheduler.calls, **slots)
    assert again.claimed[0].claim == owned["a.0"].claim
    assert [str(a) for a in await bed.pool.commit([entry(again.claimed[0], 0, 5)])] == ["not yours"]


async def test_a_claim_call_older_than_the_last_one_is_stale(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    last = scheduler.calls
    await scheduler.ask()
    with pytest.raises(StaleCall):
        await bed.pool.claim(scheduler.caller, last, free_slots=99, total_slots=99, block_tokens=16, most=9)


async def test_a_head_that_does_not_fit_now_stops_admission_for_that_group_only(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    await bed.pool.submit(submission("big", max_new_tokens=60))
    await bed.pool.submit(submission("small"))
    assert (await first.ask(free_slots=32, total_slots=64)).is_blocked
    # Others pass the reserved head, and are not blocked by it.
    answer = await second.ask(free_slots=32, total_slots=64)
    assert ([c.request.id for c in answer.claimed], answer.is_blocked) == (["small.0"], False)
    # The marked group admits nothing younger, even if it would fit.
    await bed.pool.submit(submission("later"))
    assert await first.take(free_slots=32, total_slots=64) == {}
    assert list(await first.take(free_slots=64, total_slots=64)) == ["big.0"]


async def test_any_group_takes_a_reserved_head_that_fits_there(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    await bed.pool.submit(submission("big", max_new_tokens=60))
    await first.ask(free_slots=32, total_slots=64)
    assert list(await second.take(free_slots=64, total_slots=64)) == ["big.0"]
    await bed.pool.submit(submission("later"))
    answer = await first.ask(free_slots=32, total_slots=64)
    assert ([c.request.id for c in answer.claimed], answer.is_blocked) == (["later.0"], False)


async def test_a_group_that_could_never_hold_the_head_does_not_reserve_it(bed: Bed) -> None:
    small, large = await seated(bed, "g", "h")
    await bed.pool.submit(submission("big", max_new_tokens=60))
    await bed.pool.submit(submission("small"))
    assert list(await small.take(free_slots=32, total_slots=32)) == ["small.0"]
    assert (await large.ask(free_slots=32, total_slots=64)).is_blocked


async def test_a_reservation_ends_with_the_seats_lease(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    await bed.pool.submit(submission("big", max_new_tokens=60))
    await first.ask(free_slots=32, total_slots=64)
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    await second.heartbeat()
    assert (await second.ask(free_slots=32, total_slots=64)).is_blocked


async def test_a_reservation_ends_with_the_epoch_it_was_made_in(bed: Bed) -> None:
    first, second = await seated(bed, "g", "h")
    await bed.pool.submit(submission("big", max_new_tokens=60))
    await first.ask(free_slots=32, total_slots=64)
    await first.enter()
    assert (await second.ask(free_slots=32, total_slots=64)).is_blocked


async def test_a_request_given_back_returns_to_its_old_place(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", "b")
    await bed.pool.submit(submission("c"))
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    assert list(await scheduler.take()) == ["a.0", "c.0"]
    assert list(await scheduler.heartbeat()) == ["a.0", "b.0", "c.0"] or len(await scheduler.heartbeat()) == 3


async def test_giving_back_an_ended_claim_does_nothing(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pool.give_back({"a.0": owned["a.0"].claim, "unknown.0": owned["a.0"].claim})
    again = await scheduler.take()
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    assert await scheduler.heartbeat() == {"a.0": again["a.0"].claim}


async def test_the_first_claim_is_remembered(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a"))
    assert (await bed.pool.status("a.0")).first_claimed_ms is None
    scheduler = Scheduler(bed)
    await scheduler.enter()
    owned = await scheduler.take()
    first = (await bed.pool.status("a.0")).first_claimed_ms
    assert first is not None
    assert abs(first - await bed.wall_ms()) < 5000
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    await bed.freeze(500)
    await scheduler.take()
    assert (await bed.pool.status("a.0")).first_claimed_ms == first


async def test_a_claim_repeated_after_a_request_is_gone_leaves_it_out(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a", "b")
    await bed.pool.cancel("a")
    await bed.pass_awake(SETTINGS.retention_ms)
    await scheduler.heartbeat()
    await bed.pool.sweep()
    with pytest.raises(UnknownRequest):
        await bed.pool.status("a.0")
    slots = {"free_slots": 0, "total_slots": 0, "block_tokens": 16, "most": 0}
    again = await bed.pool.claim(scheduler.caller, scheduler.calls, **slots)
    assert [claimed.request.id for claimed in again.claimed] == ["b.0"]
