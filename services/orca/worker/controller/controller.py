"""The controller of a stage: one process, control messages only, no torch (ORCA, section 4.1, Figure 7).

It serves the Stage service to the master and to the previous stage. It sends each step to its ranks and, without
waiting for their computation, to the next stage; on the last stage it streams results back. If a rank is the whole
group, a master on this machine sends it the steps directly (local_masters.py).

worker.rank.rank is the code of a rank process, worker.controller.stage_ranks starts and replaces those processes, and
worker.controller.step_order decides which step may run when.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links, wire
from orca.core.transport.local_link import LocalLink
from orca.core.transport.tls_files import TlsFiles
from orca.worker.controller.failure_cause import FailureCause
from orca.worker.controller.liveness import stage_still_s
from orca.worker.controller.local_masters import LocalMasters
from orca.worker.controller.rank_process import RANK_COMMAND
from orca.worker.controller.stage_epoch import StageEpoch
from orca.worker.controller.stage_ranks import StageRanks
from orca.worker.controller.step_order import ResultLog, StepVerdict
from orca.worker.messages import frames
from orca.worker.messages.frames import JoinOrder
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_LEAVE_SHARE = 0.3
"""Share of a join's time limit within which a rank must have left its old group."""

_VERDICTS = {
    StepVerdict.ACCEPTED: pb.RunReply.ACCEPTED,
    StepVerdict.ALREADY_DONE: pb.RunReply.ALREADY_DONE,
    StepVerdict.WRONG_EPOCH: pb.RunReply.WRONG_EPOCH,
}
_CAUSES = {
    FailureCause.INSIDE: pb.StatusReply.INSIDE,
    FailureCause.OUTSIDE: pb.StatusReply.OUTSIDE,
    FailureCause.LINK: pb.StatusReply.LINK,
}


