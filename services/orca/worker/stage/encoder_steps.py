"""The encoder layers of a stage, over the sources of a step.

A source runs once, whole: its tokens see each other. The keys and values of a layer are needed only while that layer
runs, so all layers share one workspace. It is laid out as a KV cache is, and each source has consecutive blocks in it.
The workspace has room for the sources of any step, and `slots_possible` leaves its memory free.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orca.core.domain.encoder_decoder import SOURCE_SLOTS_MAX
from orca.core.domain.errors import EngineError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed
from orca.kernels.contract.reference import ContextRow
from orca.kernels.contract.transfer import to_device
from orca.kernels.device import kernels_of
from orca.worker.models.blocks import StepContext
from orca.worker.models.build import StageModel
from orca.worker.models.encoder_decoder.encoder_run import EncoderRun
from orca.worker.parallel.shard import SingleRank


@dataclass(frozen=True, slots=True)
class PreparedSources:
    """The sources of a step, ready to run."""

    context: StepContext
    ids: Tensor | None  # [source tokens] int64, on the stage that begins the encoder


def workspace_slots(model: StageModel, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> int:
    """Return the slots of a workspace: enough for the sources of a step, or for a single longer one."""
    return slots_needed(max(SOURCE_SLOTS_MAX, model.info.max_model_len), block_tokens)


class EncoderSteps:
    """Runs the encoder layers of one rank."""

    def __init__(self, model: StageModel, run: EncoderRun, block_tokens: int) -> None:
        self._model, self._run = model, run
        self._block_tokens = block_tokens
        self._kernels = kernels_of(model.device)
        shape = (workspace_slots(model, block_tokens) // block_tokens, 2 * run.heads.num_kv, block_tokens, run.head_dim)
        # Memory that is never written takes none on a CPU.
        self._workspace = torch.empty(shape, dtype=model.dtype, device=model.device)
        parts = run.layers if run.embed is None else [run.embed, *run.layers]
        self._only_kernels = isinstance(model.group, SingleRank) and all(part.only_kernels for part in parts)

    @property
    def workspace_bytes(self) -> int:
        """Memory of the keys and values of one layer, for the step with most sources."""
        return self._workspace.nbytes

    def prepare(self, sources: Sequence[Sequence[int]]) -> PreparedSources:
        """Lay out the sources of a step.

        Args: sources: their tokens, at least one source.
        Raises: EngineError for more sources than any step may have.
        """
        model, lengths = self._model, np.array([len(source) for source in sources], np.int64)
        firsts = np.cumsum(lengths) - lengths
        blocks = -(-lengths // self._block_tokens)
        first_blocks = np.cumsum(blocks) - blocks
        if blocks.sum() > len(self._workspace):
            raise EngineError(
                f"sources of {blocks.sum()} blocks in one step: a stage has room for {len(self._workspace)}"
            )
        positions = np.arange(lengths.sum()) - np.repeat(firsts, lengths)
        # Entries behind a source's last block are never read.
        tables = first_blocks[:, None] + np.arange(blocks.max())
        slots = np.repeat(first_blocks * self._block_tokens, lengths) + positions
        rows = [
            ContextRow(int(first), int(length), 0, line, keys=int(length))
            for line, (first, length) in enumerate(zip(firsts, lengths, strict=True))
        ]
        view = self._run.view(
            to_device(tables.astype(np.int32), model.device), self._block_tokens, model.dtype, model.device
        )
        context = StepContext(
            group=model.group,
            caches=[self._workspace] * len(self._run.layers),
            slots=to_device(slots, model.device),
            positions=to_device(positions, model.device),
            attention={None: self._kernels.attention(rows, view)},
        )
        ids = None
        if self._run.embed is not None:
            ids = to_device(np.fromiter((token for source in sources for token in source), np.int64), model.device)
        return PreparedSources(context, ids)

    def run(self, prepared: PreparedSources, hidden: Tensor | None) -> Tensor:
        """Run the layers. After the encoder's last one the result is the encoder output.

        Args:
            hidden: [source tokens, hidden] from the stage before, which is overwritten; None at the encoder's begin.
        """
        run, context = self._run, prepared.context
        context.group = self._model.group
        with self._kernels.deferred() if self._only_kernels else nullcontext():
            if run.embed is not None:
                assert prepared.ids is not None
                hidden = run.embed(prepared.ids, context)
            assert hidden is not None
            for layer in run.layers:
                hidden = layer(hidden, context)
            return hidden if run.norm is None else run.norm(hidden)
