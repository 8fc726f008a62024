"""How the pool talks to Redis: what a call owes to the task that makes it."""

import asyncio
import contextlib

import pytest

from orca.pool.redis_link import heedful


async def test_a_call_that_swallows_a_cancellation_does_not_keep_its_task_alive() -> None:
    async def deaf() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "an answer"

    task = asyncio.create_task(heedful(deaf()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_without_a_cancellation_goes_through() -> None:
    async def call() -> str:
        return "an answer"

    assert await heedful(call()) == "an answer"
