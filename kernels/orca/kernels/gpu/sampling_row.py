"""Device code that applies a line's sampling settings (sampling_lines.py) to a row's logits.

Every kernel that needs an adjusted logit computes it again, and must get the same bits as the others. A floor found by
one kernel is compared with values computed by the next. So kernels are launched without fused multiply-add, which a
compiler places freely, and divide as IEEE 754 specifies. The bits also equal those of PyTorch.
"""

import triton
import triton.language as tl

from orca.kernels.contract.sampling_lines import COUNT_MAX, TEMPERATURE_LEAST, FloatColumn, IntColumn

LOG2_E = tl.constexpr(1.4426950408889634)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
PARTS = tl.constexpr(4)
"""Rows of `parts` [PARTS, splits] float32: the largest adjusted logit of each split, and the sum of weights relative to
it; then both for the raw logits at temperature 1."""

_NUMBERS, _INTEGERS, LARGEST_COUNT = (
    tl.constexpr(len(FloatColumn)),
    tl.constexpr(len(IntColumn)),
    tl.constexpr(COUNT_MAX),
)
TEMPERATURE, TOP_P, MIN_P = (
    tl.constexpr(int(each)) for each in (FloatColumn.TEMPERATURE, FloatColumn.TOP_P, FloatColumn.MIN_P)
)
_REPETITION, _PRESENCE = tl.constexpr(int(FloatColumn.REPETITION)), tl.constexpr(int(FloatColumn.PRESENCE))
_FREQUENCY = tl.constexpr(int(FloatColumn.FREQUENCY))
SEED, TOP_K, COUNT_ROW = (tl.constexpr(int(each)) for each in (IntColumn.SEED, IntColumn.TOP_K, IntColumn.COUNT_ROW))
_MIN_TOKENS, _BIASES = tl.constexpr(int(IntColumn.MIN_TOKENS)), tl.constexpr(int(IntColumn.BIASES))
_MASKED = tl.constexpr(int(IntColumn.MASKED))

_COLDEST = tl.constexpr(TEMPERATURE_LEAST)
_ENTRIES = tl.constexpr(128)
"""Biases that are searched at once."""


@triton.jit  # type: ignore[untyped-decorator]
def load_float(numbers, line, column: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(numbers + line * _NUMBERS + column)


@triton.jit  # type: ignore[untyped-decorator]
def load_int(integers, line, column: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(integers + line * _INTEGERS + column)


@triton.jit  # type: ignore[untyped-decorator]
def factor_of(temperature):  # type: ignore[no-untyped-def]
    """Return the factor with which exp2((logit - largest) * factor) is a token's weight."""
    return LOG2_E / tl.maximum(temperature, _COLDEST)


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(values, largest, factor):  # type: ignore[no-untyped-def]
    """Return weights relative to the largest logit; all are 0 if that is minus infinity."""
    return tl.exp2((values - tl.where(largest == NEGATIVE_INFINITY, 0.0, largest)) * factor)


@triton.jit  # type: ignore[untyped-decorator]
def adjusted_logits(raw, token, first, end, line, index, tables, vocab):  # type: ignore[no-untyped-def]
    """Return logits after bias, mask of min_tokens, and penalties, in float32.

    Args:
        raw: float32, minus infinity after the end of the vocabulary.
        token: the token ids, first <= id < end.
        tables: those of SamplingLines, and the room for biases and for masked tokens.
    """
    numbers, integers, bias_tokens, bias, masked, counts, bias_room, masked_room = tables
    values = raw
    biases = load_int(integers, line, _BIASES).to(tl.int32)
    if biases > 0:
        own_tokens, own_bias = bias_tokens + line * bias_room, bias + line * bias_room
        low, high = _entries(own_tokens, biases, first, end)
        for entry in range(low, high):
            values = tl.where(token == tl.load(own_tokens + entry), values + tl.load(own_bias + entry), values)
    if index < load_int(integers, line, _MIN_TOKENS):
        for entry in range(load_int(integers, line, _MASKED).to(tl.int32)):
            values = tl.where(token == tl.load(masked + line * masked_room + entry), NEGATIVE_INFINITY, values)
    count_row = load_int(integers, line, COUNT_ROW) - 1
    if count_row >= 0:
        known = tl.load(counts + count_row * vocab + token, mask=token < vocab, other=0).to(tl.int32)
        count = known & LARGEST_COUNT
        repetition = load_float(numbers, line, _REPETITION)
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where(known != 0, repeated, values)
        values -= tl.where(count > 0, load_float(numbers, line, _PRESENCE), 0.0)
        values -= load_float(numbers, line, _FREQUENCY) * count.to(tl.float32)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _entries(own_tokens, biases, first, end):  # type: ignore[no-untyped-def]
    """Return the range of a line's biases, sorted by token, that concern tokens first <= id < end."""
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32)
    for begin in range(0, biases, _ENTRIES):
        entry = begin + tl.arange(0, _ENTRIES)
        tokens = tl.load(own_tokens + entry, mask=entry < biases, other=(1 << 31) - 1)
        low += tl.sum((tokens < first).to(tl.int32))
        high += tl.sum((tokens < end).to(tl.int32))
    return low, high
