"""The order of steps and results inside an epoch, as a stage's controller keeps it: no gRPC, no processes.

StepOrder lets steps through by their numbers however the calls that carry them overtake each other (protocol: stage);
ResultLog hands results out in step order and keeps the latest, so that a broken stream can be read on.
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
"""Results kept for a reader that comes back. Far more than the steps that a master keeps in flight."""


class Verdict(enum.Enum):
    ACCEPTED = "accepted"
    ALREADY_DONE = "already done"
    WRONG_EPOCH = "wrong epoch"


class _Moves:
    """Wakes everyone who waits for a change; who comes later waits for the next one."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def happen(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        await self._next.wait()


class StepOrder:
    """Which step of one epoch comes next."""

    def __init__(self, epoch: Epoch) -> None:
        self.last = 0  # number of the last step accepted
        self.is_open = False  # steps run
        self._epoch = epoch
        self._moves = _Moves()

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        """No step runs any more; calls that wait for a gap are answered WRONG_EPOCH."""
        self.is_open = False
        self._moves.happen()

    async def admit(self, epoch: Epoch, number: int, wait_s: float) -> Verdict:
        """Wait for the step's turn, at most `wait_s`. After ACCEPTED the caller starts it before it awaits anything.

        Raises: TimeoutError when the steps before it did not come in time.
        """
        if epoch != self._epoch:
            return Verdict.WRONG_EPOCH
        if self.is_open and number > self.last + 1:
            async with asyncio.timeout(wait_s):
                while self.is_open and number > self.last + 1:
                    await self._moves.wait()
        if not self.is_open:
            return Verdict.WRONG_EPOCH
        if number <= self.last:
            return Verdict.ALREADY_DONE
        self.last = number
        self._moves.happen()
        return Verdict.ACCEPTED


class ResultLog:
    """The results of one epoch, in step order. A stage that is not the last has an empty one: it only ends."""

    def __init__(self, kept: int = RESULTS_KEPT) -> None:
        self._kept: deque[pb.ResultMessage] = deque(maxlen=kept)
        self._last = 0
        self._failure: str | None = None
        self._has_ended = asyncio.Event()
        self._moves = _Moves()

    def append(self, message: pb.ResultMessage) -> None:
        """Raises: EngineError when a rank answers out of order, which would commit tokens at wrong places."""
        if message.number != self._last + 1:
            raise EngineError(f"result {message.number} came after result {self._last}")
        self._last = message.number
        self._kept.append(message)
        self._moves.happen()

    def end(self, detail: str) -> None:
        """The epoch is over: readers get what is there, then an EngineError with `detail`. The first detail stands."""
        if self._failure is None:
            self._failure = detail
            self._has_ended.set()
            self._moves.happen()

    async def read(self, after: int) -> AsyncIterator[pb.ResultMessage]:
        """Results with numbers above `after`, for ever.

        Raises: EngineError when the epoch ends, or when the first one asked for is no longer kept.
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
            await self._moves.wait()

    async def wait_end(self) -> NoReturn:
        """Raises: EngineError when the epoch ends."""
        await self._has_ended.wait()
        raise EngineError(str(self._failure))
