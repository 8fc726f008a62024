"""Matrix products of a batch on a CPU: y = x W^T + b, with the weight in panels, and what comes before and after it.

    x [rows, inputs], W [outputs, inputs], b [outputs], y [rows, outputs]; sums in float32

A panel holds two vectors of outputs, input by input: the `lanes` of the first, then those of the second. A task is a
panel for some rows. It goes through the inputs once for every few rows, whose sums stay in registers meanwhile
(numba_tile.py), so the weight is read once from memory and a row once per panel from the processor's cache. While the
first of its rows are computed, the panel that this thread probably takes next is asked for: products of few rows wait
for memory otherwise. The result of a row does not depend on the rows beside it.

Rows are normalised by each thread for itself: that takes less time than to hand them over. The sums of a task are in
the first cache when they are added to what is there, gated, or turned and put into the KV cache.

Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008: the inner kernel. The rest is left out:
a batch is small enough to stay in the cache as it is.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, literally, njit
from torch import Tensor

from orca.kernels.numba_intrinsics import (
    BITS_OF,
    FAST,
    elements,
    gate_lanes,
    join,
    narrow,
    narrow_lanes,
    own_floats,
    real,
    take,
    turn_lanes,
    wide,
)
from orca.kernels.numba_rows import normalise
from orca.kernels.numba_team import Kernel
from orca.kernels.numba_tile import Tile, add_products, tile_of
from orca.kernels.reference import Kept, RowNorm

_TASK_ROWS = 96
"""Of a task at most: their sums of one panel, 12 KiB, stay in the first cache."""
_DEPTH = 512
"""Inputs (or pairs of them) that all rows of a task go through before the next: their weights, 64 KiB, stay in the
second cache."""
_TASKS_A_THREAD = 4
"""At least, where there are rows to split: threads end at about the same time."""

_STORE, _ADD, _GATE, _KEEP = range(4)

# Places of the arguments, in the order in which `_launch` gives them.
_X, _WEIGHT, _BIAS, _Y, _NORM, _NORMED, _TURNS, _SLOTS, _CACHE = range(2, 11)
_ROWS, _BLOCKS, _INPUTS, _OUTPUTS, _PARTS, _PANELS, _THREADS, _ENDING = range(11, 19)
_HEAD_DIM, _KEPT, _BLOCK_TOKENS, _EPS = range(19, 23)


class Panels:
    """A weight [outputs, inputs] and perhaps a bias [outputs], laid out for products with few rows.

    Args:
        is_gated: the outputs are a gate and what it opens for, of equal sizes (`gated_silu`): each panel has a vector
            of both.
    Raises: ValueError for a number of inputs that cannot be paired on this processor.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False, tile: Tile | None = None
    ) -> None:
        self._tile = tile or tile_of(weight.dtype)
        self.outputs, self.inputs = weight.shape
        if self._tile.pairs and self.inputs % 2:
            raise ValueError(f"an odd number of inputs, {self.inputs}, has no pairs")
        self._parts = 2 if is_gated else 1
        self.weight = self._laid_out(weight)
        own_bias = weight.new_zeros(self.outputs) if bias is None else bias
        self._bias = self._laid_out(own_bias.float()[:, None]).flatten()
        self._kernel = kernel(weight.dtype, self._tile)
        self._kernel.compile()

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.weight, self._bias))

    def product(self, x: Tensor, norm: RowNorm | None = None) -> Tensor:
        """x [rows, inputs] to y [rows, outputs]."""
        y = x.new_empty(x.shape[0], self.outputs)
        self._launch(x, y, _STORE, norm)
        return y

    def add_product(self, x: Tensor, to: Tensor) -> None:
        """to [rows, outputs] += y, rounded once."""
        assert to.shape == (x.shape[0], self.outputs)
        self._launch(x, to, _ADD)

    def gated_product(self, x: Tensor, norm: RowNorm | None = None) -> Tensor:
        """silu(the first half of y) * the second: [rows, outputs / 2]. Of a gated weight only."""
        assert self._parts == 2
        gated = x.new_empty(x.shape[0], self.outputs // 2)
        self._launch(x, gated, _GATE, norm)
        return gated

    def can_keep(self, head_dim: int) -> bool:
        """Whether a vector of outputs lies inside one head."""
        return head_dim % self._tile.lanes == 0

    def kept_product(self, x: Tensor, norm: RowNorm | None, kept: Kept) -> Tensor:
        """y as [rows, query heads + 2 x kv heads, head_dim], turned and put into the cache where `can_keep`."""
        head_dim = kept.cache.shape[3]
        assert self._parts == 1
        assert self.can_keep(head_dim)
        assert self.outputs % head_dim == 0
        assert kept.cache.dtype == x.dtype
        y = x.new_empty(x.shape[0], self.outputs // head_dim, head_dim)
        self._launch(x, y, _KEEP, norm, kept)
        return y

    def _laid_out(self, features: Tensor) -> Tensor:
        """[outputs, inputs] as [panels, inputs (or pairs), 2 x lanes (x 2)], filled up with zeros."""
        depth = max(features.shape[1] // self._tile.together, 1)
        each, size = 2 * self._tile.lanes // self._parts, self.outputs // self._parts
        whole, rest = divmod(size, each)
        rows = features.view(self._parts, size, depth, -1)
        # Filled in place: a copy more of a vocabulary would be the most memory that loading takes.
        panels = features.new_zeros(whole + (rest > 0), depth, self._parts, each, rows.shape[3])
        panels[:whole] = rows[:, : whole * each].unflatten(1, (whole, each)).permute(1, 3, 0, 2, 4)
        panels[whole:, :, :, :rest] = rows[:, whole * each :].permute(2, 0, 1, 3)
        return panels.flatten(2)

    def _launch(self, x: Tensor, y: Tensor, ending: int, norm: RowNorm | None = None, kept: Kept | None = None) -> None:
        assert x.dtype == y.dtype == self.weight.dtype
        assert x.shape[1] == self.inputs
        assert y.is_contiguous()
        assert norm is None or (norm.weight.shape == (self.inputs,) and norm.weight.dtype == x.dtype)
        assert norm is None or norm.weight.is_contiguous()
        x = x.contiguous()
        rows, panels, threads = x.shape[0], self.weight.shape[0], torch.get_num_threads()
        blocks = max(-(-rows // _TASK_ROWS), min(-(-_TASKS_A_THREAD * threads // panels), rows // self._tile.rows), 1)
        normed = None if norm is None else x.new_empty(threads * -(-rows // blocks) * self.inputs)
        self._kernel(
            panels * blocks,
            *(x.data_ptr(), self.weight.data_ptr(), self._bias.data_ptr(), y.data_ptr()),
            *((0, 0) if norm is None or normed is None else (norm.weight.data_ptr(), normed.data_ptr())),
            *_addresses(kept, rows),
            *(rows, blocks, self.inputs, self.outputs, self._parts, panels, threads, ending),
            *((1, 1, 1) if kept is None else (kept.cache.shape[3], kept.cache.shape[1], kept.cache.shape[2])),
            0.0 if norm is None else norm.eps,
        )


def _addresses(kept: Kept | None, rows: int) -> Iterator[int]:
    """Of turns, slots and cache."""
    if kept is None:
        return iter((0, 0, 0))
    turns, slots, cache = kept.turns, kept.slots, kept.cache
    assert slots.shape == (rows,)
    assert slots.dtype == torch.int64
    assert turns is None or (turns.dtype == torch.complex64 and turns.numel() * 2 == rows * cache.shape[3])
    tensors = (turns, slots, cache)
    assert all(each is None or each.is_contiguous() for each in tensors)
    return (0 if each is None else each.data_ptr() for each in tensors)


@cache
def kernel(dtype: torch.dtype, tile: Tile) -> Kernel:
    kind, lanes, tile_rows, together, is_paired = BITS_OF[dtype], tile.lanes, tile.rows, tile.together, tile.pairs
    kind_bytes = dtype.itemsize
    input_bytes = together * kind_bytes
    task_sums = _TASK_ROWS * 2 * lanes

    def body(args: Any) -> None:
        rows, blocks, depth, outputs = args[_ROWS], args[_BLOCKS], args[_INPUTS] // together, args[_OUTPUTS]
        panels, threads, ending = args[_PANELS], args[_THREADS], args[_ENDING]
        row_bytes = depth * input_bytes
        vectors_bytes = 2 * lanes * input_bytes
        bias = carray(elements(args[_BIAS], np.float32), (panels, 2 * lanes))
        width = outputs // 2 if ending == _GATE else outputs
        sums_at = own_floats(task_sums)
        sums = carray(elements(sums_at, np.float32), (_TASK_ROWS, 2 * lanes))
        normed_at = args[_NORMED] + join(args) * ((rows + blocks - 1) // blocks) * row_bytes
        normed_block = -1
        task = take(args)
        while task < panels * blocks:
            block, panel = task // panels, task % panels
            first, last = rows * block // blocks, rows * (block + 1) // blocks
            x = args[_X] + first * row_bytes
            if args[_NORM] != 0:
                if normed_block != block:
                    _normalise(normed_at, x, args, last - first, kind, kind_bytes)
                    normed_block = block
                x = normed_at
            for row in range(last - first):
                for lane in range(2 * lanes):
                    sums[row, lane] = bias[panel, lane]
            weights = args[_WEIGHT] + panel * depth * vectors_bytes
            upcoming = args[_WEIGHT] + min(panel + threads, panels - 1) * depth * vectors_bytes
            tiles = (last - first + tile_rows - 1) // tile_rows
            for done in range(0, depth, _DEPTH):
                for tile in range(tiles):
                    low, high = (last - first) * tile // tiles, (last - first) * (tile + 1) // tiles
                    add_products(
                        sums_at + low * 2 * lanes * 4,
                        x + low * row_bytes + done * input_bytes,
                        row_bytes,
                        weights + done * vectors_bytes,
                        (upcoming if tile == 0 else weights) + done * vectors_bytes,
                        min(_DEPTH, depth - done),
                        high - low,
                        kind,
                        lanes,
                        tile_rows,
                        is_paired,
                    )
            if ending == _KEEP:
                _keep(sums_at, first, last, panel, args, kind, kind_bytes, lanes)
            else:
                y = args[_Y] + first * width * kind_bytes
                _finish(sums_at, y, last - first, width, panel, args[_PARTS], ending, kind, kind_bytes, lanes)
            task = take(args)

    return Kernel(f"product-{dtype}-{tile.name}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _normalise(normed_at: Any, x_at: Any, args: Any, rows: Any, kind: Any, bytes_: Any) -> None:
    inputs, eps = args[_INPUTS], np.float32(real(args[_EPS]))
    for row in range(rows):
        behind = row * inputs * bytes_
        normalise(normed_at + behind, x_at + behind, args[_NORM], inputs, eps, kind)


# Functions of the module, not of `kernel`: Numba would not know those again in the next process.


@njit(**FAST)  # type: ignore[untyped-decorator]
def _finish(
    sums_at: Any, y: Any, rows: Any, width: Any, panel: Any, parts: Any, ending: Any, kind: Any, bytes_: Any, lanes: Any
) -> None:
    """From sums [rows, 2 x lanes] of a panel to y [rows, width], of which they are two pieces, or one when gated."""
    vector_bytes = literally(lanes) * 4
    if ending == _GATE:
        for row in range(rows):
            gate_lanes(sums_at + row * 2 * vector_bytes, literally(lanes))
        column = panel * lanes
        _put(sums_at, y + column * bytes_, rows, width, width - column, False, kind, bytes_, lanes)
        return
    for half in range(2):
        # Where the piece begins, and what is left of y, or of this part of it.
        column = panel * lanes + half * (width // 2) if parts == 2 else (2 * panel + half) * lanes
        left = width // 2 - panel * lanes if parts == 2 else width - column
        at = sums_at + half * vector_bytes
        _put(at, y + column * bytes_, rows, width, left, ending == _ADD, kind, bytes_, lanes)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _put(
    sums_at: Any, y: Any, rows: Any, width: Any, left: Any, is_added: Any, kind: Any, bytes_: Any, lanes: Any
) -> None:
    """A vector of each row, as far as there is room for it, to y, or to what is there."""
    for row in range(rows):
        numbers, into = sums_at + row * 2 * lanes * 4, y + row * width * bytes_
        if left < lanes:
            sums, some = carray(elements(numbers, np.float32), (lanes,)), carray(elements(into, kind), (lanes,))
            for lane in range(left):
                some[lane] = narrow(sums[lane] + (wide(some[lane]) if is_added else np.float32(0.0)), kind)
        elif is_added:
            narrow_lanes(numbers, into, kind, literally(lanes), True)
        else:
            narrow_lanes(numbers, into, kind, literally(lanes), False)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _keep(sums_at: Any, first: Any, last: Any, panel: Any, args: Any, kind: Any, bytes_: Any, lanes: Any) -> None:
    """From sums of a panel of queries, keys or values to y and the cache (device.Kernels.keep)."""
    outputs, head_dim, kept, block_tokens = args[_OUTPUTS], args[_HEAD_DIM], args[_KEPT], args[_BLOCK_TOKENS]
    slots = carray(elements(args[_SLOTS], np.int64), (args[_ROWS],))
    for half in range(2):
        column = (2 * panel + half) * literally(lanes)
        if column < outputs:
            head, dim = column // head_dim, column % head_dim
            line = head - outputs // head_dim + kept  # of a block in the cache; below 0 for queries
            for row in range(first, last):
                numbers = sums_at + ((row - first) * 2 + half) * lanes * 4
                if args[_TURNS] != 0 and line < kept // 2:
                    turn_lanes(numbers, args[_TURNS] + (row * head_dim + dim) * 4, literally(lanes))
                narrow_lanes(numbers, args[_Y] + (row * outputs + column) * bytes_, kind, literally(lanes), False)
                if line >= 0:
                    block, place = slots[row] // block_tokens, slots[row] % block_tokens
                    to = ((block * kept + line) * block_tokens + place) * head_dim + dim
                    narrow_lanes(numbers, args[_CACHE] + to * bytes_, kind, literally(lanes), False)
