"""Ragged paged attention on a GPU: one Triton launch for all rows of a step (ORCA, section 5: thread blocks of one
kernel belong to different requests).

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g(h)] + bias[h, j - i]) v[j, g(h)]        (see reference.py)

The unit of work is one KV head of an item: some consecutive tokens of one request. All query heads that read this KV
head are side by side in one tile, so that keys and values are read once for all of them. Items have two sizes:

- wide: a tile of many queries, from the initiation phase;
- narrow: a few queries, as in the increment phase.

A context is split into parts, an item each, if there are too few queries to fill the device (flash-decoding: Dao et
al., 2023). A part of a narrow tile has `SPLIT` positions. A part of a wide tile has `WIDE_SPLIT` positions for every
two tiles of its row. So a row has some dozens of parts, and a whole prompt is never split. Longer contexts have parts
that are a multiple of this, so that there are at most `PARTS_MAX` parts. The program that finishes last adds up the
partial sums of a tile, in the order of positions. The split of a context depends only on its row: on the positions, or
on the number of keys if attention is not causal.

The grid is fixed, and its programs take items in turn. The number of items is read from memory, so one captured launch
serves steps of any lengths, whose items are built on the device (inputs.py). Softmax uses base 2 and float32, with a
running maximum and sum; the division comes last.

A token's result has the same bits alone and among others if its row and the kind of launch are the same. A launch with
wide items has more warps, and may sum in another order. The number of tokens in a chunk of a prompt may depend on other
requests.

    qkv       [tokens, heads, head_dim]                        read: the first heads, which are the queries
    cache     [blocks, 2 x kv heads, block_tokens, head_dim]   read once per item: 2 x positions x kv heads x head_dim
    items     [1 + items, 10] int32                            number of items and of wide items; then `AttentionItem`s
    tables    [lines, blocks] int32                            blocks of the requests
    bias      [query heads, distances] float32                 read by position and query, if the model has it
    out       [tokens, query heads, head_dim]                  written once
    partials  [rows, head_dim + 2] float32                     per query, KV head and part of a split context: sums,
                                                               maximum and total
    arrived   [split tiles, kv heads] int32                    number of finished parts; zeros before and after
"""

from collections.abc import Sequence
from functools import cache as once
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from orca.kernels.contract.reference import AttentionView, ContextRow, DistanceBias
from orca.kernels.contract.transfer import to_device
from orca.kernels.gpu.attention_item import LOG2_E, PARTS_MAX, AttentionItem, attend
from orca.kernels.gpu.torch_operator import operator

SPLIT = 256
"""Fewest positions of a narrow part. At 128 dimensions its keys and values are 128 KiB (bfloat16), and its partial sums
2 KiB for each token and 4 heads."""
WIDE_SPLIT = 1024
"""Fewest positions of a wide part: 512 KiB, and 65 KiB of partial sums of 128 queries."""
_NO_WINDOW = (1 << 31) - 1


class TileShape(NamedTuple):
    """The sizes of tiles for a dtype and head_dim; all sizes are powers of two."""

    wide: int  # queries of a wide item
    narrow: int  # queries of a narrow item
    positions: int  # keys and values that are loaded at once; a divisor of SPLIT
    warps: int
    narrow_warps: int  # warps of a launch without wide items
    stages: int


def shape_of(dtype: torch.dtype, head_dim: int) -> TileShape:
    """Return the tile sizes for a dtype and head_dim.

    Tensor cores multiply at least 16 queries. tests/support/kernels/compile_triton.py shows the registers and shared
    memory that the other sizes take.
    """
    is_long = head_dim > 128
    if dtype == torch.float32:
        return TileShape(wide=16 if is_long else 32, narrow=16, positions=32, warps=4, narrow_warps=4, stages=2)
    if is_long:
        return TileShape(wide=64, narrow=16, positions=32, warps=8, narrow_warps=4, stages=2)
    return TileShape(wide=128, narrow=16, positions=64, warps=8, narrow_warps=4, stages=3)


