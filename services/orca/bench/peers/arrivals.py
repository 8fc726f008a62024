"""Hands out the requests of a workload when they arrive, and records when each of them had its tokens.

It is for systems that run in the process that drives them. `serve` drives a system that runs one step per call. The
module needs only the standard library, because peers import it too.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from orca.bench.peers.workload import PeerWorkload


class Arrivals:
    """The requests of one run, by number. The run starts when this object is made."""

    def __init__(
        self,
        workload: PeerWorkload,
        *,
        clock_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        requests = len(workload.prompts)
        self.first_s = [0.0] * requests  # from the arrival of a request to its first token
        self.last_s = [0.0] * requests  # from the arrival of a request to its latest token
        self._arrivals_s = workload.arrivals_s or [0.0] * requests
        self._coming = deque(range(requests))
        self._clock_s = clock_s
        self._sleep = sleep
        self._start_s = clock_s()

    @property
    def has_more(self) -> bool:
        """Return whether there is a request that has not been taken."""
        return bool(self._coming)

    def take(self) -> list[int]:
        """Return the requests that have arrived since the last call, in order."""
        taken: list[int] = []
        now_s = self._now_s()
        while self._coming and self._arrivals_s[self._coming[0]] <= now_s:
            taken.append(self._coming.popleft())
        return taken

    def wait(self) -> None:
        """Sleep until the next request arrives. Call it when no request runs."""
        self._sleep(max(0.0, self._arrivals_s[self._coming[0]] - self._now_s()))

    def record_tokens(self, requests: list[int]) -> None:
        """Record that these requests have one more token now."""
        now_s = self._now_s()
        for number in requests:
            self.last_s[number] = now_s - self._arrivals_s[number]
            self.first_s[number] = self.first_s[number] or self.last_s[number]

    def _now_s(self) -> float:
        return self._clock_s() - self._start_s


class SteppedSystem(Protocol):
    """A system that runs one step per call. Requests have numbers."""

    def add(self, number: int) -> None:
        """Add a request, which takes part from the next step on."""
        ...

    @property
    def is_busy(self) -> bool:
        """Return whether the system has unfinished requests."""
        ...

    def step(self) -> Mapping[int, Sequence[int]]:
        """Run one step. Returns: the new tokens, by request."""
        ...


def serve(workload: PeerWorkload, system: SteppedSystem, arrivals: Arrivals | None = None) -> dict[str, Any]:
    """Run a workload: each request joins after the step during which it arrives.

    Args: arrivals: of the workload; None: they start now.
    Returns: fields of a PeerAnswer.
    """
    arrivals, tokens = arrivals or Arrivals(workload), [list[int]() for _ in workload.prompts]
    while arrivals.has_more or system.is_busy:
        for number in arrivals.take():
            system.add(number)
        if not system.is_busy:
            arrivals.wait()
            continue
        new_tokens_by_request = system.step()
        arrivals.record_tokens([number for number, new in new_tokens_by_request.items() if new])
        for number, new in new_tokens_by_request.items():
            tokens[number] += new
    return {"tokens": tokens, "first_s": arrivals.first_s, "last_s": arrivals.last_s}
