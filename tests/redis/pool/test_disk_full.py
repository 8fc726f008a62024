"""The disk of the append-only file is full: new work is refused, what runs waits, and goes on when there is room."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.request import FinishReason
from orca.pool.records import CommitAnswer, OnDisconnect
from orca.pool.redis.embedded import EmbeddedRedis
from support.pool.beds import RedisBed, entry, started, submission, with_settings
from support.pool.kinds import KINDS, redis_binary

LIMIT_S = 20.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB. Making one needs root, or a user who may mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture(params=KINDS[1:])
async def bed(request: pytest.FixtureRequest, small_disk: Path) -> AsyncIterator[RedisBed]:
    with EmbeddedRedis(small_disk / "redis", binary=redis_binary(request.param)) as server:
        bed = RedisBed(server.url, with_settings())
        yield bed
        await bed.close()


async def test_running_requests_wait_for_disk_space_and_nothing_is_lost(bed: RedisBed, small_disk: Path) -> None:
    _, owned = await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    filler = small_disk / "filler"
    accepted = await submit_until_refused(bed, filler)
    with pytest.raises(PoolUnavailable, match=r"AOF|MISCONF"):
        await bed.pool.commit([entry(owned["a.0"], 1, 6)])
    assert [token.id for token in (await bed.pool.read("a.0", 0)).tokens] == [5]
    filler.unlink()
    last = entry(owned["a.0"], 1, 6, end=FinishReason.STOP)
    async with asyncio.timeout(LIMIT_S):
        while (answers := await commit_if_it_goes(bed, last)) is None:
            await asyncio.sleep(0.05)
    assert answers == [CommitAnswer.APPLIED]
    for name in accepted:
        await bed.pool.status(f"{name}.0")
    await bed.pool.submit(submission("after"))


async def submit_until_refused(bed: RedisBed, filler: Path) -> list[str]:
    """Fill the disk, then submit. Returns: the parents that were accepted before Redis noticed."""
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    accepted: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await bed.pool.submit(submission(f"b{len(accepted)}", on_disconnect=OnDisconnect.KEEP))
            except PoolUnavailable:
                return accepted
            accepted.append(f"b{len(accepted)}")


async def commit_if_it_goes(bed: RedisBed, *entries: object) -> list[CommitAnswer] | None:
    try:
        return list(await bed.pool.commit(entries))
    except PoolUnavailable:
        return None
