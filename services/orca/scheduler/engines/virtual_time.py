"""An asyncio event loop on virtual time: instead of waiting it sets its clock to the next timer and goes on.

The real scheduler loop, the in-memory pool and the simulated engine run on it unchanged: hours take seconds, and two
runs with the same seed take the same turns. It owns only the clock; no task may wait for anything outside the process.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits for another one and no timer is set: no task would ever run again."""


class _JumpingSelector(selectors.SelectSelector):
    """Returns at once and advances the clock by the timeout, instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = [] if timeout is not None else super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("every task waits for ever")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 seconds and moves only when no task can run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own, as `asyncio.run` does.

    Raises: Deadlock if it can never end, and what `main` raises.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """The running loop's clock in the units of the in-memory pool and the scheduler."""

    def wall_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e3)

    def monotonic_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)
