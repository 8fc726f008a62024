"""The order of steps and results inside an epoch on a stage's controller, without gRPC and processes.

StepOrder admits steps by their numbers, even if the calls that carry them overtake each other (protocol: stage).
ResultLog returns results in step order and keeps the latest, so that the reader of a broken stream can continue.
"""

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator
from typing import NoReturn

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb

RESULTS_KEPT = 256
"""Results kept for a reader that comes back: far more than a master has steps in flight."""


class StepVerdict(enum.Enum):
    ACCEPTED = "accepted"
    ALREADY_DONE = "already done"
    WRONG_EPOCH = "wrong epoch"


class _Change:
    """Wakes all tasks that wait for a change. Tasks that come later wait for the next change."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        await self._next.wait()


class StepOrder:
    """Admits the steps of one epoch in the order of their numbers."""

    def __init__(self, epoch: Epoch) -> None:
        self.last = 0  # number of the last step accepted
        self.is_open = False  # steps run
        self._epoch = epoch
        self._change = _Change()

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        """Admit no more steps; calls that wait for an earlier step get WRONG_EPOCH."""
        self.is_open = False
        self._change.notify()

    async def admit(self, epoch: Epoch, number: int, wait_s: float) -> StepVerdict:
        """Wait for the step's turn, at most `wait_s`.

        After ACCEPTED, the caller starts the step before it awaits anything.

        Raises: TimeoutError if the steps before it do not come in time.
        """
        if epoch != self._epoch:
            return StepVerdict.WRONG_EPOCH
        if self.is_open and number > self.last + 1:
            async with asyncio.timeout(wait_s):
                while self.is_open and number > self.last + 1:
                    await self._change.wait()
        if not self.is_open:
            return StepVerdict.WRONG_EPOCH
        if number <= self.last:
            return StepVerdict.ALREADY_DONE
        self.last = number
        self._change.notify()
        return StepVerdict.ACCEPTED


class ResultLog:
    """The results of one epoch, in step order. On all stages but the last it stays empty and only ends."""

    def __init__(self, kept: int = RESULTS_KEPT) -> None:
        self._kept: deque[pb.ResultMessage] = deque(maxlen=kept)
        self._last = 0
        self._failure: str | None = None
        self._has_ended = asyncio.Event()
        self._change = _Change()

    def append(self, message: pb.ResultMessage) -> None:
        """Add a result. Raises: EngineError for a result out of order, which would commit tokens at wrong places."""
        if message.number != self._last + 1:
            raise EngineError(f"result {message.number} came after result {self._last}")
        self._last = message.number
        self._kept.append(message)
        self._change.notify()

    def end(self, detail: str) -> None:
        """End the log: readers get the results so far, then an EngineError with the first `detail`."""
        if self._failure is None:
            self._failure = detail
            self._has_ended.set()
            self._change.notify()

    async def read(self, after: int) -> AsyncIterator[pb.ResultMessage]:
        """Yield results with numbers above `after`, and wait for more, until the epoch ends.

        Raises: EngineError when the epoch ends, or if the first result asked for is no longer kept.
        """
        while True:
            while after < self._last:
                oldest = self._kept[0].number
                if after + 1 < oldest:
                    raise EngineError(f"result {after + 1} was asked for, the oldest kept is {oldest}")
                after += 1
                yield self._kept[after - oldest]
            if self._failure is not None:
                raise EngineError(self._failure)
            await self._change.wait()

    async def wait_end(self) -> NoReturn:
        """Wait for the end of the epoch. Raises: EngineError when it ends."""
        await self._has_ended.wait()
        raise EngineError(str(self._failure))
