"""One epoch of real stages as their master sees it: steps in flight, the results that came, and the first failure.

Any call may notice a failure first. The failure ends the epoch with one EngineError; grpc_engine.py then forms another
epoch.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
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
from orca.scheduler.engines.stage_probe import JoinedStage, StageProbe
from orca.scheduler.engines.step_timeout import StepTimeout

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""Time for what a stage has sent before its end: its last results on the local link, or its controller's reason."""
_MEND_S = 0.05
_MEND_MAX_S = 2.0


class EngineEpoch:
    """An epoch that all stages have joined, until it is over."""

    def __init__(self, epoch: Epoch, stages: Sequence[JoinedStage], step_timeout_s: float) -> None:
        self.epoch = epoch
        self._stages = stages
        self._probe = StageProbe(epoch, stages)
        self._timeout = StepTimeout(round(step_timeout_s * 1e6))
        self._is_out = asyncio.Event()  # a step is in flight
        self._arrived: asyncio.Queue[StepResult | EngineError | None] = asyncio.Queue()
        self._is_failing = False  # from the first sign of a failure on
        self._is_settled = asyncio.Event()  # the cause of the failure is known, or nobody needs it any more
        self._error: EngineError | None = None  # the failure, once its cause is known
        self._is_ended = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._link_readers: dict[int, asyncio.Task[None]] = {}
        for number, stage in enumerate(stages):
            if stage.link is not None:
                self._link_readers[number] = self._spawn(self._read_link(number, stage.link))
            self._spawn(self._read(number))
        self._spawn(self._watch_steps())

    async def submit(self, step: Step) -> None:
        """Send a step to the first stage. Raises: EngineError if the epoch is over."""
        if self._is_failing:
            await self._is_settled.wait()
        if self._error is not None or self._is_ended:
            is_from_inside = self._error is not None and self._error.is_from_inside
            detail = f"epoch {self.epoch.number} is over"
            raise EngineError(detail, is_from_inside=is_from_inside) from self._error
        message = wire.step_to_wire(step)
        self._timeout.submit(step.number, now_us=_now_us(self._loop))
        self._is_out.set()
        first = self._stages[0]
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
            self._arrived.put_nowait(arrived)  # the last item, for every reader
            if arrived is not None:
                raise arrived
            return

    async def end(self, reason: str | None) -> None:
        """Stop watching, and end the results of all readers. Args: reason: if given, they end by an EngineError."""
        self._is_ended = True
        self._is_settled.set()
        if self._error is None:
            self._arrived.put_nowait(None if reason is None else EngineError(reason))
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stage in self._stages:
            if stage.link is not None:
                stage.link.close()

    async def _hand_over(self, handover: StepDelivery) -> None:
        try:
            await handover.wait_until_taken()
        except EngineError as error:
            self._fail(f"stage 0 {error}")

    async def _read_link(self, stage: int, link: LocalLink) -> None:
        """Read a stage's results from its local link, which ends only with the epoch or with a process of the stage."""
        async with contextlib.aclosing(link.frames()) as frames:
            async for kind, payload in frames:
                if kind is LinkFrameKind.OVER:
                    self._fail(f"stage {stage}: {payload.decode(errors='replace')}")
                    return
                if kind is LinkFrameKind.RESULT:
                    self._take(pb.ResultMessage.FromString(payload))
        self._spawn(self._fail_after_link(stage))

    async def _fail_after_link(self, stage: int) -> None:
        """Fail after a link that ended without a reason. A killed rank's does so: its controller can give the
        reason."""
        await asyncio.sleep(_LAST_WORDS_S)
        self._fail(f"stage {stage}: its local link ended")

    async def _read(self, stage: int) -> None:
        """Read a stage's result stream: the last stage sends results, the others only report their failure."""
        after = broken = 0
        only_end = self._stages[stage].link is not None
        while True:
            opened_s = self._loop.time()
            request = pb.ResultsRequest(epoch=wire.epoch_to_wire(self.epoch), after=after, only_end=only_end)
            stream = self._stages[stage].stub.Results(request)
            try:
                async for message in stream:
                    self._take(message)
                    after = message.number
                detail = "its result stream ended"
            except aio.AioRpcError as error:
                detail = f"{error.code().name} {error.details()}"
                # A broken link may mend, and the stage keeps its latest results. Every other error is the stage's own.
                if error.code() is grpc.StatusCode.UNAVAILABLE and await self._probe.is_still_joined(stage):
                    broken = 0 if self._loop.time() - opened_s > _MEND_MAX_S else broken + 1
                    await asyncio.sleep(mending_pause_s(broken, random.random()))
                    continue
            finally:
                stream.cancel()
            if only_end:
                # Its last results may still be on the link, and the requests that they finish did not fail.
                await asyncio.wait([self._link_readers[stage]], timeout=_LAST_WORDS_S)
            self._fail(f"stage {stage}: {detail}")
            return

    def _take(self, message: pb.ResultMessage) -> None:
        if self._error is not None:
            return  # readers have got the failure as the last item
        result = wire.result_from_wire(message)
        if result.epoch != self.epoch or result.number != self._timeout.oldest:
            self._fail(f"result {result.number} of epoch {result.epoch.number} came out of turn")
            return
        self._timeout.take()
        if self._timeout.oldest is None:
            self._is_out.clear()
        self._arrived.put_nowait(result)

    async def _watch_steps(self) -> None:
        """End the epoch when a step counts as lost. The stages are polled only once it has been out for the bound."""
        timeout = self._timeout
        while not self._is_failing:
            if timeout.oldest is None:
                await self._is_out.wait()
                continue
            # Until the stages are polled, all of them may have stood still since the step was submitted.
            left_us = timeout.left_us(now_us=_now_us(self._loop), still_us=timeout.bound_us)
            if left_us <= 0:
                progress = await self._probe.progress()
                if progress.restarted is not None:
                    self._fail(f"stage {progress.restarted} has restarted")
                if (number := timeout.oldest) is None:
                    continue
                still_us = timeout.bound_us if progress.still_us is None else progress.still_us
                left_us = timeout.left_us(now_us=_now_us(self._loop), still_us=still_us)
                if left_us <= 0:
                    bound_s = timeout.bound_us / 1e6
                    detail = f"step {number} did not come back within {bound_s} s, and no stage is at work"
                    self._fail(detail, is_hang=True)
            await asyncio.sleep(max(left_us, 0) / 1e6)

    def _fail(self, detail: str, *, is_hang: bool = False) -> None:
        if not self._is_failing and not self._is_ended:
            log.warning("the epoch is over", extra={"epoch": self.epoch.number, "detail": detail})
            self._is_failing = True
            self._spawn(self._settle(detail, is_hang=is_hang))

    async def _settle(self, detail: str, *, is_hang: bool) -> None:
        """End the epoch once the stages have reported the cause of the failure."""
        self._conclude(detail, is_from_inside=await self._probe.is_from_inside(is_hang=is_hang))

    def _conclude(self, detail: str, *, is_from_inside: bool) -> None:
        """Report to all readers why the epoch is over, once."""
        if self._error is None and not self._is_ended:
            self._error = EngineError(f"epoch {self.epoch.number}: {detail}", is_from_inside=is_from_inside)
            self._arrived.put_nowait(self._error)
            self._is_settled.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """End the epoch after an unexpected error of a task: otherwise nobody might read a stage or miss a step."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a task of the epoch failed", extra={"epoch": self.epoch.number}, exc_info=error)
        detail = f"{type(error).__name__}: {error}"
        if self._is_failing:
            self._conclude(detail, is_from_inside=False)  # perhaps this task was the one that would have concluded
        else:
            self._fail(detail)


def mending_pause_s(broken: int, drawn: float) -> float:
    """Return the seconds before a stream is opened again that broke `broken` times in a row, the last time included.

    The pause doubles up to a bound. Half of it is drawn (`drawn` is from 0 to 1): one event breaks the links of many
    groups at once, and they should not all come back in the same moment.
    """
    return min(_MEND_S * 2.0 ** min(broken, 10), _MEND_MAX_S) * (0.5 + drawn / 2)


def _now_us(loop: asyncio.AbstractEventLoop) -> int:
    return round(loop.time() * 1e6)
