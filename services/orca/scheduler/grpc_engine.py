"""The engine of real stages: core.engine.Engine over gRPC (the paper's engine master; ORCA, section 4.1).

Owns the links to all stages, the rendezvous of the present epoch and the watch over both. It decides nothing: epochs
come from the pool's seat, steps from the scheduler. A failure anywhere ends the epoch with one EngineError, and the
next form() starts a new life.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from orca.core import engine_pb2 as pb
from orca.core import links, wire
from orca.core.engine import EngineShape
from orca.core.errors import EngineError
from orca.core.step import Epoch, Step, StepResult
from orca.scheduler.rendezvous import Rendezvous

log = logging.getLogger(__name__)

_STATUS_S = 2.0
_STATUS_EVERY_S = 0.25
_RUN_S = 5.0
"""Bound on handing a step to stage 0, retries included: it answers without computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How far the stages are, for a progress bar or a log line."""

    stage: int
    permille: int | None  # share of the weights read; None while the stage does not answer
    detail: str


class GrpcEngine:
    """Master of a group of stages."""

    def __init__(
        self,
        stages: Sequence[str],
        *,
        listen: str,
        slots: int | None,
        block_tokens: int,
        prefetch: int,
        step_timeout_s: float,
        join_timeout_s: float,
        advertise: str | None = None,
        on_loading: Callable[[Loading], None] | None = None,
    ) -> None:
        """
        Args:
            stages: host:port of each stage's controller, stage 0 first.
            listen: host:port of the rendezvous; port 0 takes a free one.
            slots: KV slots to use; None takes what the poorest stage offers.
            block_tokens: slots in a KV block.
            prefetch: 1 feeds sampled tokens on the device from the last stage to the first.
            step_timeout_s: bound from submit to result of one step, waiting for steps before it included.
            join_timeout_s: bound on forming an epoch, and on the silence of a stage meanwhile.
            advertise: host under which stages reach `listen`; the host of `listen` by default.
            on_loading: hears of each change while stages load; the log hears of it by default.
        """
        self._addresses = tuple(stages)
        self._slots = slots
        self._block_tokens = block_tokens
        self._feeds_tokens = prefetch > 0
        self._step_timeout_s = step_timeout_s
        self._join_timeout_s = join_timeout_s
        self._advertise = advertise
        self._on_loading = on_loading or _log_loading
        self._rendezvous = Rendezvous(listen)
        self._channels: list[aio.Channel] = []
        self._stubs: list[Any] = []
        self._life: _Life | None = None

    async def wait_loaded(self) -> list[pb.StatusReply]:
        """Wait until every stage has its weights, however long that takes; say so through `on_loading`.

        Raises: EngineError when a stage does not answer for join_timeout_s, or the stages do not fit together.
        """
        await self._open_links()
        statuses = await asyncio.gather(*(self._wait_loaded(stage) for stage in range(len(self._stubs))))
        _require_one_group(statuses)
        return statuses

    async def form(self, epoch: Epoch) -> EngineShape:
        """See core.engine.Engine."""
        await self._end_life(f"epoch {epoch.number} begins")
        statuses = await self.wait_loaded()
        known = max(status.epoch.number for status in statuses)
        if epoch.number <= known:
            raise EngineError(f"epoch {epoch.number} is not above {known}, which a stage knows", reported_epoch=known)
        shape = self._shape_of(statuses)
        await self._rendezvous.open(epoch)
        request = pb.JoinRequest(
            epoch=wire.epoch_to_wire(epoch),
            rendezvous=self._rendezvous_address(),
            stages=self._addresses,
            slots=shape.slots,
            block_tokens=self._block_tokens,
            feeds_tokens=self._feeds_tokens,
            timeout_ms=int(self._join_timeout_s * 1000),
        )
        await self._join_all(request)
        self._life = _Life(epoch, self._stubs, self._step_timeout_s)
        return shape

    async def submit(self, step: Step) -> None:
        """See core.engine.Engine. Costs the caller one conversion: the call itself runs behind it."""
        if self._life is None or self._life.epoch != step.epoch:
            raise EngineError(f"epoch {step.epoch.number} is over")
        self._life.submit(step)

    def results(self) -> AsyncIterator[StepResult]:
        """See core.engine.Engine. Ends, without an error, when close() or another form() ended the epoch."""
        if self._life is None:
            raise EngineError("no epoch was formed")
        return self._life.results()

    async def close(self) -> None:
        """See core.engine.Engine. The stages stay in their epoch, which nobody can speak for any more."""
        await self._end_life(None)
        channels, self._channels, self._stubs = self._channels, [], []
        for channel in channels:
            await channel.close()
        await self._rendezvous.stop()

    async def _open_links(self) -> None:
        if self._stubs:
            return
        await self._rendezvous.start()
        self._channels = [links.open_channel(address) for address in self._addresses]
        self._stubs = [links.stage_stub(channel) for channel in self._channels]

    async def _wait_loaded(self, stage: int) -> pb.StatusReply:
        heard = time.monotonic()
        told: Loading | None = None
        while True:
            try:
                status: pb.StatusReply = await self._stubs[stage].Status(pb.StatusRequest(), timeout=_STATUS_S)
            except aio.AioRpcError as error:
                detail = f"stage {stage} at {self._addresses[stage]} does not answer: {error.details()}"
                if time.monotonic() - heard > self._join_timeout_s:
                    raise EngineError(detail) from error
                now = Loading(stage=stage, permille=None, detail=detail)
            else:
                heard = time.monotonic()
                self._check_place(stage, status)
                now = Loading(stage=stage, permille=status.loaded_permille, detail=status.detail)
                if status.phase != pb.StatusReply.LOADING:
                    if told is not None:
                        self._on_loading(now)
                    return status
            if told is None or (now.permille, now.detail) != (told.permille, told.detail):
                self._on_loading(now)
            told = now
            await asyncio.sleep(_STATUS_EVERY_S)

    def _check_place(self, stage: int, status: pb.StatusReply) -> None:
        if (status.stage, status.stages) != (stage, len(self._addresses)):
            raise EngineError(
                f"{self._addresses[stage]} serves stage {status.stage} of {status.stages}, "
                f"not stage {stage} of {len(self._addresses)}"
            )

    def _shape_of(self, statuses: Sequence[pb.StatusReply]) -> EngineShape:
        """Agree on the slots: every stage holds all requests, so the poorest one decides."""
        poorest = min(statuses, key=lambda status: status.slots_possible)
        possible = poorest.slots_possible // self._block_tokens * self._block_tokens
        slots = possible if self._slots is None else self._slots // self._block_tokens * self._block_tokens
        if not 0 < slots <= possible:
            raise EngineError(f"{slots} slots are wanted, stage {poorest.stage} has room for {possible}")
        return EngineShape(
            stages=len(statuses),
            slots=slots,
            block_tokens=self._block_tokens,
            max_model_len=min(status.max_model_len for status in statuses),
        )

    def _rendezvous_address(self) -> str:
        host, _, port = self._rendezvous.address.rpartition(":")
        return f"{self._advertise or host}:{port}"

    async def _join_all(self, request: pb.JoinRequest) -> None:
        """Send every stage into the epoch at the same time. Raises: EngineError with the first refusal."""
        bound_s = self._join_timeout_s + 1.0
        calls = [asyncio.ensure_future(_join(stub, request, bound_s)) for stub in self._stubs]
        try:
            await asyncio.gather(*calls)
        except aio.AioRpcError as error:
            raise EngineError(f"epoch {request.epoch.number}: {error.code().name} {error.details()}") from error
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _end_life(self, reason: str | None) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.end(reason)


class _Life:
    """One epoch of the group as its master sees it: steps in flight, the results that came, and what went wrong."""

    def __init__(self, epoch: Epoch, stubs: Sequence[Any], step_timeout_s: float) -> None:
        self.epoch = epoch
        self._stubs = stubs
        self._step_timeout_s = step_timeout_s
        self._in_flight: deque[tuple[int, float]] = deque()  # number, loop time of submit
        self._arrived: asyncio.Queue[StepResult | EngineError | None] = asyncio.Queue()
        self._over: EngineError | None = None
        self._is_ended = False
        self._alarm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        for stage in range(len(stubs)):
            self._spawn(self._read(stage))

    def submit(self, step: Step) -> None:
        """Raises: EngineError when the epoch is over."""
        if self._over is not None or self._is_ended:
            raise EngineError(f"epoch {self.epoch.number} is over") from self._over
        message = wire.step_to_wire(step)
        self._in_flight.append((step.number, self._loop.time()))
        if self._alarm is None:
            self._alarm = self._loop.call_later(self._step_timeout_s, self._check_oldest)
        # Started here and not in the task, so that steps go on the wire in the order of their numbers.
        call = self._stubs[0].Run(message, timeout=_RUN_S)
        self._spawn(self._hand_over(message, call))

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
        if self._over is None:
            self._arrived.put_nowait(None if reason is None else EngineError(reason))
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hand_over(self, message: pb.StepMessage, call: Any) -> None:
        """See the step taken by stage 0. Repeating it is harmless: steps are numbered."""
        deadline = self._loop.time() + _RUN_S
        while True:
            try:
                reply = await call
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and self._loop.time() < deadline:
                    await asyncio.sleep(0.02)
                    call = self._stubs[0].Run(message, timeout=max(0.001, deadline - self._loop.time()))
                    continue
                self._fail(f"stage 0 did not take step {message.number}: {error.code().name} {error.details()}")
            else:
                if reply.verdict == pb.RunReply.WRONG_EPOCH:
                    self._fail(f"stage 0 runs no steps of epoch {self.epoch.number}")
            return

    async def _read(self, stage: int) -> None:
        """Read a stage's result stream: the last one sends results, the others say only when they fail."""
        after = 0
        while True:
            stream = self._stubs[stage].Results(pb.ResultsRequest(epoch=wire.epoch_to_wire(self.epoch), after=after))
            try:
                async for message in stream:
                    self._take(message)
                    after = message.number
                detail = "its result stream ended"
            except aio.AioRpcError as error:
                detail = f"{error.code().name} {error.details()}"
                # A broken link may mend, and the stage keeps its latest results; everything else is the stage's word.
                if error.code() is grpc.StatusCode.UNAVAILABLE and await self._still_runs(stage):
                    continue
            finally:
                stream.cancel()
            self._fail(f"stage {stage}: {detail}")
            return

    async def _still_runs(self, stage: int) -> bool:
        """Whether a stage whose stream broke answers, and is in this epoch."""
        try:
            status = await self._stubs[stage].Status(pb.StatusRequest(), timeout=_STATUS_S)
        except aio.AioRpcError:
            return False
        return status.phase == pb.StatusReply.JOINED and wire.epoch_from_wire(status.epoch) == self.epoch

    def _take(self, message: pb.ResultMessage) -> None:
        result = wire.result_from_wire(message)
        if not self._in_flight or result.epoch != self.epoch or result.number != self._in_flight[0][0]:
            self._fail(f"result {result.number} of epoch {result.epoch.number} came out of turn")
            return
        self._in_flight.popleft()
        self._arrived.put_nowait(result)

    def _check_oldest(self) -> None:
        """The one alarm of this life: set for the oldest step in flight, set again when that one has come back."""
        self._alarm = None
        if not self._in_flight:
            return
        number, submitted = self._in_flight[0]
        left_s = submitted + self._step_timeout_s - self._loop.time()
        if left_s > 0:
            self._alarm = self._loop.call_later(left_s, self._check_oldest)
        else:
            self._fail(f"step {number} did not come back within {self._step_timeout_s} s")

    def _fail(self, detail: str) -> None:
        if self._over is None and not self._is_ended:
            log.warning("the epoch is over", extra={"epoch": self.epoch.number, "detail": detail})
            self._over = EngineError(f"epoch {self.epoch.number}: {detail}")
            self._arrived.put_nowait(self._over)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _join(stub: Any, request: pb.JoinRequest, bound_s: float) -> None:
    await stub.Join(request, timeout=bound_s)


def _require_one_group(statuses: Sequence[pb.StatusReply]) -> None:
    """Raises: EngineError when the stages cannot be parts of one model's one group."""
    first = statuses[0]
    for status in statuses[1:]:
        if (status.revision, status.tensor) != (first.revision, first.tensor):
            raise EngineError(
                f"stage {status.stage} holds revision {status.revision} on {status.tensor} ranks, "
                f"stage 0 holds {first.revision} on {first.tensor}"
            )


def _log_loading(loading: Loading) -> None:
    log.info("stage loads", extra={"stage": loading.stage, "permille": loading.permille, "detail": loading.detail})
