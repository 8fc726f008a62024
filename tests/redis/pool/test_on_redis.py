"""Faults that only the pool in Redis can have: memory, restarts, silence, replicas, foreign schemas, its own keys."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from orca.core.domain.errors import PoolFull, PoolUnavailable, SettingError, UnknownRequest
from orca.core.domain.request import FinishReason, SamplingParams
from orca.pool import codec
from orca.pool.order.order_rules import ClaimOrder, OrderRules, RunEstimates
from orca.pool.records import OnDisconnect, OwnershipState
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.keys import NAMED, SINGLE, lua_key_builders
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.schemas import SCHEMAS
from support.pool.beds import (
    REVISION,
    SETTINGS,
    RedisBed,
    Scheduler,
    add_user,
    entry,
    started,
    submission,
    until_followed,
    with_settings,
)
from support.waiting import until

TYPES = {
    "meta": "hash", "par": "hash", "render": "string", "readers": "zset", "req": "hash", "body": "string",
    "log": "stream", "q": "zset", "classes": "hash", "waiting": "zset", "steps": "hash", "own": "hash", "seat": "hash",
    "seats": "zset", "closed_at": "zset", "watch": "zset",
    "deadlines": "zset", "ended": "zset", "retired": "zset", "promises": "hash", "blocks": "hash",
    "parts": "zset", "replaced": "zset", "forgotten": "zset", "lengths": "hash", "latencies": "hash",
    "outcomes": "hash",
    "periods": "zset", "results": "string",
}  # fmt: skip

BY_DEADLINE = ClaimOrder(
    rules=OrderRules(),
    estimates=RunEstimates(step_ms=1.0, least_step_ms=1.0),
    free_prompt_tokens=1,
    total_prompt_tokens=1,
)


@pytest.fixture
async def own_bed(own_redis: EmbeddedRedis) -> AsyncIterator[RedisBed]:
    bed = RedisBed(own_redis.url, SETTINGS)
    yield bed
    await bed.close()


async def everything(bed: RedisBed) -> dict[bytes, Any]:
    """All that the deployment has in Redis, byte for byte."""
    keys = sorted([key async for key in bed.redis.scan_iter(bed.keys.prefix + "*", count=1000)])
    return {key: await bed.redis.dump(key) for key in keys}


async def test_keys_and_types_are_those_of_the_table(redis_bed: RedisBed) -> None:
    scheduler, owned = await started(redis_bed, "a", deadline_ms=2**42)
    await redis_bed.pool.submit(submission("b", deadline_ms=2**42))
    await redis_bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)])
    await redis_bed.pool.promise_slots("r2", 100)
    await redis_bed.pool.state_block_tokens(scheduler.caller, 16)
    await redis_bed.pool.set_revision("r2", 2)
    await redis_bed.pool.submit(submission("c", revision="r2"))
    await redis_bed.pool.sweep()
    await redis_bed.pool.submit(submission("d", revision="r2"))
    await redis_bed.pool.forget("d")
    await redis_bed.pool.give_back({})
    await redis_bed.pool.report("part")
    await redis_bed.pool.keep_result("job", b"{}")
    await redis_bed.pool.leave(Scheduler(redis_bed, "p9", "g9").caller)
    await scheduler.take()
    await redis_bed.pool.submit(submission("e", revision="r2"))
    other = Scheduler(redis_bed, "p8", "g8", "r2")
    await other.enter()
    await other.ask(most=0, order=BY_DEADLINE)
    found = {}
    async for key in redis_bed.redis.scan_iter(redis_bed.keys.prefix + "*"):
        kind = key.decode().removeprefix(redis_bed.keys.prefix).partition(":")[0]
        found[kind] = (await redis_bed.redis.type(key)).decode()
    assert found == TYPES
    assert set(TYPES) | {"news"} == {*NAMED, *SINGLE}


def test_scripts_build_no_key_names_of_their_own() -> None:
    scripts = Path(__file__).parents[3] / "services" / "orca" / "pool" / "redis" / "scripts"
    builders, paths = lua_key_builders(), list(scripts.glob("*.lua"))
    assert paths
    for path in paths:
        assert "PREFIX" not in path.read_text(), path.name
        assert "KEYS[" not in path.read_text(), path.name
    assert all(f"{kind}_key(name)" in builders for kind in NAMED)


async def test_two_deployments_in_one_redis_are_isolated(redis_bed: RedisBed) -> None:
    other = RedisBed(redis_bed.url, SETTINGS)
    await started(redis_bed, "a")
    with pytest.raises(UnknownRequest):
        await other.pool.status("a.0")
    assert (await other.pool.stats()).owned == 0
    await other.close()


async def test_a_server_that_lost_the_scripts_gets_their_text(redis_bed: RedisBed) -> None:
    await redis_bed.redis.script_flush()
    scheduler, _ = await started(redis_bed, "a")
    await redis_bed.redis.script_flush()
    assert list(await scheduler.heartbeat()) == ["a.0"]


GROWING: dict[str, Callable[[RedisBed, Scheduler, Any], Any]] = {
    "submit": lambda bed, _s, _o: bed.pool.submit(submission("new")),
    "enter": lambda _b, scheduler, _o: scheduler.enter(),
    "claim": lambda _b, scheduler, _o: scheduler.ask(),
    "commit": lambda bed, _s, owned: bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)]),
    "attach": lambda bed, _s, _o: bed.pool.attach("a", "other"),
    "set_revision": lambda bed, _s, _o: bed.pool.set_revision(REVISION, 9),
    "promise_slots": lambda bed, _s, _o: bed.pool.promise_slots(REVISION, 64),
    "set_schema": lambda bed, _s, _o: bed.pool.set_schema(1),
    "keep_result": lambda bed, _s, _o: bed.pool.keep_result("job", b"{}"),
}
FREEING: dict[str, Callable[[RedisBed, Scheduler, Any], Any]] = {
    "cancel": lambda bed, _s, _o: bed.pool.cancel("a"),
    "forget": lambda bed, _s, _o: bed.pool.forget("a"),
    "heartbeat": lambda _b, scheduler, _o: scheduler.heartbeat(),
    "give_back": lambda bed, _s, owned: bed.pool.give_back({"a.0": owned["a.0"].claim}),
    "leave": lambda bed, scheduler, _o: bed.pool.leave(scheduler.caller),
    "renew": lambda bed, _s, _o: bed.pool.renew([("a", "reader")]),
    "detach": lambda bed, _s, _o: bed.pool.detach("a", "reader"),
    "report": lambda bed, _s, _o: bed.pool.report("part"),
    "sweep": lambda bed, _s, _o: bed.pool.sweep(),
    "lengths": lambda bed, _s, _o: bed.pool.lengths(REVISION),
    "latencies": lambda bed, _s, _o: bed.pool.latencies(REVISION),
    "deadline_counts": lambda bed, _s, _o: bed.pool.deadline_counts(REVISION),
    "result": lambda bed, _s, _o: bed.pool.result("job"),
    "stats": lambda bed, _s, _o: bed.pool.stats(),
    "set_promise": lambda bed, _s, _o: bed.pool.set_promise(REVISION, 32, expected=64),
    "larger_requests": lambda bed, _s, _o: bed.pool.larger_requests(REVISION, 16),
}


@pytest.mark.parametrize("transition", GROWING)
async def test_full_memory_leaves_nothing_partly_written(own_bed: RedisBed, transition: str) -> None:
    scheduler, owned = await started(own_bed, "a")
    await own_bed.pool.submit(submission("waiting"))
    before = await everything(own_bed)
    await own_bed.redis.config_set("maxmemory", 1)
    with pytest.raises(PoolFull if transition == "submit" else PoolUnavailable):
        await GROWING[transition](own_bed, scheduler, owned)
    await own_bed.redis.config_set("maxmemory", 0)
    assert await everything(own_bed) == before
    await GROWING[transition](own_bed, scheduler, owned)
    await own_bed.recount()


@pytest.mark.parametrize("transition", FREEING)
async def test_calls_that_need_no_memory_work_when_it_is_full(own_bed: RedisBed, transition: str) -> None:
    scheduler, owned = await started(own_bed, "a")
    await own_bed.redis.config_set("maxmemory", 1)
    await FREEING[transition](own_bed, scheduler, owned)
    await own_bed.recount()


async def test_full_memory_accepts_a_changed_promise(own_bed: RedisBed) -> None:
    await started(own_bed, "a")
    await own_bed.pool.promise_slots(REVISION, 64)
    await own_bed.redis.config_set("maxmemory", 1)
    assert await own_bed.pool.set_promise(REVISION, 32, expected=64) == 32


async def test_full_memory_drains_by_retention(own_bed: RedisBed) -> None:
    await started(own_bed, "a")
    await own_bed.pool.cancel("a")
    await own_bed.pass_awake(SETTINGS.retention_ms)
    await own_bed.redis.config_set("maxmemory", 1)
    await own_bed.pool.sweep()
    with pytest.raises(UnknownRequest):
        await own_bed.pool.status("a.0")


@pytest.mark.parametrize("ending", ["kill", "stop"])
async def test_a_restarted_pool_has_everything(own_redis: EmbeddedRedis, own_bed: RedisBed, ending: str) -> None:
    scheduler, owned = await started(own_bed, "a", on_disconnect=OnDisconnect.KEEP)
    await own_bed.pool.commit([entry(owned["a.0"], 0, 5)])
    await own_bed.pool.submit(submission("b"))
    before = await everything(own_bed)
    getattr(own_redis, ending)()
    with pytest.raises(PoolUnavailable):
        await own_bed.pool.read("a.0", 0)
    own_redis.restart()
    add_user(own_redis.url, own_bed.deployment)
    await own_bed.redis.connection_pool.disconnect()  # the test's own, dead since the restart
    assert await everything(own_bed) == before
    assert await own_bed.pool.commit([entry(owned["a.0"], 1, 6)]) == [own_bed.applied]
    assert list(await scheduler.take()) == ["b.0"]


async def test_a_silent_pool_is_unavailable_at_the_timeout_and_the_call_may_have_happened(
    own_redis: EmbeddedRedis, own_bed: RedisBed
) -> None:
    _, owned = await started(own_bed, "a")
    hasty = RedisPool(own_bed.url, own_bed.deployment, dataclasses.replace(own_bed.settings, call_timeout_ms=300))
    os.kill(own_redis.pid, signal.SIGSTOP)
    step = [entry(owned["a.0"], 0, 5)]
    async with asyncio.timeout(10):
        with pytest.raises(PoolUnavailable):
            await hasty.commit(step)
    os.kill(own_redis.pid, signal.SIGCONT)
    await hasty.close()
    assert str((await own_bed.pool.commit(step))[0]) in ("applied", "already there")
    assert [token.id for token in (await own_bed.pool.read("a.0", 0)).tokens] == [5]


async def test_an_unreachable_pool_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(PoolUnavailable):
        await open_redis_pool(f"unix://{tmp_path}/none.sock", "d", SETTINGS)


async def test_a_part_starts_without_an_unreachable_pool_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = RedisPool(f"unix://{tmp_path}/none.sock", "d", SETTINGS)
    await pool.check_server_if_there()
    assert "started without the pool" in caplog.text
    await pool.close()


async def test_a_part_does_not_start_on_a_pool_that_may_evict(own_redis: EmbeddedRedis, own_bed: RedisBed) -> None:
    await own_bed.redis.config_set("maxmemory-policy", "allkeys-lru")
    pool = RedisPool(own_redis.url, "d", SETTINGS)
    with pytest.raises(SettingError, match="noeviction"):
        await pool.check_server_if_there()
    await pool.close()


async def test_a_server_that_may_evict_is_refused(own_redis: EmbeddedRedis, own_bed: RedisBed) -> None:
    await own_bed.redis.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(SettingError, match="allkeys-lru, it must be noeviction"):
        await open_redis_pool(own_redis.url, "d", SETTINGS)


async def test_a_server_that_forgets_is_refused_unless_that_is_accepted(
    own_redis: EmbeddedRedis, own_bed: RedisBed
) -> None:
    await own_bed.redis.config_set("appendonly", "no")
    with pytest.raises(SettingError, match="no append-only file"):
        await open_redis_pool(own_redis.url, "d", SETTINGS)
    pool = await open_redis_pool(own_redis.url, "d", dataclasses.replace(SETTINGS, accepts_loss=True))
    await pool.close()


async def test_a_server_with_less_memory_than_promised_is_refused(own_redis: EmbeddedRedis, own_bed: RedisBed) -> None:
    await own_bed.redis.config_set("maxmemory", 100 << 20)
    with pytest.raises(SettingError, match="bytes_max"):
        await open_redis_pool(own_redis.url, "d", SETTINGS)
    pool = await open_redis_pool(own_redis.url, "d", with_settings(bytes_max=68 << 20))
    await pool.close()


@pytest.mark.parametrize("name", ["", "a b", "{a}", "a:b"])
async def test_an_invalid_deployment_name_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="deployment"):
        await open_redis_pool("redis://127.0.0.1:1", name, SETTINGS)


async def test_a_foreign_schema_in_force_stops_the_start_and_every_script(redis_bed: RedisBed) -> None:
    await redis_bed.pool.set_revision(REVISION, 1)
    meta = redis_bed.keys.single("meta")
    await redis_bed.redis.hset(meta, "schema", 7)
    with pytest.raises(SettingError, match="schema 7 is in force"):
        await open_redis_pool(redis_bed.url, redis_bed.deployment, SETTINGS)
    with pytest.raises(PoolUnavailable, match="7 is in force"):
        await redis_bed.pool.submit(submission("a"))
    await redis_bed.redis.hset(meta, "schema", SCHEMAS.oldest)
    await redis_bed.pool.sweep()
    await redis_bed.pool.submit(submission("a"))


async def test_a_record_of_a_foreign_schema_is_skipped_in_the_queue(redis_bed: RedisBed) -> None:
    scheduler, _ = await started(redis_bed)
    await redis_bed.pool.submit(submission("newer"))
    await redis_bed.pool.submit(submission("ours"))
    await redis_bed.redis.hset(redis_bed.keys.named("req", "newer.0"), "schema", 9)
    answer = await scheduler.ask(free_slots=16, total_slots=64)
    assert ([claimed.request.id for claimed in answer.claimed], answer.is_blocked) == (["ours.0"], False)


async def test_a_bug_in_a_script_is_not_taken_for_an_outage(redis_bed: RedisBed) -> None:
    await redis_bed.redis.set(redis_bed.keys.named("par", "broken"), "not a hash")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await redis_bed.pool.cancel("broken")
    await redis_bed.redis.delete(redis_bed.keys.named("par", "broken"))


@pytest.mark.parametrize("order", [None, BY_DEADLINE], ids=["arrival", "deadline"])
async def test_requests_weigh_less_than_what_is_reserved_for_them(own_bed: RedisBed, order: ClaimOrder | None) -> None:
    await own_bed.pool.set_revision(REVISION, 1)
    sampling = SamplingParams(temperature=0.5, seed=12345)
    scheduler = Scheduler(own_bed)
    await scheduler.enter()
    await scheduler.ask(most=0, order=order)
    empty = await own_bed.data_bytes()
    for i in range(300):
        await own_bed.pool.submit(submission(f"cmpl-{i:032x}", prompt=tuple(range(100)), sampling=sampling))
    waiting = await own_bed.data_bytes() - empty
    without_log = (await own_bed.pool.stats()).bytes_reserved / 300 - codec.LOG_BYTES - 12 * codec.token_bytes(sampling)
    assert waiting / 300 < without_log, waiting / 300
    owned = await scheduler.take(free_slots=10**9, total_slots=10**9, most=300)
    await own_bed.pool.commit([entry(one, 0, *range(50_000, 50_011)) for one in owned.values()])
    await own_bed.pool.commit([entry(one, 11, 99, end=FinishReason.LENGTH) for one in owned.values()])
    ended = await own_bed.data_bytes() - empty
    reserved = (await own_bed.pool.stats()).bytes_reserved
    assert waiting < ended < reserved, (waiting / 300, ended / 300, reserved / 300)


@pytest.fixture
async def replicated(own_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[tuple[RedisBed, EmbeddedRedis]]:
    """A pool whose answers wait for one replica, and that replica."""
    # Without files of their own: a replica that still writes its first one does not stop when told to.
    at_once = ("--repl-diskless-sync-delay", "0", "--appendonly", "no")
    with EmbeddedRedis(tmp_path / "main", binary=own_redis.binary, port=0, options=at_once) as main:
        options = ("--replicaof", *main.url.removeprefix("redis://").removesuffix("/0").split(":"))
        with EmbeddedRedis(tmp_path / "replica", binary=own_redis.binary, port=0, options=options) as replica:
            bed = RedisBed(main.url, with_settings(replicas=1, call_timeout_ms=1000, accepts_loss=True))
            await until_followed(bed.redis)
            yield bed, replica
            os.kill(replica.pid, signal.SIGCONT)
            await bed.close()


async def test_with_replicas_only_replicated_writes_are_acknowledged(
    replicated: tuple[RedisBed, EmbeddedRedis],
) -> None:
    bed, replica = replicated
    _, owned = await started(bed, "a")
    assert (await bed.pool.read("a.0", 0)).tokens == ()
    await bed.pool.submit(submission("deleted"))
    os.kill(replica.pid, signal.SIGSTOP)
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    # Another connection than the one that wrote: it must not take the replica's silence for a yes.
    reads = bed.pool.read("a.0", 0), bed.pool.read_many({"a.0": 0})
    for refused in (*reads, bed.pool.submit(submission("b")), bed.pool.forget("deleted")):
        # On a busy machine the answer itself may come too late: that is no yes either.
        with pytest.raises(PoolUnavailable, match=r"0 of 1 replicas|no answer in time"):
            await refused
    os.kill(replica.pid, signal.SIGCONT)
    assert [token.id for token in (await bed.pool.read("a.0", 0)).tokens] == [5]
    assert (await bed.pool.submit(submission("b")))[0].arrival == 3


async def test_the_pool_closes_all_its_connections(own_redis: EmbeddedRedis, own_bed: RedisBed) -> None:
    pool = RedisPool(own_redis.url, "other", SETTINGS)
    await pool.wait_for_work(REVISION, 0.05)
    await pool.stats()
    await pool.close()

    async def are_closed() -> bool:
        return len(await own_bed.redis.client_list()) <= 2

    await until(are_closed, limit_s=60)


async def test_a_new_pool_object_has_the_same_state(redis_bed: RedisBed) -> None:
    await started(redis_bed, "a")
    again = await open_redis_pool(redis_bed.url, redis_bed.deployment, SETTINGS)
    assert (await again.status("a.0")).state is OwnershipState.OWNED
    await again.close()
