"""Garbage of a scheduler goes at a steady pace: young objects each time, all of them seldom and after a formation."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from orca.core.domain.step import Epoch
from orca.scheduler import gc_pace
from orca.scheduler.gc_pace import GcPace


class Ring:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


class Beat:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self._asleep, self._awake = asyncio.Event(), asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        assert seconds == gc_pace.PACE_S
        self._asleep.set()
        await self._awake.wait()
        self._awake.clear()

    async def pass_by(self) -> None:
        """Let one sleep end, and wait for the next one."""
        await self._asleep.wait()
        self._asleep.clear()
        self._awake.set()
        await self._asleep.wait()


@asynccontextmanager
async def running(pace: GcPace) -> AsyncIterator[None]:
    task = asyncio.create_task(pace.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def garbage(*, old: bool) -> "weakref.ref[Ring]":
    ring = Ring()
    if old:
        gc.collect()  # what lives is old from now on
    return weakref.ref(ring)


async def test_young_garbage_goes_at_each_beat_and_python_collects_none() -> None:
    beat = Beat()
    pace = GcPace(beat.sleep)
    async with running(pace):
        await beat.pass_by()
        assert not gc.isenabled()
        for _ in range(3):
            young = garbage(old=False)
            assert young() is not None
            await beat.pass_by()
            assert young() is None
    assert gc.isenabled()


async def test_old_garbage_goes_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pace, "FULL_EVERY", 3)
    beat = Beat()
    async with running(GcPace(beat.sleep)):
        old = garbage(old=True)
        for is_there in (True, True, False):
            await beat.pass_by()
            assert (old() is not None) == is_there


async def test_what_the_last_epoch_left_goes_after_a_formation() -> None:
    beat = Beat()
    pace = GcPace(beat.sleep)
    async with running(pace):
        old = garbage(old=True)
        await beat.pass_by()
        assert old() is not None
        pace.formed(Epoch(2, "g"), 64, "stages")
        await beat.pass_by()
        assert old() is None
