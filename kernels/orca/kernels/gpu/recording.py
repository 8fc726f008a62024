"""Recorded steps on a GPU (contract/recording.py): captured graphs, whose inputs are built on the device (inputs.py).

A graph has a fixed number of rows, so steps are padded with rows that belong to no request. Fewer sizes mean fewer
graphs to capture. All graphs share one memory pool, because one runs at a time.

The description of a step is copied to the device from pinned memory, so the host does not wait for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.contract.recording import COLUMNS, LINE, Recorded, RecordingSize, RequestLines, StepDescription
from orca.kernels.contract.reference import AttentionView
from orca.kernels.gpu.attention import SPLIT, AttentionSizes, Scratch, TritonAttention, parts_max, window_of
from orca.kernels.gpu.attention_item import AttentionItem
from orca.kernels.gpu.inputs import make_items, make_rows

_PADDING = -1
_ROWS_SHARED = 512
"""Graphs with up to this many rows share the memory for split contexts."""
_UPLOADS = 4
"""Steps that can be uploaded before the first of them has been read: more than are ever in flight."""


class GraphRecorder:
    """The recorder of one stage. On a CPU, with Triton's interpreter, a run calls the recorded function again."""

    only_kernels = False
    recordings_max = 64
    chunk_tokens_max = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._capture_stream: Any = None
        if device.type == "cuda":
            self._pool, self._capture_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scratch: dict[tuple[object, ...], Scratch] = {}

    def size_of(self, step: StepDescription) -> RecordingSize:
        """Return a power of two up to 8; above that a multiple such that at most an eighth of the rows are padding."""
        requests = len(step.requests)
        if requests <= 8:
            return RecordingSize(triton.next_power_of_2(requests), None)
        multiple = max(8, triton.next_power_of_2(requests) // 16)
        return RecordingSize(-(-requests // multiple) * multiple, None)

    def inputs(self, size: RecordingSize, lines: RequestLines, *, slots: int, block_tokens: int) -> "GraphInputs":
        return GraphInputs(size.tokens, lines, slots, block_tokens, self._scratch_of)

    def clear(self) -> None:
        self._scratch.clear()
        if self._device.type == "cuda":
            # A pool whose last graph is gone accepts no new graph.
            self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, compute: Callable[[], Recorded], captured: Callable[[], Recorded] | None = None
    ) -> tuple[Recorded, Callable[[], None]]:
        if self._device.type != "cuda":
            return _rerun(compute)
        # Not `torch.cuda.graph`, which waits for all work of the device. That work may include receives whose senders
        # wait for this step. Other threads may call the device meanwhile.
        cuda: Any = torch.cuda  # untyped in parts
        graph, capture_stream, here = cuda.CUDAGraph(), self._capture_stream, cuda.current_stream()
        capture_stream.wait_stream(here)
        with cuda.stream(capture_stream):
            # Compile kernels and set up libraries outside the capture. All rows are padding at this time.
            compute()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = (captured or compute)()
            finally:
                graph.capture_end()
        here.wait_stream(capture_stream)
        return made, graph.replay

    def _scratch_of(self, view: AttentionView, slots: int, rows: int) -> Scratch:
        """Return scratch memory: shared by all graphs, except those with very many rows, which have their own."""
        rows = max(rows, _ROWS_SHARED)
        key = (tuple(view.kv_of_query), view.head_dim, rows)
        if key not in self._scratch:
            part_rows = triton.next_power_of_2(AttentionSizes.of(view).group)  # queries of one token
            partials = parts_max(slots, rows) * view.kv_heads * part_rows
            self._scratch[key] = Scratch.of(view, partials, rows, part_rows)
        return self._scratch[key]


class GraphInputs:
    """See contract.recording.StepInputs. All rows are wanted.

    Args:
        slots: number of slots of the cache, which bounds the total length of all contexts.
        scratch_of: returns the scratch memory for a view, a number of slots and a number of rows.
    """

    wanted = None

    def __init__(
        self,
        rows: int,
        lines: RequestLines,
        slots: int,
        block_tokens: int,
        scratch_of: Callable[[AttentionView, int, int], Scratch],
    ) -> None:
        device = lines.tables.device
        self._lines, self._block_tokens, self._scratch_of = lines, block_tokens, scratch_of
        self._step_rows = torch.full((rows, COLUMNS), _PADDING, dtype=torch.int64, device=device)
        self._upload = _StepUpload(rows, device)
        self.ids, self.positions, self.slots = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.sampled = (
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
        )
        self._cache_slots = slots
        # Arguments of make_items for each window and for cross attention. The last ones are columns of the tables,
        # window, whether it is causal, positions of a tile, SPLIT, rows of a part.
        self._items: list[tuple[Tensor, Tensor, tuple[int, int, bool, int, int, int]]] = []  # keys of each line, items

    def put(self, step: StepDescription) -> None:
        assert step.wanted is None
        assert step.tokens == len(step.requests)
        self._upload.send(step.requests, self._step_rows)

    def build(self, extra_inputs: Sequence[Tensor] = ()) -> None:
        del extra_inputs
        made = (self.ids, self.positions, self.slots, *self.sampled)
        make_rows(self._step_rows, *self._lines[:3], *made, self._block_tokens)
        for keys, items, geometry in self._items:
            make_items(self._step_rows, keys, items, *geometry)

    def attention(self, view: AttentionView, *, wanted_only: bool = False) -> TritonAttention:
        assert not wanted_only
        assert view.tables is (self._lines.tables if view.is_causal else self._lines.source_tables)
        rows = len(self._step_rows)
        scratch = self._scratch_of(view, self._cache_slots, rows)
        items = torch.zeros(
            1 + parts_max(self._cache_slots, rows), len(AttentionItem._fields), dtype=torch.int32, device=view.device
        )
        positions, part_lines = AttentionSizes.of(view).shape.positions, view.kv_heads * scratch.part_rows
        columns = view.tables.shape[1]
        keys = self._lines.prompts if self._lines.sources is None else self._lines.sources
        self._items.append((keys, items, (columns, window_of(view), view.is_causal, positions, SPLIT, part_lines)))
        return TritonAttention.of_items(items, scratch, view)


class _StepUpload:
    """Uploads descriptions of steps: host buffers from which one copy reads while the next step is written."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = torch.full((_UPLOADS, rows, COLUMNS), _PADDING, dtype=torch.int64, pin_memory=self._is_cuda)
        self._read = [torch.cuda.Event() for _ in range(_UPLOADS)] if self._is_cuda else []
        self._next = 0

    def send(self, requests: NDArray[np.int64], to: Tensor) -> None:
        """Pad the description with rows of no request, and let the device copy it."""
        place, self._next = self._next, (self._next + 1) % _UPLOADS
        if self._is_cuda:
            self._read[place].synchronize()
        buffer = self._buffers[place].numpy()
        buffer[: len(requests)] = requests
        buffer[len(requests) :, LINE] = _PADDING
        to.copy_(self._buffers[place], non_blocking=True)
        if self._is_cuda:
            self._read[place].record()


def _rerun(compute: Callable[[], Recorded]) -> tuple[Recorded, Callable[[], None]]:
    """Return a run that calls `compute` again and copies its results into the tensors of the first call."""
    made = compute()

    def run() -> None:
        for to, of in zip(made, compute(), strict=True):
            if to is not None and of is not None:
                to.copy_(of)

    return made, run
