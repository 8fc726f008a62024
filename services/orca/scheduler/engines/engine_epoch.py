"""One epoch of real stages as their master sees it: steps in flight, the results that came, and what went wrong.

A failure anywhere, seen first by whichever call hears of it, ends the life with one EngineError; grpc_engine then forms
another one.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch, Step, StepResult
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.core.transport.frame_stream import encode
from orca.core.transport.local_link import LinkFrameKind, LocalLink
from orca.core.transport.step_delivery import StepDelivery
from orca.scheduler.engines.step_timeout import StepTimeout

log = logging.getLogger(__name__)

STATUS_S = 2.0
"""Bound on asking a stage where it stands: it answers without computing."""
_CAUSE_S = 1.0
"""How long the stage that knows why an epoch failed may take to hear of it; a dead process shows in milliseconds."""
_CAUSE_EVERY_S = 0.05
_MEND_S = 0.05
_MEND_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class JoinedStage:
    """A stage as it was when the epoch was formed."""

    stub: Any  # client of the Stage service
    process: str  # its word: under another one it has restarted, and its KV is gone
    link: LocalLink | None = None  # brings it steps, and brings its results; None: gRPC does


class EngineEpoch:
    """From the moment when all stages have joined an epoch until it is over."""

    def __init__(self, epoch: Epoch, peers: Sequence[JoinedStage], step_timeout_s: float) -> None:
        self.epoch = epoch
        self._peers = peers
        self._bound = StepTimeout(round(step_timeout_s * 1e6))
        self._is_out = asyncio.Event()  # a step is in flight
        self._arrived: asyncio.Queue[StepResult | EngineError | None] = asyncio.Queue()
        self._is_failing = False  # from the first sign of a failure on
        self._is_settled = asyncio.Event()  # its cause is known, or nobody wants to know it any more
        self._over: EngineError | None = None
        self._is_ended = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: dict[int, asyncio.Task[None]] = {}
        for stage, peer in enumerate(peers):
            if peer.link is not None:
                self._links[stage] = self._spawn(self._read_link(stage, peer.link))
            self._spawn(self._read(stage))
        self._spawn(self._watch_steps())

    async def submit(self, step: Step) -> None:
        """Raises: EngineError when the epoch is over."""
        if self._is_failing:
            await self._is_settled.wait()
        if self._over is not None or self._is_ended:
            is_from_inside = self._over is not None and self._over.is_from_inside
            detail = f"epoch {self.epoch.number} is over"
            raise EngineError(detail, is_from_inside=is_from_inside) from self._over
        message = wire.step_to_wire(step)
        self._bound.submit(step.number, now_us=self._now_us())
        self._is_out.set()
        first = self._peers[0]
        if first.link is None:
            self._spawn(self._hand_over(StepDelivery(first.stub, message)))
        else:
            first.link.write(encode(LinkFrameKind.STEP, message.SerializeToString()))

    async def results(self) -> AsyncIterator[StepResult]:
        while True:
            arrived = await self._arrived.get()
            if isinstance(arrived, StepResult):
                yield arrived
                continue
            self._arrived.put_nowait(arrived)  # it is the last word, for every reader
            if arrived is not None:
                raise arrived
            return

    async def end(self, reason: str | None) -> None:
        """Stop watching. Readers of results come to their end; with a reason, by an EngineError."""
        self._is_ended = True
        self._is_settled.set()
        if self._over is None:
            self._arrived.put_nowait(None if reason is None else EngineError(reason))
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers:
            if peer.link is not None:
                peer.link.close()

    async def _hand_over(self, handover: StepDelivery) -> None:
        try:
            await handover.wait_until_taken()
        except EngineError as error:
            self._fail(f"stage 0 {error}")

    async def _read_link(self, stage: int, link: LocalLink) -> None:
        """Take a stage's results from its local link, which ends only with the epoch or with a process of the stage."""
        async with contextlib.aclosing(link.frames()) as frames:
            async for kind, payload in frames:
                if kind is LinkFrameKind.OVER:
                    self._fail(f"stage {stage}: {payload.decode(errors='replace')}")
                    return
                if kind is LinkFrameKind.RESULT:
                    self._take(pb.ResultMessage.FromString(payload))
        self._spawn(self._fail_untold(stage))

    async def _fail_untold(self, stage: int) -> None:
        """A link ended without a word, as that of a rank does which was killed: its controller can say why."""
        await asyncio.sleep(_CAUSE_S)
        self._fail(f"stage {stage}: its local link ended")

    async def _read(self, stage: int) -> None:
        """Read a stage's result stream: the last one sends results, the others say only when they fail."""
        after = broken = 0
        only_end = self._peers[stage].link is not None
        while True:
            opened_s = self._loop.time()
            request = pb.ResultsRequest(epoch=wire.epoch_to_wire(self.epoch), after=after, only_end=only_end)
            stream = self._peers[stage].stub.Results(request)
            try:
                async for message in stream:
                    self._take(message)
                    after = message.number
                detail = "its result stream ended"
            except aio.AioRpcError as error:
                detail = f"{error.code().name} {error.details()}"
                # A broken link may mend, and the stage keeps its latest results; everything else is the stage's word.
                if error.code() is grpc.StatusCode.UNAVAILABLE and await self._still_runs(stage):
                    broken = 0 if self._loop.time() - opened_s > _MEND_MAX_S else broken + 1
                    await asyncio.sleep(mending_pause_s(broken, random.random()))
                    continue
            finally:
                stream.cancel()
            if only_end:
                # Its last results may still be on the link, and what they finish did not fail.
                await asyncio.wait([self._links[stage]], timeout=_CAUSE_S)
            self._fail(f"stage {stage}: {detail}")
            return

    async def _still_runs(self, stage: int) -> bool:
        """Whether a stage whose stream broke answers, is the process that joined, and is in this epoch."""
        status = await self._status(stage)
        if status is None or status.process != self._peers[stage].process:
            return False
        return status.phase == pb.StatusReply.JOINED and wire.epoch_from_wire(status.epoch) == self.epoch

    async def _status(self, stage: int) -> pb.StatusReply | None:
        """Where the stage stands; None when it does not answer."""
        try:
            status: pb.StatusReply = await self._peers[stage].stub.Status(pb.StatusRequest(), timeout=STATUS_S)
        except aio.AioRpcError:
            return None
        return status

    def _take(self, message: pb.ResultMessage) -> None:
        if self._over is not None:
            return  # readers have had the last word
        result = wire.result_from_wire(message)
        if result.epoch != self.epoch or result.number != self._bound.oldest:
            self._fail(f"result {result.number} of epoch {result.epoch.number} came out of turn")
            return
        self._bound.take()
        if self._bound.oldest is None:
            self._is_out.clear()
        self._arrived.put_nowait(result)

    async def _watch_steps(self) -> None:
        """End the epoch when a step counts as lost. The stages are asked only once it has been out for the bound."""
        while not self._is_failing:
            if self._bound.oldest is None:
                await self._is_out.wait()
                continue
            # As long as nobody was asked, all may have stood still since the step was submitted.
            left_us = self._bound.left_us(now_us=self._now_us(), still_us=self._bound.bound_us)
            if left_us <= 0:
                still_us = await self._still_us()
                if (number := self._bound.oldest) is None:
                    continue
                left_us = self._bound.left_us(now_us=self._now_us(), still_us=still_us)
                if left_us <= 0:
                    bound_s = self._bound.bound_us / 1e6
                    detail = f"step {number} did not come back within {bound_s} s, and no stage is at work"
                    self._fail(detail, is_hang=True)
            await asyncio.sleep(max(left_us, 0) / 1e6)

    async def _still_us(self) -> int:
        """For how long nothing has moved on any stage; the whole bound when none of them answers."""
        statuses = await asyncio.gather(*(self._status(stage) for stage in range(len(self._peers))))
        answers = [(stage, status) for stage, status in enumerate(statuses) if status is not None]
        for stage, status in answers:
            if status.process != self._peers[stage].process:
                self._fail(f"stage {stage} has restarted")
        return min((status.still_ms * 1_000 for _, status in answers), default=self._bound.bound_us)

    def _fail(self, detail: str, *, is_hang: bool = False) -> None:
        if not self._is_failing and not self._is_ended:
            log.warning("the epoch is over", extra={"epoch": self.epoch.number, "detail": detail})
            self._is_failing = True
            self._spawn(self._settle(detail, is_hang))

    async def _settle(self, detail: str, is_hang: bool) -> None:
        """End the epoch once the stages have told whose doing the failure was."""
        self._conclude(detail, is_from_inside=await self._is_from_inside(is_hang))

    def _conclude(self, detail: str, *, is_from_inside: bool) -> None:
        """Tell everybody why the epoch is over, once."""
        if self._over is None and not self._is_ended:
            self._over = EngineError(f"epoch {self.epoch.number}: {detail}", is_from_inside=is_from_inside)
            self._arrived.put_nowait(self._over)
            self._is_settled.set()

    async def _is_from_inside(self, is_hang: bool) -> bool:
        """Did the engine fail by itself (orca.pool.poison)?

        Whoever is heard of first is often a neighbour that lost its link, so all stages are asked. A stage that is gone
        or is another process by now died from outside as far as anybody can tell.
        """
        deadline_s = self._loop.time() + _CAUSE_S
        while True:
            statuses = await asyncio.gather(*(self._status(stage) for stage in range(len(self._peers))))
            joined = [s for s, peer in zip(statuses, self._peers, strict=True) if s and s.process == peer.process]
            causes = {status.cause for status in joined}
            if len(joined) < len(self._peers) or pb.StatusReply.OUTSIDE in causes:
                return False
            if is_hang or pb.StatusReply.INSIDE in causes:
                return True
            if self._loop.time() >= deadline_s:
                return False
            await asyncio.sleep(_CAUSE_EVERY_S)

    def _now_us(self) -> int:
        return round(self._loop.time() * 1e6)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """The epoch ends with what no task foresees: otherwise a stage might go unheard, or a step be lost for ever."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a task of the epoch failed", extra={"epoch": self.epoch.number}, exc_info=error)
        detail = f"{type(error).__name__}: {error}"
        if self._is_failing:
            self._conclude(detail, is_from_inside=False)  # perhaps it was the task that would have
        else:
            self._fail(detail)


def mending_pause_s(broken: int, drawn: float) -> float:
    """Seconds before a stream is opened again that broke `broken` times in a row, the last time included.

    It doubles up to a bound. Half of it is drawn (`drawn` is from 0 to 1): one event breaks the links of many groups at
    once, which then do not all come back in one moment.
    """
    return min(_MEND_S * 2.0 ** min(broken, 10), _MEND_MAX_S) * (0.5 + drawn / 2)
