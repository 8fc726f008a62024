"""Ragged paged attention on a CPU: all rows of a step in one launch, each key and value read where it lies.

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g(h)]) v[j, g(h)]        (reference.py has the meaning)

A task is one KV head of a tile: some consecutive tokens of one request (one, in the increment phase), with all query
heads that read this KV head. It walks the context `_CHUNK` positions at a time, first the keys, then the values, with a
running maximum and sum (online softmax, in float32). While it reads keys it asks the memory for the values of the same
positions, and while it reads values for the keys that come next, those of its next task too: contexts lie in blocks all
over the memory, and waiting for each took 1.5 (float32) to 2 times (bfloat16) as long. The softmax's division comes
last, so that sums of whole numbers stay exact (worker/models/chain.py).

    qkv    [tokens, query heads + 2 x kv heads, head_dim]   read: the queries
    cache  [blocks, 2 x kv heads, block_tokens, head_dim]   read once per tile: 2 x context x kv heads x head_dim
    tables [lines, blocks] int32                            the requests' blocks
    tiles  [tiles, 4] int64                                 the request's line, position of the first token, tokens,
                                                            flat row of the first
    out    [tokens, query heads, head_dim]                  written once
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, literally, njit
from numba.np.numpy_support import from_dtype
from torch import Tensor

from orca.kernels.contract.reference import AttentionView, ContextRow
from orca.kernels.cpu.activations import exp
from orca.kernels.cpu.attention.tile import (
    QUERIES,
    ROWS,
    add_weighted,
    dots,
    is_paired,
    largest_of,
    query,
    write_mean,
)
from orca.kernels.cpu.team.intrinsics import BITS_OF, FAST, LINE_BYTES, elements, join, prefetch, real, take
from orca.kernels.cpu.team.team import Kernel, new_empty, rows_of

_CHUNK = 256
"""Positions whose scores are held at a time."""
_QUERIES = 32
"""Queries of a task: tokens x query heads of one KV head. Their scores stay in the processor's first cache."""
_NO_WINDOW = 1 << 62
TILE_COLUMNS = 4
_SCORE_BYTES = _CHUNK * 4
"""From a query's scores to the next query's."""


