"""Hands the requests of a workload out when they arrive, and notes when each of them had its tokens.

For systems that run in the process that drives them. Nothing but the standard library: peers import it, too.
"""

import time
from collections import deque
from collections.abc import Callable

from orca.cli.bench.peers.workload import Workload


class Arrivals:
    """The requests of one run, by their numbers. The run begins when this is made."""

    def __init__(
        self,
        workload: Workload,
        *,
        clock_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        requests = len(workload.prompts)
        self.first_s = [0.0] * requests  # behind its arrival: when a request had its first token
        self.last_s = [0.0] * requests
        self._arrivals_s = workload.arrivals_s or [0.0] * requests
        self._coming = deque(range(requests))
        self._clock_s = clock_s
        self._sleep = sleep
        self._start_s = clock_s()

    @property
    def has_more(self) -> bool:
        """Is there a request that nobody has taken?"""
        return bool(self._coming)

    def take(self) -> list[int]:
        """The requests that have arrived since the last call, in order."""
        taken: list[int] = []
        now_s = self._now_s()
        while self._coming and self._arrivals_s[self._coming[0]] <= now_s:
            taken.append(self._coming.popleft())
        return taken

    def wait(self) -> None:
        """Sleep until the next request arrives: there is nothing to do."""
        self._sleep(max(0.0, self._arrivals_s[self._coming[0]] - self._now_s()))

    def note(self, requests: list[int]) -> None:
        """These had one token more just now."""
        now_s = self._now_s()
        for number in requests:
            self.last_s[number] = now_s - self._arrivals_s[number]
            self.first_s[number] = self.first_s[number] or self.last_s[number]

    def _now_s(self) -> float:
        return self._clock_s() - self._start_s
