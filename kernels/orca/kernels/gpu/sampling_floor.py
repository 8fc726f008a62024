"""Device code that finds the floor under the logits that top_k, top_p and min_p keep, with one program per row.

Three settings cut logits. The first, top_k, keeps the logits that reach the k-th largest. Of these, top_p keeps the
fewest whose weights reach the fraction top_p of all their weights. The last, min_p, keeps those whose weight reaches
the fraction min_p of the largest weight. Equal logits are kept or cut together, so each cut is a floor. The floors of
top_k and top_p are the largest float32 t for which

    Q(t) = sum of q(v) over all logits v >= t    reaches a target, with q = 1 for top_k and q = weight for top_p.

The search keeps a low t that reaches the target and a high t that does not. Each pass over the row computes Q at eight
places between them. They are evenly spaced by value, and in every other pass evenly spaced among the float32 numbers:
there are at most 2^32 of them for any logits. The search ends when no two different logits are between low and high:
usually after three to seven passes, at worst after twenty-two. A split whose largest logit is below the low t is not
read. The sums of a place have a fixed order, in which more logits never sum to less.
"""

import triton
import triton.language as tl

from orca.kernels.gpu.sampling_row import (
    MIN_P,
    NEGATIVE_INFINITY,
    PARTS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    adjusted_logits,
    factor_of,
    load_float,
    load_int,
    weights_of,
)

_PLACES = tl.constexpr(8)
_GROUP = tl.constexpr(2)
"""Splits that a program reads at once."""
_RUN = tl.constexpr(8)
"""Tokens that one thread reads and sums."""
_ABOVE_ALL = tl.constexpr(float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def cut_rows(  # type: ignore[no-untyped-def]
    logits,
    lines,
    indices,
    numbers,
    integers,
    bias_tokens,
    bias,
    masked,
    counts,
    parts,
    floors,
    vocab,
    bias_room,
    masked_room,
    split: tl.constexpr,
    splits_block: tl.constexpr,
):
    """Write the floor of each row, and for rows that are cut the weights above the floor into `parts` (sampling.py).

    splits_block: at least the number of splits.
    """
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + row).to(tl.int64)
    if line < 0:
        return
    temperature, splits = load_float(numbers, line, TEMPERATURE), tl.cdiv(vocab, split)
    top_k, top_p, min_p = (
        load_int(integers, line, TOP_K),
        load_float(numbers, line, TOP_P),
        load_float(numbers, line, MIN_P),
    )
    has_top_k = (top_k > 0) & (top_k < vocab)
    own, place = parts + row * PARTS * splits, tl.arange(0, splits_block)
    tops = tl.load(own + place, mask=place < splits, other=NEGATIVE_INFINITY)
    largest, factor = tl.max(tops), factor_of(temperature)
    is_cut = has_top_k | (top_p < 1) | (min_p > 0)
    if (temperature <= 0) | (largest == NEGATIVE_INFINITY) | (is_cut == 0):
        tl.store(floors + row, NEGATIVE_INFINITY)
        return
    state = (logits + row * vocab, line, tl.load(indices + row), own, largest, factor)
    tables = (numbers, integers, bias_tokens, bias, masked, counts, bias_room, masked_room)
    floor = tl.full((), NEGATIVE_INFINITY, tl.float32)
    if has_top_k:
        # A guess below most of the splits' largest logits, for a search that has no better lower end.
        spread = largest - tl.min(tl.where(tops > NEGATIVE_INFINITY, tops, largest))
        guess = largest - tl.maximum(2.0 * spread, 8.0)
        floor = _search(state, tables, _kth(tops, top_k), guess, top_k.to(tl.float64), vocab, True, split)
    if top_p < 1:
        if has_top_k:
            total = _weigh(state, tables, floor, vocab, split)
        else:
            sums = tl.load(own + splits + place, mask=place < splits, other=0.0)
            total = tl.sum(weights_of(tops, largest, factor).to(tl.float64) * sums)
        low = tl.maximum(floor, _top_p_least(largest, temperature, top_p, vocab))
        floor = _search(state, tables, low, low, top_p.to(tl.float64) * total, vocab, False, split)
    if min_p > 0:
        floor = tl.maximum(floor, _min_p_floor(largest, temperature, min_p))
    tl.store(floors + row, floor)
    _weigh(state, tables, floor, vocab, split)


