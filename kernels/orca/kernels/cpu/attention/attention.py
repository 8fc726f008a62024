"""Ragged paged attention on a CPU: all rows of a step in one launch, keys and values read directly from the cache.

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g(h)] + bias[h, j - i]) v[j, g(h)]        (see reference.py)

A task is one KV head of a tile: some consecutive tokens of one request (one token in the increment phase), with all
query heads that read this KV head. It walks the context in chunks of `_CHUNK` positions, first the keys, then the
values, with a running maximum and sum (online softmax, in float32). While it reads keys, it prefetches the values of
the same positions; while it reads values, it prefetches the next keys, also those of its next task. The blocks of a
context are scattered over the memory, and without prefetching attention took 1.5 (float32) to 2 times (bfloat16) as
long. The division of the softmax comes last, so that sums of whole numbers stay exact (worker/models/chain.py).

    qkv    [tokens, heads, head_dim]                        read: the first heads, which are the queries
    cache  [blocks, 2 x kv heads, block_tokens, head_dim]   read once per tile: 2 x context x kv heads x head_dim
    tables [lines, blocks] int32                            blocks of the requests
    tiles  [tiles, 5] int64                                 the request's line, position of the first token, number of
                                                            tokens, flat row of the first token, number of positions
                                                            that the last token sees without a window
    bias   [query heads, distances] float32                 read by chunk and query, if the model has it
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

from orca.kernels.contract.reference import AttentionView, ContextRow, DistanceBias
from orca.kernels.cpu.activations import exp
from orca.kernels.cpu.attention.tile import (
    QUERIES,
    ROWS,
    add_weighted,
    dots,
    max_of,
    query_element,
    uses_bfloat16_pairs,
    write_mean,
)
from orca.kernels.cpu.attention.turned import KEYS, add_values, score_turned
from orca.kernels.cpu.team.intrinsics import (
    FAST,
    KERNEL_TYPES,
    LINE_BYTES,
    float_argument,
    next_task,
    pointer,
    prefetch,
    thread_number,
)
from orca.kernels.cpu.team.team import Kernel, new_empty, row_count

_CHUNK = 256
"""Positions whose scores are in memory at a time."""
_TASK_QUERIES = 32
"""Queries of a task: tokens x query heads of one KV head. Their scores stay in the L1 cache."""
_ENCODER_TASK_QUERIES = 128
"""The same of an encoder, which turns keys for each task."""
_NO_WINDOW = 1 << 62
TILE_COLUMNS = 5
_SCORE_BYTES = _CHUNK * 4
"""Distance from the scores of one query to those of the next."""


@njit  # type: ignore[untyped-decorator]
def _scratch_floats(queries: Any, head_dim: Any) -> Any:
    """Return the scratch memory of a thread in floats.

    It holds queries, sums, scores, largest score and total of each query, and turned keys (turned.py).
    """
    return queries * (2 * head_dim + _CHUNK + 2) + KEYS * head_dim


@njit(**FAST)  # type: ignore[untyped-decorator]
def _first_line(table: Any, position: Any, block_tokens: Any, lines: Any) -> Any:
    """Return the first line of the block that holds a position."""
    return np.int64(table[position // block_tokens]) * lines


@njit(**FAST)  # type: ignore[untyped-decorator]
def _softmax_weights(scores: Any, low: Any, high: Any, largest: Any, scale: Any) -> Any:
    """Replace scores [low, high) by exp(scale * (score - largest)), and all others by 0. Returns: their sum."""
    scores[:low] = 0.0
    scores[high:] = 0.0
    visible = scores[low:high]
    total = np.float32(0.0)
    for j in range(len(visible)):
        visible[j] = exp(scale * (visible[j] - largest))
        total += visible[j]
    return total


@njit(**FAST)  # type: ignore[untyped-decorator]
def _seen_range(last_seen: Any, window: Any, start: Any, stop: Any) -> Any:
    """Return which scores [low, high) of a chunk belong to positions that a token sees.

    Args: last_seen: the last position that it sees, or any behind the context; start, stop: positions of the chunk.
    """
    return max(last_seen - window + 1 - start, 0), min(last_seen + 1, stop) - start


@njit(**FAST)  # type: ignore[untyped-decorator]
def _add_bias(
    scores_at: Any,
    bias: Any,
    zero: Any,
    scale: Any,
    position: Any,
    head: Any,
    group: Any,
    query_count: Any,
    start: Any,
    stop: Any,
) -> None:
    """Scale the scores of a chunk and add the bias of their distances, bias [heads, distances].

    It does so for scores of positions that a token does not see, too: their memory may hold anything.
    """
    columns = bias.shape[1]
    for i in range(query_count):
        scores = carray(pointer(scores_at + i * _SCORE_BYTES, np.float32), (stop - start,))
        own = bias[head + i % group]
        column = zero + start - (position + i // group)  # of the first score, before it is clamped
        # Scores [first, last) have a column each; those before have the first column, those behind the last one.
        first = min(max(-column, 0), len(scores))
        last = min(max(columns - column, first), len(scores))
        for j in range(first):
            scores[j] = scale * scores[j] + own[0]
        here, added = scores[first:last], own[column + first :]
        for j in range(len(here)):
            here[j] = scale * here[j] + added[j]
        for j in range(last, len(scores)):
            scores[j] = scale * scores[j] + own[columns - 1]


def _walk_block(operation: Any) -> Any:
    """Make a function that applies `operation` to rows [first, last) of a block and the queries of a task.

    It works in whole tiles as far as possible, and skips tiles that no query sees.

    Addresses: `rows` of the block in the cache; `ahead`, prefetched meanwhile; `query_data`, the first query's own
    data; `scores`, the first query's score for row 0 of the block. `query_range` has the number of queries; the last
    row that the first group of queries sees (each later group sees one row more); and the size of a group.
    """

    @njit(**FAST)  # type: ignore[untyped-decorator]
    def walk(
        rows: Any,
        first: Any,
        last: Any,
        ahead: Any,
        query_data: Any,
        scores: Any,
        query_range: Any,
        row_bytes: Any,
        kind: Any,
        head_dim: Any,
    ) -> None:
        width = literally(head_dim)
        query_count, own, group = query_range
        tiles_end = last - (last - first) % ROWS
        for j in range(first, tiles_end, ROWS):
            for byte in range(0, ROWS * row_bytes, LINE_BYTES):
                prefetch(ahead + j * row_bytes + byte)
            seeing = max(j - own, 0) * group // QUERIES * QUERIES
            whole = query_count - (query_count - seeing) % QUERIES
            row, at = rows + j * row_bytes, scores + j * 4
            for i in range(seeing, whole, QUERIES):
                operation(query_data, row, at, _SCORE_BYTES, i, kind, width, QUERIES, ROWS)
            for i in range(whole, query_count):
                operation(query_data, row, at, _SCORE_BYTES, i, kind, width, 1, ROWS)
        for j in range(tiles_end, last):
            row, at = rows + j * row_bytes, scores + j * 4
            for i in range(max(j - own, 0) * group, query_count):
                operation(query_data, row, at, _SCORE_BYTES, i, kind, width, 1, 1)

    return walk


_score_keys = _walk_block(dots)
_add_values = _walk_block(add_weighted)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _update_softmax(
    scores_at: Any,
    sums: Any,
    largest: Any,
    total: Any,
    scale: Any,
    last_seen: Any,
    group: Any,
    query_count: Any,
    window: Any,
    begin: Any,
    start: Any,
    stop: Any,
) -> None:
    """Turn the scores of a chunk into weights for the new running maximum, and rescale the earlier sums to it."""
    for i in range(query_count):
        own_at = scores_at + i * _SCORE_BYTES
        scores = carray(pointer(own_at, np.float32), (stop - start,))
        low, high = _seen_range(last_seen + i // group, window, start, stop)
        if low >= high:
            scores[:] = 0.0
            continue
        raised = max(largest[i], max_of(own_at + low * 4, high - low))
        if start > begin:
            kept = exp(scale * (largest[i] - raised))
            total[i] *= kept
            for d in range(sums.shape[1]):
                sums[i, d] *= kept
        largest[i] = raised
        total[i] += _softmax_weights(scores, low, high, raised, scale)


def turns_keys(dtype: torch.dtype, block_tokens: int) -> bool:
    """Return whether an encoder's kernel is the one of turned.py."""
    return dtype == torch.float32 and block_tokens % KEYS == 0


