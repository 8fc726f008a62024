"""Watches that end for any reason are logged, counted and begun again."""

import asyncio
import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest

from orca.operator.cluster import watches
from orca.operator.cluster.watches import Watches
from orca.operator.cluster.watching import OnChange

WITHIN_S = 30.0
"""Far more than a test takes."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "AGAIN_FIRST_S", 0.01)


@contextlib.asynccontextmanager
async def running(served: Watches) -> AsyncIterator[None]:
    """Watch one namespace. The end must not hang either."""
    served.serve(["ns"])
    task = asyncio.create_task(served.run())
    try:
        async with asyncio.timeout(WITHIN_S):
            yield
    finally:
        task.cancel()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), WITHIN_S)


async def ignore(namespace: str, name: str) -> None:
    """Take a change and do nothing."""


async def cannot_begin(**_: Any) -> list[asyncio.Task[None]]:
    raise OSError("no file descriptors")


async def begins_nothing(**_: Any) -> list[asyncio.Task[None]]:
    return []


async def end_at_once(*_: Any, **__: Any) -> None:
    """Stand for a kopf whose tasks have all ended without an exception."""


@pytest.mark.parametrize(
    ("spawn", "why"),
    [(cannot_begin, "OSError: no file descriptors"), (begins_nothing, "they ended without an error")],
    ids=["cannot begin", "ends without an error"],
)
def test_watches_that_end_are_logged_and_counted_and_begin_again(
    spawn: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    monkeypatch.setattr(kopf, "run_tasks", end_at_once)

    async def fail_twice() -> None:
        failures: asyncio.Queue[None] = asyncio.Queue()
        async with running(Watches(ignore, lambda: failures.put_nowait(None))):
            await failures.get()
            await failures.get()

    with caplog.at_level(logging.WARNING, "orca.operator"):
        asyncio.run(fail_twice())
    told = [each.getMessage() for each in caplog.records if "the watches of the namespace ns" in each.getMessage()]
    assert len(told) >= 2
    assert all(each.endswith(why) for each in told)


def test_a_call_that_waits_is_not_collected_as_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    async def name_one(_: str | None, on_change: OnChange, stop: threading.Event) -> None:
        await on_change("ns", "shop")
        await asyncio.to_thread(stop.wait)

    monkeypatch.setattr(watches, "_watch", name_one)

    async def call() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()
        waits_for: list[weakref.ref[asyncio.Future[None]]] = []

        async def on_change(*_: str) -> None:
            waiting = asyncio.get_running_loop().create_future()
            waits_for.append(weakref.ref(waiting))
            begun.set()
            await waiting
            ended.set()

        async with running(Watches(on_change, lambda: None)):
            await begun.wait()
            await asyncio.sleep(0)
            gc.collect()
            [waiting] = [each() for each in waits_for]
            assert waiting is not None
            waiting.set_result(None)
            await ended.wait()

    asyncio.run(call())
