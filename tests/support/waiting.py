"""Tests wait for a condition, with a limit, and report the state if the limit passes."""

import asyncio
import inspect
import time
from collections.abc import Callable

import pytest

from orca.pool.settings import PoolSettings

PATIENT_POOL = PoolSettings(call_timeout_ms=20_000)
"""Settings of a pool on a real Redis: only tests of silence may fail because the machine is busy or stands still."""


async def until(is_true: Callable[[], object], limit_s: float) -> None:
    """Wait for a condition, which may be asked of a coroutine, while the loop goes on.

    Raises: TimeoutError when it does not come true in time.
    """
    async with asyncio.timeout(limit_s):
        while not await _answer(is_true):
            await asyncio.sleep(0.01)


async def _answer(is_true: Callable[[], object]) -> object:
    answer = is_true()
    return await answer if inspect.isawaitable(answer) else answer


def wait_until(is_true: Callable[[], object], limit_s: float, story: Callable[[], str] = lambda: "") -> None:
    """Ask until the answer is yes; fail the test with the story of what came instead when the limit is over."""
    end = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > end:
            pytest.fail(f"did not come within {limit_s:g} s\n{story()}")
        time.sleep(0.05)
