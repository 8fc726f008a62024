"""The attention of one KV head of an item (attention.py), as device code.

Softmax uses base 2: scores are multiplied by log2(e).
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


class AttentionItem(NamedTuple):
    """A row of `items`."""

    first: int  # flat row of the first token
    count: int  # number of tokens
    position: int  # position of the first token; in the source, or in the target
    table: int  # offset of the request's blocks in `tables`
    begin: int  # first position that is read
    end: int  # position after the last one
    part: int = -1  # first row in `partials`; -1: the context is not split
    first_part: int = 0  # first row of the tile's first part; the other parts follow
    parts: int = 1
    tile: int = 0  # row of `arrived`


def _column(name: str) -> tl.constexpr:
    return tl.constexpr(AttentionItem._fields.index(name))


_LOG2_E = tl.constexpr(LOG2_E)
PARTS_MAX = tl.constexpr(32)
"""Most parts of a context. A power of two, for code that computes all parts side by side."""
_SUMS_AHEAD, _SUMS_SMALL = tl.constexpr(4), tl.constexpr(4096)
"""Parts whose sums are read at a time, and the largest tile for which their sums fit into a program's registers."""
COLUMNS = tl.constexpr(len(AttentionItem._fields))
FIRST, COUNT, POSITION, TABLE = _column("first"), _column("count"), _column("position"), _column("table")
BEGIN, END, PART, FIRST_PART = _column("begin"), _column("end"), _column("part"), _column("first_part")
PARTS, TILE = _column("parts"), _column("tile")


