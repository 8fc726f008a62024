"""What a rank was sent and its main thread has not dealt with: orders, and steps.

Frames are taken in the order in which they came, with one exception: steps that wait behind the one that runs next are
taken up before it runs (epoch_steps.py), for taking one up posts its receive.
"""

import queue
from collections.abc import Iterator

from orca.worker.messages.frames import Frame, Kind


class Inbox:
    """Frames on their way to the main thread, from those that read the controller's socket and a master's link."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._order: Frame | None = None  # it stood behind steps that were taken

    def put(self, frame: Frame) -> None:
        self._arrived.put(frame)

    def next(self) -> Frame:
        """Wait for the next frame."""
        order, self._order = self._order, None
        return self._arrived.get() if order is None else order

    @property
    def has_order(self) -> bool:
        """Whether an order stands in front of what has come since."""
        return self._order is not None

    def steps(self, wait_s: float = 0.0) -> Iterator[bytes]:
        """Take the steps (their payloads) that are here already, up to the first frame that is an order.

        Args: wait_s: for the first of them.
        """
        while self._order is None:
            try:
                kind, payload = self._arrived.get(timeout=wait_s) if wait_s > 0 else self._arrived.get_nowait()
            except queue.Empty:
                return
            wait_s = 0.0
            if kind is Kind.STEP:
                yield payload
            else:
                self._order = kind, payload
