"""The inner part of attention on a CPU: a few queries by a few keys or values. With AVX-512 all sums are in registers.

Keys and values are rows [head_dim] of their own dtype. Queries are rows of bfloat16 if the processor multiplies pairs
of them (AVX512_BF16), otherwise of float32 (`query_element`). Sums over values are rows of float32 in an order that is
cheap to compute (`_load_ordered`); only `write_mean` restores the order of the elements.

If head_dim is a multiple of 8, the result of a query and a key does not depend on the queries and keys beside them.
Otherwise LLVM cuts a row's last vector up, and may round its products in one tile and not in another.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from orca.kernels.cpu.team.intrinsics import (
    BFLOAT,
    constant,
    emit_fma,
    emit_from_float32,
    emit_to_float32,
    has_cpu_feature,
    load_vector,
    splat,
)

QUERIES, ROWS = 4, 4
"""Size of a whole tile. Its sums take half of the AVX-512 registers. AVX2 has too few registers for them, but fewer
queries are no faster there."""

_LANES = 16
"""Most lanes of a vector: one register of the largest kind. LLVM takes seconds to split longer vectors."""
FLOAT, WORD = ir.FloatType(), ir.IntType(32)

SUM_FLAGS = ("nsz",)
"""Flags of sums and products: without any, Numba lets LLVM add in any order, and contract a product and a sum."""


def uses_bfloat16_pairs(kind: Any) -> bool:
    """Return whether queries stay bfloat16, because the processor multiplies pairs of them."""
    return kind == types.uint16 and has_cpu_feature("avx512bf16")


@intrinsic  # type: ignore[untyped-decorator]
def query_element(_typing: Any, bits: Any, kind: Any) -> Any:
    """Convert an element of a query to the type that `dots` reads."""
    is_kept = uses_bfloat16_pairs(kind.dtype)

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return values[0] if is_kept else emit_to_float32(builder, values[0], kind.dtype)

    return (kind.dtype if is_kept else types.float32)(bits, kind), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dots(
    _typing: Any,
    queries: Any,
    keys: Any,
    scores: Any,
    score_bytes: Any,
    first: Any,
    kind: Any,
    dim: Any,
    query_count: Any,
    rows: Any,
) -> Any:
    """Compute scores [query_count, rows] = queries [query_count, dim], from query `first` on, times keys [rows, dim].

    Args: the first three are addresses; score_bytes is the distance from one query's scores to the next; the last
        three are compile-time constants, `rows` is ROWS or 1.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        queries_at, keys_at, scores_at, score_bytes_, first_ = values[:5]
        width, places = dim.literal_value, range(rows.literal_value)
        products = _PairedDots(width) if uses_bfloat16_pairs(kind.dtype) else _Dots(width, kind.dtype)
        queries_at = builder.add(queries_at, builder.mul(first_, ir.IntType(64)(width * products.query_bytes)))
        scores_at = builder.add(scores_at, builder.mul(first_, score_bytes_))
        sums: dict[tuple[int, int], list[Any]] = {}
        for piece in products.pieces:
            row_pieces = [products.key(builder, keys_at, place, piece) for place in places]
            for i in range(query_count.literal_value):
                asked_piece = products.query(builder, queries_at, i, piece)
                for place in places:
                    products.add(builder, sums.setdefault((i, place), []), asked_piece, row_pieces[place])
        for i in range(query_count.literal_value):
            totals = _horizontal_sums(builder, [_sum_vectors(builder, sums[i, place]) for place in places])
            at = builder.add(scores_at, builder.mul(score_bytes_, ir.IntType(64)(i)))
            builder.store(totals, builder.inttoptr(at, totals.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(queries, keys, scores, score_bytes, first, kind, dim, query_count, rows), generate


def _pieces(dim: int) -> list[tuple[int, int]]:
    """Split a row into vectors: first element and number of lanes of each."""
    return [(first, min(_LANES, dim - first)) for first in range(0, dim, _LANES)]


class _Dots:
    """Dot products with vectors of float32."""

    query_bytes = 4  # of an element

    def __init__(self, dim: int, kind: Any) -> None:
        self._dim, self._kind = dim, kind
        self.pieces = _pieces(dim)

    def query(self, builder: Any, at: Any, i: int, piece: tuple[int, int]) -> Any:
        return load_vector(builder, at, i * self._dim + piece[0], types.float32, piece[1])

    def key(self, builder: Any, at: Any, place: int, piece: tuple[int, int]) -> Any:
        return load_vector(builder, at, place * self._dim + piece[0], self._kind, piece[1])

    def add(self, builder: Any, sums: list[Any], query: Any, key: Any) -> None:
        """Add to the sum with the same number of lanes; all pieces except the last have equal lengths."""
        if sums and sums[-1].type == query.type:
            sums[-1] = emit_fma(builder, query, key, sums[-1])
        else:
            sums.append(builder.fmul(query, key, flags=SUM_FLAGS))


class _PairedDots:
    """Dot products with vectors of bfloat16 pairs; the rest of a row, too short for such a vector, uses `_Dots`."""

    query_bytes = 2

    def __init__(self, dim: int) -> None:
        self._dim, self._rest = dim, _Dots(dim, types.uint16)
        whole = dim // (2 * _LANES) * 2 * _LANES
        self.pieces = [(first, 2 * _LANES) for first in range(0, whole, 2 * _LANES)]
        self.pieces += [(whole + first, lanes) for first, lanes in _pieces(dim - whole)]

    def query(self, builder: Any, at: Any, i: int, piece: tuple[int, int]) -> Any:
        return self.key(builder, at, i, piece)

    def key(self, builder: Any, at: Any, place: int, piece: tuple[int, int]) -> Any:
        if piece[1] < 2 * _LANES:
            return self._rest.key(builder, at, place, piece)
        kind = ir.VectorType(BFLOAT, 2 * _LANES)
        return builder.bitcast(_words(builder, at, place * self._dim + piece[0]), kind)

    def add(self, builder: Any, sums: list[Any], query: Any, key: Any) -> None:
        if query.type.count < 2 * _LANES:
            self._rest.add(builder, sums, query, key)
            return
        numbers = ir.VectorType(FLOAT, _LANES)
        kind = ir.FunctionType(numbers, [numbers, query.type, query.type])
        multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        before = sums.pop() if sums else constant(numbers, 0.0)
        sums.append(builder.call(multiply, [before, query, key]))


def _words(builder: Any, at: Any, element: int) -> Any:
    """Emit a load of 2 x _LANES 16-bit elements, from `element` after an address on, as a vector of 32-bit words."""
    here = builder.add(at, ir.IntType(64)(2 * element))
    return builder.load(builder.inttoptr(here, ir.VectorType(WORD, _LANES).as_pointer()), align=2)


def shuffle(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    """Emit a vector of the chosen lanes of two vectors."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(WORD, len(places)), places))


def _sum_vectors(builder: Any, sums: list[Any]) -> Any:
    """Emit the sum of vectors of at most _LANES lanes, as a vector of _LANES lanes."""
    total = None
    for each in sums:
        if each.type.count < _LANES:
            places = [min(lane, each.type.count) for lane in range(_LANES)]  # its own lanes, then zeros
            each = shuffle(builder, each, constant(each.type, 0.0), places)
        total = each if total is None else builder.fadd(total, each, flags=SUM_FLAGS)
    return total


def _horizontal_sums(builder: Any, sums: list[Any]) -> Any:
    """Emit the sum of the lanes of each of ROWS vectors, or of one.

    Halves are added to halves; as they get shorter, several vectors share one register.
    """
    width = _LANES

    def folded(*vectors: Any) -> Any:
        """Add the two halves of each run of `width` lanes in one vector or two."""
        half = width // 2
        runs = range(0, sum(each.type.count for each in vectors), width)
        low, high = ([run + lane for run in runs for lane in range(at, at + half)] for at in (0, half))
        both = vectors[0], vectors[-1]
        return builder.fadd(shuffle(builder, *both, low), shuffle(builder, *both, high), flags=SUM_FLAGS)

    while width > 1:
        sums = [folded(*sums[i : i + 2]) for i in range(0, len(sums), 2)]
        width //= 2
    return sums[0]


def _load_ordered(builder: Any, at: Any, first: int, lanes: int, kind: Any) -> list[Any]:
    """Emit float32 vectors of the elements from `first` on, in the order of sums.

    Pairs of bfloat16 give first the even elements, then the odd ones.
    """
    if lanes <= _LANES:
        return [load_vector(builder, at, first, kind, lanes)]
    words = _words(builder, at, first)
    even, odd = (
        builder.shl(words, constant(words.type, 16)),
        builder.and_(words, constant(words.type, 0xFFFF0000)),
    )
    return [builder.bitcast(half, ir.VectorType(FLOAT, _LANES)) for half in (even, odd)]


def _is_split(kind: Any, dim: int) -> bool:
    return kind == types.uint16 and dim % (2 * _LANES) == 0


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_weighted(
    _typing: Any,
    sums: Any,
    values_at: Any,
    weights: Any,
    weight_bytes: Any,
    first: Any,
    kind: Any,
    dim: Any,
    query_count: Any,
    rows: Any,
) -> Any:
    """Add weights [query_count, rows] times values [rows, dim] to the sums of the queries from `first` on.

    Args: the first three are addresses; weight_bytes is the distance from one query's weights to the next; the last
        three are compile-time constants.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        long, width = ir.IntType(64), dim.literal_value
        places, queries = range(rows.literal_value), range(query_count.literal_value)
        sums_at = builder.add(values[0], builder.mul(values[4], long(4 * width)))
        weights_at = [builder.add(values[2], builder.mul(builder.add(values[4], long(i)), values[3])) for i in queries]
        factors = [
            [builder.load(builder.inttoptr(builder.add(at, long(4 * place)), FLOAT.as_pointer())) for place in places]
            for at in weights_at
        ]
        is_split = _is_split(kind.dtype, width)
        for first, lanes in [(at, 2 * _LANES) for at in range(0, width, 2 * _LANES)] if is_split else _pieces(width):
            rows_here = [
                _load_ordered(builder, values[1], place * width + first, lanes, kind.dtype) for place in places
            ]
            for half, here in enumerate(zip(*rows_here, strict=True)):
                for i in queries:
                    at = builder.add(sums_at, long(4 * (i * width + first + half * _LANES)))
                    sum_ = load_vector(builder, at, 0, types.float32, here[0].type.count)
                    for place in places:
                        weight = splat(builder, factors[i][place], here[place].type.count)
                        sum_ = emit_fma(builder, weight, here[place], sum_)
                    builder.store(sum_, builder.inttoptr(at, sum_.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(sums, values_at, weights, weight_bytes, first, kind, dim, query_count, rows), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def write_mean(_typing: Any, into: Any, sums: Any, total: Any, kind: Any, dim: Any) -> Any:
    """Write sums / total to a row [dim] of a kind. Args: into, sums: addresses."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width, is_split = dim.literal_value, _is_split(kind.dtype, dim.literal_value)
        parts = []
        for first, lanes in _pieces(width):
            sum_ = load_vector(builder, values[1], first, types.float32, lanes)
            parts.append(emit_from_float32(builder, builder.fdiv(sum_, splat(builder, values[2], lanes)), kind.dtype))
        if is_split:
            order = [lane // 2 + lane % 2 * _LANES for lane in range(2 * _LANES)]
            parts = [shuffle(builder, even, odd, order) for even, odd in zip(parts[::2], parts[1::2], strict=True)]
        done = 0
        for part in parts:
            to = builder.add(values[0], ir.IntType(64)(done * kind.dtype.bitwidth // 8))
            builder.store(part, builder.inttoptr(to, part.type.as_pointer()), align=kind.dtype.bitwidth // 8)
            done += part.type.count
        return context.get_dummy_value()

    return types.void(into, sums, total, kind, dim), generate


@intrinsic  # type: ignore[untyped-decorator]
def max_of(_typing: Any, address: Any, count: Any) -> Any:
    """Return the largest of `count` float32 numbers, none of which is NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        long, at, many = ir.IntType(64), values[0], values[1]
        whole = builder.and_(many, long(-_LANES))
        lanes = cgutils.alloca_once_value(builder, constant(ir.VectorType(FLOAT, _LANES), float("-inf")))
        most = cgutils.alloca_once_value(builder, FLOAT(float("-inf")))

        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        with cgutils.for_range_slice(builder, long(0), whole, long(_LANES)) as (first, _):
            here = load_vector(builder, builder.add(at, builder.mul(first, long(4))), 0, types.float32, _LANES)
            builder.store(larger(here, builder.load(lanes)), lanes)
        with cgutils.for_range_slice(builder, whole, many, long(1)) as (first, _):
            here = builder.inttoptr(builder.add(at, builder.mul(first, long(4))), FLOAT.as_pointer())
            builder.store(larger(builder.load(here), builder.load(most)), most)
        each, width = builder.load(lanes), _LANES
        while width > 1:
            width //= 2
            halves = ([*range(start, start + width)] for start in (0, width))
            each = larger(*(shuffle(builder, each, each, half) for half in halves))
        return larger(builder.extract_element(each, WORD(0)), builder.load(most))

    return types.float32(address, count), generate
