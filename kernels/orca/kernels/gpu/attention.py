"""Ragged paged attention on a GPU: one Triton launch for all rows of a step (ORCA, section 5: thread blocks of one
kernel belong to different requests).

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g(h)]) v[j, g(h)]        (reference.py has the meaning)

The unit of work is one KV head of an item: some consecutive tokens of one request, with all query heads that read this
KV head side by side in one tile, so that keys and values are read once for them. Items are of two sizes:

- wide: a tile of many queries from the initiation phase;
- narrow: a few queries, as in the increment phase.

A context is cut into parts, an item each, where there are few queries to fill the device with (flash-decoding: Dao et
al., 2023). A part of a narrow tile has `SPLIT` positions, one of a wide tile `WIDE_SPLIT` for every two tiles of its
row, so that a row has some dozens of parts and a whole prompt is never cut; or as many times that as keep to
`PARTS_MAX` parts. The partial sums of a tile are added up by whichever program finishes last, in the order of
positions. Where a context is cut depends on nothing but the positions of its own row.

The grid is a fixed one whose programs take items in turn; how many there are is read from memory, so one captured
launch serves steps of any lengths, whose items are made on the device (inputs.py). Softmax is in base 2, in
float32, with a running maximum and sum; the division comes last.

A token gets the same bits alone and among others where its row is the same and the launch is of the same kind: one with
wide items has more warps, and may sum in another order. How many tokens a chunk of a prompt has may depend on others.

    qkv       [tokens, query heads + 2 x kv heads, head_dim]   read: the queries
    cache     [blocks, 2 x kv heads, block_tokens, head_dim]   read once per item: 2 x positions x kv heads x head_dim
    items     [1 + items, 10] int32                            how many there are, and wide ones; then `Item`s
    tables    [lines, blocks] int32                            blocks of the requests
    out       [tokens, query heads, head_dim]                  written once
    partials  [rows, head_dim + 2] float32                     of each query, KV head and part of contexts that are cut:
                                                               sums, maximum and total
    arrived   [cut tiles, kv heads] int32                      parts that are done; zeros before and after
"""

from collections.abc import Sequence
from functools import cache as once
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from orca.kernels.contract.reference import AttentionView, ContextRow
from orca.kernels.contract.transfer import to_device
from orca.kernels.gpu.attention_item import PARTS_MAX, Item, attend
from orca.kernels.gpu.torch_operator import operator

SPLIT = 256
"""Positions of a narrow part, at least. At 128 dimensions its keys and values are 128 KiB (bfloat16), its partial sums
2 KiB for each token and 4 heads."""
WIDE_SPLIT = 1024
"""Of a wide one, at least: 512 KiB, and 65 KiB of partial sums of 128 queries."""
_NO_WINDOW = (1 << 31) - 1
_LOG2_E = 1.4426950408889634


class Shape(NamedTuple):
    """Sizes of tiles, by what suits a dtype and head_dim; powers of two."""

    wide: int  # queries of a wide item
    narrow: int
    positions: int  # keys and values taken at once; a divisor of SPLIT
    warps: int
    narrow_warps: int  # of a launch without wide items
    stages: int


def shape_of(dtype: torch.dtype, head_dim: int) -> Shape:
    """16 queries are the fewest that tensor cores multiply. What the others take of a processor's registers and memory:
    tests/support/kernels/compile_triton.py."""
    is_long = head_dim > 128
    if dtype == torch.float32:
        return Shape(wide=16 if is_long else 32, narrow=16, positions=32, warps=4, narrow_warps=4, stages=2)
    if is_long:
        return Shape(wide=64, narrow=16, positions=32, warps=8, narrow_warps=4, stages=2)
    return Shape(wide=128, narrow=16, positions=64, warps=8, narrow_warps=4, stages=3)