@triton.jit  # type: ignore[untyped-decorator]
def _product(a, b, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the product of two tiles, summed in float32.

    precision: that of float32 tiles; "wide" is for the interpreter, which treats the bits of bfloat16 as integers.
    """
    if precision == "wide":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=precision)


@triton.jit  # type: ignore[untyped-decorator]
def _new_maximum(largest, others):  # type: ignore[no-untyped-def]
    """Return the new maxima, and the values to subtract from scores before exponentiation.

    For a query that has seen nothing yet the maximum stays minus infinity; subtracting that from itself would give NaN.
    """
    raised = tl.maximum(largest, others)
    return raised, tl.where(raised == float("-inf"), 0.0, raised)


@triton.jit  # type: ignore[untyped-decorator]
def _empty_state(block_m: tl.constexpr, block_d: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the state of queries that have seen nothing yet: largest score, total of weights, weighted sums."""
    largest = tl.full((block_m,), float("-inf"), tl.float32)
    return largest, tl.zeros((block_m,), tl.float32), tl.zeros((block_m, block_d), tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _at(partials, line, head_dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the address of a query's row in `partials`: its sums, then its largest score, then its total."""
    return partials + line * (head_dim + 2)


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
    is_causal: tl.constexpr,
    bias,
    columns,
    zero,
    has_bias: tl.constexpr,
):
    """Add positions [low, high) to the running softmax; with a mask if some query does not see all of them.

    bias: the address of each query's row of the bias.
    """
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
        if has_bias:
            column = tl.minimum(tl.maximum(zero + seen[None, :] - own[:, None], 0), columns - 1)
            scores += tl.load(bias[:, None] + column) * _LOG2_E
        if is_masked:
            is_seen = is_there[None, :]
            if is_causal:
                is_seen = (seen[None, :] <= own[:, None]) & (seen[None, :] > own[:, None] - window) & is_seen
            scores = tl.where(is_seen, scores, float("-inf"))
        raised, base = _new_maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(largest - base)
        total = total * kept + tl.sum(weights, axis=1)
        value = tl.load(key_at + kv_heads * block_tokens * head_dim, mask=is_stored, other=0.0)
        summed = summed * kept[:, None] + _product(weights.to(value.dtype), value, precision)
        largest = raised
    return largest, total, summed


@triton.jit  # type: ignore[untyped-decorator]
def _attend_positions(  # type: ignore[no-untyped-def]
    item,
    query,
    own,
    cache,
    table,
    kv_head,
    window,
    scale,
    kv_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
    is_causal: tl.constexpr,
    bias,
    columns,
    zero,
    has_bias: tl.constexpr,
):
    """Add all positions of an item to the running softmax, with a mask only where it is needed."""
    count = tl.load(item + COUNT)
    position = tl.load(item + POSITION)
    begin = tl.load(item + BEGIN)
    end = tl.load(item + END)
    state = _empty_state(block_m, block_d)
    # Every token sees positions [all_from, all_to). Below, the window hides some from some token; above, some position
    # comes after some token.
    hidden = tl.maximum(position + count - window - begin, 0)
    all_to = tl.maximum(tl.minimum(position + 1, end) // block_n * block_n, begin)
    all_from = tl.minimum(begin + tl.cdiv(hidden, block_n) * block_n, all_to)
    if not is_causal:
        all_to = tl.maximum(end // block_n * block_n, begin)
        all_from = begin
    state = _walk(
        state, query, own, cache, table, begin, all_from, end, kv_head, window, scale,
        kv_heads, block_tokens, head_dim, block_n, block_d, precision, True,
        is_causal, bias, columns, zero, has_bias,
    )  # fmt: skip
    state = _walk(
        state, query, own, cache, table, all_from, all_to, end, kv_head, window, scale,
        kv_heads, block_tokens, head_dim, block_n, block_d, precision, False,
        is_causal, bias, columns, zero, has_bias,
    )  # fmt: skip
    return _walk(
        state, query, own, cache, table, all_to, end, end, kv_head, window, scale,
        kv_heads, block_tokens, head_dim, block_n, block_d, precision, True,
        is_causal, bias, columns, zero, has_bias,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _write_part(item, partials, own_row, done_at, state, is_row, dim, head_dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a part to `partials`. own_row: offset from the part's first row. Returns: whether it is the last part."""
    largest, total, summed = state
    at = _at(partials, tl.load(item + PART) + own_row, head_dim)
    tl.store(at[:, None] + dim[None, :], summed, mask=is_row[:, None] & (dim < head_dim)[None, :])
    tl.store(at + head_dim, largest, mask=is_row)
    tl.store(at + head_dim + 1, total, mask=is_row)
    # All threads must have stored before one of them counts the part.
    tl.debug_barrier()
    return tl.atomic_add(done_at, 1, sem="acq_rel") == tl.load(item + PARTS) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _merge_parts(  # type: ignore[no-untyped-def]
    item, partials, own_row, is_row, dim, part_lines: tl.constexpr, head_dim: tl.constexpr, ahead: tl.constexpr
):
    """Merge the parts of a tile into total [rows] and sums [rows, dims].

    The largest score is computed first, so that no part's sums depend on another's. `ahead` parts are read at a time
    and added in the order of positions. Other programs wrote them during this launch, so the reads bypass the cache of
    this multiprocessor.

    part_lines: rows of `partials` from one part to the next.
    """
    is_mine = is_row[:, None] & (dim < head_dim)[None, :]
    first = _at(partials, tl.load(item + FIRST_PART) + own_row, head_dim)
    parts = tl.load(item + PARTS)
    largest, total, summed = _empty_state(own_row.shape[0], dim.shape[0])
    for part in tl.range(0, parts, loop_unroll_factor=ahead):
        at = first + part * part_lines * (head_dim + 2)
        largest = tl.maximum(largest, tl.load(at + head_dim, mask=is_row, other=float("-inf"), cache_modifier=".cg"))
    _, base = _new_maximum(largest, largest)
    for part in tl.range(0, parts, loop_unroll_factor=ahead):
        at = first + part * part_lines * (head_dim + 2)
        its_sums = tl.load(at[:, None] + dim[None, :], mask=is_mine, other=0.0, cache_modifier=".cg")
        its_largest = tl.load(at + head_dim, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(at + head_dim + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(its_largest - base)
        total += its_total * weight
        summed += its_sums * weight[:, None]
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
    part_rows: tl.constexpr,
    row_heads: tl.constexpr,
    is_causal: tl.constexpr,
    bias,
    columns,
    zero,
    has_bias: tl.constexpr,
):
    """Compute one KV head of an item: its queries over their context, or over their part of it."""
    first = tl.load(item + FIRST).to(tl.int64)
    count = tl.load(item + COUNT)
    position = tl.load(item + POSITION)
    table = tables + tl.load(item + TABLE)
    head = tl.load(first_query + kv_head)
    group = tl.load(first_query + kv_head + 1) - head

    row = tl.arange(0, block_m)
    dim = tl.arange(0, block_d)
    is_row = row < count * group
    is_mine = is_row[:, None] & (dim < head_dim)[None, :]
    token = tl.where(is_row, row // tl.maximum(group, 1), 0)
    own_head = head + tl.where(is_row, row % tl.maximum(group, 1), 0)
    own = position + token
    query_line = (first + token) * row_heads + own_head
    query = tl.load(qkv + query_line[:, None] * head_dim + dim[None, :], mask=is_mine, other=0.0)

    state = _attend_positions(
        item, query, own, cache, table, kv_head, window, scale,
        kv_heads, block_tokens, head_dim, block_m, block_n, block_d, precision,
        is_causal, bias + own_head * columns, columns, zero, has_bias,
    )  # fmt: skip
    _, total, summed = state

    out_at = out + ((first + token) * heads + own_head)[:, None] * head_dim + dim[None, :]
    is_last = True
    if tl.load(item + PART) >= 0:
        done_at = arrived + tl.load(item + TILE) * kv_heads + kv_head
        own_row = kv_head * part_rows + row.to(tl.int64)
        is_last = _write_part(item, partials, own_row, done_at, state, is_row, dim, head_dim)
        if is_last:
            tl.store(done_at, 0)
            ahead: tl.constexpr = _SUMS_AHEAD if block_m * block_d <= _SUMS_SMALL else 1
            total, summed = _merge_parts(item, partials, own_row, is_row, dim, kv_heads * part_rows, head_dim, ahead)
    if is_last:
        # Padding rows see nothing (inputs.py), so their result is zero.
        result = summed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_mine)


# Compiled once for all windows ("no window" is a number without divisors), and for all biases.
@triton.jit(do_not_specialize=["window", "columns", "zero"])  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    qkv,
    cache,
    items,
    tables,
    first_query,
    out,
    partials,
    arrived,
    bias,
    columns,
    zero,
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
    part_rows: tl.constexpr,
    row_heads: tl.constexpr,
    is_causal: tl.constexpr,
    has_bias: tl.constexpr,
):
    """Compute all items; each program takes items in turn.

    The bias has `columns` columns, and `zero` is that of distance 0. A row of qkv has `row_heads` heads. Wide items are
    possible only if `has_wide`. A narrow part has at most `part_rows` queries.
    """
    many = tl.load(items)
    many_wide = tl.load(items + 1)
    # Addresses are computed again for each item: kept over all items, they would take registers from the products.
    for task in tl.range(tl.program_id(0), many * kv_heads, tl.num_programs(0), disable_licm=True):
        number = task // kv_heads
        item, kv_head = items + (1 + number) * COLUMNS, task % kv_heads
        if has_wide and number < many_wide:
            _attend_item(
                item, kv_head, qkv, cache, tables, first_query, out, partials, arrived, window, scale,
                heads, kv_heads, block_tokens, head_dim, wide, block_n, block_d, precision, wide,
                row_heads, is_causal, bias, columns, zero, has_bias,
            )  # fmt: skip
        else:
            _attend_item(
                item, kv_head, qkv, cache, tables, first_query, out, partials, arrived, window, scale,
                heads, kv_heads, block_tokens, head_dim, narrow, block_n, block_d, precision, part_rows,
                row_heads, is_causal, bias, columns, zero, has_bias,
            )  # fmt: skip
