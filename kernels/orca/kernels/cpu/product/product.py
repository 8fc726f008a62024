"""Matrix products of a batch on a CPU: y = x W^T + b, with the weight in panels, and what comes before and after it.

    x [rows, inputs], W [outputs, inputs], b [outputs], y [rows, outputs]; sums in float32

W may be of 8 bits with a scale for each output, y = s (x W^T) + b. Beside x of float32 it may be of half precision: the
products are those of the same numbers in float32, bit for bit, out of half the memory.

A panel holds two vectors of outputs, input by input: the `lanes` of the first, then those of the second, or both by
turns (`has_words`). A task is a panel for some rows. The result of a row does not depend on the rows beside it.

Rows are normalised by each thread for itself: that takes less time than to hand them over. The sums of a task are in
the processor's cache when they are activated, gated, added to what is there, or turned and put into the KV cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.cpu import huge_pages, lookups
from orca.kernels.cpu.product import amx_product, vector_product
from orca.kernels.cpu.product.panel import ACTIVATE, ADD, GATE, KEEP, STORE, TASK_ROWS, WIDE, blocks_of
from orca.kernels.cpu.product.tile import Tile, has_words, tile_of
from orca.kernels.cpu.rows import address_of, kept_addresses, norm_arguments, write_kv
from orca.kernels.cpu.team.team import Kernel, new_empty, rows_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kernel(dtype: torch.dtype, weight_dtype: torch.dtype, tile: Tile | None = None) -> Kernel:
    """That of all products of rows and weights of two dtypes: the same, or weights of 8 bits, or rows of float32 with
    weights of half precision."""
    tile = tile or _tile_of(dtype, weight_dtype)
    return amx_product.kernel() if tile.is_amx else vector_product.kernel(dtype, weight_dtype, tile)


def _tile_of(dtype: torch.dtype, weight_dtype: torch.dtype) -> Tile:
    """Weights that are widened meet rows of float32."""
    return tile_of(dtype if dtype == weight_dtype else torch.float32)


class PackedWeight:
    """A weight [outputs, inputs] and perhaps a bias [outputs], laid out for products with few rows.

    Args:
        scale: [outputs] of float32, of a weight of int8.
        dtype: of rows and results; None if it is the weight's. See `kernel`.
        is_gated: the outputs are a gate and what it opens for, of equal sizes (`gated_silu`): each panel has a vector
            of both.
        memory: for the weight; None takes it anywhere.
    Raises: ValueError for a number of inputs that cannot be paired on this processor.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
        is_gated: bool = False,
        memory: huge_pages.WeightMemory | None = None,
        tile: Tile | None = None,
    ) -> None:
        self._dtype = dtype or weight.dtype
        self._tile = tile or _tile_of(self._dtype, weight.dtype)
        assert (weight.dtype == torch.int8) == (scale is not None)
        assert self._dtype in ((weight.dtype, torch.float32) if weight.dtype.is_floating_point else _FLOATS)
        assert scale is None or scale.shape == weight.shape[:1]
        self.outputs, self.inputs = weight.shape
        if self._tile.pairs and self.inputs % 2:
            raise ValueError(f"an odd number of inputs, {self.inputs}, has no pairs")
        self._parts = 2 if is_gated else 1
        self.weight = self._laid_out(weight, self._tile.together, self._tile.step, memory)
        self._scale = None if scale is None else self._laid_out(scale.float()[:, None], 1, 1).flatten()
        if bias is None and scale is None:  # sums begin with it, where nothing is scaled behind them
            bias = torch.zeros(self.outputs)
        self._bias = None if bias is None else self._laid_out(bias.float()[:, None], 1, 1).flatten()
        self._kernel = kernel(self._dtype, weight.dtype, self._tile)
        self._kernel.compile()

    @property
    def bytes(self) -> int:
        tensors = (self.weight, self._bias, self._scale)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    @property
    def keeps_rows(self) -> bool:
        """Whether rows of W are in the panels as they were: it has no scale, and no gate that parts its outputs."""
        return self._scale is None and self._parts == 1

    def product(self, x: Tensor, norm: NormParameters | None = None, activation: Activation | None = None) -> Tensor:
        """x [rows, inputs] to y [rows, outputs]."""
        y = new_empty(x.dtype, rows_of(x), self.outputs)
        self._launch(x, y, STORE if activation is None else ACTIVATE + activation, norm)
        return y

    def float32_product(self, x: Tensor, norm: NormParameters | None = None) -> Tensor:
        """`product`, the sums as they are: y [rows, outputs] of float32."""
        y = new_empty(torch.float32, rows_of(x), self.outputs)
        self._launch(x, y, STORE if x.dtype == torch.float32 else WIDE, norm)
        return y

    def add_product(self, x: Tensor, to: Tensor) -> None:
        """to [rows, outputs] += y, rounded once."""
        assert to.shape == (x.shape[0], self.outputs)
        self._launch(x, to, ADD)

    def gated_product(self, x: Tensor, norm: NormParameters | None = None) -> Tensor:
        """silu(the first half of y) * the second: [rows, outputs / 2]. Of a gated weight only."""
        assert self._parts == 2
        gated = new_empty(x.dtype, rows_of(x), self.outputs // 2)
        self._launch(x, gated, GATE, norm)
        return gated

    def write_kv_product(self, x: Tensor, norm: NormParameters | None, kept: KvWrite) -> Tensor:
        """y as [rows, query heads + 2 x kv heads, head_dim], turned and put into the cache."""
        head_dim = kept.cache.shape[3]
        assert self._parts == 1
        assert self.outputs % head_dim == 0
        assert kept.cache.dtype == x.dtype
        y = new_empty(x.dtype, rows_of(x), self.outputs // head_dim, head_dim)
        if head_dim % self._tile.lanes == 0 and kept.head_norm is None:  # a vector of outputs lies inside one head
            self._launch(x, y, KEEP, norm, kept)
        else:
            self._launch(x, y, STORE, norm)
            write_kv(y, kept)
        return y

    def embed(self, ids: Tensor, places: Tensor | None, positions: Tensor) -> Tensor:
        """Rows of W, of the outputs `ids`, as they were (device.Kernels.embed), where it `shows_rows`."""
        assert self.keeps_rows
        lanes, together = self._tile.lanes, self._tile.together
        _, depth, line = self.weight.shape
        is_word = has_words(self.weight.dtype, self._tile)
        lane, vector = (line // lanes, together) if is_word else (together, lanes * together)
        layout = lookups.RowLayout(
            width=self.inputs,
            together=together,
            step=line,
            block=depth * line,
            vectors=2,
            vector=vector,
            lanes=lanes,
            lane=lane,
        )
        return lookups.embed_from(self.weight, layout, ids, places, positions, self._dtype)

    def _laid_out(
        self, features: Tensor, together: int, step: int, memory: huge_pages.WeightMemory | None = None
    ) -> Tensor:
        """[outputs, inputs] as [panels, inputs / together, 2 x lanes (x together)], filled up with zeros."""
        lanes, parts, size = self._tile.lanes, self._parts, self.outputs // self._parts
        each = 2 * lanes // parts
        whole, rest = divmod(size, each)
        depth, filled = features.shape[1] // together, -(-features.shape[1] // step) * step // together
        rows = features.view(parts, size, depth, together)
        # Filled in place: a copy more of a vocabulary would be the most memory that loading takes.
        shape = (whole + (rest > 0), filled, 2 * lanes * together)
        panels = features.new_zeros(shape) if memory is None else memory.zeros(shape, features.dtype)
        if has_words(features.dtype, self._tile):
            vectors = panels.unflatten(2, (lanes, 2, together)).transpose(2, 3)
        else:
            vectors = panels.unflatten(2, (2, lanes, together))
        last = F.pad(rows[:, whole * each :], (0, 0, 0, 0, 0, -rest % each))
        for first, some in ((0, rows[:, : whole * each]), (whole, last)):
            many = some.shape[1] // each
            laid = some.unflatten(1, (many, 2 // parts, lanes)).permute(1, 4, 0, 2, 3, 5).flatten(2, 3)
            vectors[first : first + many, :depth] = laid
        return panels

    def _launch(
        self, x: Tensor, y: Tensor, ending: int, norm: NormParameters | None = None, kept: KvWrite | None = None
    ) -> None:
        assert x.dtype == self._dtype
        assert y.dtype == (torch.float32 if ending == WIDE else x.dtype)
        assert x.shape[1] == self.inputs
        assert y.is_contiguous()
        assert x.is_contiguous()
        rows, panels, threads = x.shape[0], self.weight.shape[0], torch.get_num_threads()
        blocks = blocks_of.py_func(rows, panels, threads, self._tile.rows)
        scratch_bytes = self._scratch_bytes(min(rows, TASK_ROWS), x.dtype, is_normed=norm is not None)
        scratch = new_empty(torch.uint8, threads * scratch_bytes)
        self._kernel(
            panels * blocks,
            *(x.data_ptr(), self.weight.data_ptr(), address_of(self._bias), y.data_ptr()),
            scratch.data_ptr(),
            *((0, 0, 0) if kept is None else kept_addresses(kept, rows)),
            *(rows_of(x), self.inputs, self.outputs, self._parts, panels, threads, ending),
            *((1, 1, 1) if kept is None else (kept.cache.shape[3], kept.cache.shape[1], kept.cache.shape[2])),
            scratch_bytes,
            *norm_arguments(norm, x),
            address_of(self._scale),
        )

    def _scratch_bytes(self, rows: int, dtype: torch.dtype, *, is_normed: bool) -> int:
        """Of a thread whose tasks have so many rows."""
        if self._tile.is_amx:
            return amx_product.scratch_bytes(rows, self.inputs)
        return vector_product.scratch_bytes(rows, self.inputs, dtype, self._tile, is_normed=is_normed)
