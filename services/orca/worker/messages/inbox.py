"""The frames that a rank has received and its main thread has not handled: orders, and steps.

Frames are handled in the order in which they came, with one exception. Steps that follow the next one are received
before it runs (epoch_steps.py), because receiving a step posts the receive of its activations.
"""

import queue
from collections.abc import Iterator

from orca.worker.messages.frames import RankFrame, RankFrameKind


class Inbox:
    """Frames for the main thread, from the threads that read the controller's socket and a master's link."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[RankFrame] = queue.SimpleQueue()
        self._order: RankFrame | None = None  # it followed steps that were taken

    def put(self, frame: RankFrame) -> None:
        self._arrived.put(frame)

    def next(self) -> RankFrame:
        """Wait for the next frame."""
        order, self._order = self._order, None
        return self._arrived.get() if order is None else order

    @property
    def has_order(self) -> bool:
        """Return whether the next frame is known to be an order."""
        return self._order is not None

    def steps(self, wait_s: float = 0.0) -> Iterator[bytes]:
        """Take the payloads of the steps that have arrived, up to the first frame that is an order.

        Args: wait_s: how long to wait for the first frame.
        """
        while self._order is None:
            try:
                kind, payload = self._arrived.get(timeout=wait_s) if wait_s > 0 else self._arrived.get_nowait()
            except queue.Empty:
                return
            wait_s = 0.0
            if kind is RankFrameKind.STEP:
                yield payload
            else:
                self._order = kind, payload
