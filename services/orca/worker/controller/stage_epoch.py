"""An epoch on a stage's controller: it is formed, then steps run in it, then it is over, for good.

A newer epoch is another object. So a late call or step of an old epoch finds that epoch over, and does not affect the
new one.
"""

import asyncio
import logging
from typing import Any

from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links
from orca.core.transport.step_delivery import StepDelivery
from orca.worker.controller.failure_cause import FailureCause, outweighs
from orca.worker.controller.step_order import ResultLog, StepOrder

log = logging.getLogger(__name__)


class StageEpoch:
    """The steps, the results and the link to the next stage of one epoch, and why it ended."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.order = StepOrder(epoch)
        self.results = ResultLog()
        self.failure: str | None = None  # why it is over, by the latest report
        self.cause: FailureCause | None = None
        self._channel: aio.Channel | None = None  # to the next stage, if there is one
        self._next: Any = None
        self._handovers: set[asyncio.Task[None]] = set()

    def link(self, channel: aio.Channel) -> None:
        """Forward steps to the stage at the end of this channel, which this object owns from now on."""
        self._channel, self._next = channel, grpc_links.stage_stub(channel)
        # Connect at once: the certificate is valid now, and the first step may come much later.
        channel.get_state(try_to_connect=True)

    def open(self) -> None:
        """Let steps run: the epoch is formed."""
        self.order.open()

    def require_alive(self) -> None:
        """Raises: EngineError if the epoch broke, or a newer one began, while it was formed."""
        if self.failure is not None:
            raise EngineError(self.failure)

    def forward(self, step: pb.StepMessage) -> None:
        """Send a step to the next stage, if there is one, without waiting for it."""
        if self._next is not None:
            handover = asyncio.create_task(StepDelivery(self._next, step).wait_until_taken())
            self._handovers.add(handover)
            handover.add_done_callback(self._on_done)

    def end(self, detail: str, cause: FailureCause) -> None:
        """End the epoch on this stage: no step runs any more, and readers of results get the detail."""
        if self.order.is_open:
            log.info("epoch ends", extra={"epoch": self.epoch.number, "detail": detail})
        self.failure = detail
        self.cause = cause if outweighs(cause, self.cause) else self.cause
        self.order.close()
        self.results.end(detail)
        for handover in self._handovers:
            handover.cancel()

    async def close(self) -> None:
        """Close the link to the next stage, after `end`."""
        if self._channel is not None:
            await self._channel.close()

    def _on_done(self, handover: asyncio.Task[None]) -> None:
        """End the epoch if the next stage did not take a step, whatever the reason: it cannot run later ones."""
        self._handovers.discard(handover)
        if handover.cancelled() or (error := handover.exception()) is None or not self.order.is_open:
            return
        if isinstance(error, EngineError):
            self.end(f"the next stage {error}", FailureCause.LINK)
        else:
            log.error("forwarding a step failed", extra={"epoch": self.epoch.number}, exc_info=error)
            self.end(f"a step was not forwarded: {type(error).__name__}: {error}", FailureCause.OUTSIDE)
