"""The engine of real stages: core.domain.engine.Engine over gRPC (the paper's engine master; ORCA, section 4.1).

Steps go to a stage of the same machine, and its results come, by core.transport.local_link.

Owns the links to all stages, who has the place of each, and the rendezvous of the present epoch; what happens within
an epoch is engine_life's. It decides nothing: epochs come from the pool's seat, steps from the scheduler.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from grpc import aio

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError, SettingError
from orca.core.domain.step import Epoch, Step, StepResult
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links, wire
from orca.core.transport.local_link import LocalLink, open_link
from orca.core.transport.tls_files import TlsFiles
from orca.scheduler.engines.engine_epoch import STATUS_S, EngineEpoch, JoinedStage
from orca.scheduler.engines.rendezvous import RendezvousServer

log = logging.getLogger(__name__)

T = TypeVar("T")

_STATUS_EVERY_S = 0.05
_PLACE_S = 2.0
"""How long a silent process keeps its stage's place: several times `_STATUS_EVERY_S`, and less than weights load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoading:
    """How far the stages are, for a progress bar or a log line."""

    stage: int
    permille: int | None  # share of the weights read; None while the stage does not answer
    detail: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The process that is a stage, as far as this master has heard."""

    process: str
    heard_s: float  # monotonic clock of its last answer


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
        on_loading: Callable[[StageLoading], None] | None = None,
        certificates: TlsFiles | None = None,
        uses_local_links: bool = True,
    ) -> None:
        """
        Args:
            stages: host:port of each stage's controller, stage 0 first.
            listen: host:port of the rendezvous; port 0 takes a free one.
            slots: KV slots to use; None takes what the poorest stage offers.
            block_tokens: slots in a KV block.
            prefetch: 1 feeds sampled tokens on the device from the last stage to the first.
            step_timeout_s: a step that has been out for so long is lost if no stage has moved for so long either.
            join_timeout_s: bound on forming an epoch, and on the silence of a stage meanwhile.
            advertise: host under which stages reach `listen`; the host of `listen` by default.
            on_loading: hears of each change while stages load; the log hears of it by default.
            certificates: of this scheduler, for its links to the stages and theirs to it; None encrypts nothing.
            uses_local_links: steps go to a stage on this machine, and its results come, by core.transport.local_link.
        """
        self._addresses = tuple(stages)
        self._slots = slots
        self._block_tokens = block_tokens
        self._feeds_tokens = prefetch > 0
        self._step_timeout_s = step_timeout_s
        self._join_timeout_s = join_timeout_s
        self._advertise = advertise
        self._on_loading = on_loading or _log_loading
        self._rendezvous = RendezvousServer(listen, certificates)
        self._certificates = certificates
        self._uses_local_links = uses_local_links
        self._shown: tuple[bytes, bytes, bytes] | None = None  # what the channels were opened with
        self._channels: list[aio.Channel] = []
        self._stubs: list[Any] = []
        self._places: dict[int, _Place] = {}  # by stage
        self._life: EngineEpoch | None = None

    async def wait_loaded(self) -> list[pb.StatusReply]:
        """Wait until every stage has its weights, however long that takes; say so through `on_loading`.

        Raises: EngineError when a stage does not answer for join_timeout_s, or the stages do not fit together.
        """
        await self._open_links()
        statuses = await _all_or_none(self._wait_loaded(stage) for stage in range(len(self._stubs)))
        _require_one_group(statuses)
        return statuses

    async def form(self, epoch: Epoch) -> EngineShape:
        """See core.domain.engine.Engine."""
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
            processes=[status.process for status in statuses],
            contract=wire.CONTRACT,
        )
        await self._join_all(request)
        peers = [JoinedStage(stub, status.process) for stub, status in zip(self._stubs, statuses, strict=True)]
        for stage in {0, len(peers) - 1}:  # steps go to the first, results come from the last
            peers[stage] = replace(peers[stage], link=self._local_link(statuses[stage], request.epoch))
        self._life = EngineEpoch(epoch, peers, self._step_timeout_s)
        return shape

    async def submit(self, step: Step) -> None:
        """See core.domain.engine.Engine. Costs the caller one conversion: the call itself runs behind it."""
        if self._life is None or self._life.epoch != step.epoch:
            raise EngineError(f"epoch {step.epoch.number} is over")
        await self._life.submit(step)

    def results(self) -> AsyncIterator[StepResult]:
        """See core.domain.engine.Engine. Ends, without an error, when close() or another form() ended the epoch."""
        if self._life is None:
            raise EngineError("no epoch was formed")
        return self._life.results()

    async def close(self) -> None:
        """See core.domain.engine.Engine. The stages stay in their epoch, which nobody can speak for any more."""
        await self._end_life(None)
        await self._close_channels()
        await self._rendezvous.stop()

    async def _open_links(self) -> None:
        """Anew where the certificates are others by now: a channel shows for ever what it was opened with."""
        shown = None if self._certificates is None else self._certificates.read()
        if self._stubs and shown == self._shown:
            return
        await self._end_life("its links are opened anew, with other certificates")
        await self._close_channels()
        await self._rendezvous.start()
        self._shown = shown
        self._channels = [grpc_links.open_channel(address, self._certificates) for address in self._addresses]
        self._stubs = [grpc_links.stage_stub(channel) for channel in self._channels]

    async def _close_channels(self) -> None:
        channels, self._channels, self._stubs = self._channels, [], []
        for channel in channels:
            await channel.close()

    async def _wait_loaded(self, stage: int) -> pb.StatusReply:
        heard = time.monotonic()
        told: StageLoading | None = None
        while True:
            try:
                status: pb.StatusReply = await self._stubs[stage].Status(pb.StatusRequest(), timeout=STATUS_S)
            except aio.AioRpcError as error:
                detail = f"stage {stage} at {self._addresses[stage]} does not answer: {error.details()}"
                if time.monotonic() - heard > self._join_timeout_s:
                    raise EngineError(detail) from error
                now = StageLoading(stage=stage, permille=None, detail=detail)
            else:
                heard = time.monotonic()
                self._check_place(stage, status)
                now = StageLoading(stage=stage, permille=status.loaded_permille, detail=status.detail)
                if not self._take_place(stage, status.process, heard):
                    now = StageLoading(
                        stage=stage, permille=None, detail="a second process answers while the first lives"
                    )
                elif status.phase != pb.StatusReply.LOADING:
                    if told is not None:
                        self._on_loading(now)
                    return status
            if told is None or (now.permille, now.detail) != (told.permille, told.detail):
                self._on_loading(now)
            told = now
            await asyncio.sleep(_STATUS_EVERY_S)

    def _check_place(self, stage: int, status: pb.StatusReply) -> None:
        wire.require_same_contract(status.contract, f"stage {stage}")
        if (status.stage, status.stages) != (stage, len(self._addresses)):
            raise EngineError(
                f"{self._addresses[stage]} serves stage {status.stage} of {status.stages}, "
                f"not stage {stage} of {len(self._addresses)}"
            )

    def _take_place(self, stage: int, process: str, now_s: float) -> bool:
        """Give the process the stage's place if it has that already, or may take it over. Returns: whether it has it.

        The first one keeps it while it answers (protocol: stage). Else one epoch could be formed with a process and its
        steps be sent to another, when two serve one address.
        """
        place = self._places.get(stage)
        if place is not None and place.process != process:
            fields = {"stage": stage, "first": place.process, "second": process}
            if now_s - place.heard_s < _PLACE_S:
                log.warning("a second process answers for a stage and is refused", extra=fields)
                return False
            log.info("another process has a stage's place", extra=fields)
        self._places[stage] = _Place(process, now_s)
        return True

    def _shape_of(self, statuses: Sequence[pb.StatusReply]) -> EngineShape:
        """Agree on the slots: every stage holds all requests, so the poorest one decides.

        Raises: SettingError when more are wanted, or less than a block; EngineError when there is no room for a block.
        """
        poorest = min(statuses, key=lambda status: status.slots_possible)
        possible = poorest.slots_possible // self._block_tokens * self._block_tokens
        slots = possible if self._slots is None else self._slots // self._block_tokens * self._block_tokens
        if slots > possible:
            raise SettingError(f"slots: {slots} are wanted, stage {poorest.stage} has room for {possible}")
        if not slots and self._slots is not None:
            raise SettingError(f"slots: {self._slots} are less than a block of {self._block_tokens}")
        if not slots:
            raise EngineError(f"stage {poorest.stage} has room for {poorest.slots_possible} slots, less than a block")
        return EngineShape(
            stages=len(statuses),
            slots=slots,
            block_tokens=self._block_tokens,
            max_model_len=min(status.max_model_len for status in statuses),
        )

    def _local_link(self, status: pb.StatusReply, epoch: pb.Epoch) -> LocalLink | None:
        """A link to the stage, if it is on this machine."""
        if not self._uses_local_links or not status.HasField("local"):
            return None
        return open_link(status.local, epoch)

    def _rendezvous_address(self) -> str:
        host, _, port = self._rendezvous.address.rpartition(":")
        return f"{self._advertise or host}:{port}"

    async def _join_all(self, request: pb.JoinRequest) -> None:
        """Send every stage into the epoch at the same time. Raises: EngineError with the first refusal."""
        bound_s = self._join_timeout_s + 1.0
        try:
            await _all_or_none(_join(stub, request, bound_s) for stub in self._stubs)
        except aio.AioRpcError as error:
            raise EngineError(f"epoch {request.epoch.number}: {error.code().name} {error.details()}") from error

    async def _end_life(self, reason: str | None) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.end(reason)


async def _all_or_none(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all calls answer. Raises: the first error, with no other call under way any more."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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


def _log_loading(loading: StageLoading) -> None:
    log.info("stage loads", extra={"stage": loading.stage, "permille": loading.permille, "detail": loading.detail})