class Controller:
    """A stage of a group: its ranks, its place in the present epoch, and the Stage service over both.

    The class is long but one idea: the Stage service, whose methods gRPC wants on one object. They share the present
    epoch (stage_epoch.py), the ranks (stage_ranks.py) and the masters on this machine (local_masters.py).
    """

    def __init__(self, settings: WorkerSettings, rank_command: Sequence[str] = RANK_COMMAND) -> None:
        self._settings = settings
        self._process = secrets.token_hex(8)
        self._ranks = StageRanks(
            settings,
            rank_command,
            self._on_result,
            self._on_broken,
            on_failure=lambda detail, cause: self._current.end(detail, cause),
        )
        self._current = StageEpoch(Epoch(0, ""))  # the last epoch that this stage was ordered to join
        self._server: aio.Server | None = None
        self._local: LocalMasters | None = None
        self._certificates = TlsFiles.of(settings)
        self.address = ""

    @property
    def rank_pids(self) -> list[int | None]:
        """The process ids of the ranks as they are now."""
        return [rank.pid for rank in self._ranks.processes]

    async def start(self) -> None:
        """Serve, and start the ranks.

        Raises: OSError if the address is taken, EngineError if a certificate cannot be read.
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
        await self._ranks.start()
        log.info("stage serves", extra={"stage": self._settings.stage, "address": self.address})

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises: ModelError if this model can never be served, EngineError if ranks keep dying while they load.
        """
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        hopeless = self._ranks.hopeless
        waited: set[asyncio.Future[Any]] = {stopping, hopeless}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if hopeless.done():
            raise hopeless.result()

    async def close(self) -> None:
        """End the epoch, the ranks and the server. Nothing of this stage runs afterwards."""
        self._current.end("the stage stops", FailureCause.OUTSIDE)
        await self._ranks.close()
        await self._current.close()
        if self._local is not None:
            await self._local.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)

    # The methods of the service; gRPC gives them their names.

    async def Status(self, request: pb.StatusRequest, context: aio.ServicerContext) -> pb.StatusReply:  # noqa: N802, ARG002
        loaded, current, ranks = self._ranks.loaded, self._current, self._ranks.processes
        reply = pb.StatusReply(
            detail=current.failure or "; ".join(f"rank {rank.rank}: {rank.state.heartbeat.doing}" for rank in ranks),
            contract=wire.CONTRACT,
            stage=self._settings.stage,
            stages=self._settings.stages,
            tensor=self._settings.tensor,
            epoch=wire.epoch_to_wire(current.epoch),
            last_step=current.order.last,
            process=self._process,
            still_ms=int(stage_still_s(rank.state.liveness for rank in ranks) * 1000),
            cause=pb.StatusReply.CAUSE_UNSPECIFIED if current.cause is None else _CAUSES[current.cause],
            local=None if self._local is None else self._local.address,
        )
        if len(loaded) < self._settings.tensor:
            reply.phase = pb.StatusReply.LOADING
            # A rank that is started again is not in the list yet.
            is_whole = len(ranks) == self._settings.tensor
            reply.loaded_permille = min(rank.state.loaded_permille for rank in ranks) if is_whole else 0
            return reply
        reply.phase = _phase(current)
        reply.loaded_permille = 1000
        reply.revision = loaded[0].revision
        reply.max_model_len = min(rank.max_model_len for rank in loaded)
        reply.slots_possible = min(rank.slots_possible for rank in loaded)
        reply.weight_bytes = sum(rank.weight_bytes for rank in loaded)
        # Every rank holds its heads of the same slots.
        reply.slots_in_use = max(rank.state.heartbeat.slots_in_use for rank in ranks)
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
        if len(self._ranks.loaded) < self._settings.tensor:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "weights are being loaded")
        before.end(f"epoch {epoch.number} begins", FailureCause.OUTSIDE)
        current = self._current = StageEpoch(epoch)
        started = time.monotonic()
        try:
            async with asyncio.timeout(request.timeout_ms / 1000):
                await before.close()
                await self._form(request, current)
                current.require_alive()
        except (EngineError, TimeoutError) as error:
            detail = f"epoch {epoch.number} was not formed: {str(error) or 'a rank did not come in time'}"
            current.end(detail, FailureCause.LINK)
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

    # The two ways to this stage, gRPC and local links, both call these.

    async def _take_step(self, message: pb.StepMessage, encoded: bytes, wait_s: float) -> StepVerdict:
        """Start a step when it is its turn; wait for that at most `wait_s`.

        Args: encoded: the bytes of `message`.
        Raises: TimeoutError if the steps before it do not come in time.
        """
        received_ns = time.monotonic_ns()
        epoch, current = wire.epoch_from_wire(message.epoch), self._current
        try:
            verdict = await current.order.admit(epoch, message.number, wait_s)
        except TimeoutError as error:
            detail = f"step {message.number} cannot run: step {current.order.last + 1} did not come in time"
            raise TimeoutError(detail) from error
        if verdict is StepVerdict.ACCEPTED:
            # No await from here on: steps leave in the order in which they were admitted.
            # The ranks come first: this stage may be idle, and the next one needs their output anyway.
            self._ranks.send(frames.encode_step(received_ns, encoded))
            current.forward(message)
        else:
            joined = self._current  # perhaps a newer one by now
            fields = {"verdict": verdict.value, "step": message.number, "epoch": epoch.number, "holder": epoch.holder}
            log.info("step refused", extra=fields | {"joined": joined.epoch.number, "last_step": joined.order.last})
        return verdict

    def _results_of(self, epoch: Epoch) -> ResultLog:
        """Return the results of the present epoch. Raises: EngineError if the stage is in another one than `epoch`."""
        if self._current.epoch != epoch:
            raise EngineError(f"this stage is in epoch {self._current.epoch.number}, not {epoch.number}")
        return self._current.results

    async def _hand_on(self, epoch: Epoch, link: LocalLink) -> None:
        """Let the only rank serve a master of the present epoch.

        Raises: EngineError if that epoch is over or not formed yet, OSError if the rank is gone.
        """
        self._current.require_alive()
        if not self._current.order.is_open:
            raise EngineError(f"epoch {epoch.number} is not formed yet")
        await self._ranks.processes[0].give_link(epoch.number, link)

    async def _form(self, request: pb.JoinRequest, current: StageEpoch) -> None:
        """Order the ranks out of their old group and into that of `current`.

        Raises: EngineError if a rank cannot join; the caller limits the time.
        """
        if self._settings.uses_nccl:
            await self._ranks.renew()
        current.require_alive()
        if not self._settings.is_last:
            current.link(grpc_links.open_channel(request.stages[self._settings.stage + 1], self._certificates))
        limit_s, epoch = request.timeout_ms / 1000, current.epoch
        order = JoinOrder(
            epoch=epoch.number,
            prefix=f"{epoch.number}/{epoch.holder}/",
            rendezvous=request.rendezvous,
            slots=request.slots,
            block_tokens=request.block_tokens,
            feeds_tokens=request.feeds_tokens,
            timeout_s=limit_s,
        )
        ranks = list(self._ranks.processes)
        moves = [rank.order_join(order) for rank in ranks]
        left, _ = await asyncio.wait([left for left, _ in moves], timeout=limit_s * _LEAVE_SHARE)
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
            self._current.end(str(error), FailureCause.INSIDE)

    def _on_broken(self, epoch: int, detail: str, cause: FailureCause) -> None:
        if epoch == self._current.epoch.number:
            self._current.end(detail, cause)


def _phase(epoch: StageEpoch) -> "pb.StatusReply.Phase":
    if epoch.failure is not None:
        return pb.StatusReply.FAILED
    return pb.StatusReply.JOINED if epoch.order.is_open else pb.StatusReply.IDLE
