"""Ragged paged attention on a GPU: one Triton launch for all rows of a step (ORCA, section 5: thread blocks of one
kernel belong to different requests).

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g(h)]) v[j, g(h)]        (reference.py has the meaning)

The unit of work is one KV head of an item: some consecutive tokens of one request, with all query heads that read this
KV head side by side in one tile, so that keys and values are read once for them. Items are of two sizes:

- wide: a tile of many queries from the initiation phase, over all that they see;
- narrow: a few queries, as in the increment phase, over `SPLIT` positions of their context (flash-decoding: Dao et al.,
  2023). The partial sums of a tile are added up by whichever program finishes last, in the order of positions. Where a
  context is cut depends on nothing but positions, and not on what else is in the batch.

The grid is a fixed one whose programs take items in turn; how many there are is read from memory, so that one captured
launch could serve steps of any lengths (the buffers here are a step's own, so none does yet). Softmax is in base 2, in
float32, with a running maximum and sum; the division comes last.

A token gets the same bits alone and among others that are computed in items of the same size; a launch with wide items
has more warps, and may sum in another order than one without. No stage uses this yet: it compiles when it first meets a
model's sizes, which belongs into loading, and it has not run on a GPU.

    qkv       [tokens, query heads + 2 x kv heads, head_dim]   read: the queries
    cache     [blocks, 2 x kv heads, block_tokens, head_dim]   read once per item: 2 x positions x kv heads x head_dim
    items     [1 + items, 10] int32                            how many there are, and wide ones; then `_Item`s
    tables    int32                                            blocks of the requests, one request behind the other
    out       [tokens, query heads, head_dim]                  written once
    partials  [parts, kv heads, rows, head_dim + 2] float32    of contexts that are cut: sums, maximum and total
    arrived   [cut tiles, kv heads] int32                      parts that are done; zeros before and after
"""

from collections.abc import Sequence
from functools import cache as once
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.reference import ContextRow, Sight

SPLIT = 256
"""Positions of a narrow item. At 128 dimensions its keys and values are 128 KiB (bfloat16), its partial sums 2 KiB."""
_NO_WINDOW = (1 << 31) - 1
_LOG2_E = 1.4426950408889634


class _Item(NamedTuple):
    """A row of `items`."""

    first: int  # flat row of the first token
    count: int  # tokens
    position: int  # of the first token
    table: int  # where the request's blocks begin in `tables`
    begin: int  # first position that is read
    end: int  # behind the last one
    part: int = -1  # place in `partials`; -1: the context is not cut
    first_part: int = 0  # of the same tile
    parts: int = 1
    tile: int = 0  # place in `arrived`


def _column(name: str) -> tl.constexpr:
    return tl.constexpr(_Item._fields.index(name))


