"""The steps of one epoch on a rank: taken up in their order, run, and read as results."""

from collections import deque
from collections.abc import Iterator

from orca.core.domain.errors import EngineError
from orca.core.domain.step import StepResult
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.worker.messages import frames
from orca.worker.messages.inbox import Inbox
from orca.worker.rank.executor import Executor, Ordered, Task

_LOOK_S = 0.0002
"""How long a step is waited for before a device is asked whether it is done."""
_UNREAD_MAX = 2
"""Steps that are ordered from a device and not read: one computes, one is ready to."""


class EpochSteps:
    """The steps of one epoch on this rank, from control message to result. Used by the main thread only."""

    def __init__(self, epoch: int, executor: Executor, inbox: Inbox) -> None:
        self._epoch = epoch
        self._executor = executor
        self._inbox = inbox
        self._last = 0  # number of the newest step that was taken
        self._tasks: deque[Task] = deque()
        self._unread: deque[Ordered] = deque()

    def __bool__(self) -> bool:
        """Is there one to run?"""
        return bool(self._tasks)

    def take(self, payload: bytes) -> None:
        """Take up a step, or pass over one that was taken before, or whose epoch broke or was left.

        Raises: EngineError when the one before it is missing (protocol: stage); what Executor.take raises.
        """
        received_ns, message = frames.decode_step(payload)
        step = wire.step_from_wire(pb.StepMessage.FromString(message))
        if step.epoch.number != self._epoch or step.number <= self._last:
            return
        if step.number > self._last + 1:
            raise EngineError(f"step {step.number} came after step {self._last}")
        self._last = step.number
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
        while self._unread:
            if not self._unread[0].is_there:
                self._executor.watch(self._unread[0])
                # Its successor comes when the master has the result before it, which is while this one computes.
                while not (self._tasks or self._inbox.has_order or self._unread[0].is_there):
                    self._take_arrived(_LOOK_S)
                if self._tasks and len(self._unread) < _UNREAD_MAX:
                    return
            yield self._executor.result(self._unread.popleft())

    def _take_arrived(self, wait_s: float = 0.0) -> None:
        for payload in self._inbox.steps(wait_s):
            self.take(payload)
