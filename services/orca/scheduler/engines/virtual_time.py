"""An asyncio event loop on virtual time: where others wait, it sets its clock to the next timer and goes on.

The real scheduler loop, the in-memory pool and the simulated engine run on it unchanged, hours in seconds, and two runs
with the same seed take the same turns. It owns the clock only; nothing outside the process may be waited for.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits for another one and no timer is set: nothing would ever happen again."""


class _JumpingSelector(selectors.SelectSelector):
    """Answers at once, and tells the loop by how much its clock jumps instead of waiting."""

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
    """Its time starts at 0 seconds and moves only when nothing is left to do."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own, as `asyncio.run` does.

    Raises: Deadlock when it can never end, and whatever `main` raises.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """The running loop's clock as the in-memory pool and the scheduler want it."""

    def wall_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e3)

    def monotonic_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)