class TritonAttention:
    """The geometry of one step under one sliding window: built once, then applied in each layer.

    Args: as of device.Kernels.attention.
    """

    def __init__(self, rows: Sequence[ContextRow], seen: AttentionView) -> None:
        sizes = Sizes.of(seen)
        items = _Items(seen, sizes)
        for row in rows:
            items.add(row)
        # The longest first: what begins last ends soon.
        wide = sorted(items.wide, key=lambda item: item.begin - item.end)
        head = (len(wide) + len(items.narrow), len(wide), *[0] * (len(Item._fields) - 2))
        said = to_device(np.array([head, *wide, *items.narrow], np.int32), seen.device)
        scratch = Scratch.of(seen, items.partials, items.tiles, sizes.shape.narrow)
        self._take(said, scratch, seen, sizes, has_wide=bool(wide))

    @classmethod
    def of_items(cls, items: Tensor, scratch: "Scratch", seen: AttentionView) -> "TritonAttention":
        """Attention of rows of one token each, whose items are there when it runs (recording.py)."""
        attention = cls.__new__(cls)
        attention._take(items, scratch, seen, Sizes.of(seen), has_wide=False)
        return attention

    def _take(self, items: Tensor, scratch: "Scratch", seen: AttentionView, sizes: "Sizes", *, has_wide: bool) -> None:
        assert seen.tables.dtype == torch.int32
        assert seen.tables.is_contiguous()
        self.items, self._scratch, self._tables, self._sizes = items, scratch, seen.tables, sizes
        self._heads, self._kv_heads = len(seen.kv_of_query), seen.kv_heads
        self._window = window_of(seen)
        self._has_wide = has_wide

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
        """As device.RaggedAttention."""
        assert qkv.is_contiguous()
        assert cache.is_contiguous()
        tokens, _, head_dim = qkv.shape
        output = torch.empty(tokens, self._heads * head_dim, dtype=qkv.dtype, device=qkv.device)
        _attend(
            qkv,
            cache,
            self.items,
            self._tables,
            self._sizes.first_query,
            output,
            self._scratch.partials,
            self._scratch.arrived,
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
    window: int,
    scale: float,
    heads: int,
    narrow: int,
    has_wide: bool,
    part_rows: int,
) -> None:
    _, lines, block_tokens, head_dim = cache.shape
    shape = _widened(shape_of(qkv.dtype, head_dim), narrow)
    attend[(programs(qkv.device),)](
        qkv,
        cache,
        items,
        tables,
        first_query,
        out,
        partials,
        arrived,
        window,
        scale * _LOG2_E,
        **constants_of(shape, heads, lines // 2, block_tokens, head_dim),
        narrow=narrow,
        has_wide=has_wide,
        part_rows=part_rows,
        num_warps=shape.warps if has_wide else shape.narrow_warps,
        num_stages=shape.stages,
    )


class Sizes(NamedTuple):
    """Of the tiles of one model's attention on a rank."""

    shape: Shape
    group: int  # query heads of a KV head, at most
    first_query: Tensor  # [kv heads + 1] int32: the first query head of each KV head

    @classmethod
    def of(cls, seen: AttentionView) -> "Sizes":
        first_query, group = _query_groups(tuple(seen.kv_of_query), seen.kv_heads, seen.device)
        shape = shape_of(seen.dtype, seen.head_dim)
        # All query heads of a KV head fit into a tile of either size.
        narrow = max(shape.narrow, triton.next_power_of_2(group))
        return cls(_widened(shape, narrow), group, first_query)


def _widened(shape: Shape, narrow: int) -> Shape:
    return shape._replace(narrow=narrow, wide=max(shape.wide, narrow))


class Scratch(NamedTuple):
    """Memory of contexts that are cut."""

    partials: Tensor
    arrived: Tensor
    part_rows: int  # queries that a narrow part has room for

    @classmethod
    def of(cls, seen: AttentionView, partials: int, tiles: int, part_rows: int) -> "Scratch":
        """Args: partials: rows of these; tiles: whose contexts are cut."""
        return cls(
            torch.empty(partials, seen.head_dim + 2, dtype=torch.float32, device=seen.device),
            torch.zeros(tiles, seen.kv_heads, dtype=torch.int32, device=seen.device),
            part_rows,
        )


def split_of(length: int, least: int) -> int:
    """Positions of a part of so many, a multiple of `least`."""
    return triton.cdiv(length, PARTS_MAX.value * least) * least


def parts_max(slots: int, rows: int) -> int:
    """Narrow parts of so many rows whose contexts have so many slots of the cache together."""
    return min(slots // SPLIT + rows, PARTS_MAX.value * rows)


def window_of(seen: AttentionView) -> int:
    """The positions that a token sees, as kernels are told."""
    return _NO_WINDOW if seen.window is None else seen.window


def constants_of(shape: Shape, heads: int, kv_heads: int, block_tokens: int, head_dim: int) -> dict[str, int | str]:
    """What `attend` is compiled for, besides the kinds of items."""
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "block_tokens": block_tokens,
        "head_dim": head_dim,
        "wide": shape.wide,
        "block_n": shape.positions,
        "block_d": max(16, triton.next_power_of_2(head_dim)),
        # Of float32 only: products as they are, not rounded to the 10 bits of TF32.
        "precision": "wide" if triton.knobs.runtime.interpret else "ieee",
    }


@once
def programs(device: torch.device) -> int:
    """The grid: two programs for each processor, and a few on a CPU, where the interpreter runs one by one."""
    if device.type != "cuda":
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


@once
def _query_groups(kv_of_query: tuple[int, ...], kv_heads: int, device: torch.device) -> tuple[Tensor, int]:
    """The first query head of each KV head, [kv heads + 1] int32, and how many the largest group has."""
    assert list(kv_of_query) == sorted(kv_of_query)
    first_query = np.searchsorted(kv_of_query, np.arange(kv_heads + 1)).astype(np.int32)
    return torch.from_numpy(first_query).to(device), max(1, int(np.diff(first_query).max()))


class _Items:
    """The items of a step."""

    def __init__(self, seen: AttentionView, sizes: Sizes) -> None:
        self.wide: list[Item] = []
        self.narrow: list[Item] = []
        self.partials = 0  # rows of these
        self.tiles = 0  # whose contexts are cut
        self._seen, self._shape, self._window = seen, sizes.shape, window_of(seen)
        self._wide_tokens, self._narrow_tokens = sizes.shape.wide // sizes.group, sizes.shape.narrow // sizes.group

    def add(self, row: ContextRow) -> None:
        if row.count <= self._narrow_tokens:
            self.narrow += self._cut(self._tile(row, 0, row.count), SPLIT, self._shape.narrow)
            return
        least = WIDE_SPLIT * max(1, triton.cdiv(row.count, self._wide_tokens) // 2)
        for done in range(0, row.count, self._wide_tokens):
            tile = self._tile(row, done, min(self._wide_tokens, row.count - done))
            self.wide += self._cut(tile, least, self._shape.wide)

    def _tile(self, row: ContextRow, done: int, count: int) -> Item:
        position, table = row.position + done, row.line * self._seen.tables.shape[1]
        begin = max(position - self._window + 1, 0) // self._shape.positions * self._shape.positions
        return Item(row.first + done, count, position, table, begin, position + count)

    def _cut(self, tile: Item, least: int, queries: int) -> list[Item]:
        """The parts of a tile. Args: least: positions of a part; queries: that a part has room for."""
        split = split_of(tile.end - tile.begin, least)
        lows = range(tile.begin, tile.end, split)
        if len(lows) == 1:
            return [tile]
        first_part, part_lines, number = self.partials, self._seen.kv_heads * queries, self.tiles
        self.partials += len(lows) * part_lines
        self.tiles += 1
        tile = tile._replace(first_part=first_part, parts=len(lows), tile=number)
        return [
            tile._replace(begin=low, end=min(low + split, tile.end), part=first_part + place * part_lines)
            for place, low in enumerate(lows)
        ]
