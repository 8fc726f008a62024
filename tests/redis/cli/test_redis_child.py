"""The supervised Redis: each of its ends is a crash like any other, also one before it answers."""

import asyncio
import functools
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from orca.cli.up.redis_child import RedisChild, _exit_code
from orca.cli.up.supervisor import Supervisor
from orca.pool.redis.embedded import find_redis_server
from orca.pool.redis.keys import Keys
from support import waiting

until = functools.partial(waiting.until, limit_s=90.0)

MOODY = """#!/bin/sh
[ -e {folder}/moody ] && kill -9 $$
exec {binary} "$@"
"""


@pytest.fixture
async def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisChild]:
    """A Redis that dies whenever it starts while there is a file `moody`."""
    program = tmp_path / "bin" / "redis-server"
    program.parent.mkdir()
    program.write_text(MOODY.format(folder=tmp_path, binary=find_redis_server()))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    child = RedisChild(tmp_path / "redis", "d", fsync="everysec")
    yield child
    await child.stop()


def kill(child: RedisChild) -> None:
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)


async def test_a_death_before_it_answers_has_an_exit_code_like_any_other(child: RedisChild, tmp_path: Path) -> None:
    kill(child)
    assert await child.run_once() == -signal.SIGKILL
    (tmp_path / "moody").touch()
    assert await child.run_once() == -signal.SIGKILL
    assert child.pid is None


async def test_a_redis_that_dies_while_it_starts_again_is_restarted_until_it_stays(
    child: RedisChild, tmp_path: Path
) -> None:
    told: list[str] = []
    supervisor = Supervisor([child], report=told.append, restart_delays_s=(0.0, 0.01, 0.5, 0.5))
    supervisor.was_up = True
    running = asyncio.create_task(supervisor.run())
    (tmp_path / "moody").touch()
    kill(child)
    await until(lambda: len(told) >= 2)
    (tmp_path / "moody").unlink()
    await until(lambda: child.pid is not None)
    assert all(sentence.startswith("redis was killed by SIGKILL") for sentence in told)
    await supervisor.stop()
    await running


def connect(child: RedisChild) -> Redis:
    password = Path(child.login["ORCA_POOL_PASSWORD_FILE"]).read_text().strip()
    return Redis.from_url(child.url, username=child.login["ORCA_POOL_USER"], password=password)


async def test_script_writes_survive_a_kill(child: RedisChild) -> None:
    key, other = Keys("d").single("meta"), Keys("d").named("req", "a")
    script = "redis.call('HSET', KEYS[1], 'a', '1'); redis.call('HSET', ARGV[1], 'b', '2')"
    async with connect(child) as redis:
        await redis.eval(script, 1, key, other)  # two writes, so Redis keeps them as a transaction
    kill(child)
    assert await child.run_once() == -signal.SIGKILL
    running = asyncio.create_task(child.run_once())
    await until(lambda: child.pid is not None)
    async with connect(child) as redis:
        assert await redis.hgetall(other) == {b"b": b"2"}
    await child.stop()
    await running


def test_the_exit_of_an_already_reaped_child_counts_as_clean() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert _exit_code(ended.pid) == 0