@triton.jit  # type: ignore[untyped-decorator]
def _kth(tops, k):  # type: ignore[no-untyped-def]
    """Return the k-th largest of the splits' largest logits, a lower bound of the k-th largest logit.

    The result is minus infinity if there are fewer splits.
    """
    reaching = tl.sum((tops[None, :] >= tops[:, None]).to(tl.int32), axis=1)
    return tl.max(tl.where(reaching >= k, tops, NEGATIVE_INFINITY))


@triton.jit  # type: ignore[untyped-decorator]
def _top_p_least(largest, temperature, top_p, vocab):  # type: ignore[no-untyped-def]
    """Return a bound: a whole vocabulary of logits below it weighs less than 1 - top_p of the largest weight alone.

    It includes an allowance for rounding.
    """
    reach = tl.log(vocab.to(tl.float64) / (1.0 - top_p.to(tl.float64))) + 0.01
    return (largest - temperature * reach - 1e-6 * tl.abs(largest)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _min_p_floor(largest, temperature, min_p):  # type: ignore[no-untyped-def]
    """Return the smallest float32 that is not below largest + temperature * log(min_p)."""
    exact = largest.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
    rounded = exact.to(tl.float32)
    return tl.where(rounded < exact, _value(_key(rounded) + 1), rounded)


@triton.jit  # type: ignore[untyped-decorator]
def _key(value):  # type: ignore[no-untyped-def]
    """Return the rank of a float32 among all float32 numbers."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _value(key):  # type: ignore[no-untyped-def]
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _search(state, tables, low_value, guess, wanted, vocab, is_of_tokens: tl.constexpr, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a floor that keeps the same logits as the largest t with Q(t) >= wanted.

    Args:
        low_value: a value whose Q reaches `wanted`.
        guess: where the search by value begins if `low_value` is minus infinity.
        is_of_tokens: Q counts tokens; otherwise it sums their weights.
    """
    low, high = _key(low_value), _key(state[4]) + 1
    is_by_value = tl.full((), 1, tl.int32)
    while high - low > 1:
        places = _places(low, high, guess, is_by_value)
        sums, least, most = _above(state, tables, _value(places), _value(low), _value(high), vocab, is_of_tokens, split)
        reaches = sums >= wanted
        if least < most:
            low = tl.maximum(tl.max(tl.where(reaches, places, low)), _key(least))
            high = tl.minimum(tl.min(tl.where(reaches, high, places)), _key(most) + 1)
        else:
            high = low
        is_by_value = 1 - is_by_value
    return _value(low)


@triton.jit  # type: ignore[untyped-decorator]
def _places(low, high, guess, is_by_value):  # type: ignore[no-untyped-def]
    """Return keys between low and high: evenly spaced by value, or among the float32 numbers."""
    step = tl.arange(0, _PLACES) + 1
    by_number = low + (high - low) * step // (_PLACES + 1)
    bottom, top = _value(low), _value(high)
    bottom = tl.where(bottom == NEGATIVE_INFINITY, guess, bottom)
    by_value = _key(bottom + (top - bottom) * (step.to(tl.float32) / (_PLACES + 1)))
    by_value = tl.minimum(tl.maximum(by_value, low), high)
    return tl.where(is_by_value != 0, by_value, by_number)


@triton.jit  # type: ignore[untyped-decorator]
def _above(state, tables, places, low, high, vocab, is_of_tokens: tl.constexpr, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make one pass. Returns: Q at each place, the smallest logit >= low, and the largest logit < high.

    No place may be below low.
    """
    _, _, _, own, largest, factor = state
    splits = tl.cdiv(vocab, split)
    lanes: tl.constexpr = split // _RUN
    sums = tl.zeros((_PLACES, _GROUP, lanes), tl.float32)
    least = tl.full((_GROUP, lanes), _ABOVE_ALL, tl.float32)
    most = tl.full((_GROUP, lanes), NEGATIVE_INFINITY, tl.float32)
    each = tl.arange(0, _PLACES)
    lower = (_at(places, 0), _at(places, 1), _at(places, 2), _at(places, 3))
    levels = (lower, (_at(places, 4), _at(places, 5), _at(places, 6), _at(places, 7)))
    for group in range(0, splits, _GROUP):
        tops = _tops(own, group, splits)
        if tl.max(tops) >= low:
            values = _group_values(state, tables, group, tops, low, vocab, split)
            amounts = tl.full(values.shape, 1.0, tl.float32) if is_of_tokens else weights_of(values, largest, factor)
            for place in tl.static_range(_PLACES):
                # One place at a time stays in the registers of a thread; a tile with all places would be distributed.
                level = levels[place // 4][place % 4]
                above = tl.sum(tl.where(values >= level, amounts, 0.0), axis=2)
                sums += tl.where((each == place)[:, None, None], above[None, :, :], 0.0)
            least = tl.minimum(least, tl.min(tl.where(values >= low, values, _ABOVE_ALL), axis=2))
            most = tl.maximum(most, tl.max(tl.where(values < high, values, NEGATIVE_INFINITY), axis=2))
    of_places = tl.reshape(sums.to(tl.float64), (_PLACES, _GROUP * lanes))
    return tl.sum(of_places, axis=1), tl.min(least), tl.max(most)


@triton.jit  # type: ignore[untyped-decorator]
def _at(values, place: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.min(tl.where(tl.arange(0, values.shape[0]) == place, values, _ABOVE_ALL))


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(state, tables, floor, vocab, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the weights of each split above the floor, relative to the split's largest logit as before.

    Returns: their total, relative to the row's largest logit.
    """
    _, _, _, own, largest, factor = state
    splits = tl.cdiv(vocab, split)
    total = tl.full((), 0.0, tl.float64)
    for group in range(0, splits, _GROUP):
        tops = _tops(own, group, splits)
        sums = tl.zeros((_GROUP,), tl.float32)
        if tl.max(tops) >= floor:
            values = _group_values(state, tables, group, tops, floor, vocab, split)
            kept = tl.where(values >= floor, weights_of(values, tops[:, None, None], factor), 0.0)
            sums = tl.sum(tl.sum(kept, axis=2), axis=1)
        place = group + tl.arange(0, _GROUP)
        tl.store(own + splits + place, sums, mask=place < splits)
        total += tl.sum(weights_of(tops, largest, factor).to(tl.float64) * sums)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _tops(own, group, splits):  # type: ignore[no-untyped-def]
    place = group + tl.arange(0, _GROUP)
    return tl.load(own + place, mask=place < splits, other=NEGATIVE_INFINITY)


@triton.jit  # type: ignore[untyped-decorator]
def _group_values(state, tables, group, tops, low, vocab, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return adjusted logits [splits of the group, lanes, run].

    Splits in which no logit reaches `low` give minus infinity.
    """
    row_logits, line, index, _, _, _ = state
    lane, run = tl.arange(0, split // _RUN), tl.arange(0, _RUN)
    in_split = lane[None, :, None] * _RUN + run[None, None, :]
    token = (group + tl.arange(0, _GROUP))[:, None, None] * split + in_split
    is_read = (token < vocab) & (tops >= low)[:, None, None]
    raw = tl.load(row_logits + token, mask=is_read, other=NEGATIVE_INFINITY).to(tl.float32)
    return adjusted_logits(raw, token, group * split, (group + _GROUP) * split, line, index, tables, vocab)
