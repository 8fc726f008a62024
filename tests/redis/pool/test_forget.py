"""Forget: a parent goes on demand with all its records, and nothing that is on its way brings any of it back."""

import dataclasses
from collections.abc import Callable

import pytest

from orca.core.domain.errors import JustForgotten, NameTaken, UnknownRequest
from orca.core.domain.request import FinishReason
from orca.pool.contract import FORGOTTEN_FOR_MS
from orca.pool.records import CommitAnswer, OnDisconnect
from support.pool.beds import REVISION, SETTINGS, Bed, RedisBed, Scheduler, entry, started, submission, whole_log

STATES = ("queued", "owned", "given back", "ended", "cancelled")


async def put(bed: Bed, parent: str, state: str) -> None:
    """Let a parent of two requests be in a state."""
    await bed.pool.submit(submission(parent, n=2, deadline_ms=600_000))
    if state in ("owned", "given back", "ended"):
        scheduler = Scheduler(bed, f"of-{parent}", f"g-{parent}")
        await scheduler.enter()
        owned = await scheduler.take()
        first = owned[f"{parent}.0"]
        await bed.pool.commit([entry(first, 0, 5, end=FinishReason.STOP if state == "ended" else None)])
        if state == "given back":
            await bed.pool.give_back({name: claimed.claim for name, claimed in owned.items()})
    if state in ("ended", "cancelled"):
        await bed.pool.cancel(parent)


async def assert_unknown(bed: Bed, parent: str) -> None:
    for call in (bed.pool.parent(parent), bed.pool.status(f"{parent}.0"), bed.pool.read(f"{parent}.1", 0)):
        with pytest.raises(UnknownRequest):
            await call
    with pytest.raises(UnknownRequest):
        await bed.pool.attach(parent, "reader")
    assert await bed.pool.read_many({f"{parent}.0": 0}) == {f"{parent}.0": None}


@pytest.mark.parametrize("state", STATES)
async def test_nothing_is_left_of_a_forgotten_parent(bed: Bed, state: str) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("other"))
    before = await bed.pool.stats()
    await put(bed, "a", state)
    await bed.pool.forget("a")
    await assert_unknown(bed, "a")
    await bed.recount()
    after = await bed.pool.stats()
    assert (after.queued + after.owned, after.ended, after.bytes_reserved) == (1, 0, before.bytes_reserved)
    assert after.ended_ever - before.ended_ever == 2
    for call in (bed.pool.forget("a"), bed.pool.cancel("a"), bed.pool.detach("a", "reader"), bed.pool.sweep()):
        await call
    await bed.pool.renew([("a", "reader")])
    assert (await bed.pool.parent("other")).parent == "other"


@pytest.mark.parametrize("state", STATES)
async def test_no_key_names_a_forgotten_parent(redis_bed: RedisBed, state: str) -> None:
    await redis_bed.pool.set_revision(REVISION, 1)
    await put(redis_bed, "a", state)
    await redis_bed.pool.forget("a")
    for index in ("watch", "deadlines", "ended"):
        assert await redis_bed.redis.zcard(redis_bed.keys.single(index)) == 0, index
    left = [key.decode() async for key in redis_bed.redis.scan_iter(redis_bed.keys.prefix + "*:*")]
    kinds = {key.removeprefix(redis_bed.keys.prefix).partition(":")[0] for key in left}
    assert kinds <= {"seat", "lengths", "latencies", "outcomes"}


async def test_what_its_owner_sends_is_harmless(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", "b")
    await bed.pool.forget("a")
    step = [entry(owned["a.0"], 0, 5), entry(owned["b.0"], 0, 6)]
    assert await bed.pool.commit(step) == [CommitAnswer.NOT_YOURS, bed.applied]
    assert await bed.pool.commit([entry(owned["a.0"], 0, end=FinishReason.STOP)]) == [CommitAnswer.NOT_YOURS]
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    assert list(await scheduler.heartbeat()) == ["b.0"]
    await scheduler.fail(owned["a.0"], owned["b.0"])
    assert list(await scheduler.take()) == ["b.0"]


async def test_a_claim_that_comes_again_leaves_it_out(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a", "b")
    await bed.pool.forget("a")
    scheduler.calls -= 1
    assert list(await scheduler.take()) == ["b.0"]


async def test_a_late_submit_stores_nothing_for_a_while(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a"))
    await bed.pool.forget("a")
    with pytest.raises(UnknownRequest):
        await bed.pool.submit(submission("a"))
    await bed.pass_awake(FORGOTTEN_FOR_MS - 10_000)
    await bed.pool.sweep()
    with pytest.raises(UnknownRequest):
        await bed.pool.submit(submission("a"))
    await bed.pass_awake(10_000)
    await bed.pool.sweep()
    await bed.pool.submit(submission("a"))
    assert (await bed.pool.stats()).queued == 1


async def test_the_name_of_a_keyed_call_is_free_when_nobody_reads_the_first_log_any_more(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    first = dataclasses.replace(submission("keyed-a"), digest="x")
    other = dataclasses.replace(first, digest="y")
    scheduler = Scheduler(bed)
    await scheduler.enter()
    await bed.pool.submit(first)
    owned = (await scheduler.take())["keyed-a.0"]
    await bed.pool.commit([entry(owned, 0, 1, 2, 3)])
    await bed.pool.forget("keyed-a")
    for passed_ms in (0, FORGOTTEN_FOR_MS - 10_000):
        await bed.pass_awake(passed_ms)
        await bed.pool.sweep()
        # A late copy of the first call, and the next one of its client.
        for keyed in (first, other):
            with pytest.raises(JustForgotten) as refused:
                await bed.pool.submit(keyed)
            assert abs(refused.value.rest_s - (FORGOTTEN_FOR_MS - passed_ms) / 1000) < 9
        assert (await bed.pool.stats()).queued == 0
        assert await bed.pool.read_many({"keyed-a.0": 3}) == {"keyed-a.0": None}
    await bed.pass_awake(10_000)
    await bed.pool.sweep()
    assert [request.arrival for request in await bed.pool.submit(other)] == [2]
    with pytest.raises(NameTaken):
        await bed.pool.submit(first)


async def test_a_record_of_another_release_stays(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a"))
    await bed.set_record_schema("a", 9)
    with pytest.raises(UnknownRequest):
        await bed.pool.forget("a")
    assert (await bed.pool.parent("a")).parent == "a"


async def test_a_record_that_readers_keep_is_forgotten_all_the_same(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await bed.pool.commit([entry(owned["a.0"], 0, *range(9), end=FinishReason.STOP)])
    await bed.pool.attach("a", "other")
    assert len(await whole_log(bed.pool, "a.0")) == 9
    await bed.pool.forget("a")
    await assert_unknown(bed, "a")
    await bed.pass_awake(SETTINGS.retention_ms)
    await bed.pool.sweep()
    assert await scheduler.heartbeat() == {}
