"""The controller of a stage: one process, control messages only, no torch (ORCA, section 4.1, Figure 7).

It serves the Stage service to the master and to the stage before, hands each step to its ranks and at once, without
waiting for their computation, to the next stage, and (on the last stage) streams results back. A rank that is the whole
group gets its steps from a master on this machine without it (local_masters.py). What a rank process does is
worker.rank.rank's; which step may run when is worker.controller.step_order's.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import grpc
from grpc import aio

from orca.core.domain.errors import EngineError, ModelError, OrcaError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links, wire
from orca.core.transport.local_link import LocalLink
from orca.core.transport.tls_files import TlsFiles
from orca.worker.controller.failure_cause import Cause
from orca.worker.controller.liveness import AwakeClock, overdue, stage_still_s
from orca.worker.controller.local_masters import LocalMasters
from orca.worker.controller.rank_process import RANK_COMMAND, RankProcess
from orca.worker.controller.stage_epoch import StageEpoch
from orca.worker.controller.step_order import ResultLog, Verdict
from orca.worker.messages import frames
from orca.worker.messages.frames import JoinOrder, Loaded
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_STOP_GRACE_S = 3.0
_LEAVE_SHARE = 0.3
"""Part of a join's bound in which a rank must have left its old group."""
_LOADS_FAILED_MAX = 3
"""Ranks that die while they load, in a row, before the controller gives up and lets its supervisor decide."""
_RELOAD_PAUSE_S = 0.5
"""Before a rank that died while it loaded is started again; doubles with each in a row."""
_WATCH_EVERY_S = 0.25

_VERDICTS = {
    Verdict.ACCEPTED: pb.RunReply.ACCEPTED,
    Verdict.ALREADY_DONE: pb.RunReply.ALREADY_DONE,
    Verdict.WRONG_EPOCH: pb.RunReply.WRONG_EPOCH,
}
_CAUSES = {
    Cause.INSIDE: pb.StatusReply.INSIDE,
    Cause.OUTSIDE: pb.StatusReply.OUTSIDE,
    Cause.LINK: pb.StatusReply.LINK,
}


