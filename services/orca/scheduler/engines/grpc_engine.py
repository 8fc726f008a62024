"""The engine of real stages: core.domain.engine.Engine over gRPC (the paper's engine master; ORCA, section 4.1).

Steps go to a stage of the same machine by core.transport.local_link, and its results come by it.

It owns the links to all stages and the rendezvous of the present epoch; within an epoch engine_epoch.py takes over. It
decides nothing: epochs come from the pool's seat, steps from the scheduler.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError, SettingError
from orca.core.domain.step import Epoch, Step, StepResult
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.core.transport.local_link import LocalLink, open_link
from orca.core.transport.tls_files import TlsFiles
from orca.scheduler.engines.engine_epoch import EngineEpoch
from orca.scheduler.engines.rendezvous import RendezvousServer
from orca.scheduler.engines.stage_links import StageLinks, StageLoading
from orca.scheduler.engines.stage_probe import JoinedStage


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
            listen: host:port of the rendezvous; port 0 uses a free port.
            slots: KV slots to use; None uses as many as the stage with the fewest has.
            block_tokens: slots in a KV block.
            prefetch: 1 feeds sampled tokens on the device from the last stage to the first.
            step_timeout_s: a step that has been out for so long is lost if no stage has moved for so long either.
            join_timeout_s: bound on forming an epoch, and on the silence of a stage meanwhile.
            advertise: host by which stages reach `listen`; the host of `listen` by default.
            on_loading: called with each change while stages load; by default it is logged.
            certificates: of this scheduler, for its links to the stages and theirs to it; None encrypts nothing.
            uses_local_links: exchange steps and results with stages on this machine by core.transport.local_link.
        """
        self._links = StageLinks(stages, silence_s=join_timeout_s, certificates=certificates, on_loading=on_loading)
        self._slots = slots
        self._block_tokens = block_tokens
        self._feeds_tokens = prefetch > 0
        self._step_timeout_s = step_timeout_s
        self._join_timeout_s = join_timeout_s
        self._advertise = advertise
        self._rendezvous = RendezvousServer(listen, certificates)
        self._uses_local_links = uses_local_links
        self._epoch: EngineEpoch | None = None

    async def wait_loaded(self) -> list[pb.StatusReply]:
        """Wait until every stage has its weights, for any time; report the progress through `on_loading`.

        Raises: EngineError if a stage does not answer for join_timeout_s, or if the stages do not fit together.
        """
        if self._links.are_outdated:
            await self._end_epoch("its links are opened again, with other certificates")
            await self._links.close()
            await self._rendezvous.start()
            self._links.open()
        return await self._links.wait_loaded()

    async def form(self, epoch: Epoch) -> EngineShape:
        """See core.domain.engine.Engine."""
        await self._end_epoch(f"epoch {epoch.number} begins")
        statuses = await self.wait_loaded()
        known = max(status.epoch.number for status in statuses)
        if epoch.number <= known:
            raise EngineError(f"epoch {epoch.number} is not above {known}, which a stage knows", reported_epoch=known)
        shape = self._shape_of(statuses)
        await self._rendezvous.open(epoch)
        request = pb.JoinRequest(
            epoch=wire.epoch_to_wire(epoch),
            rendezvous=self._rendezvous_address(),
            stages=self._links.addresses,
            slots=shape.slots,
            block_tokens=self._block_tokens,
            feeds_tokens=self._feeds_tokens,
            timeout_ms=int(self._join_timeout_s * 1000),
            processes=[status.process for status in statuses],
            contract=wire.CONTRACT,
        )
        await self._links.join_all(request, self._join_timeout_s + 1.0)
        stages = [JoinedStage(stub, status.process) for stub, status in zip(self._links.stubs, statuses, strict=True)]
        for stage in {0, len(stages) - 1}:  # steps go to the first, results come from the last
            stages[stage] = replace(stages[stage], link=self._local_link(statuses[stage], request.epoch))
        self._epoch = EngineEpoch(epoch, stages, self._step_timeout_s)
        return shape

    async def submit(self, step: Step) -> None:
        """See core.domain.engine.Engine. The caller pays for one conversion; the call itself runs after it."""
        if self._epoch is None or self._epoch.epoch != step.epoch:
            raise EngineError(f"epoch {step.epoch.number} is over")
        await self._epoch.submit(step)

    def results(self) -> AsyncIterator[StepResult]:
        """See core.domain.engine.Engine. Ends without an error if close() or another form() ended the epoch."""
        if self._epoch is None:
            raise EngineError("no epoch was formed")
        return self._epoch.results()

    async def close(self) -> None:
        """See core.domain.engine.Engine. The stages stay in their epoch, for which nobody can act any more."""
        await self._end_epoch(None)
        await self._links.close()
        await self._rendezvous.stop()

    def _shape_of(self, statuses: Sequence[pb.StatusReply]) -> EngineShape:
        """Agree on the slots: every stage holds all requests, so the stage with the fewest decides.

        Raises: SettingError if more are wanted, or less than a block; EngineError if a stage has less than a block.
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
        """Return a link to the stage if it is on this machine."""
        if not self._uses_local_links or not status.HasField("local"):
            return None
        return open_link(status.local, epoch)

    def _rendezvous_address(self) -> str:
        host, _, port = self._rendezvous.address.rpartition(":")
        return f"{self._advertise or host}:{port}"

    async def _end_epoch(self, reason: str | None) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            await epoch.end(reason)
