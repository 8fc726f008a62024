"""The inner part of an encoder's attention in float32: dozens of queries by the same keys and values.

`tile.dots` sums along the head, so each score needs a sum over the lanes of a vector at the end. Here 16 keys are
turned around first, once for all queries of a task, and each lane has a key of its own. Turning costs about as much as
the scores of six queries. `add_values` keeps sums in registers for a whole block.

A score is the sum over the head in its order, so it does not depend on the queries and keys beside it.
"""

from typing import Any

from llvmlite import ir
from numba import literally, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from orca.kernels.cpu.attention.tile import FLOAT, shuffle
from orca.kernels.cpu.team.intrinsics import (
    FAST,
    LINE_BYTES,
    constant,
    emit_fma,
    has_cpu_feature,
    load_vector,
    prefetch,
    splat,
)

KEYS = 16
"""Keys that are turned together: the lanes of a vector. A block of the cache holds a multiple of them."""
_QUERIES = 8 if has_cpu_feature("avx512f") else 4
"""Queries whose sums are in registers."""
_LONG = ir.IntType(64)
_VECTOR = ir.VectorType(FLOAT, KEYS)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _turn(_typing: Any, into: Any, keys: Any, dim: Any) -> Any:
    """Write keys [KEYS, dim] as [dim, KEYS]. Args: into, keys: addresses."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = dim.literal_value
        for first in range(0, width, KEYS):
            lanes = min(KEYS, width - first)
            rows = []
            for place in range(KEYS):
                row = load_vector(builder, values[1], place * width + first, types.float32, lanes)
                if lanes < KEYS:
                    rest = constant(row.type, 0.0)
                    places = [min(lane, lanes) for lane in range(KEYS)]
                    row = shuffle(builder, row, rest, places)
                rows.append(row)
            for lane, row in enumerate(_turned(builder, rows)[:lanes]):
                at = builder.add(values[0], _LONG(4 * KEYS * (first + lane)))
                builder.store(row, builder.inttoptr(at, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(into, keys, dim), generate


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Emit the transposition of KEYS vectors of KEYS lanes: in each of four rounds, pairs of rows exchange lanes."""
    half = KEYS // 2
    while half:
        ones = [lane if not lane & half else KEYS + (lane ^ half) for lane in range(KEYS)]
        others = [lane | half if not lane & half else KEYS + lane for lane in range(KEYS)]
        exchanged = list(rows)
        for place in range(KEYS):
            if not place & half:
                pair = rows[place], rows[place | half]
                exchanged[place] = shuffle(builder, *pair, ones)
                exchanged[place | half] = shuffle(builder, *pair, others)
        rows, half = exchanged, half // 2
    return rows


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _dots(
    _typing: Any, queries: Any, keys: Any, scores: Any, score_bytes: Any, first: Any, dim: Any, query_count: Any
) -> Any:
    """Compute scores [query_count, KEYS] = queries [query_count, dim], from `first` on, times keys [dim, KEYS].

    Args: the first three are addresses; score_bytes is the distance from one query's scores to the next; the last two
        are compile-time constants.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        queries_at, keys_at, scores_at, score_bytes_, first_ = values[:5]
        width, count = dim.literal_value, query_count.literal_value
        queries_at = builder.add(queries_at, builder.mul(first_, _LONG(4 * width)))
        scores_at = builder.add(scores_at, builder.mul(first_, score_bytes_))
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(count)]
        for each in sums:
            builder.store(constant(_VECTOR, 0.0), each)
        with cgutils.for_range(builder, _LONG(width)) as loop:
            at = builder.add(keys_at, builder.mul(loop.index, _LONG(4 * KEYS)))
            row = builder.load(builder.inttoptr(at, _VECTOR.as_pointer()), align=4)
            for i, each in enumerate(sums):
                at = builder.add(queries_at, builder.mul(builder.add(loop.index, _LONG(i * width)), _LONG(4)))
                asked = splat(builder, builder.load(builder.inttoptr(at, FLOAT.as_pointer()), align=4), KEYS)
                builder.store(emit_fma(builder, asked, row, builder.load(each)), each)
        for i, each in enumerate(sums):
            at = builder.add(scores_at, builder.mul(score_bytes_, _LONG(i)))
            builder.store(builder.load(each), builder.inttoptr(at, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(queries, keys, scores, score_bytes, first, dim, query_count), generate


@njit(**FAST)  # type: ignore[untyped-decorator]
def score_turned(
    rows: Any,
    last: Any,
    ahead: Any,
    query_data: Any,
    scores: Any,
    score_bytes: Any,
    query_count: Any,
    row_bytes: Any,
    turned: Any,
    head_dim: Any,
) -> None:
    """Compute the scores of all queries of a task by the first `last` rows of a block, and by the rest of their KEYS.

    Addresses: `rows` of the block in the cache; `ahead`, prefetched meanwhile; `query_data`, the first query's own;
    `scores`, the first query's score for row 0; `turned`, scratch memory for [head_dim, KEYS].
    """
    width = literally(head_dim)
    whole = query_count - query_count % _QUERIES
    for j in range(0, last, KEYS):
        for byte in range(0, KEYS * row_bytes, LINE_BYTES):
            prefetch(ahead + j * row_bytes + byte)
        _turn(turned, rows + j * row_bytes, width)
        at = scores + j * 4
        for i in range(0, whole, _QUERIES):
            _dots(query_data, turned, at, score_bytes, i, width, _QUERIES)
        for i in range(whole, query_count):
            _dots(query_data, turned, at, score_bytes, i, width, 1)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _add_rows(
    _typing: Any,
    sums: Any,
    values_at: Any,
    weights: Any,
    weight_bytes: Any,
    first: Any,
    rows: Any,
    dim: Any,
    query_count: Any,
) -> Any:
    """Add weights [query_count, rows] times values [rows, dim] to the sums of the queries from `first` on.

    The sums of a part of the head stay in registers for all rows.

    Args: the first three are addresses; weight_bytes is the distance from one query's weights to the next; the last
        two are compile-time constants.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width, queries = dim.literal_value, range(query_count.literal_value)
        sums_at = builder.add(values[0], builder.mul(values[4], _LONG(4 * width)))
        weights_at = [builder.add(values[2], builder.mul(builder.add(values[4], _LONG(i)), values[3])) for i in queries]
        for begin in range(0, width, KEYS):
            vector = ir.VectorType(FLOAT, min(KEYS, width - begin))
            places = [builder.add(sums_at, _LONG(4 * (i * width + begin))) for i in queries]
            totals = [cgutils.alloca_once(builder, vector) for _ in queries]
            for at, total in zip(places, totals, strict=True):
                builder.store(builder.load(builder.inttoptr(at, vector.as_pointer()), align=4), total)
            with cgutils.for_range(builder, values[5]) as loop:
                row_at = builder.add(values[1], builder.mul(loop.index, _LONG(4 * width)))
                row = load_vector(builder, row_at, begin, types.float32, vector.count)
                for at, total in zip(weights_at, totals, strict=True):
                    here = builder.add(at, builder.mul(loop.index, _LONG(4)))
                    weight = builder.load(builder.inttoptr(here, FLOAT.as_pointer()), align=4)
                    product = splat(builder, weight, vector.count), row
                    builder.store(emit_fma(builder, *product, builder.load(total)), total)
            for at, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), builder.inttoptr(at, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(sums, values_at, weights, weight_bytes, first, rows, dim, query_count), generate


@njit(**FAST)  # type: ignore[untyped-decorator]
def add_values(
    rows: Any,
    last: Any,
    ahead: Any,
    sums: Any,
    weights: Any,
    weight_bytes: Any,
    query_count: Any,
    row_bytes: Any,
    head_dim: Any,
) -> None:
    """Add the first `last` rows of a block, weighted, to the sums of all queries of a task (see `score_turned`)."""
    width = literally(head_dim)
    for byte in range(0, last * row_bytes, LINE_BYTES):
        prefetch(ahead + byte)
    whole = query_count - query_count % _QUERIES
    for i in range(0, whole, _QUERIES):
        _add_rows(sums, rows, weights, weight_bytes, i, last, width, _QUERIES)
    for i in range(whole, query_count):
        _add_rows(sums, rows, weights, weight_bytes, i, last, width, 1)
