"""An engine without a model: it answers each step after a fixed time with tokens from a counter.

Only the host path remains: scheduler, pool and gateway. The engine checks no step (the simulated engine does), because
all of its processor time counts as the scheduler's.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from zlib import crc32

from orca.core.domain.engine import EngineShape
from orca.core.domain.request import Token
from orca.core.domain.step import Epoch, Sampled, Step, StepResult

STRIDE = 7919
"""Difference between two tokens of a request: a prime, so that a lost, repeated or foreign token shows."""


def expected_token(request_id: str, index: int, vocab_size: int) -> int:
    """Return the token with this index of a request; it is the same in every epoch."""
    return (crc32(request_id.encode()) + index * STRIDE) % vocab_size


class NullEngine:
    """One stage that computes nothing.

    Args:
        step_us: time from the start of a step to its result; a step starts when the previous one has ended. 0 answers
            in the loop's next turn.
        before_forming: awaited before the first epoch is formed.
    """

    def __init__(
        self,
        shape: EngineShape,
        *,
        vocab_size: int,
        step_us: int = 0,
        before_forming: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._shape = shape
        self._vocab_size = vocab_size
        self._step_s = step_us / 1e6
        self._before_forming = before_forming
        self._results: asyncio.Queue[StepResult] = asyncio.Queue()
        self._coming: deque[StepResult] = deque()  # results whose timers run
        self._next: dict[int, tuple[int, int]] = {}  # handle -> index and unreduced value of its next token
        self._free_s = 0.0  # end of all submitted work of the stage, on the loop's clock
        self.steps = self.tokens = 0  # steps with rows, and their tokens, over all epochs

    async def form(self, epoch: Epoch) -> EngineShape:  # noqa: ARG002 - the seam's signature
        if self._before_forming is not None:
            before_forming, self._before_forming = self._before_forming, None
            await before_forming()
        self._results, self._coming, self._next = asyncio.Queue(), deque(), {}
        return self._shape

    async def submit(self, step: Step) -> None:
        for handle in (*step.freed, *step.kept):
            del self._next[handle]
        for new in step.new:
            index = len(new.tokens) - new.prompt_length
            self._next[new.handle] = index, expected_token(new.request_id, index, self._vocab_size)
        sampled = tuple(self._sample(row.handle) for row in step.rows if row.sample)
        self._answer(StepResult(epoch=step.epoch, number=step.number, sampled=sampled))
        self.steps += bool(step.rows)
        self.tokens += len(sampled)

    async def results(self) -> AsyncIterator[StepResult]:
        while True:
            yield await self._results.get()

    async def close(self) -> None:
        """Do nothing: the engine runs nothing."""

    def _sample(self, handle: int) -> Sampled:
        index, value = self._next[handle]
        self._next[handle] = index + 1, value + STRIDE
        return Sampled(handle, index, Token(value % self._vocab_size))

    def _answer(self, result: StepResult) -> None:
        loop, coming, results = asyncio.get_running_loop(), self._coming, self._results

        def deliver_oldest() -> None:
            results.put_nowait(coming.popleft())

        coming.append(result)
        if not self._step_s:
            loop.call_soon(deliver_oldest)
            return
        self._free_s = max(self._free_s, loop.time()) + self._step_s
        # If the process loses the processor while uvloop sets a timer, a later timer may run first.
        loop.call_at(self._free_s, deliver_oldest)