@cache
def kernel(dtype: torch.dtype, head_dim: int, *, turns: bool = False) -> Kernel:
    """Return the kernel for one dtype and head_dim; both are compile-time constants.

    Args: turns: it is for encoders (turned.py), and is not causal.

    The function inside is long: its loops share the state of one walk over a context, which is one idea.
    """
    kind = KERNEL_TYPES[dtype]
    query_kind = kind if uses_bfloat16_pairs(from_dtype(np.dtype(kind))) else np.float32
    row_bytes, sums_bytes = head_dim * dtype.itemsize, head_dim * 4

    def attend(args: Any) -> None:
        tokens, heads, kv_heads = args[8], args[9], args[10]
        block_tokens, num_tiles, window, queries_max = args[11], args[12], args[13], args[14]
        scale = np.float32(float_argument(args[15]))
        qkv = carray(pointer(args[2], kind), (tokens, args[19], head_dim))
        cache = args[3]
        tiles = carray(pointer(args[5], np.int64), (num_tiles, TILE_COLUMNS))
        tables = carray(pointer(args[16], np.int32), (args[17], args[18]))
        is_causal, has_bias, zero = args[20] != 0, args[21] != 0, args[23]
        bias = carray(pointer(args[21], np.float32), (heads, args[22]))
        first_query = carray(pointer(args[6], np.int64), (kv_heads + 1,))
        lines = 2 * kv_heads  # lines of a block: keys of each head, then values of each head
        line_bytes = block_tokens * row_bytes

        # This thread's scratch memory.
        queries_at = args[7] + thread_number(args) * _scratch_floats(queries_max, head_dim) * 4
        sums_at = queries_at + queries_max * sums_bytes
        scores_at = sums_at + queries_max * sums_bytes
        queries = carray(pointer(queries_at, query_kind), (queries_max, head_dim))
        sums = carray(pointer(sums_at, np.float32), (queries_max, head_dim))
        largest_at = scores_at + queries_max * _SCORE_BYTES
        largest, total = carray(pointer(largest_at, np.float32), (2, queries_max))
        turned_at = largest_at + queries_max * 8

        task = next_task(args)
        while task < num_tiles * kv_heads:
            upcoming = next_task(args)
            tile, kv_head = task // kv_heads, task % kv_heads
            position, count, token, end = tiles[tile, 1], tiles[tile, 2], tiles[tile, 3], tiles[tile, 4]
            table = tables[tiles[tile, 0]]
            head = first_query[kv_head]
            group = first_query[kv_head + 1] - head
            query_count = count * group
            for i in range(query_count):
                own = qkv[token + i // group, head + i % group]
                for d in range(head_dim):
                    queries[i, d] = query_element(own[d], kind)
                    sums[i, d] = 0.0
                largest[i] = -np.inf
                total[i] = 0.0

            # The first keys of this thread's next task.
            next_table, next_begin, next_end, next_head = table, 0, 0, 0
            if upcoming < num_tiles * kv_heads:
                next_tile, next_head = upcoming // kv_heads, upcoming % kv_heads
                next_begin, next_end = max(tiles[next_tile, 1] - window + 1, 0), tiles[next_tile, 4]
                next_table = tables[tiles[next_tile, 0]]
            begin = max(position - window + 1, 0)
            # The last position that the first token sees, or one behind the context.
            last_seen = position if is_causal else end
            # Chunks end at the same positions for all tiles, so a token's result does not depend on its tile.
            for border in range(begin // _CHUNK * _CHUNK, end, _CHUNK):
                start, stop = max(begin, border), min(border + _CHUNK, end)
                block_start = start // block_tokens * block_tokens

                for block in range(block_start, stop, block_tokens):
                    keys = cache + (_first_line(table, block, block_tokens, lines) + kv_head) * line_bytes
                    ahead = keys + kv_heads * line_bytes
                    first, last = max(start - block, 0), min(stop - block, block_tokens)
                    at, query_range = scores_at + (block - start) * 4, (query_count, last_seen - block, group)
                    if turns:
                        score_turned(
                            keys,
                            last,
                            ahead,
                            queries_at,
                            at,
                            _SCORE_BYTES,
                            query_count,
                            row_bytes,
                            turned_at,
                            head_dim,
                        )
                    else:
                        _score_keys(keys, first, last, ahead, queries_at, at, query_range, row_bytes, kind, head_dim)

                factor = scale
                if has_bias:
                    _add_bias(scores_at, bias, zero, scale, position, head, group, query_count, start, stop)
                    factor = np.float32(1.0)
                _update_softmax(
                    scores_at, sums, largest, total, factor, last_seen, group, query_count, window, begin, start, stop
                )

                for block in range(block_start, stop, block_tokens):
                    values = cache + (_first_line(table, block, block_tokens, lines) + kv_heads + kv_head) * line_bytes
                    ahead = values
                    if block + _CHUNK < end:
                        ahead = cache + (_first_line(table, block + _CHUNK, block_tokens, lines) + kv_head) * line_bytes
                    elif next_begin + block - block_start < next_end:
                        ahead = (
                            _first_line(next_table, next_begin + block - block_start, block_tokens, lines) + next_head
                        )
                        ahead = cache + ahead * line_bytes
                    first, last = max(start - block, 0), min(stop - block, block_tokens)
                    at, query_range = scores_at + (block - start) * 4, (query_count, last_seen - block, group)
                    if turns:
                        add_values(values, last, ahead, sums_at, at, _SCORE_BYTES, query_count, row_bytes, head_dim)
                    else:
                        _add_values(values, first, last, ahead, sums_at, at, query_range, row_bytes, kind, head_dim)

            for i in range(query_count):
                place = (token + i // group) * heads + head + i % group
                write_mean(args[4] + place * row_bytes, sums_at + i * sums_bytes, total[i], kind, literally(head_dim))
            task = upcoming

    return Kernel(f"attention-{dtype}-{head_dim}{'-turned' if turns else ''}", attend)


@cache
def _query_groups(kv_of_query: tuple[int, ...], kv_heads: int) -> tuple[Tensor, int]:
    """Return the first query head of each KV head, [kv heads + 1], and the size of the largest group."""
    assert list(kv_of_query) == sorted(kv_of_query)
    first_query = np.searchsorted(kv_of_query, np.arange(kv_heads + 1)).astype(np.int64)
    return torch.from_numpy(first_query), max(1, int(np.diff(first_query).max()))


def tile_tokens(view: AttentionView) -> int:
    """Return the largest number of tokens in a tile."""
    _, group = _query_groups(tuple(view.kv_of_query), view.kv_heads)
    queries = _ENCODER_TASK_QUERIES if view.is_encoder else _TASK_QUERIES
    return max(1, queries // group)


class CpuAttention:
    """The geometry of one step under one sliding window: built once, then applied in each layer.

    Args: those of device.Kernels.attention.
    """

    def __init__(self, rows: Sequence[ContextRow], view: AttentionView) -> None:
        longest = tile_tokens(view)
        tiles = []
        for row in rows:
            keys = row.keys_end(is_causal=view.is_causal)
            for done in range(0, row.count, longest):
                position, count = row.position + done, min(longest, row.count - done)
                end = position + count if view.is_causal else keys
                tiles.append((row.line, position, count, row.first + done, end))
        # Large tasks first, so that no thread is still busy with a large one when the others are idle.
        tiles.sort(key=lambda tile: tile[4] * tile[2], reverse=True)
        self._set_up(torch.from_numpy(np.array(tiles, np.int64)), view)

    @classmethod
    def of_tiles(cls, tiles: Tensor, view: AttentionView) -> "CpuAttention":
        """Return attention whose tiles are written later, before each run (recording.py)."""
        attention = cls.__new__(cls)
        attention._set_up(tiles, view)
        return attention

    def _set_up(self, tiles: Tensor, view: AttentionView) -> None:
        assert view.tables.dtype == torch.int32
        assert view.tables.is_contiguous()
        self._tiles, self._tables = tiles, view.tables
        self._first_query, group = _query_groups(tuple(view.kv_of_query), view.kv_heads)
        self._heads, self._kv_heads, self._queries = len(view.kv_of_query), view.kv_heads, tile_tokens(view) * group
        self._is_causal = view.is_causal
        self._turns = view.is_encoder and turns_keys(view.dtype, view.block_tokens)
        self._window = view.window if view.is_causal and view.window is not None else _NO_WINDOW

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float, bias: DistanceBias | None = None) -> Tensor:
        """See reference.RaggedAttention."""
        assert qkv.is_contiguous()
        assert cache.is_contiguous()
        assert scale >= 0
        tokens, head_dim = row_count(qkv), cache.shape[3]
        output = new_empty(qkv.dtype, tokens, self._heads * head_dim)
        floats = _scratch_floats.py_func(self._queries, head_dim)
        scratch = new_empty(torch.float32, torch.get_num_threads() * floats)
        kernel(qkv.dtype, head_dim, turns=self._turns)(
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
            row_count(self._tiles),
            self._window,
            self._queries,
            scale,
            self._tables.data_ptr(),
            *self._tables.shape,
            qkv.shape[1] if qkv.dim() == 3 else self._heads,
            self._is_causal,
            *self._bias_arguments(bias),
        )
        return output

    def _bias_arguments(self, bias: DistanceBias | None) -> tuple[int, int, int]:
        """Return the address of a bias (0 for none), its number of columns, and the column of distance 0."""
        if bias is None:
            return 0, 0, 0
        assert bias.table.dtype == torch.float32
        assert bias.table.is_contiguous()
        heads, columns = bias.table.shape
        assert heads == self._heads
        assert columns > 0
        return bias.table.data_ptr(), columns, bias.zero