@njit  # type: ignore[untyped-decorator]
def _scratch_floats(queries: Any, head_dim: Any) -> Any:
    """What a thread needs: queries and sums, scores, largest score and total of each query."""
    return queries * (2 * head_dim + _CHUNK + 2)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _line(table: Any, position: Any, block_tokens: Any, lines: Any) -> Any:
    """The first line of the block that holds a position."""
    return np.int64(table[position // block_tokens]) * lines


@njit(**FAST)  # type: ignore[untyped-decorator]
def _weights(scores: Any, low: Any, high: Any, largest: Any, scale: Any) -> Any:
    """Scores [low, high) become exp(scale * (score - largest)), the others 0. Returns: their sum."""
    scores[:low] = 0.0
    scores[high:] = 0.0
    seen = scores[low:high]
    total = np.float32(0.0)
    for j in range(len(seen)):
        seen[j] = exp(scale * (seen[j] - largest))
        total += seen[j]
    return total


def _over_block(operation: Any) -> Any:
    """`operation` over rows [first, last) of a block and the queries of a task, in whole tiles where there are.

    By their addresses: `rows` of the block in the cache; `ahead`, which is asked for meanwhile; `each`, what the first
    query has for itself; `scores`, its score of the block's row 0. `asking`: how many queries there are; the row that
    the first ones see last, the next ones the row behind it; and how many see the same ones. What none of a tile's
    queries sees is passed over.
    """

    @njit(**FAST)  # type: ignore[untyped-decorator]
    def walk(
        rows: Any,
        first: Any,
        last: Any,
        ahead: Any,
        each: Any,
        scores: Any,
        asking: Any,
        row_bytes: Any,
        kind: Any,
        head_dim: Any,
    ) -> None:
        width = literally(head_dim)
        asked, own, group = asking
        tiles_end = last - (last - first) % ROWS
        for j in range(first, tiles_end, ROWS):
            for byte in range(0, ROWS * row_bytes, LINE_BYTES):
                prefetch(ahead + j * row_bytes + byte)
            seeing = max(j - own, 0) * group // QUERIES * QUERIES
            whole = asked - (asked - seeing) % QUERIES
            row, at = rows + j * row_bytes, scores + j * 4
            for i in range(seeing, whole, QUERIES):
                operation(each, row, at, _SCORE_BYTES, i, kind, width, QUERIES, ROWS)
            for i in range(whole, asked):
                operation(each, row, at, _SCORE_BYTES, i, kind, width, 1, ROWS)
        for j in range(tiles_end, last):
            row, at = rows + j * row_bytes, scores + j * 4
            for i in range(max(j - own, 0) * group, asked):
                operation(each, row, at, _SCORE_BYTES, i, kind, width, 1, 1)

    return walk


_score_keys = _over_block(dots)
_add_values = _over_block(add_weighted)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _weigh(
    scores_at: Any,
    sums: Any,
    largest: Any,
    total: Any,
    scale: Any,
    position: Any,
    group: Any,
    asked: Any,
    window: Any,
    begin: Any,
    start: Any,
    stop: Any,
) -> None:
    """A chunk's scores become weights under the maximum so far, and what was summed under the one before follows it."""
    for i in range(asked):
        own_at = scores_at + i * _SCORE_BYTES
        scores = carray(elements(own_at, np.float32), (stop - start,))
        own_position = position + i // group
        low = max(own_position - window + 1 - start, 0)
        high = min(own_position + 1, stop) - start
        if low >= high:
            scores[:] = 0.0
            continue
        raised = max(largest[i], largest_of(own_at + low * 4, high - low))
        if start > begin:
            kept = exp(scale * (largest[i] - raised))
            total[i] *= kept
            for d in range(sums.shape[1]):
                sums[i, d] *= kept
        largest[i] = raised
        total[i] += _weights(scores, low, high, raised, scale)


@cache
def kernel(dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel for one dtype and head_dim, which is thus known to the compiler."""
    kind = BITS_OF[dtype]
    query_kind = kind if is_paired(from_dtype(np.dtype(kind))) else np.float32
    row_bytes, sums_bytes = head_dim * dtype.itemsize, head_dim * 4

    def attend(args: Any) -> None:
        tokens, heads, kv_heads = args[8], args[9], args[10]
        block_tokens, num_tiles, window, queries_max = args[11], args[12], args[13], args[14]
        scale = np.float32(real(args[15]))
        qkv = carray(elements(args[2], kind), (tokens, heads + 2 * kv_heads, head_dim))
        cache = args[3]
        tiles = carray(elements(args[5], np.int64), (num_tiles, 4))
        tables = carray(elements(args[16], np.int32), (args[17], args[18]))
        first_query = carray(elements(args[6], np.int64), (kv_heads + 1,))
        lines = 2 * kv_heads  # of a block: keys of each head, values of each head
        line_bytes = block_tokens * row_bytes

        # This thread's scratch memory.
        queries_at = args[7] + join(args) * _scratch_floats(queries_max, head_dim) * 4
        sums_at = queries_at + queries_max * sums_bytes
        scores_at = sums_at + queries_max * sums_bytes
        queries = carray(elements(queries_at, query_kind), (queries_max, head_dim))
        sums = carray(elements(sums_at, np.float32), (queries_max, head_dim))
        largest, total = carray(elements(scores_at + queries_max * _SCORE_BYTES, np.float32), (2, queries_max))

        task = take(args)
        while task < num_tiles * kv_heads:
            upcoming = take(args)
            tile, kv_head = task // kv_heads, task % kv_heads
            position, count, token = tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
            end = position + count
            table = tables[tiles[tile, 0]]
            head = first_query[kv_head]
            group = first_query[kv_head + 1] - head
            asked = count * group
            for i in range(asked):
                own = qkv[token + i // group, head + i % group]
                for d in range(head_dim):
                    queries[i, d] = query(own[d], kind)
                    sums[i, d] = 0.0
                largest[i] = -np.inf
                total[i] = 0.0

            # The first keys of this thread's next task.
            next_table, next_begin, next_end, next_head = table, 0, 0, 0
            if upcoming < num_tiles * kv_heads:
                next_tile, next_head = upcoming // kv_heads, upcoming % kv_heads
                next_begin = max(tiles[next_tile, 1] - window + 1, 0)
                next_end = tiles[next_tile, 1] + tiles[next_tile, 2]
                next_table = tables[tiles[next_tile, 0]]
            begin = max(position - window + 1, 0)
            # Chunks end at the same positions for all tiles: a token gets the same, whichever tokens its tile has.
            for border in range(begin // _CHUNK * _CHUNK, end, _CHUNK):
                start, stop = max(begin, border), min(border + _CHUNK, end)
                block_start = start // block_tokens * block_tokens

                for block in range(block_start, stop, block_tokens):
                    keys = cache + (_line(table, block, block_tokens, lines) + kv_head) * line_bytes
                    ahead = keys + kv_heads * line_bytes
                    first, last = max(start - block, 0), min(stop - block, block_tokens)
                    at, asking = scores_at + (block - start) * 4, (asked, position - block, group)
                    _score_keys(keys, first, last, ahead, queries_at, at, asking, row_bytes, kind, head_dim)

                _weigh(scores_at, sums, largest, total, scale, position, group, asked, window, begin, start, stop)

                for block in range(block_start, stop, block_tokens):
                    values = cache + (_line(table, block, block_tokens, lines) + kv_heads + kv_head) * line_bytes
                    ahead = values
                    if block + _CHUNK < end:
                        ahead = cache + (_line(table, block + _CHUNK, block_tokens, lines) + kv_head) * line_bytes
                    elif next_begin + block - block_start < next_end:
                        ahead = _line(next_table, next_begin + block - block_start, block_tokens, lines) + next_head
                        ahead = cache + ahead * line_bytes
                    first, last = max(start - block, 0), min(stop - block, block_tokens)
                    at, asking = scores_at + (block - start) * 4, (asked, position - block, group)
                    _add_values(values, first, last, ahead, sums_at, at, asking, row_bytes, kind, head_dim)

            for i in range(asked):
                place = (token + i // group) * heads + head + i % group
                write_mean(args[4] + place * row_bytes, sums_at + i * sums_bytes, total[i], kind, literally(head_dim))
            task = upcoming

    return Kernel(f"attention-{dtype}-{head_dim}", attend)


@cache
def _query_groups(kv_of_query: tuple[int, ...], kv_heads: int) -> tuple[Tensor, int]:
    """The first query head of each KV head, [kv heads + 1], and how many the largest group has."""
    assert list(kv_of_query) == sorted(kv_of_query)
    first_query = np.searchsorted(kv_of_query, np.arange(kv_heads + 1)).astype(np.int64)
    return torch.from_numpy(first_query), max(1, int(np.diff(first_query).max()))


def tile_tokens(seen: AttentionView) -> int:
    """Of a tile, at most."""
    _, group = _query_groups(tuple(seen.kv_of_query), seen.kv_heads)
    return max(1, _QUERIES // group)


class CpuAttention:
    """The geometry of one step under one sliding window: built once, then applied in each layer.

    Args: as of device.Kernels.attention.
    """

    def __init__(self, rows: Sequence[ContextRow], seen: AttentionView) -> None:
        longest = tile_tokens(seen)
        tiles = [
            (row.line, row.position + done, min(longest, row.count - done), row.first + done)
            for row in rows
            for done in range(0, row.count, longest)
        ]
        # Large tasks first, so that none is left to one thread while the others have nothing to do.
        tiles.sort(key=lambda tile: (tile[1] + tile[2]) * tile[2], reverse=True)
        self._take(torch.from_numpy(np.array(tiles, np.int64)), seen)

    @classmethod
    def of_tiles(cls, tiles: Tensor, seen: AttentionView) -> "CpuAttention":
        """Attention of tiles that are there when it runs (recording.py)."""
        attention = cls.__new__(cls)
        attention._take(tiles, seen)
        return attention

    def _take(self, tiles: Tensor, seen: AttentionView) -> None:
        assert seen.tables.dtype == torch.int32
        assert seen.tables.is_contiguous()
        self._tiles, self._tables = tiles, seen.tables
        self._first_query, group = _query_groups(tuple(seen.kv_of_query), seen.kv_heads)
        self._heads, self._kv_heads, self._queries = len(seen.kv_of_query), seen.kv_heads, tile_tokens(seen) * group
        self._window = _NO_WINDOW if seen.window is None else seen.window

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
        """As device.RaggedAttention."""
        assert qkv.is_contiguous()
        assert cache.is_contiguous()
        assert scale >= 0
        tokens, head_dim = rows_of(qkv), qkv.shape[2]
        output = new_empty(qkv.dtype, tokens, self._heads * head_dim)
        floats = _scratch_floats.py_func(self._queries, head_dim)
        scratch = new_empty(torch.float32, torch.get_num_threads() * floats)
        kernel(qkv.dtype, head_dim)(
            len(self._tiles) * self._kv_heads,
            qkv.data_ptr(),
            cache.data_ptr(),
            output.data_ptr(),
            self._tiles.data_ptr(),
            self._first_query.data_ptr(),
            scratch.data_ptr(),
            tokens,
            self._heads,
            self._kv_heads,
            cache.shape[2],
            rows_of(self._tiles),
            self._window,
            self._queries,
            scale,
            self._tables.data_ptr(),
            *self._tables.shape,
        )
        return output
