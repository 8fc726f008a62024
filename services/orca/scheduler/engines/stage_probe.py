"""Polls the stages of an epoch for their status, and judges a failure by their answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grpc import aio

from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.core.transport.local_link import LocalLink

STATUS_S = 2.0
"""Bound on a status call: a stage answers it without computing."""
_CAUSE_S = 1.0
"""Time for the stage that knows why an epoch failed to learn of it; a dead process shows in milliseconds."""
_CAUSE_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class JoinedStage:
    """A stage as it was when the epoch was formed."""

    stub: Any  # client of the Stage service
    process: str  # drawn at its start: under another one it has restarted, and its KV is gone
    link: LocalLink | None = None  # carries its steps and results; None: gRPC does


class GroupProgress(NamedTuple):
    """The progress of all stages together, by their answers."""

    still_us: int | None  # time for which no stage has moved, in microseconds; None if no stage answers
    restarted: int | None  # the first stage that is another process than the one that joined


class StageProbe:
    """The status of the stages that joined one epoch."""

    def __init__(self, epoch: Epoch, stages: Sequence[JoinedStage]) -> None:
        self._epoch = epoch
        self._stages = stages

    async def is_still_joined(self, stage: int) -> bool:
        """Return true if the stage answers, is the process that joined, and is in this epoch."""
        status = await self._status(stage)
        if status is None or status.process != self._stages[stage].process:
            return False
        return status.phase == pb.StatusReply.JOINED and wire.epoch_from_wire(status.epoch) == self._epoch

    async def progress(self) -> GroupProgress:
        answers = [(stage, status) for stage, status in enumerate(await self._all()) if status is not None]
        restarted = (stage for stage, status in answers if status.process != self._stages[stage].process)
        return GroupProgress(
            still_us=min((status.still_ms * 1_000 for _, status in answers), default=None),
            restarted=next(restarted, None),
        )

    async def is_from_inside(self, *, is_hang: bool) -> bool:
        """Return true if the engine failed by itself (orca.pool.poison). Args: is_hang: no stage moves any more.

        The first report often comes from a neighbour that lost its link, so all stages are polled. A stage that is gone
        or that is another process by now died from outside, as far as anybody can know.
        """
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + _CAUSE_S
        while True:
            statuses = await self._all()
            joined = [s for s, stage in zip(statuses, self._stages, strict=True) if s and s.process == stage.process]
            causes = {status.cause for status in joined}
            if len(joined) < len(self._stages) or pb.StatusReply.OUTSIDE in causes:
                return False
            if is_hang or pb.StatusReply.INSIDE in causes:
                return True
            if clock() >= deadline_s:
                return False
            await asyncio.sleep(_CAUSE_POLL_S)

    async def _all(self) -> list[pb.StatusReply | None]:
        return await asyncio.gather(*(self._status(stage) for stage in range(len(self._stages))))

    async def _status(self, stage: int) -> pb.StatusReply | None:
        """Return the status of the stage; None if it does not answer."""
        try:
            status: pb.StatusReply = await self._stages[stage].stub.Status(pb.StatusRequest(), timeout=STATUS_S)
        except aio.AioRpcError:
            return None
        return status
