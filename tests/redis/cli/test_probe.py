"""A Redis that does not answer, as the supervisor sees it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orca.cli.up.probe import Probe
from orca.cli.up.redis_child import RedisChild
from support.cli.probed_parts import Counted, until


class CountedRedis(Counted, RedisChild):
    pass


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[CountedRedis]:
    redis = CountedRedis(tmp_path / "redis", "d", fsync="everysec")
    yield redis
    await redis.stop()


async def test_a_stopped_redis_is_woken_and_not_killed(redis: CountedRedis) -> None:
    told: list[str] = []
    probing = asyncio.create_task(Probe([redis], period_s=0.2, report=told.append).run())
    pid = redis.pid
    assert pid is not None
    await until(lambda: redis.answers)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: told)
    assert await redis.is_answering(60.0)
    assert redis.pid == pid
    assert f"redis (pid {pid}) is frozen" in told[0]
    assert "resumed (SIGCONT)" in told[0]
    probing.cancel()


async def test_a_redis_that_is_gone_does_not_answer(redis: CountedRedis) -> None:
    await redis.stop()
    assert not await redis.is_answering(60.0)