_COLUMNS = tl.constexpr(len(_Item._fields))
_FIRST, _COUNT, _POSITION, _TABLE = _column("first"), _column("count"), _column("position"), _column("table")
_BEGIN, _END, _PART, _FIRST_PART = _column("begin"), _column("end"), _column("part"), _column("first_part")
_PARTS, _TILE = _column("parts"), _column("tile")


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
    tests/kernels/compile_triton.py."""
    is_long = head_dim > 128
    if dtype == torch.float32:
        return Shape(wide=16 if is_long else 32, narrow=16, positions=32, warps=4, narrow_warps=4, stages=2)
    if is_long:
        return Shape(wide=64, narrow=16, positions=32, warps=8, narrow_warps=4, stages=2)
    return Shape(wide=128, narrow=16, positions=64, warps=8, narrow_warps=4, stages=3)


@triton.jit  # type: ignore[untyped-decorator]
def _product(a, b, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of two tiles, summed in float32.

    precision: of float32 tiles; "wide" is for the interpreter, which takes the bits of bfloat16 for whole numbers.
    """
    if precision == "wide":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=precision)


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    state,
    query,
    own,
    cache,
    table,
    low,
    high,
    end,
    kv_head,
    window,
    scale,
    kv_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
    is_masked: tl.constexpr,
):
    """Take positions [low, high) into the running softmax; with a mask where some query does not see all of them."""
    largest, total, summed = state
    dim = tl.arange(0, block_d)
    for start in range(low, high, block_n):
        seen = start + tl.arange(0, block_n)
        is_there = seen < end
        block = tl.load(table + seen // block_tokens, mask=is_there, other=0).to(tl.int64)
        line = (block * (2 * kv_heads) + kv_head) * block_tokens + seen % block_tokens
        key_at = cache + line[:, None] * head_dim + dim[None, :]
        is_stored = is_there[:, None] & (dim < head_dim)[None, :]
        key = tl.load(key_at, mask=is_stored, other=0.0)
        scores = _product(query, tl.trans(key), precision) * scale
        if is_masked:
            is_seen = (seen[None, :] <= own[:, None]) & (seen[None, :] > own[:, None] - window) & is_there[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
        raised = tl.maximum(largest, tl.max(scores, axis=1))
        # A query that has seen nothing yet keeps minus infinity; subtracting that from itself would be NaN.
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(largest - base)
        total = total * kept + tl.sum(weights, axis=1)
        value = tl.load(key_at + kv_heads * block_tokens * head_dim, mask=is_stored, other=0.0)
        summed = summed * kept[:, None] + _product(weights.to(value.dtype), value, precision)
        largest = raised
    return largest, total, summed


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    partials, first_part, parts, kv_head, row, is_row, dim, kv_heads: tl.constexpr, head_dim: tl.constexpr
):
    """The parts of a tile as one: total [rows] and sums [rows, dims], in the order of positions.

    Other programs wrote them during this launch: they are read past the caches that only this one's processor sees.
    """
    block_m: tl.constexpr = row.shape[0]
    is_mine = is_row[:, None] & (dim < head_dim)[None, :]
    largest = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    summed = tl.zeros((block_m, dim.shape[0]), tl.float32)
    for part in range(parts):
        line = (first_part.to(tl.int64) + part) * kv_heads + kv_head
        at = partials + (line * block_m + row) * (head_dim + 2)
        its_sums = tl.load(at[:, None] + dim[None, :], mask=is_mine, other=0.0, cache_modifier=".cg")
        its_largest = tl.load(at + head_dim, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(at + head_dim + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        raised = tl.maximum(largest, its_largest)
        base = tl.where(raised == float("-inf"), 0.0, raised)
        kept, added = tl.exp2(largest - base), tl.exp2(its_largest - base)
        total = total * kept + its_total * added
        summed = summed * kept[:, None] + its_sums * added[:, None]
        largest = raised
    return total, summed


@triton.jit  # type: ignore[untyped-decorator]
def _attend_item(  # type: ignore[no-untyped-def]
    item,
    kv_head,
    qkv,
    cache,
    tables,
    first_query,
    out,
    partials,
    arrived,
    window,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
    may_be_part: tl.constexpr,
):
    """One KV head of an item: its queries, or its part of their context."""
    first = tl.load(item + _FIRST).to(tl.int64)
    count = tl.load(item + _COUNT)
    position = tl.load(item + _POSITION)
    table = tables + tl.load(item + _TABLE)
    begin = tl.load(item + _BEGIN)
    end = tl.load(item + _END)
    head = tl.load(first_query + kv_head)
    group = tl.load(first_query + kv_head + 1) - head

    row = tl.arange(0, block_m)
    dim = tl.arange(0, block_d)
    is_row = row < count * group
    is_mine = is_row[:, None] & (dim < head_dim)[None, :]
    token = tl.where(is_row, row // tl.maximum(group, 1), 0)
    own_head = head + tl.where(is_row, row % tl.maximum(group, 1), 0)
    own = position + token
    query_line = (first + token) * (heads + 2 * kv_heads) + own_head
    query = tl.load(qkv + query_line[:, None] * head_dim + dim[None, :], mask=is_mine, other=0.0)

    largest = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    summed = tl.zeros((block_m, block_d), tl.float32)
    # Of the positions below `all_from` the window hides some from some token; those from `all_to` on are ahead of one.
    hidden = tl.maximum(position + count - window - begin, 0)
    all_to = tl.maximum(tl.minimum(position + 1, end) // block_n * block_n, begin)
    all_from = tl.minimum(begin + tl.cdiv(hidden, block_n) * block_n, all_to)
    state = (largest, total, summed)
    state = _walk(
        state, query, own, cache, table, begin, all_from, end, kv_head, window, scale,
        kv_heads, block_tokens, head_dim, block_n, block_d, precision, True,
    )  # fmt: skip
    state = _walk(
        state, query, own, cache, table, all_from, all_to, end, kv_head, window, scale,
        kv_heads, block_tokens, head_dim, block_n, block_d, precision, False,
    )  # fmt: skip
    state = _walk(
        state, query, own, cache, table, all_to, end, end, kv_head, window, scale,
        kv_heads, block_tokens, head_dim, block_n, block_d, precision, True,
    )  # fmt: skip
    largest, total, summed = state

    out_at = out + ((first + token) * heads + own_head)[:, None] * head_dim + dim[None, :]
    is_last = True
    if may_be_part:
        part = tl.load(item + _PART)
        if part >= 0:
            parts = tl.load(item + _PARTS)
            at = partials + ((part.to(tl.int64) * kv_heads + kv_head) * block_m + row) * (head_dim + 2)
            tl.store(at[:, None] + dim[None, :], summed, mask=is_mine)
            tl.store(at + head_dim, largest, mask=is_row)
            tl.store(at + head_dim + 1, total, mask=is_row)
            # All threads have stored before one of them says so.
            tl.debug_barrier()
            done_at = arrived + tl.load(item + _TILE) * kv_heads + kv_head
            is_last = tl.atomic_add(done_at, 1, sem="acq_rel") == parts - 1
            if is_last:
                tl.store(done_at, 0)
                total, summed = _add_up(
                    partials, tl.load(item + _FIRST_PART), parts, kv_head, row, is_row, dim, kv_heads, head_dim
                )
    if is_last:
        result = summed / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_mine)


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    qkv,
    cache,
    items,
    tables,
    first_query,
    out,
    partials,
    arrived,
    window,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    wide: tl.constexpr,
    narrow: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
    has_wide: tl.constexpr,
):
    """Every program takes items in turn. has_wide: whether there may be wide ones."""
    many = tl.load(items)
    many_wide = tl.load(items + 1)
    for task in range(tl.program_id(0), many * kv_heads, tl.num_programs(0)):
        number = task // kv_heads
        item, kv_head = items + (1 + number) * _COLUMNS, task % kv_heads
        if has_wide and number < many_wide:
            _attend_item(
                item, kv_head, qkv, cache, tables, first_query, out, partials, arrived, window, scale,
                heads, kv_heads, block_tokens, head_dim, wide, block_n, block_d, precision, False,
            )  # fmt: skip
        else:
            _attend_item(
                item, kv_head, qkv, cache, tables, first_query, out, partials, arrived, window, scale,
                heads, kv_heads, block_tokens, head_dim, narrow, block_n, block_d, precision, True,
            )  # fmt: skip


class TritonAttention:
    """The geometry of one step under one sliding window: built once, then applied in each layer.

    Args: as of device.Kernels.attention.
    """

    def __init__(self, rows: Sequence[ContextRow], seen: Sight) -> None:
        self._shape = shape_of(seen.dtype, seen.head_dim)
        self._heads, self._kv_heads = len(seen.kv_of_query), seen.kv_heads
        self._window = _NO_WINDOW if seen.window is None else seen.window
        self._first_query, group = _query_groups(tuple(seen.kv_of_query), seen.kv_heads, seen.device)
        # All query heads of a KV head fit into a tile of either size.
        self._narrow = max(self._shape.narrow, triton.next_power_of_2(group))
        self._shape = self._shape._replace(wide=max(self._shape.wide, self._narrow))
        wide, narrow, self._tables = _items(rows, seen, self._shape, self._narrow // group, group)
        self._has_wide = bool(wide)
        head = (len(wide) + len(narrow), len(wide), *[0] * (len(_Item._fields) - 2))
        said = np.array([head, *wide, *narrow], np.int32)
        self._items = torch.from_numpy(said).to(seen.device)
        parts = sum(item.part >= 0 for item in narrow)
        rows_of_parts = parts * seen.kv_heads * self._narrow
        self._partials = torch.empty(rows_of_parts, seen.head_dim + 2, dtype=torch.float32, device=seen.device)
        tiles = max((item.tile + 1 for item in narrow), default=0)
        self._arrived = torch.zeros(tiles, seen.kv_heads, dtype=torch.int32, device=seen.device)

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
        """As device.RaggedAttention."""
        assert qkv.is_contiguous()
        assert cache.is_contiguous()
        tokens, _, head_dim = qkv.shape
        output = torch.empty(tokens, self._heads * head_dim, dtype=qkv.dtype, device=qkv.device)
        attend[(programs(qkv.device),)](
            qkv,
            cache,
            self._items,
            self._tables,
            self._first_query,
            output,
            self._partials,
            self._arrived,
            self._window,
            scale * _LOG2_E,
            **constants_of(self._shape, self._heads, self._kv_heads, cache.shape[2], head_dim),
            narrow=self._narrow,
            has_wide=self._has_wide,
            num_warps=self._shape.warps if self._has_wide else self._shape.narrow_warps,
            num_stages=self._shape.stages,
        )
        return output


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


def _items(
    rows: Sequence[ContextRow], seen: Sight, shape: Shape, narrow_tokens: int, group: int
) -> tuple[list[_Item], list[_Item], Tensor]:
    """Wide items, the longest first, narrow ones, and the tables that they point into."""
    window = _NO_WINDOW if seen.window is None else seen.window
    wide_tokens = shape.wide // group
    wide: list[_Item] = []
    narrow: list[_Item] = []
    tables: list[NDArray[np.int64]] = []
    table = parts = tiles = 0
    for row in rows:
        position, end = len(row.slots) - row.count, len(row.slots)
        tables.append(row.slots.numpy()[:: seen.block_tokens] // seen.block_tokens)
        begin = max(position - window + 1, 0) // shape.positions * shape.positions
        if row.count > narrow_tokens:
            for done in range(0, row.count, wide_tokens):
                count, own = min(wide_tokens, row.count - done), position + done
                begin = max(own - window + 1, 0) // shape.positions * shape.positions
                wide.append(_Item(row.first + done, count, own, table, begin, own + count))
        elif begin // SPLIT == (end - 1) // SPLIT:
            narrow.append(_Item(row.first, row.count, position, table, begin, end))
        else:
            borders = [begin, *range((begin // SPLIT + 1) * SPLIT, end, SPLIT), end]
            first_part, many = parts, len(borders) - 1
            for low, high in pairwise(borders):
                item = _Item(row.first, row.count, position, table, low, high, parts, first_part, many, tiles)
                narrow.append(item)
                parts += 1
            tiles += 1
        table += len(tables[-1])
    wide.sort(key=lambda item: item.end - item.begin, reverse=True)
    flat = np.concatenate(tables).astype(np.int32) if tables else np.empty(0, np.int32)
    return wide, narrow, torch.from_numpy(flat).to(seen.device)
