"""What the controller sent to a rank and its main thread has not dealt with: orders, and the steps of an epoch.

Frames are taken in the order in which they came, with one exception: steps that wait behind the one that runs next are
taken up before it runs, for taking one up posts its receive.
"""

import queue
from collections import deque
from collections.abc import Iterator

from orca.core import engine_pb2 as pb
from orca.core import wire
from orca.core.step import StepResult
from orca.worker import frames
from orca.worker.executor import Executor, Ran, Task
from orca.worker.frames import Frame, Kind


class Inbox:
    """Frames on their way from the reader thread to the main thread."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._order: Frame | None = None  # it stood behind steps that were taken

    def put(self, frame: Frame) -> None:
        self._arrived.put(frame)

    def next(self) -> Frame:
        """Wait for the next frame."""
        order, self._order = self._order, None
        return self._arrived.get() if order is None else order

    def steps(self) -> Iterator[bytes]:
        """Take the steps (their payloads) that are here already, up to the first frame that is an order."""
        while self._order is None:
            try:
                kind, payload = self._arrived.get_nowait()
            except queue.Empty:
                return
            if kind is Kind.STEP:
                yield payload
            else:
                self._order = kind, payload


class EpochSteps:
    """The steps of one epoch on this rank, from control message to result. Used by the main thread only."""

    def __init__(self, epoch: int, executor: Executor, inbox: Inbox) -> None:
        self._epoch = epoch
        self._executor = executor
        self._inbox = inbox
        self._tasks: deque[Task] = deque()
        self._unread: deque[Ran] = deque()

    def __bool__(self) -> bool:
        """Is there one to run?"""
        return bool(self._tasks)

    def take(self, payload: bytes) -> None:
        """Take up a step, or pass over one of an epoch that broke or was left. Raises: what Executor.take raises."""
        received_ns, message = frames.decode_step(payload)
        step = wire.step_from_wire(pb.StepMessage.FromString(message))
        if step.epoch.number == self._epoch:
            self._tasks.append(self._executor.take(step, received_ns))

    def run_next(self) -> Iterator[StepResult]:
        """Run the oldest step, with the receives of all that have come behind it posted before it computes.

        While a device computes, the next step is ordered from it before the tokens of this one are waited for.

        Yields: the results that are there, or are waited for because nothing else is to be done.
        Raises: what Executor.run does; there must be one to run.
        """
        self._take_arrived()
        ran = self._executor.run(self._tasks.popleft())
        if ran is not None:
            self._unread.append(ran)
        if len(self._unread) == 1 and not self._unread[0].is_there:
            self._take_arrived()
        while self._unread and (self._unread[0].is_there or len(self._unread) > 1 or not self._tasks):
            yield self._executor.result(self._unread.popleft())

    def _take_arrived(self) -> None:
        for payload in self._inbox.steps():
            self.take(payload)
