"""What a line's settings (sampling_lines.py) make of a row's logits, on the device.

Every kernel that needs a changed logit computes it anew, and must get the same bits as the others: a floor that one has
found is compared with what the next one computes. So kernels are launched without fused multiplications, which a
compiler places here and there, and divide as IEEE 754 has it. They are PyTorch's bits, too.
"""

import triton
import triton.language as tl

from orca.kernels.contract.sampling_lines import COUNT_MAX, TEMPERATURE_LEAST, Integer, Number

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
PARTS = tl.constexpr(4)
"""Of a row, [PARTS, splits] float32: the largest changed logit of each split and the sum of weights relative to it; the
same of the raw logits at temperature 1."""

_NUMBERS, _INTEGERS, LARGEST_COUNT = tl.constexpr(len(Number)), tl.constexpr(len(Integer)), tl.constexpr(COUNT_MAX)
TEMPERATURE, TOP_P, MIN_P = (tl.constexpr(int(each)) for each in (Number.TEMPERATURE, Number.TOP_P, Number.MIN_P))
_REPETITION, _PRESENCE = tl.constexpr(int(Number.REPETITION)), tl.constexpr(int(Number.PRESENCE))
_FREQUENCY = tl.constexpr(int(Number.FREQUENCY))
SEED, TOP_K, COUNT_ROW = (tl.constexpr(int(each)) for each in (Integer.SEED, Integer.TOP_K, Integer.COUNT_ROW))
_MIN_TOKENS, _BIASES = tl.constexpr(int(Integer.MIN_TOKENS)), tl.constexpr(int(Integer.BIASES))
_MASKED = tl.constexpr(int(Integer.MASKED))

_COLDEST = tl.constexpr(TEMPERATURE_LEAST)
_ENTRIES = tl.constexpr(128)
"""Biases that are looked through at once."""


@triton.jit  # type: ignore[untyped-decorator]
def number(numbers, line, column: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(numbers + line * _NUMBERS + column)


@triton.jit  # type: ignore[untyped-decorator]
def integer(integers, line, column: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(integers + line * _INTEGERS + column)


@triton.jit  # type: ignore[untyped-decorator]
def factor_of(temperature):  # type: ignore[no-untyped-def]
    """exp2((logit - largest) * factor) is a token's weight."""
    return LOG2_E / tl.maximum(temperature, _COLDEST)


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(values, largest, factor):  # type: ignore[no-untyped-def]
    """Weights relative to the largest; where that is minus infinity, none has any."""
    return tl.exp2((values - tl.where(largest == NOTHING, 0.0, largest)) * factor)


@triton.jit  # type: ignore[untyped-decorator]
def values_of(raw, token, first, end, line, index, tables, vocab):  # type: ignore[no-untyped-def]
    """Logits after bias, mask of min_tokens, and penalties, in float32.

    Args:
        raw: float32, minus infinity behind the vocabulary.
        token: their ids, first <= id < end.
        tables: of SamplingLines, with the room for biases and for masked tokens.
    """
    numbers, integers, bias_tokens, bias, masked, counts, bias_room, masked_room = tables
    values = raw
    biases = integer(integers, line, _BIASES).to(tl.int32)
    if biases > 0:
        own_tokens, own_bias = bias_tokens + line * bias_room, bias + line * bias_room
        low, high = _entries(own_tokens, biases, first, end)
        for entry in range(low, high):
            values = tl.where(token == tl.load(own_tokens + entry), values + tl.load(own_bias + entry), values)
    if index < integer(integers, line, _MIN_TOKENS):
        for entry in range(integer(integers, line, _MASKED).to(tl.int32)):
            values = tl.where(token == tl.load(masked + line * masked_room + entry), NOTHING, values)
    count_row = integer(integers, line, COUNT_ROW) - 1
    if count_row >= 0:
        known = tl.load(counts + count_row * vocab + token, mask=token < vocab, other=0).to(tl.int32)
        count = known & LARGEST_COUNT
        repetition = number(numbers, line, _REPETITION)
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where(known != 0, repeated, values)
        values -= tl.where(count > 0, number(numbers, line, _PRESENCE), 0.0)
        values -= number(numbers, line, _FREQUENCY) * count.to(tl.float32)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _entries(own_tokens, biases, first, end):  # type: ignore[no-untyped-def]
    """Where the biases of tokens from first to end begin and end among those of a line, which rise."""
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32)
    for begin in range(0, biases, _ENTRIES):
        entry = begin + tl.arange(0, _ENTRIES)
        tokens = tl.load(own_tokens + entry, mask=entry < biases, other=(1 << 31) - 1)
        low += tl.sum((tokens < first).to(tl.int32))
        high += tl.sum((tokens < end).to(tl.int32))
    return low, high