class Controller:
    """A stage of a group: its ranks, its place in the present epoch, and the Stage service over both."""

    def __init__(self, settings: WorkerSettings, rank_command: Sequence[str] = RANK_COMMAND) -> None:
        self._settings = settings
        self._rank_command = rank_command
        self._process = secrets.token_hex(8)
        self._clock = AwakeClock()
        self._ranks: list[RankProcess] = []
        self._current = StageEpoch(Epoch(0, ""))  # the last one that this stage was ordered to join
        self._server: aio.Server | None = None
        self._local: LocalMasters | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads_failed = 0
        self._hopeless: asyncio.Future[OrcaError] = asyncio.get_running_loop().create_future()
        self._certificates = TlsFiles.of(settings)
        self.address = ""

    @property
    def rank_pids(self) -> list[int | None]:
        """Process ids of the ranks as they are now."""
        return [rank.pid for rank in self._ranks]

    async def start(self) -> None:
        """Serve, and start the ranks.

        Raises: OSError when the address is taken, EngineError when a certificate cannot be read.
        """
        self._server = grpc_links.new_server()
        grpc_links.serve_stage(self._server, self)
        try:
            port = grpc_links.listen(self._server, self._settings.listen, self._certificates)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._settings.listen}") from error
        await self._server.start()
        try:
            is_one_rank = self._settings.stages == self._settings.tensor == 1
            self._local = LocalMasters(self._take_step, self._results_of, self._hand_on if is_one_rank else None)
        except OSError as error:
            log.warning("this machine has no local links, steps come by gRPC: %s", error)
        self.address = f"{self._settings.listen.rpartition(':')[0]}:{port}"
        for rank in range(self._settings.tensor):
            await self._start_rank(rank)
        self._spawn(self._watch())
        log.info("stage serves", extra={"stage": self._settings.stage, "address": self.address})

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises: ModelError when this model can never be served, EngineError when ranks keep dying while they load.
        """
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        waited: set[asyncio.Future[Any]] = {stopping, self._hopeless}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._hopeless.done():
            raise self._hopeless.result()

    async def close(self) -> None:
        """End the epoch, the ranks and the server. Nothing of this stage runs afterwards."""
        self._current.end("the stage stops", Cause.OUTSIDE)
        for task in [*self._tasks]:
            task.cancel()
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(rank.stop(_STOP_GRACE_S) for rank in ranks))
        await self._current.close()
        if self._local is not None:
            await self._local.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)

    # The methods of the service; grpc gives them their names.

    async def Status(self, request: pb.StatusRequest, context: aio.ServicerContext) -> pb.StatusReply:  # noqa: N802, ARG002
        loaded, current = self._loaded(), self._current
        reply = pb.StatusReply(
            detail=current.failure or "; ".join(f"rank {rank.rank}: {rank.beat.doing}" for rank in self._ranks),
            contract=wire.CONTRACT,
            stage=self._settings.stage,
            stages=self._settings.stages,
            tensor=self._settings.tensor,
            epoch=wire.epoch_to_wire(current.epoch),
            last_step=current.order.last,
            process=self._process,
            still_ms=int(stage_still_s(rank.signs for rank in self._ranks) * 1000),
            cause=pb.StatusReply.CAUSE_UNSPECIFIED if current.cause is None else _CAUSES[current.cause],
            local=None if self._local is None else self._local.address,
        )
        if len(loaded) < self._settings.tensor:
            reply.phase = pb.StatusReply.LOADING
            # A rank that is started again is not in the list yet.
            is_whole = len(self._ranks) == self._settings.tensor
            reply.loaded_permille = min(rank.loaded_permille for rank in self._ranks) if is_whole else 0
            return reply
        reply.phase = self._phase()
        reply.loaded_permille = 1000
        reply.revision = loaded[0].revision
        reply.max_model_len = min(rank.max_model_len for rank in loaded)
        reply.slots_possible = min(rank.slots_possible for rank in loaded)
        reply.weight_bytes = sum(rank.weight_bytes for rank in loaded)
        # Every rank holds its heads of the same slots.
        reply.slots_in_use = max(rank.beat.slots_in_use for rank in self._ranks)
        return reply

    async def Join(self, request: pb.JoinRequest, context: aio.ServicerContext) -> pb.JoinReply:  # noqa: N802
        epoch = wire.epoch_from_wire(request.epoch)
        place = slice(self._settings.stage, self._settings.stage + 1)
        try:
            wire.require_same_contract(request.contract, "the scheduler")
        except EngineError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        if request.processes and request.processes[place] != [self._process]:
            detail = f"stage {self._settings.stage} is process {self._process}, not {request.processes[place]}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        before = self._current
        if epoch.number <= before.epoch.number:
            detail = f"epoch {epoch.number} is not above the last one, {before.epoch.number}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        if len(self._loaded()) < self._settings.tensor:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "weights are being loaded")
        before.end(f"epoch {epoch.number} begins", Cause.OUTSIDE)
        current = self._current = StageEpoch(epoch)
        started = time.monotonic()
        try:
            async with asyncio.timeout(request.timeout_ms / 1000):
                await before.close()
                await self._form(request, current)
                current.require_alive()
        except (EngineError, TimeoutError) as error:
            detail = f"epoch {epoch.number} was not formed: {str(error) or 'a rank did not come in time'}"
            current.end(detail, Cause.LINK)
            await context.abort(grpc.StatusCode.ABORTED, detail)
        current.open()
        took_s = time.monotonic() - started
        log.info("epoch joined", extra={"epoch": epoch.number, "holder": epoch.holder, "took_s": round(took_s, 3)})
        return pb.JoinReply(epoch=request.epoch)

    async def Run(self, request: pb.StepMessage, context: aio.ServicerContext) -> pb.RunReply:  # noqa: N802
        try:
            verdict = await self._take_step(request, request.SerializeToString(), context.time_remaining())
        except TimeoutError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        return pb.RunReply(verdict=_VERDICTS[verdict], epoch=wire.epoch_to_wire(self._current.epoch))

    async def Results(  # noqa: N802
        self, request: pb.ResultsRequest, context: aio.ServicerContext
    ) -> AsyncIterator[pb.ResultMessage]:
        try:
            results = self._results_of(wire.epoch_from_wire(request.epoch))
        except EngineError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        try:
            if request.only_end:
                await results.wait_end()
            async for message in results.read(request.after):
                yield message
        except EngineError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    # What both ways to this stage, gRPC and local links, come to.

    async def _take_step(self, message: pb.StepMessage, encoded: bytes, wait_s: float) -> Verdict:
        """Start a step when it is its turn; wait for that at most `wait_s`.

        Args: encoded: bytes of `message`.
        Raises: TimeoutError when the steps before it did not come in time.
        """
        received_ns = time.monotonic_ns()
        epoch, current = wire.epoch_from_wire(message.epoch), self._current
        try:
            verdict = await current.order.admit(epoch, message.number, wait_s)
        except TimeoutError as error:
            detail = f"step {message.number} waited in vain for step {current.order.last + 1}"
            raise TimeoutError(detail) from error
        if verdict is Verdict.ACCEPTED:
            # No await from here on: steps leave in the order in which they were admitted.
            # The ranks first: a stage may idle for this step, and the next one cannot before they have computed it.
            frame = frames.encode_step(received_ns, encoded)
            for rank in self._ranks:
                rank.send(frame)
            current.forward(message)
        else:
            joined = self._current  # perhaps a newer one by now
            fields = {"verdict": verdict.value, "step": message.number, "epoch": epoch.number, "holder": epoch.holder}
            log.info("step refused", extra=fields | {"joined": joined.epoch.number, "last_step": joined.order.last})
        return verdict

    def _results_of(self, epoch: Epoch) -> ResultLog:
        """Raises: EngineError when this is not the epoch that the stage is in."""
        if self._current.epoch != epoch:
            raise EngineError(f"this stage is in epoch {self._current.epoch.number}, not {epoch.number}")
        return self._current.results

    async def _hand_on(self, epoch: Epoch, link: LocalLink) -> None:
        """Let the only rank serve a master of the present epoch.

        Raises: EngineError when that is over or not formed yet, OSError when the rank is gone.
        """
        self._current.require_alive()
        if not self._current.order.is_open:
            raise EngineError(f"epoch {epoch.number} is not formed yet")
        await self._ranks[0].give_link(epoch.number, link)

    def _loaded(self) -> list[Loaded]:
        """What the ranks hold that have their weights; fewer than `tensor` while one loads or is started again."""
        return [rank.loaded for rank in self._ranks if rank.loaded is not None]

    def _phase(self) -> "pb.StatusReply.Phase":
        if self._current.failure is not None:
            return pb.StatusReply.FAILED
        return pb.StatusReply.JOINED if self._current.order.is_open else pb.StatusReply.IDLE

    async def _form(self, request: pb.JoinRequest, current: StageEpoch) -> None:
        """Send the ranks from their old group into that of `current`.

        Raises: EngineError when a rank cannot; the caller bounds the time.
        """
        if self._settings.uses_nccl:
            await self._renew_ranks()
        current.require_alive()
        if not self._settings.is_last:
            current.link(grpc_links.open_channel(request.stages[self._settings.stage + 1], self._certificates))
        bound_s, epoch = request.timeout_ms / 1000, current.epoch
        order = JoinOrder(
            epoch=epoch.number,
            prefix=f"{epoch.number}/{epoch.holder}/",
            rendezvous=request.rendezvous,
            slots=request.slots,
            block_tokens=request.block_tokens,
            feeds_tokens=request.feeds_tokens,
            timeout_s=bound_s,
        )
        ranks = list(self._ranks)
        moves = [rank.order_join(order) for rank in ranks]
        left, _ = await asyncio.wait([left for left, _ in moves], timeout=bound_s * _LEAVE_SHARE)
        current.require_alive()
        for rank, (has_left, _) in zip(ranks, moves, strict=True):
            if has_left not in left:
                # Others cannot wait for it: it holds sockets of the old group, and nobody knows for how long.
                log.warning("a rank did not leave its old group and is killed", extra={"rank": rank.rank})
                await rank.kill()
        await asyncio.gather(*(joined for _, joined in moves))

    def _on_result(self, payload: bytes) -> None:
        message = pb.ResultMessage.FromString(payload)
        if wire.epoch_from_wire(message.epoch) != self._current.epoch:
            return
        try:
            self._current.results.append(message)
        except EngineError as error:
            self._current.end(str(error), Cause.INSIDE)

    def _on_broken(self, epoch: int, detail: str, cause: Cause) -> None:
        if epoch == self._current.epoch.number:
            self._current.end(detail, cause)

    def _on_death(self, rank: RankProcess, detail: str, cause: Cause) -> None:
        if rank not in self._ranks:
            return  # it was stopped on purpose
        log.error("a rank died", extra={"rank": rank.rank, "detail": detail, "cause": cause.value})
        self._current.end(detail, cause)
        if rank.refusal is not None:
            self._give_up(ModelError(rank.refusal))
            return
        has_loaded = rank.loaded_event.is_set()
        self._loads_failed = 0 if has_loaded else self._loads_failed + 1
        if self._loads_failed >= _LOADS_FAILED_MAX:
            times = self._loads_failed
            self._give_up(EngineError(f"{times} times in a row a rank died while it loaded; the last time: {detail}"))
            return
        pause_s = 0.0 if has_loaded else _RELOAD_PAUSE_S * 2 ** (self._loads_failed - 1)
        self._spawn(self._replace([rank], pause_s))

    def _give_up(self, error: OrcaError) -> None:
        if not self._hopeless.done():
            self._hopeless.set_result(error)

    async def _replace(self, dead: Sequence[RankProcess], pause_s: float = 0.0) -> None:
        """Start the ranks of `dead` again, or give up: a stage without all its ranks would load for ever."""
        self._ranks = [rank for rank in self._ranks if rank not in dead]
        await asyncio.sleep(pause_s)
        try:
            for rank in dead:
                await self._start_rank(rank.rank)
        except OSError as error:
            self._give_up(EngineError(f"a rank could not be started: {error}"))

    async def _start_rank(self, rank: int) -> None:
        process = RankProcess(rank, lambda: self._clock.seconds, self._on_result, self._on_broken, self._on_death)
        await process.start(self._settings, self._rank_command)
        # At once, and no await in between: the death of a rank that is in no list is taken for one on purpose.
        self._ranks = sorted([*self._ranks, process], key=lambda each: each.rank)

    async def _renew_ranks(self) -> None:
        """NCCL: a process that was in a group starts anew, and finds its weights in the page cache."""
        used = [rank for rank in self._ranks if rank.joined_once]

        async def renew() -> None:
            # Out of the list first: then their death is nobody's failure. Dead first: then the device has room again.
            self._ranks = [rank for rank in self._ranks if rank not in used]
            await asyncio.gather(*(rank.kill() for rank in used))
            await self._replace(used)

        # Seen through also when this join is given up meanwhile: nobody else would start the ranks that are missing.
        await asyncio.shield(self._spawn(renew()))
        await asyncio.gather(*(rank.loaded_event.wait() for rank in self._ranks))

    async def _watch(self) -> None:
        """End the epoch of a rank that is silent or stands still, and kill it; its death starts it again."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._clock.advance(time.monotonic())
            for rank in self._ranks:
                reason = None if rank.is_condemned else overdue(rank.signs, self._settings)
                if reason is not None:
                    log.error("a rank is killed", extra={"rank": rank.rank, "pid": rank.pid, "reason": reason})
                    rank.condemn(reason)
                    self._current.end(f"rank {rank.rank} {reason}", Cause.INSIDE)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Give up on what no task foresees: without it a hung rank would go unseen, or a dead one never be replaced."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a task of the controller failed", exc_info=error)
        detail = f"the controller failed: {type(error).__name__}: {error}"
        self._current.end(detail, Cause.OUTSIDE)
        self._give_up(EngineError(detail))
