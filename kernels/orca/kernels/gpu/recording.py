"""Recorded steps on a GPU (recording.py): captured graphs, whose inputs are made on the device (inputs.py).

A graph has a fixed number of rows, so steps are filled up with rows of padding, which belong to no request: the fewer
sizes, the fewer graphs to capture. All graphs share one pool of memory, for one runs at a time.

What is told of a step goes to the device out of pinned memory, without waiting for what the device does meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.contract.recording import COLUMNS, LINE, Made, RecordingSize, RequestLines, StepDescription
from orca.kernels.contract.reference import AttentionView
from orca.kernels.gpu.attention import SPLIT, Scratch, Sizes, TritonAttention, parts_max, window_of
from orca.kernels.gpu.attention_item import Item
from orca.kernels.gpu.inputs import make_items, make_rows

_PADDING = -1
_ROWS_SHARED = 512
"""Graphs of up to so many rows share the memory of contexts that are cut."""
_TOLD = 4
"""Steps that may be told of before the first of them has been read: more than are ever under way."""


class GraphRecorder:
    """Of one stage. On a CPU, where Triton's interpreter computes, a run calls again what was recorded."""

    only_kernels = False
    recordings_max = 64
    chunk_tokens_max = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._apart: Any = None  # the stream that captures
        if device.type == "cuda":
            self._pool, self._apart = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scratch: dict[tuple[object, ...], Scratch] = {}

    def size_of(self, said: StepDescription) -> RecordingSize:
        """Up to 8 a power of two, then steps of an eighth of it at most: an eighth of the rows are padding."""
        requests = len(said.requests)
        if requests <= 8:
            return RecordingSize(triton.next_power_of_2(requests), None)
        step = max(8, triton.next_power_of_2(requests) // 16)
        return RecordingSize(-(-requests // step) * step, None)

    def inputs(self, size: RecordingSize, lines: RequestLines, *, slots: int, block_tokens: int) -> "GraphInputs":
        return GraphInputs(size.tokens, lines, slots, block_tokens, self._scratch_of)

    def clear(self) -> None:
        self._scratch.clear()
        if self._device.type == "cuda":
            # A pool whose last graph is gone takes no other one.
            self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, compute: Callable[[], Made], captured: Callable[[], Made] | None = None
    ) -> tuple[Made, Callable[[], None]]:
        if self._device.type != "cuda":
            return _repeated(compute)
        # Not `torch.cuda.graph`, which waits for all that the device has to do: receives among it, whose senders may
        # wait for this step. Other threads may call the device meanwhile.
        cuda: Any = torch.cuda  # untyped in parts
        graph, apart, here = cuda.CUDAGraph(), self._apart, cuda.current_stream()
        apart.wait_stream(here)
        with cuda.stream(apart):
            # Kernels are compiled and libraries set up outside the capture. All rows are padding now.
            compute()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = (captured or compute)()
            finally:
                graph.capture_end()
        here.wait_stream(apart)
        return made, graph.replay

    def _scratch_of(self, seen: AttentionView, slots: int, rows: int) -> Scratch:
        """One for all graphs but those of very many rows, which have their own."""
        rows = max(rows, _ROWS_SHARED)
        key = (tuple(seen.kv_of_query), seen.head_dim, rows)
        if key not in self._scratch:
            part_rows = triton.next_power_of_2(Sizes.of(seen).group)  # of one token
            partials = parts_max(slots, rows) * seen.kv_heads * part_rows
            self._scratch[key] = Scratch.of(seen, partials, rows, part_rows)
        return self._scratch[key]


class GraphInputs:
    """As recording.StepInputs. All rows are wanted.

    Args:
        slots: of the cache, which bound the contexts of all rows together.
        scratch_of: memory for a geometry, so many slots and rows.
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
        self._said = torch.full((rows, COLUMNS), _PADDING, dtype=torch.int64, device=device)
        self._told = _Told(rows, device)
        self.ids, self.positions, self.slots = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.sampled = (
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
        )
        self._cache_slots = slots
        # Of each window, as make_items wants them: items; window, positions of a tile, SPLIT, rows of a part.
        self._items: list[tuple[Tensor, tuple[int, int, int, int]]] = []

    def put(self, said: StepDescription) -> None:
        assert said.wanted is None
        assert said.tokens == len(said.requests)
        self._told.send(said.requests, self._said)

    def build(self, extra_inputs: Sequence[Tensor] = ()) -> None:
        del extra_inputs
        made = (self.ids, self.positions, self.slots, *self.sampled)
        make_rows(self._said, *self._lines, *made, self._block_tokens)
        for items, geometry in self._items:
            make_items(self._said, items, self._lines.tables.shape[1], *geometry)

    def attention(self, seen: AttentionView, *, wanted_only: bool = False) -> TritonAttention:
        assert not wanted_only
        assert seen.tables is self._lines.tables
        rows = len(self._said)
        scratch = self._scratch_of(seen, self._cache_slots, rows)
        items = torch.zeros(
            1 + parts_max(self._cache_slots, rows), len(Item._fields), dtype=torch.int32, device=seen.device
        )
        positions, part_lines = Sizes.of(seen).shape.positions, seen.kv_heads * scratch.part_rows
        self._items.append((items, (window_of(seen), positions, SPLIT, part_lines)))
        return TritonAttention.of_items(items, scratch, seen)


class _Told:
    """The way of what is told to the device: memory of the host that a copy reads while the next step is told of."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._is_apart = device.type == "cuda"
        self._buffers = torch.full((_TOLD, rows, COLUMNS), _PADDING, dtype=torch.int64, pin_memory=self._is_apart)
        self._read = [torch.cuda.Event() for _ in range(_TOLD)] if self._is_apart else []
        self._next = 0

    def send(self, said: NDArray[np.int64], to: Tensor) -> None:
        """Fill up with padding and have the device copy it."""
        place, self._next = self._next, (self._next + 1) % _TOLD
        if self._is_apart:
            self._read[place].synchronize()
        buffer = self._buffers[place].numpy()
        buffer[: len(said)] = said
        buffer[len(said) :, LINE] = _PADDING
        to.copy_(self._buffers[place], non_blocking=True)
        if self._is_apart:
            self._read[place].record()


def _repeated(compute: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
    """A run that calls again what was recorded, and puts what it makes where the first one's is."""
    made = compute()

    def run() -> None:
        for to, of in zip(made, compute(), strict=True):
            if to is not None and of is not None:
                to.copy_(of)

    return made, run
