"""Hands the requests of a workload out when they arrive, and notes when each of them had its tokens.

For systems that run in the process that drives them; `serve` does it for those that are asked for one step after the
other. Nothing but the standard library: peers import it, too.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from orca.bench.peers.workload import Workload


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


class Stepped(Protocol):
    """A system that runs a step when it is asked to. Requests go by their numbers."""

    def add(self, number: int) -> None:
        """It takes part from the next step on."""
        ...

    @property
    def is_busy(self) -> bool:
        """Has it requests that are not done?"""
        ...

    def step(self) -> Mapping[int, Sequence[int]]:
        """Returns: the new tokens, by request."""
        ...


def serve(workload: Workload, system: Stepped, arrivals: Arrivals | None = None) -> dict[str, Any]:
    """Each request when it arrives, taken up behind the step in which it comes.

    Args: arrivals: of the workload, from now on.
    Returns: fields of an Answer.
    """
    arrivals, tokens = arrivals or Arrivals(workload), [list[int]() for _ in workload.prompts]
    while arrivals.has_more or system.is_busy:
        for number in arrivals.take():
            system.add(number)
        if not system.is_busy:
            arrivals.wait()
            continue
        came = system.step()
        arrivals.note([number for number, new in came.items() if new])
        for number, new in came.items():
            tokens[number] += new
    return {"tokens": tokens, "first_s": arrivals.first_s, "last_s": arrivals.last_s}
