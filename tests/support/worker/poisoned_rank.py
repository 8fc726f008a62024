"""A real rank that a segmentation fault ends, on the last stage, when it draws a certain token of a poisoned request.

Run by a controller in the place of worker.rank.rank: its model, links and frames are the real ones, and its death is
too.
"""

import os
import signal
import sys

from orca.worker.rank import rank, rank_epoch
from orca.worker.rank.executor import Executor, LaunchedStep, ReceivedStep

POISON = 77
"""First prompt token of a poisoned request."""
FATAL_TOKENS = 2
"""Tokens that come out of a poisoned request before the fatal one."""


class PoisonedExecutor(Executor):
    """Runs steps until one draws a fatal token."""

    _fatal: dict[int, int]  # handle -> positions at which it is over

    def run(self, received: ReceivedStep) -> LaunchedStep | None:
        self._fatal = getattr(self, "_fatal", {}) | {
            new.handle: new.prompt_length + FATAL_TOKENS for new in received.step.new if new.tokens[0] == POISON
        }
        over = (row.start + row.count >= self._fatal.get(row.handle, 1_000_000) for row in received.step.rows)
        if self._shard.is_last and any(over):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().run(received)


if __name__ == "__main__":
    rank_epoch.Executor = PoisonedExecutor  # type: ignore[misc]
    rank.main(sys.argv[1:])
