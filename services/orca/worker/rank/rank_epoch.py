"""An epoch on a rank: its rendezvous, process groups, stage and steps."""

from collections.abc import Callable

import torch
from torch.distributed.distributed_c10d import Store

from orca.core.domain.errors import EngineError
from orca.core.transport.tls_files import TlsFiles
from orca.worker.messages.frames import JoinOrder
from orca.worker.messages.inbox import Inbox
from orca.worker.models.build import StageModel
from orca.worker.parallel.process_groups import EpochGroups
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.rendezvous_store import RendezvousStore
from orca.worker.parallel.shard import Shard
from orca.worker.parallel.tensor_link import TensorLink
from orca.worker.rank.epoch_steps import EpochSteps
from orca.worker.rank.executor import Executor
from orca.worker.rank.stage_log import StageLog
from orca.worker.settings import WorkerSettings
from orca.worker.stage.screen import RequestScreen
from orca.worker.stage.stage import Stage


class RankEpoch:
    """One epoch. The main thread forms and leaves it; before and after that it is empty."""

    def __init__(
        self,
        settings: WorkerSettings,
        shard: Shard,
        device: torch.device,
        *,
        tensor: TensorLink,
        progress: RankProgress,
    ) -> None:
        self.steps: EpochSteps | None = None  # set while the epoch is formed
        self._settings = settings
        self._shard = shard
        self._device = device
        self._tensor = tensor
        self._progress = progress
        self._store: RendezvousStore | None = None
        self._groups: EpochGroups | None = None
        self._stage: Stage | None = None

    @property
    def slots_in_use(self) -> int:
        stage = self._stage
        return 0 if stage is None else stage.slots_in_use

    def form(
        self,
        order: JoinOrder,
        model: StageModel,
        *,
        inbox: Inbox,
        iteration_log: StageLog | None,
        is_outdated: Callable[[], bool],
    ) -> None:
        """Meet the other ranks under the epoch's keys, with an empty stage.

        Args:
            is_outdated: returns whether a newer epoch was ordered.
        Raises: EngineError or RuntimeError if the epoch cannot be formed; the caller calls `leave`.
        """
        stage = Stage(
            model,
            slots=order.slots,
            block_tokens=order.block_tokens,
            eos_token_ids=model.info.eos_token_ids,
            feeds_tokens=order.feeds_tokens,
        )
        self._store = RendezvousStore(order.rendezvous, order.timeout_s, TlsFiles.of(self._settings))
        if is_outdated():  # the reader thread may have called `interrupt` before there was a store to close
            raise EngineError("a newer epoch was ordered")
        require_same_layers(self._store, order.prefix, self._shard, model.config.num_layers)
        self._groups = EpochGroups(
            self._shard,
            self._device,
            uses_nccl=self._settings.uses_nccl,
            data_host=self._settings.data_host,
            interface=self._settings.network_interface,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            progress=self._progress,
            fed_stage=self._shard.stage_of(model.encoder_layers, model.config.num_layers),
        )
        self._groups.form(
            self._store,
            order.prefix,
            self._tensor,
            feeds_tokens=order.feeds_tokens,
            timeout_s=order.timeout_s,
        )
        self._stage = stage
        executor = Executor(
            self._shard,
            stage,
            self._groups,
            screen=RequestScreen.of(model, model.info.eos_token_ids),
            feeds_tokens=order.feeds_tokens,
            progress=self._progress,
            iteration_log=iteration_log,
            delay_ms=self._settings.delay_ms,
        )
        self.steps = EpochSteps(order.epoch, executor, inbox)

    def leave(self) -> None:
        """Close all links of the epoch and free its memory."""
        self.steps = None
        self._stage = None
        if self._groups is not None:
            self._groups.leave(self._tensor)
            self._groups = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def interrupt(self) -> None:
        """Wake the main thread if it is still forming this epoch. Any thread may call it."""
        store = self._store
        if store is not None:
            store.close()


def require_same_layers(store: Store, prefix: str, shard: Shard, num_layers: int) -> None:
    """Check that all ranks divide the layers in the same way: otherwise a layer would run twice, or not at all.

    The first rank of the epoch writes its division into the store, and every other rank compares its own with that.

    Raises: EngineError if they differ.
    """
    if shard.stages == 1:
        return
    own = ",".join(map(str, shard.layers_by_stage(num_layers)))
    written = store.compare_set(f"{prefix}layers", "", f"{shard.stage}/{own}").decode()
    stage, _, first = written.partition("/")
    if first != own:
        raise EngineError(
            f"stage {shard.stage} divides the layers as {own}, but stage {stage} as {first}: "
            "start all stages of the group with the same --layers"
        )
