"""Matrix products of a batch on a CPU: y = x W^T + b, with a packed weight, and the operations before and after it.

    x [rows, inputs], W [outputs, inputs], b [outputs], y [rows, outputs]; sums in float32

W may be int8 with a scale per output: y = s (x W^T) + b. W may also be half precision while x is float32: the products
are bit-identical to those with the same numbers in float32, from half the memory.

A panel holds two vectors of outputs, input by input: the `lanes` of the first vector, then those of the second, or both
interleaved (`is_interleaved`). A task is a panel for some rows. The result of a row does not depend on the rows beside
it.

Each thread normalises the rows for itself: that takes less time than passing them on. When the sums of a task are
activated, gated, added to y, or rotated and written to the KV cache, they are still in the processor's cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.cpu import huge_pages, lookups
from orca.kernels.cpu.product import amx_product, vector_product
from orca.kernels.cpu.product.panel import ACTIVATE, ADD, FLOAT32, GATE, STORE, TASK_ROWS, WRITE_KV, blocks_of
from orca.kernels.cpu.product.tile import Tile, is_interleaved, tile_of
from orca.kernels.cpu.rows import address_of, kv_addresses, norm_arguments, write_kv
from orca.kernels.cpu.team.team import Kernel, new_empty, row_count

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kernel(dtype: torch.dtype, weight_dtype: torch.dtype, tile: Tile | None = None) -> Kernel:
    """Return the kernel of all products of rows and weights of two dtypes.

    The dtypes are equal, or the weights are int8, or the rows are float32 and the weights half precision.
    """
    tile = tile or _tile_of(dtype, weight_dtype)
    return amx_product.kernel() if tile.is_amx else vector_product.kernel(dtype, weight_dtype, tile)


def _tile_of(dtype: torch.dtype, weight_dtype: torch.dtype) -> Tile:
    """Return the tile of a product. Weights of another dtype are converted to float32 and meet float32 rows."""
    return tile_of(dtype if dtype == weight_dtype else torch.float32)


class PackedWeight:
    """A weight [outputs, inputs] and an optional bias [outputs], packed into panels for products with few rows.

    Args:
        scale: [outputs] float32, the scales of an int8 weight.
        dtype: dtype of rows and results; None: that of the weight. See `kernel`.
        is_gated: the outputs are a gate and the up-projection, of equal sizes (`gated_product`); each panel has one
            vector of each.
        memory: memory for the weight; None: allocate it anywhere.
    Raises: ValueError for an odd number of inputs if this processor needs pairs.
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
        self.weight = self._pack(weight, self._tile.adjacent, self._tile.step, memory)
        self._scale = None if scale is None else self._pack(scale.float()[:, None], 1, 1).flatten()
        if bias is None and scale is None:  # sums begin with the bias, unless they are scaled at the end
            bias = torch.zeros(self.outputs)
        self._bias = None if bias is None else self._pack(bias.float()[:, None], 1, 1).flatten()
        self._kernel = kernel(self._dtype, weight.dtype, self._tile)
        self._kernel.compile()

    @property
    def bytes(self) -> int:
        tensors = (self.weight, self._bias, self._scale)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    @property
    def keeps_rows(self) -> bool:
        """True if the panels contain the rows of W unchanged: there is no scale, and no gate that splits outputs."""
        return self._scale is None and self._parts == 1

    def product(self, x: Tensor, norm: NormParameters | None = None, activation: Activation | None = None) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs]."""
        y = new_empty(x.dtype, row_count(x), self.outputs)
        self._launch(x, y, STORE if activation is None else ACTIVATE + activation, norm)
        return y

    def float32_product(self, x: Tensor, norm: NormParameters | None = None) -> Tensor:
        """Return y [rows, outputs] in float32, without rounding the sums."""
        y = new_empty(torch.float32, row_count(x), self.outputs)
        self._launch(x, y, STORE if x.dtype == torch.float32 else FLOAT32, norm)
        return y

    def add_product(self, x: Tensor, to: Tensor) -> None:
        """Compute to [rows, outputs] += y, rounded once."""
        assert to.shape == (x.shape[0], self.outputs)
        self._launch(x, to, ADD)

    def gated_product(self, x: Tensor, activation: Activation, norm: NormParameters | None = None) -> Tensor:
        """Return activation(first half of y) * second half, [rows, outputs / 2]. Only for a gated weight."""
        assert self._parts == 2
        gated = new_empty(x.dtype, row_count(x), self.outputs // 2)
        self._launch(x, gated, GATE + activation, norm)
        return gated

    def write_kv_product(self, x: Tensor, norm: NormParameters | None, kv: KvWrite) -> Tensor:
        """Return y as [rows, query heads + 2 x kv heads, head_dim], rotated, and write keys and values to the cache."""
        head_dim = kv.cache.shape[3]
        assert self._parts == 1
        assert self.outputs % head_dim == 0
        assert kv.cache.dtype == x.dtype
        y = new_empty(x.dtype, row_count(x), self.outputs // head_dim, head_dim)
        if head_dim % self._tile.lanes == 0 and kv.head_norm is None:  # a vector of outputs is inside one head
            self._launch(x, y, WRITE_KV, norm, kv)
        else:
            self._launch(x, y, STORE, norm)
            write_kv(y, kv)
        return y

    def embed(self, ids: Tensor, places: Tensor | None, positions: Tensor, scale: float = 1.0) -> Tensor:
        """Return rows `ids` of W (see device.Kernels.embed). Only if `keeps_rows`."""
        assert self.keeps_rows
        lanes, adjacent = self._tile.lanes, self._tile.adjacent
        _, depth, line = self.weight.shape
        is_interleaved_table = is_interleaved(self.weight.dtype, self._tile)
        lane, vector = (line // lanes, adjacent) if is_interleaved_table else (adjacent, lanes * adjacent)
        layout = lookups.RowLayout(
            width=self.inputs,
            adjacent=adjacent,
            step=line,
            block=depth * line,
            vectors=2,
            vector=vector,
            lanes=lanes,
            lane=lane,
        )
        return lookups.embed_from(self.weight, layout, ids, places, positions, self._dtype, scale)

    def _pack(
        self, features: Tensor, adjacent: int, step: int, memory: huge_pages.WeightMemory | None = None
    ) -> Tensor:
        """Pack [outputs, inputs] as [panels, inputs / adjacent, 2 x lanes (x adjacent)], padded with zeros."""
        lanes, parts, size = self._tile.lanes, self._parts, self.outputs // self._parts
        each = 2 * lanes // parts
        whole, rest = divmod(size, each)
        depth, filled = features.shape[1] // adjacent, -(-features.shape[1] // step) * step // adjacent
        rows = features.view(parts, size, depth, adjacent)
        # Filled in place: another copy of a vocabulary's matrix would be the peak of memory during loading.
        shape = (whole + (rest > 0), filled, 2 * lanes * adjacent)
        panels = features.new_zeros(shape) if memory is None else memory.zeros(shape, features.dtype)
        if is_interleaved(features.dtype, self._tile):
            vectors = panels.unflatten(2, (lanes, 2, adjacent)).transpose(2, 3)
        else:
            vectors = panels.unflatten(2, (2, lanes, adjacent))
        last = F.pad(rows[:, whole * each :], (0, 0, 0, 0, 0, -rest % each))
        for first, some in ((0, rows[:, : whole * each]), (whole, last)):
            many = some.shape[1] // each
            laid = some.unflatten(1, (many, 2 // parts, lanes)).permute(1, 4, 0, 2, 3, 5).flatten(2, 3)
            vectors[first : first + many, :depth] = laid
        return panels

    def _launch(
        self, x: Tensor, y: Tensor, epilogue: int, norm: NormParameters | None = None, kv: KvWrite | None = None
    ) -> None:
        assert x.dtype == self._dtype
        assert y.dtype == (torch.float32 if epilogue == FLOAT32 else x.dtype)
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
            *((0, 0, 0) if kv is None else kv_addresses(kv, rows)),
            *(row_count(x), self.inputs, self.outputs, self._parts, panels, threads, epilogue),
            *((1, 1, 1) if kv is None else (kv.cache.shape[3], kv.cache.shape[1], kv.cache.shape[2])),
            scratch_bytes,
            *norm_arguments(norm, x),
            address_of(self._scale),
        )

    def _scratch_bytes(self, rows: int, dtype: torch.dtype, *, is_normed: bool) -> int:
        """Return the scratch memory of a thread whose tasks have this many rows."""
        if self._tile.is_amx:
            return amx_product.scratch_bytes(rows, self.inputs)
        return vector_product.scratch_bytes(rows, self.inputs, dtype, self._tile, is_normed=is_normed)
