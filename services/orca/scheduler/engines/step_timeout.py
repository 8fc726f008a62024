"""The timeout of a step in flight: pure numbers, the same rule for real and for simulated stages.

A step may take any time: prompts are long, machines are slow, and earlier steps run first. A lost step differs from a
long one because nothing moves. So a step is lost when it has been out for the bound and the whole group has stood still
for the bound. That includes a broken network in which ranks wait for each other: their own waits have no bound that a
step could reach. The controller of a rank notices when the rank hangs in the middle of its work.
"""

from collections import deque


class StepTimeout:
    """The steps in flight, oldest first, and the time that the oldest has left. Times are in microseconds."""

    def __init__(self, bound_us: int) -> None:
        self.bound_us = bound_us
        self._out: deque[tuple[int, int]] = deque()  # number, time of its submit

    @property
    def oldest(self) -> int | None:
        """The number of the step whose result comes next; None if no step is out."""
        return self._out[0][0] if self._out else None

    def submit(self, number: int, *, now_us: int) -> None:
        self._out.append((number, now_us))

    def take(self) -> None:
        """Remove the oldest step, which came back."""
        self._out.popleft()

    def left_us(self, *, now_us: int, still_us: int) -> int:
        """Return the time until the oldest step counts as lost if nothing moves; zero or less means that it is lost.

        Args: still_us: time for which nothing of the group has moved; 0 while something moves.
        """
        _, submitted_us = self._out[0]
        return self.bound_us - min(now_us - submitted_us, still_us)
