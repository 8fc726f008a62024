"""The floor under the logits that top_k, top_p and min_p keep, on the device: one program for each row.

top_k keeps the logits that reach the k-th largest; top_p, of these, the fewest whose weights reach its share of theirs;
min_p those whose weight reaches its part of the largest. Equal logits stand or fall together, so each is a floor, and
the first two are the largest float32 t for which

    Q(t) = sum of q(v) over all logits v >= t    reaches what is wanted, with q = 1 for top_k, the weight for top_p.

The search keeps a low t that reaches it and a high one that does not, and computes Q at eight places between them in
each pass over the row: places that lie evenly among the values, and in every other pass evenly among the float32
numbers, of which there are at most 2^32 whatever the logits are. It ends when no two different logits lie between low
and high: after three to seven passes, as a rule, and twenty-two at worst. A split whose largest logit is below the low
t is not read. Sums of a place have one order, in which more logits never sum to less.
"""

import triton
import triton.language as tl

from orca.kernels.gpu.sampling_row import (
    MIN_P,
    NOTHING,
    PARTS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    factor_of,
    integer,
    number,
    values_of,
    weights_of,
)

_PLACES = tl.constexpr(8)
_GROUP = tl.constexpr(2)
"""Splits that a program reads at once."""
_RUN = tl.constexpr(8)
"""Tokens that a thread reads and sums by itself."""
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
    """Writes the floor of each row, and into `parts` (sampling.py) the weights above it of those that are cut.

    splits_block: at least the number of splits.
    """
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + row).to(tl.int64)
    if line < 0:
        return
    temperature, splits = number(numbers, line, TEMPERATURE), tl.cdiv(vocab, split)
    top_k, top_p, min_p = integer(integers, line, TOP_K), number(numbers, line, TOP_P), number(numbers, line, MIN_P)
    has_top_k = (top_k > 0) & (top_k < vocab)
    own, place = parts + row * PARTS * splits, tl.arange(0, splits_block)
    tops = tl.load(own + place, mask=place < splits, other=NOTHING)
    largest, factor = tl.max(tops), factor_of(temperature)
    is_cut = has_top_k | (top_p < 1) | (min_p > 0)
    if (temperature <= 0) | (largest == NOTHING) | (is_cut == 0):
        tl.store(floors + row, NOTHING)
        return
    state = (logits + row * vocab, line, tl.load(indices + row), own, largest, factor)
    tables = (numbers, integers, bias_tokens, bias, masked, counts, bias_room, masked_room)
    floor = tl.full((), NOTHING, tl.float32)
    if has_top_k:
        # Below most of the splits' largest: only where a search begins that has no better lower end.
        spread = largest - tl.min(tl.where(tops > NOTHING, tops, largest))
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
    """The k-th largest of the splits' largest logits, which the k-th largest logit reaches; minus infinity if they are
    fewer."""
    reaching = tl.sum((tops[None, :] >= tops[:, None]).to(tl.int32), axis=1)
    return tl.max(tl.where(reaching >= k, tops, NOTHING))


