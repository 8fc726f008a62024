"""The operator polls a pool on Redis and writes its promise."""

import asyncio
import base64
from pathlib import Path

import pytest

from orca.core.domain.errors import OrcaError
from orca.operator.cluster.known_latencies import KnownLatencies
from orca.operator.cluster.probes import PromiseChanged, poll_pool, set_promise
from orca.operator.domain.actions import PromiseSlots
from orca.operator.domain.resource import Json
from orca.operator.plan.slo.following import LATENCIES_AGE_S
from orca.operator.reconcile import with_pool
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment
from support.operator.followed_shop import GOAL, notes
from support.operator.pool_client import PoolClient
from support.waiting import until

LIMIT_S = 30.0

EXTERNAL = deployment(pool={"external": {"urlSecret": {"name": "redis"}}})


def secret(**texts: str) -> Json:
    return {"data": {key.replace("_", "."): base64.b64encode(text.encode()).decode() for key, text in texts.items()}}


def promise(slots: int, *, expected: int) -> PromiseSlots:
    return PromiseSlots(revision="r1", slots=slots, expected=expected, reason="the spec says so")


async def test_a_pool_counts_requests_above_the_spec_and_gets_the_new_promise(
    redis_login: dict[str, str], tmp_path: Path
) -> None:
    pool, login = PoolClient(redis_login, "ns", tmp_path), secret(**redis_login)

    def begin() -> None:
        pool.form("r1", 7, slots=64)
        pool.submit("small", "r1", need=48)
        pool.submit("large", "r1", need=60)

    await asyncio.to_thread(begin)
    assert (await poll_pool(EXTERNAL, login, None)).larger_requests == 0
    found = await poll_pool(EXTERNAL, login, 50)
    assert (found.problem, found.revision, found.promised_slots) == (None, "r1", 64)
    assert (found.larger_requests, found.smallest_larger_request, found.largest_request) == (1, 60, 60)
    await asyncio.to_thread(set_promise, EXTERNAL, login, promise(48, expected=64), within_s=lambda: LIMIT_S)
    with pytest.raises(PromiseChanged, match="the promise to a request was 64 slots, and is 48 by now"):
        await asyncio.to_thread(set_promise, EXTERNAL, login, promise(96, expected=64), within_s=lambda: LIMIT_S)
    assert (await poll_pool(EXTERNAL, login, 50)).promised_slots == 48


async def test_a_schema_number_of_the_release_before_is_seen(redis_login: dict[str, str], tmp_path: Path) -> None:
    pool, login = PoolClient(redis_login, "ns", tmp_path), secret(**redis_login)
    for number, older in ((2, 2), (3, None)):
        assert await asyncio.to_thread(pool.do, lambda one, number=number: one.set_schema(number)) == number
        assert (await poll_pool(EXTERNAL, login, None)).older_schema == older


async def test_requests_with_a_deadline_are_counted_for_the_model_in_force(
    redis_login: dict[str, str], tmp_path: Path
) -> None:
    pool, login = PoolClient(redis_login, "ns", tmp_path), secret(**redis_login)

    def begin() -> None:
        pool.form("r1", 7, slots=64)
        pool.submit("late", "r1", deadline_ms=1)

    await asyncio.to_thread(begin)

    async def is_counted() -> bool:
        await asyncio.to_thread(pool.do, lambda one: one.sweep())
        found = (await poll_pool(EXTERNAL, login, None)).deadlines
        return found is not None and (found.requests, found.in_time_percent) == (1, 0)

    await until(is_counted, limit_s=LIMIT_S)


async def test_results_and_counted_answers_are_read_only_if_asked(redis_login: dict[str, str], tmp_path: Path) -> None:
    pool, login = PoolClient(redis_login, "ns", tmp_path), secret(**redis_login)
    await asyncio.to_thread(pool.do, lambda one: one.keep_result("plan-1", b"{}"))
    found = await poll_pool(EXTERNAL, login, None)
    assert (found.problem, found.results, found.counted_answers) == (None, {}, None)
    found = await poll_pool(EXTERNAL, login, None, results=("plan-1", "plan-2"), counts_answers=True)
    assert (found.problem, found.results, found.counted_answers) == (None, {"plan-1": b"{}"}, 0)


async def test_latencies_are_read_while_a_plan_is_followed_and_not_in_each_reconcile(
    redis_login: dict[str, str], tmp_path: Path
) -> None:
    pool = PoolClient(redis_login, "ns", tmp_path)
    await asyncio.to_thread(pool.form, "r1", 7, slots=64)
    cluster = FakeCluster(deployment(slo=GOAL, pool={"external": {"urlSecret": {"name": "redis"}}}))
    cluster.pool_secret = secret(**redis_login)
    now_s = 0.0
    known = KnownLatencies(lambda: now_s)
    assert (await with_pool(cluster.observed, known)).pool.latencies is None, "there is no plan yet"
    cluster.settle()
    cluster.pool = (await with_pool(cluster.observed, known)).pool
    first = cluster.pool.latencies
    assert first is not None
    cluster.settle()
    assert notes(cluster)["since_ms"] == first.awake_ms
    assert (await with_pool(cluster.observed, known)).pool.latencies is first
    now_s = LATENCIES_AGE_S
    again = (await with_pool(cluster.observed, known)).pool.latencies
    assert again is not None
    assert again is not first


async def test_a_promise_is_not_written_after_the_lease_or_the_time_limit(
    redis_login: dict[str, str], tmp_path: Path
) -> None:
    pool, login = PoolClient(redis_login, "ns", tmp_path), secret(**redis_login)
    promised = await asyncio.to_thread(pool.form, "r1", 7, slots=64)
    told = promise(32, expected=promised)
    with pytest.raises(OrcaError, match="does not hold the Lease"):
        await asyncio.to_thread(set_promise, EXTERNAL, login, told, within_s=lambda: 0.0)
    with pytest.raises(OrcaError, match="no answer within"):
        await asyncio.to_thread(set_promise, EXTERNAL, login, told, within_s=lambda: 1e-6)
    assert (await poll_pool(EXTERNAL, login, None)).promised_slots == promised