class TritonAttention:
    """The geometry of one step under one sliding window: built once, then applied in each layer.

    Args: those of device.Kernels.attention.
    """

    def __init__(self, rows: Sequence[ContextRow], view: AttentionView) -> None:
        sizes = AttentionSizes.of(view)
        items = _ItemBuilder(view, sizes)
        for row in rows:
            items.add(row)
        # The longest first, so that the items that begin last end soon.
        wide = sorted(items.wide, key=lambda item: item.begin - item.end)
        head = (len(wide) + len(items.narrow), len(wide), *[0] * (len(AttentionItem._fields) - 2))
        said = to_device(np.array([head, *wide, *items.narrow], np.int32), view.device)
        scratch = Scratch.of(view, items.partials, items.tiles, sizes.shape.narrow)
        self._set_up(said, scratch, view, sizes, has_wide=bool(wide))

    @classmethod
    def of_items(cls, items: Tensor, scratch: "Scratch", view: AttentionView) -> "TritonAttention":
        """Return attention of rows with one token each, whose items are written before each run (recording.py)."""
        attention = cls.__new__(cls)
        attention._set_up(items, scratch, view, AttentionSizes.of(view), has_wide=False)
        return attention

    def _set_up(
        self, items: Tensor, scratch: "Scratch", view: AttentionView, sizes: "AttentionSizes", *, has_wide: bool
    ) -> None:
        assert view.tables.dtype == torch.int32
        assert view.tables.is_contiguous()
        self.items, self._scratch, self._tables, self._sizes = items, scratch, view.tables, sizes
        self._heads, self._kv_heads = len(view.kv_of_query), view.kv_heads
        self._window = window_of(view)
        self._has_wide, self._is_causal = has_wide, view.is_causal

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float, bias: DistanceBias | None = None) -> Tensor:
        """See reference.RaggedAttention."""
        assert qkv.is_contiguous()
        assert cache.is_contiguous()
        assert bias is None or (len(bias.table) == self._heads and bias.table.dtype == torch.float32)
        assert bias is None or bias.table.is_contiguous()
        head_dim = cache.shape[3]
        output = torch.empty(len(qkv), self._heads * head_dim, dtype=qkv.dtype, device=qkv.device)
        _attend(
            qkv,
            cache,
            self.items,
            self._tables,
            self._sizes.first_query,
            output,
            self._scratch.partials,
            self._scratch.arrived,
            None if bias is None else bias.table,
            0 if bias is None else bias.zero,
            self._is_causal,
            self._window,
            scale,
            self._heads,
            self._sizes.shape.narrow,
            self._has_wide,
            self._scratch.part_rows,
        )
        return output