@triton.jit  # type: ignore[untyped-decorator]
def _top_p_least(largest, temperature, top_p, vocab):  # type: ignore[no-untyped-def]
    """Logits below this have, all of a vocabulary together, less than 1 - top_p of the largest one's weight alone.

    The allowance is for rounding.
    """
    reach = tl.log(vocab.to(tl.float64) / (1.0 - top_p.to(tl.float64))) + 0.01
    return (largest - temperature * reach - 1e-6 * tl.abs(largest)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _min_p_floor(largest, temperature, min_p):  # type: ignore[no-untyped-def]
    """The least float32 that is not below largest + temperature * log(min_p)."""
    exact = largest.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
    rounded = exact.to(tl.float32)
    return tl.where(rounded < exact, _value(_key(rounded) + 1), rounded)


@triton.jit  # type: ignore[untyped-decorator]
def _key(value):  # type: ignore[no-untyped-def]
    """The place of a float32 among all of them."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _value(key):  # type: ignore[no-untyped-def]
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _search(state, tables, low_value, guess, wanted, vocab, is_of_tokens: tl.constexpr, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """A floor that keeps what the largest t with Q(t) >= wanted does.

    Args:
        low_value: reaches what is wanted.
        guess: where the search begins among values if that is minus infinity.
        is_of_tokens: Q counts tokens; else it sums their weights.
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
    """Keys from low to high: evenly among the values, or among the float32 numbers."""
    step = tl.arange(0, _PLACES) + 1
    by_number = low + (high - low) * step // (_PLACES + 1)
    bottom, top = _value(low), _value(high)
    bottom = tl.where(bottom == NOTHING, guess, bottom)
    by_value = _key(bottom + (top - bottom) * (step.to(tl.float32) / (_PLACES + 1)))
    by_value = tl.minimum(tl.maximum(by_value, low), high)
    return tl.where(is_by_value != 0, by_value, by_number)


@triton.jit  # type: ignore[untyped-decorator]
def _above(state, tables, places, low, high, vocab, is_of_tokens: tl.constexpr, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """One pass: Q at each of the places, none of which is below low; the least logit >= low, and the largest < high."""
    _, _, _, own, largest, factor = state
    splits = tl.cdiv(vocab, split)
    lanes: tl.constexpr = split // _RUN
    sums = tl.zeros((_PLACES, _GROUP, lanes), tl.float32)
    least = tl.full((_GROUP, lanes), _ABOVE_ALL, tl.float32)
    most = tl.full((_GROUP, lanes), NOTHING, tl.float32)
    each = tl.arange(0, _PLACES)
    lower = (_at(places, 0), _at(places, 1), _at(places, 2), _at(places, 3))
    levels = (lower, (_at(places, 4), _at(places, 5), _at(places, 6), _at(places, 7)))
    for group in range(0, splits, _GROUP):
        tops = _tops(own, group, splits)
        if tl.max(tops) >= low:
            values = _group_values(state, tables, group, tops, low, vocab, split)
            amounts = tl.full(values.shape, 1.0, tl.float32) if is_of_tokens else weights_of(values, largest, factor)
            for place in tl.static_range(_PLACES):
                # Of one place in the registers of a thread: a tile with all of them would be spread over threads.
                level = levels[place // 4][place % 4]
                above = tl.sum(tl.where(values >= level, amounts, 0.0), axis=2)
                sums += tl.where((each == place)[:, None, None], above[None, :, :], 0.0)
            least = tl.minimum(least, tl.min(tl.where(values >= low, values, _ABOVE_ALL), axis=2))
            most = tl.maximum(most, tl.max(tl.where(values < high, values, NOTHING), axis=2))
    of_places = tl.reshape(sums.to(tl.float64), (_PLACES, _GROUP * lanes))
    return tl.sum(of_places, axis=1), tl.min(least), tl.max(most)


@triton.jit  # type: ignore[untyped-decorator]
def _at(values, place: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.min(tl.where(tl.arange(0, values.shape[0]) == place, values, _ABOVE_ALL))


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(state, tables, floor, vocab, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the weights of each split that are above the floor, relative to its largest logit as before.

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
    return tl.load(own + place, mask=place < splits, other=NOTHING)


@triton.jit  # type: ignore[untyped-decorator]
def _group_values(state, tables, group, tops, low, vocab, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """[splits of the group, lanes, run] changed logits; minus infinity for those of splits that have none that reaches
    low."""
    row_logits, line, index, _, _, _ = state
    lane, run = tl.arange(0, split // _RUN), tl.arange(0, _RUN)
    in_split = lane[None, :, None] * _RUN + run[None, None, :]
    token = (group + tl.arange(0, _GROUP))[:, None, None] * split + in_split
    is_read = (token < vocab) & (tops >= low)[:, None, None]
    raw = tl.load(row_logits + token, mask=is_read, other=NOTHING).to(tl.float32)
    return values_of(raw, token, group * split, (group + _GROUP) * split, line, index, tables, vocab)
