"""The context of a step for the layers of a stage, from the tokens that run and the blocks of their requests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from orca.kernels.contract.recording import StepInputs
from orca.kernels.contract.reference import AttentionView, ContextRow, RaggedAttention
from orca.kernels.contract.transfer import to_device
from orca.kernels.device import kernels_of
from orca.worker.models.blocks import CrossContext, StepContext, WantedRows
from orca.worker.models.build import StageModel
from orca.worker.stage.kv_cache import KVCache


class StepContexts:
    """Builds contexts for one model on one cache."""

    def __init__(self, model: StageModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._kernels = kernels_of(model.device)

    def for_rows(self, rows: Sequence[ContextRow], prompts: Tensor) -> StepContext:
        """Build the context of a laid-out step. Args: prompts: [lines] int64, the length of each line's prompt."""
        model = self._model
        firsts, counts, starts, lines = np.array(
            [(row.first, row.count, row.position, row.line) for row in rows], np.int64
        ).T
        places = np.repeat(starts - firsts, counts) + np.arange(counts.sum())
        lines_of = np.repeat(lines, counts)
        slots = to_device(self._cache.own.slots_of(lines_of, places), model.device)
        positions = to_device(places, model.device)
        context = self._context(slots, positions, self.attention(rows))
        if (cross := self.cross_attention(rows)) is not None:
            context.cross = CrossContext(attention=cross)
        if model.rotary is not None:
            lengths = None
            if model.rotary.needs_lengths:
                lengths = prompts[to_device(lines_of, model.device)]
            context.turns = model.rotary.turns(positions, lengths, longest=int(places.max()) + 1)
        return context

    def for_inputs(self, inputs: StepInputs) -> StepContext:
        """Build the context of a recording, which adds the turns itself."""
        windows = self._model.windows
        attention = {window: inputs.attention(self._sight(window)) for window in set(windows)}
        context = self._context(inputs.slots, inputs.positions, attention)
        view = self._source_view()
        if view is not None:
            context.cross = CrossContext(attention=inputs.attention(view))
        if inputs.wanted is not None:
            last = {windows[-1]: inputs.attention(self._sight(windows[-1]), wanted_only=True)}
            cross = None if view is None else inputs.attention(view, wanted_only=True)
            context.wanted = WantedRows(inputs.wanted, last, cross)
        return context

    def cross_attention(self, rows: Sequence[ContextRow]) -> RaggedAttention | None:
        """Return the attention of target rows over their sources; None if the model has no sources."""
        view = self._source_view()
        return None if view is None else self._kernels.attention(rows, view)

    def attention(
        self, rows: Sequence[ContextRow], windows: Sequence[int | None] | None = None
    ) -> dict[int | None, RaggedAttention]:
        """Return the geometry of attention for some rows, by sliding window.

        Args:
            windows: by default those of all layers.
        """
        windows = self._model.windows if windows is None else windows
        longest = max(row.end for row in rows)
        attention: dict[int | None, RaggedAttention] = {}
        for window in set(windows):
            # A window that no context exceeds hides nothing: its layers share the geometry of layers without a window.
            effective = None if window is None or window >= longest else window
            if effective not in attention:
                attention[effective] = self._kernels.attention(rows, self._sight(effective))
            attention[window] = attention[effective]
        return attention

    def _context(
        self, slots: Tensor, positions: Tensor, attention: Mapping[int | None, RaggedAttention]
    ) -> StepContext:
        return StepContext(
            group=self._model.group,
            caches=self._cache.layers,
            slots=slots,
            positions=positions,
            attention=attention,
        )

    def _source_view(self) -> AttentionView | None:
        tables = self._cache.source_tables
        return None if tables is None else replace(self._sight(None), tables=tables, is_causal=False)

    def _sight(self, window: int | None) -> AttentionView:
        model = self._model
        return AttentionView(
            kv_of_query=model.heads.kv_of_query,
            kv_heads=model.heads.num_kv,
            head_dim=model.config.head_dim,
            tables=self._cache.tables,
            block_tokens=self._cache.block_tokens,
            window=window,
            dtype=model.dtype,
            device=model.device,
        )