@operator("out", "partials", "arrived")
def _attend(
    qkv: Tensor,
    cache: Tensor,
    items: Tensor,
    tables: Tensor,
    first_query: Tensor,
    out: Tensor,
    partials: Tensor,
    arrived: Tensor,
    bias: Tensor | None,
    zero: int,
    is_causal: bool,
    window: int,
    scale: float,
    heads: int,
    narrow: int,
    has_wide: bool,
    part_rows: int,
) -> None:
    _, lines, block_tokens, head_dim = cache.shape
    shape = _widened(shape_of(qkv.dtype, head_dim), narrow)
    attend[(grid_size(qkv.device),)](
        qkv,
        cache,
        items,
        tables,
        first_query,
        out,
        partials,
        arrived,
        partials if bias is None else bias,
        1 if bias is None else bias.shape[1],
        zero,
        window,
        scale * LOG2_E,
        **constants_of(shape, heads, lines // 2, block_tokens, head_dim),
        narrow=narrow,
        has_wide=has_wide,
        part_rows=part_rows,
        row_heads=qkv.shape[1] if qkv.dim() == 3 else heads,
        is_causal=is_causal,
        has_bias=bias is not None,
        num_warps=shape.warps if has_wide else shape.narrow_warps,
        num_stages=stages_of(shape, has_bias=bias is not None),
    )


def stages_of(shape: TileShape, *, has_bias: bool) -> int:
    """Return the number of tiles that are loaded ahead: one less with a bias, whose numbers are loaded ahead, too.

    Otherwise 128 dimensions would need more shared memory than an Ada GPU has.
    """
    return shape.stages - 1 if has_bias else shape.stages


class AttentionSizes(NamedTuple):
    """The tile sizes and head groups of one model's attention on a rank."""

    shape: TileShape
    group: int  # most query heads of a KV head
    first_query: Tensor  # [kv heads + 1] int32: the first query head of each KV head

    @classmethod
    def of(cls, view: AttentionView) -> "AttentionSizes":
        first_query, group = _query_groups(tuple(view.kv_of_query), view.kv_heads, view.device)
        shape = shape_of(view.dtype, view.head_dim)
        # All query heads of a KV head must fit into a tile of either size.
        narrow = max(shape.narrow, triton.next_power_of_2(group))
        return cls(_widened(shape, narrow), group, first_query)


def _widened(shape: TileShape, narrow: int) -> TileShape:
    return shape._replace(narrow=narrow, wide=max(shape.wide, narrow))


class Scratch(NamedTuple):
    """Memory for contexts that are split."""

    partials: Tensor
    arrived: Tensor
    part_rows: int  # most queries of a narrow part

    @classmethod
    def of(cls, view: AttentionView, partials: int, tiles: int, part_rows: int) -> "Scratch":
        """Allocate the memory. Args: partials: number of rows; tiles: number of tiles whose contexts are split."""
        return cls(
            torch.empty(partials, view.head_dim + 2, dtype=torch.float32, device=view.device),
            torch.zeros(tiles, view.kv_heads, dtype=torch.int32, device=view.device),
            part_rows,
        )


def split_of(length: int, least: int) -> int:
    """Return the positions per part of a context of this length, a multiple of `least`."""
    return triton.cdiv(length, PARTS_MAX.value * least) * least


def parts_max(slots: int, rows: int) -> int:
    """Return the largest number of narrow parts of `rows` rows whose contexts use `slots` cache slots together."""
    return min(slots // SPLIT + rows, PARTS_MAX.value * rows)


def window_of(view: AttentionView) -> int:
    """Return the number of positions that a token sees, in the form that kernels use."""
    return view.window if view.is_causal and view.window is not None else _NO_WINDOW


def constants_of(shape: TileShape, heads: int, kv_heads: int, block_tokens: int, head_dim: int) -> dict[str, int | str]:
    """Return the compile-time constants of `attend`, except those for the kinds of items."""
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "block_tokens": block_tokens,
        "head_dim": head_dim,
        "wide": shape.wide,
        "block_n": shape.positions,
        "block_d": max(16, triton.next_power_of_2(head_dim)),
        # Matters for float32 only: exact products, not rounded to the 10 bits of TF32.
        "precision": "wide" if triton.knobs.runtime.interpret else "ieee",
    }


@once
def grid_size(device: torch.device) -> int:
    """Return the size of the grid: two programs per multiprocessor; a few on a CPU, where the interpreter runs them."""
    if device.type != "cuda":
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


@once
def _query_groups(kv_of_query: tuple[int, ...], kv_heads: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the first query head of each KV head, [kv heads + 1] int32, and the size of the largest group."""
    assert list(kv_of_query) == sorted(kv_of_query)
    first_query = np.searchsorted(kv_of_query, np.arange(kv_heads + 1)).astype(np.int32)
    return torch.from_numpy(first_query).to(device), max(1, int(np.diff(first_query).max()))


class _ItemBuilder:
    """Builds the items of a step."""

    def __init__(self, view: AttentionView, sizes: AttentionSizes) -> None:
        self.wide: list[AttentionItem] = []
        self.narrow: list[AttentionItem] = []
        self.partials = 0  # rows of `Scratch.partials`
        self.tiles = 0  # number of tiles whose contexts are split
        self._view, self._shape, self._window = view, sizes.shape, window_of(view)
        self._wide_tokens, self._narrow_tokens = sizes.shape.wide // sizes.group, sizes.shape.narrow // sizes.group

    def add(self, row: ContextRow) -> None:
        if row.count <= self._narrow_tokens:
            self.narrow += self._split(self._tile(row, 0, row.count), SPLIT, self._shape.narrow)
            return
        least = WIDE_SPLIT * max(1, triton.cdiv(row.count, self._wide_tokens) // 2)
        for done in range(0, row.count, self._wide_tokens):
            tile = self._tile(row, done, min(self._wide_tokens, row.count - done))
            self.wide += self._split(tile, least, self._shape.wide)

    def _tile(self, row: ContextRow, done: int, count: int) -> AttentionItem:
        position, table = row.position + done, row.line * self._view.tables.shape[1]
        begin = max(position - self._window + 1, 0) // self._shape.positions * self._shape.positions
        is_causal = self._view.is_causal
        end = position + count if is_causal else row.keys_end(is_causal=is_causal)
        return AttentionItem(row.first + done, count, position, table, begin, end)

    def _split(self, tile: AttentionItem, least: int, queries: int) -> list[AttentionItem]:
        """Return the parts of a tile. Args: least: fewest positions of a part; queries: most queries of a part."""
        split = split_of(tile.end - tile.begin, least)
        lows = range(tile.begin, tile.end, split)
        if len(lows) == 1:
            return [tile]
        first_part, part_lines, number = self.partials, self._view.kv_heads * queries, self.tiles
        self.partials += len(lows) * part_lines
        self.tiles += 1
        tile = tile._replace(first_part=first_part, parts=len(lows), tile=number)
        return [
            tile._replace(begin=low, end=min(low + split, tile.end), part=first_part + place * part_lines)
            for place, low in enumerate(lows)
        ]
