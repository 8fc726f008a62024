"""When a step in flight counts as lost: pure numbers, the same rule for real and for simulated stages.

A step may take as long as it takes: prompts are long, machines are slow, and steps before it run first. What tells a
lost step from a long one is that nothing moves. So a step is lost when it has been out for the bound and the whole
group has stood still for the bound: also when a network fell apart and ranks wait for each other, whose own waits have
no bound that a step could reach. A rank that hangs in the middle of its work is its controller's to notice.
"""

from collections import deque


class StepTimeout:
    """The steps in flight, oldest first, and how long the oldest may still be out. Times in microseconds."""

    def __init__(self, bound_us: int) -> None:
        self.bound_us = bound_us
        self._out: deque[tuple[int, int]] = deque()  # number, time of submit

    @property
    def oldest(self) -> int | None:
        """Number of the step whose result comes next; None when no step is out."""
        return self._out[0][0] if self._out else None

    def submit(self, number: int, *, now_us: int) -> None:
        self._out.append((number, now_us))

    def take(self) -> None:
        """The oldest step came back."""
        self._out.popleft()

    def left_us(self, *, now_us: int, still_us: int) -> int:
        """How long until the oldest step counts as lost, if nothing moves meanwhile; zero or less: it is lost.

        Args: still_us: how long nothing of the group has moved; 0 while something does.
        """
        _, submitted_us = self._out[0]
        return self.bound_us - min(now_us - submitted_us, still_us)
