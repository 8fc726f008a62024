"""The disk hangs: fsyncs take seconds, and Redis keeps what it acknowledges in its own memory meanwhile."""

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pool_beds import REVISION, RedisBed, submission, with_settings
from pool_kinds import KINDS, redis_binary

from orca.core.errors import PoolNotDurable
from orca.pool.api import OnDisconnect
from orca.pool.embedded import EmbeddedRedis

SHIM = Path(__file__).with_name("slow_fsync.c")
LIMIT_S = 60.0
ROUND_S = 0.3


def slow_binary(folder: Path, kind: str) -> tuple[Path, Path]:
    """A redis-server whose fsyncs are slow while a file is there, and that file."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fsync that hangs")
    library, flag, script = folder / "slow_fsync.so", folder / "slow", folder / "redis-server"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True)
    preload = f"LD_PRELOAD={library} SLOW_FSYNC={flag}"
    script.write_text(f'#!/bin/sh\nexec env {preload} {redis_binary(kind)} "$@"\n')
    script.chmod(0o755)
    return script, flag


@pytest.fixture(params=KINDS[1:])
async def bed_on_slow_disk(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[RedisBed, EmbeddedRedis, Path]]:
    binary, flag = slow_binary(tmp_path, request.param)
    with EmbeddedRedis(tmp_path / "redis", binary=binary) as server:
        bed = RedisBed(server.url, with_settings(max_queued=10**6))
        await bed.pool.set_revision(REVISION, 1)
        yield bed, server, flag
        flag.unlink(missing_ok=True)
        await bed.close()


async def accept_until_refused(bed: RedisBed) -> list[str]:
    """Submit without a pause while rounds go on, as a gateway's do. Returns: what was accepted."""
    accepted: list[str] = []
    next_round = 0.0
    async with asyncio.timeout(LIMIT_S):
        for number in itertools.count():
            if (now := asyncio.get_running_loop().time()) >= next_round:
                await bed.pool.sweep()
                next_round = now + ROUND_S
            try:
                await bed.pool.submit(submission(f"r{number}", on_disconnect=OnDisconnect.KEEP))
            except PoolNotDurable:
                return accepted
            accepted.append(f"r{number}.0")
    raise AssertionError("unreachable")


async def wait_until_written(bed: RedisBed) -> None:
    """Redis writes what it has held back for two seconds, and counts that."""
    before = (await bed.redis.info("persistence"))["aof_delayed_fsync"]
    async with asyncio.timeout(LIMIT_S):
        while (await bed.redis.info("persistence"))["aof_delayed_fsync"] == before:
            await bed.redis.set("something", "to write")
            await asyncio.sleep(0.05)


async def test_while_fsyncs_hang_the_door_closes_and_what_it_let_in_survives_a_kill(
    bed_on_slow_disk: tuple[RedisBed, EmbeddedRedis, Path],
) -> None:
    bed, server, flag = bed_on_slow_disk
    flag.touch()
    accepted = await accept_until_refused(bed)
    await wait_until_written(bed)
    server.kill()
    flag.unlink()
    server.restart()
    await bed.redis.connection_pool.disconnect()
    lost = [name for name in accepted if not await bed.redis.exists(bed.keys.named("req", name))]
    assert accepted
    assert lost == []


async def test_the_door_opens_when_the_disk_is_well_again(
    bed_on_slow_disk: tuple[RedisBed, EmbeddedRedis, Path],
) -> None:
    bed, _, flag = bed_on_slow_disk
    flag.touch()
    await accept_until_refused(bed)
    flag.unlink()
    async with asyncio.timeout(LIMIT_S):
        while True:
            await bed.pool.sweep()
            try:
                await bed.pool.submit(submission("after"))
            except PoolNotDurable:
                await asyncio.sleep(0.1)
            else:
                return
