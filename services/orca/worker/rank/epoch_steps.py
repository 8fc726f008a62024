"""The steps of one epoch on a rank, from control message to result, in their order."""

from collections import deque
from collections.abc import Iterator

from orca.core.domain.errors import EngineError
from orca.core.domain.step import StepResult
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.worker.messages import frames
from orca.worker.messages.inbox import Inbox
from orca.worker.rank.executor import Executor, LaunchedStep, ReceivedStep

_POLL_S = 0.0002
"""Wait for a step before the device is polled again."""
_UNREAD_MAX = 2
"""Steps that are launched on a device and not read: one computes, the next one is queued."""


class EpochSteps:
    """Receives, runs and reads the steps of one epoch. Only the main thread uses it."""

    def __init__(self, epoch: int, executor: Executor, inbox: Inbox) -> None:
        self._epoch = epoch
        self._executor = executor
        self._inbox = inbox
        self._last = 0  # number of the newest step received
        self._received: deque[ReceivedStep] = deque()
        self._unread: deque[LaunchedStep] = deque()

    def __bool__(self) -> bool:
        """Return whether there is a step to run."""
        return bool(self._received)

    def receive(self, payload: bytes) -> None:
        """Receive a step. Ignore a step that was received before, or whose epoch is over.

        Raises: EngineError if the step before it is missing (protocol: stage); what Executor.receive raises.
        """
        received_ns, message = frames.decode_step(payload)
        step = wire.step_from_wire(pb.StepMessage.FromString(message))
        if step.epoch.number != self._epoch or step.number <= self._last:
            return
        if step.number > self._last + 1:
            raise EngineError(f"step {step.number} came after step {self._last}")
        self._last = step.number
        self._received.append(self._executor.receive(step, received_ns))

    def run_next(self) -> Iterator[StepResult]:
        """Run the oldest step; the receives of all steps that have arrived after it are posted before it computes.

        While a device computes, the next step is launched before the host waits for the tokens of this one.

        Yields: results that are ready, and results that are waited for because there is nothing else to do.
        Raises: what Executor.run does; there must be a step to run.
        """
        self._receive_arrived()
        launched = self._executor.run(self._received.popleft())
        if launched is not None:
            self._unread.append(launched)
        while self._unread:
            if not self._unread[0].is_ready:
                self._executor.report_computing(self._unread[0])
                # The step's successor comes when the master has the result before it, which is while this one computes.
                while not (self._received or self._inbox.has_order or self._unread[0].is_ready):
                    self._receive_arrived(_POLL_S)
                if self._received and len(self._unread) < _UNREAD_MAX:
                    return
            yield self._executor.result(self._unread.popleft())

    def _receive_arrived(self, wait_s: float = 0.0) -> None:
        for payload in self._inbox.steps(wait_s):
            self.receive(payload)
