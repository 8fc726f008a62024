"""The number of tokens in a KV block: one for all groups of a revision, as long as anybody relies on it."""

from support.pool.beds import REVISION, SETTINGS, Bed, Scheduler, submission


async def seated(bed: Bed, process: str, group: str, revision: str = REVISION) -> Scheduler:
    scheduler = Scheduler(bed, process, group, revision)
    await scheduler.enter()
    return scheduler


async def test_the_first_group_states_it_for_the_others(bed: Bed) -> None:
    first, second = await seated(bed, "p1", "g1"), await seated(bed, "p2", "g2")
    assert await bed.pool.state_block_tokens(first.caller, 16) == 16
    assert await bed.pool.state_block_tokens(second.caller, 32) == 16
    assert await bed.pool.state_block_tokens(first.caller, 16) == 16


async def test_each_revision_has_its_own(bed: Bed) -> None:
    first, second = await seated(bed, "p1", "g1"), await seated(bed, "p2", "g2", "r2")
    assert await bed.pool.state_block_tokens(first.caller, 16) == 16
    assert await bed.pool.state_block_tokens(second.caller, 32) == 32


async def test_counts_have_that_of_the_revision_in_force(bed: Bed) -> None:
    assert (await bed.pool.stats()).block_tokens is None
    first, second = await seated(bed, "p1", "g1"), await seated(bed, "p2", "g2", "r2")
    await bed.pool.set_revision(REVISION, 1)
    assert (await bed.pool.stats()).block_tokens is None
    await bed.pool.state_block_tokens(first.caller, 16)
    await bed.pool.state_block_tokens(second.caller, 32)
    assert (await bed.pool.stats()).block_tokens == 16
    await bed.pool.promise_slots("r2", 64)
    await bed.pool.set_revision("r2", 2)
    assert (await bed.pool.stats()).block_tokens == 32


async def test_a_group_alone_replaces_it_when_all_requests_have_ended(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    first = await seated(bed, "p1", "g1")
    await bed.pool.state_block_tokens(first.caller, 16)
    await bed.pool.submit(submission("a"))
    assert await bed.pool.state_block_tokens(first.caller, 32) == 16
    await bed.pool.cancel("a")
    assert await bed.pool.state_block_tokens(first.caller, 32) == 32


async def test_a_group_that_has_left_holds_nobody_up(bed: Bed) -> None:
    first, second = await seated(bed, "p1", "g1"), await seated(bed, "p2", "g2")
    await bed.pool.state_block_tokens(first.caller, 16)
    await bed.pool.leave(first.caller)
    assert await bed.pool.state_block_tokens(second.caller, 32) == 32
    third = await seated(bed, "p3", "g3")
    assert await bed.pool.state_block_tokens(third.caller, 16) == 32
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    await bed.pool.sweep()
    assert await bed.pool.state_block_tokens(third.caller, 16) == 16
