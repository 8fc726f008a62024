"""Sampling on a GPU: three Triton launches for all rows of a step. The host reads no results between them.

Meaning and order of effects are those of SamplingParams (core/domain/request.py): bias, mask of min_tokens, penalties,
temperature, top_k, top_p, min_p. The log probability is that of the raw logits. In plain PyTorch,
sampling_reference.py defines the result. All state of a request is on the device (sampling_lines.py), and grids depend
only on the shape of the logits, so the launches can be captured in a CUDA graph.

    weigh_splits   a program per split of a row: its largest adjusted logit, the sum of its weights, and the same for
                   the raw logits                                                       reads the logits once
    cut_rows       a program per row: if top_k, top_p or min_p cuts, the floor under the kept logits and the weights
                   of the splits above it (sampling_floor.py); otherwise nothing
    draw_rows      a program per row: finds the split in which the cumulated weight exceeds u times the total, then the
                   token in it; counts the token and stores it as the next input        reads one split of each row

A token is drawn by inverse transform sampling. The number u in [0, 1) is from Philox4x32-10 of the request's seed and
the token's index. The token is the first one, in order of ids, whose cumulated weight exceeds u times the total. The
Gumbel maximum would draw from the same distribution in one pass. But it needs a Philox number per token of the
vocabulary instead of one per row, and gives a seed another meaning. With this method GPUs and CPUs draw the same tokens
up to rounding.

Precision: a weight is float32, with an error of about 2^-23 of the largest one. Weights are summed in float32 within a
split, and in float64 over splits and along the split that is searched. So cumulated probabilities, and the fraction at
which top_p cuts, have an error of about 1e-6. Greedy rows and the floors of top_k and min_p are exact. Adjusted logits
have the bits of PyTorch's operations, equal ones are kept or cut together, and the first of the largest is chosen.

A row has the same bits alone and among others: its splits depend only on the vocabulary, and all sums have a fixed
order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.contract.sampling_lines import SamplingLines, SamplingTables
from orca.kernels.gpu.sampling_floor import cut_rows
from orca.kernels.gpu.sampling_row import (
    COUNT_ROW,
    LARGEST_COUNT,
    LOG2_E,
    NEGATIVE_INFINITY,
    PARTS,
    SEED,
    TEMPERATURE,
    adjusted_logits,
    factor_of,
    load_float,
    load_int,
    weights_of,
)
from orca.kernels.gpu.torch_operator import operator

SPLIT = 2048
"""Tokens per program: a row of 128,256 tokens is 63 programs, and 16 rows fill the largest GPU several times."""


def sample(
    logits: Tensor, lines: Tensor, indices: Tensor, state: SamplingLines, tokens: Tensor, logprobs: Tensor
) -> None:
    """Draw one token for each row, count it, and store it in `state.last_tokens`.

    Args:
        logits: [rows, vocab], contiguous, of any float dtype; raw; not changed.
        lines: [rows] int32, the line of each row, each at most once; rows with -1 are skipped.
        indices: [rows] int64, the number of tokens that the request has already.
        tokens: [rows] int64, written.
        logprobs: [rows] float32, written: log_softmax of the raw logits at the token.
    """
    _sample(logits, lines, indices, *state.tables, state.last_tokens, tokens, logprobs)


@operator("counts", "last_tokens", "tokens", "logprobs")
def _sample(
    logits: Tensor,
    lines: Tensor,
    indices: Tensor,
    numbers: Tensor,
    integers: Tensor,
    bias_tokens: Tensor,
    bias: Tensor,
    masked: Tensor,
    counts: Tensor,
    last_tokens: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    assert tokens.shape == logprobs.shape == lines.shape
    tables = SamplingTables(numbers, integers, bias_tokens, bias, masked, counts)
    parts, floors = weigh_and_cut(logits, lines, indices, tables)
    _launch("draw", logits, lines, indices, tables, parts, floors, tokens, logprobs, last_tokens)


def weigh_and_cut(logits: Tensor, lines: Tensor, indices: Tensor, tables: SamplingTables) -> tuple[Tensor, Tensor]:
    """Compute the weights and floors that tokens are drawn with. Args: those of `sample`.

    Returns: [rows, PARTS, splits] float32 (sampling_row.py), and [rows] float32: the floor under the adjusted logits
        that each row keeps; minus infinity if the temperature is 0.
    """
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    assert vocab == tables.counts.shape[1]
    assert lines.shape == indices.shape == (rows,)
    parts = logits.new_empty(rows, PARTS.value, triton.cdiv(vocab, SPLIT), dtype=torch.float32)
    floors = logits.new_empty(rows, dtype=torch.float32)
    _launch("weigh", logits, lines, indices, tables, parts)
    _launch("cut", logits, lines, indices, tables, parts, floors)
    return parts, floors


def _launch(name: str, logits: Tensor, lines: Tensor, indices: Tensor, tables: SamplingTables, *own: Tensor) -> None:
    """Launch a kernel. Args: own: arguments of this kernel alone, between the tables and the sizes."""
    rows, vocab = logits.shape
    if not rows:
        return
    launch = LAUNCHES[name]
    sizes = (vocab, tables.bias.shape[1], tables.masked.shape[1])
    grid = (rows,) if launch.walks_splits else (rows, triton.cdiv(vocab, SPLIT))
    launch.kernel[grid](logits, lines, indices, *tables, *own, *sizes, **launch.constants(vocab), **launch.options)


@triton.jit  # type: ignore[untyped-decorator]
def weigh_splits(  # type: ignore[no-untyped-def]
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
    vocab,
    bias_room,
    masked_room,
    split: tl.constexpr,
):
    """Write the column of `parts` (sampling_row.PARTS) of one split of a row."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = tl.load(lines + row).to(tl.int64)
    if line < 0:
        return
    token = place * split + tl.arange(0, split)
    raw = tl.load(logits + row * vocab + token, mask=token < vocab, other=NEGATIVE_INFINITY).to(tl.float32)
    tables = (numbers, integers, bias_tokens, bias, masked, counts, bias_room, masked_room)
    first, index = place * split, tl.load(indices + row)
    values = adjusted_logits(raw, token, first, first + split, line, index, tables, vocab)
    splits = tl.cdiv(vocab, split)
    largest, raw_largest = tl.max(values), tl.max(raw)
    own = parts + row * PARTS * splits + place
    tl.store(own, largest)
    tl.store(own + splits, tl.sum(weights_of(values, largest, factor_of(load_float(numbers, line, TEMPERATURE)))))
    tl.store(own + 2 * splits, raw_largest)
    tl.store(own + 3 * splits, tl.sum(weights_of(raw, raw_largest, LOG2_E)))


@triton.jit  # type: ignore[untyped-decorator]
def draw_rows(  # type: ignore[no-untyped-def]
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
    tokens,
    logprobs,
    last_tokens,
    vocab,
    bias_room,
    masked_room,
    split: tl.constexpr,
    splits_block: tl.constexpr,
):
    """Draw the token of one row. splits_block: at least the number of splits."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + row).to(tl.int64)
    if line < 0:
        return
    splits, index = tl.cdiv(vocab, split), tl.load(indices + row)
    own, place = parts + row * PARTS * splits, tl.arange(0, splits_block)
    tops = tl.load(own + place, mask=place < splits, other=NEGATIVE_INFINITY)
    sums = tl.load(own + splits + place, mask=place < splits, other=0.0)
    largest, floor = tl.max(tops), tl.load(floors + row)
    factor = factor_of(load_float(numbers, line, TEMPERATURE))
    part = weights_of(tops, largest, factor).to(tl.float64)
    weights = part * sums
    u = uniform(load_int(integers, line, SEED), index)
    if load_float(numbers, line, TEMPERATURE) <= 0:
        # Only the largest logits reach this floor, and the first of them is the first token with any weight.
        floor = largest
        weights = tl.where((tops == largest) & (place < splits), 1.0, 0.0).to(tl.float64)
        u = u * 0.0
    target = u * tl.sum(weights)
    chosen = _first_above(weights, target, place)
    # The target in the split's own scale, to which its weights are relative; 0 only if no token is allowed.
    scale = tl.maximum(tl.sum(tl.where(place == chosen, part, 0.0)), 1e-300)
    own_target = (target - tl.sum(tl.where(place < chosen, weights, 0.0))) / scale
    token = chosen * split + tl.arange(0, split)
    raw = tl.load(logits + row * vocab + token, mask=token < vocab, other=NEGATIVE_INFINITY).to(tl.float32)
    tables = (numbers, integers, bias_tokens, bias, masked, counts, bias_room, masked_room)
    first = chosen * split
    values = adjusted_logits(raw, token, first, first + split, line, index, tables, vocab)
    top = tl.max(values)
    kept = tl.where((values >= floor) & (token < vocab), weights_of(values, top, factor), 0.0).to(tl.float64)
    drawn = first + _first_above(kept, own_target, tl.arange(0, split))
    tl.store(tokens + row, drawn.to(tl.int64))
    tl.store(last_tokens + line, drawn.to(tl.int64))
    tl.store(logprobs + row, _logprob(logits + row * vocab + drawn, own + 2 * splits, place, splits))
    count_row = load_int(integers, line, COUNT_ROW) - 1
    if count_row >= 0:
        at = counts + count_row * vocab + drawn
        known = tl.load(at).to(tl.int32)
        tl.store(at, (known + ((known & LARGEST_COUNT) < LARGEST_COUNT).to(tl.int32)).to(tl.int16))


@triton.jit  # type: ignore[untyped-decorator]
def _first_above(weights, target, place):  # type: ignore[no-untyped-def]
    """Return the first index with a weight whose cumulated weight exceeds the target; 0 if there is no weight at all.

    The sums of a scan need not increase: one may exceed the target at an index without weight. And rounding may raise
    the target to the total itself: then the result is the last index with a weight.
    """
    is_above = (tl.cumsum(weights, axis=0) > target) & (weights > 0)
    found = tl.min(tl.where(is_above, place, weights.shape[0]))
    last = tl.max(tl.where(weights > 0, place, 0))
    return tl.where(found < weights.shape[0], found, last)


@triton.jit  # type: ignore[untyped-decorator]
def _logprob(at, raw_parts, place, splits):  # type: ignore[no-untyped-def]
    """Return the log probability of the raw logit at an address, from the splits' largest logits and weights."""
    tops = tl.load(raw_parts + place, mask=place < splits, other=NEGATIVE_INFINITY)
    sums = tl.load(raw_parts + splits + place, mask=place < splits, other=0.0)
    largest = tl.max(tops)
    total = tl.sum(weights_of(tops, largest, LOG2_E).to(tl.float64) * sums)
    return tl.load(at).to(tl.float32) - largest - tl.log(total).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def uniform(seed, index):  # type: ignore[no-untyped-def]
    """Return a float64 in [0, 1): the first 53 bits of Philox4x32-10 with the seed as key and the index as counter."""
    zero = (index * 0).to(tl.uint32)
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    words = tl.philox(seed, low, high, zero, zero)
    bits = (words[0].to(tl.uint64) << 32) | words[1].to(tl.uint64)
    return (bits >> 11).to(tl.float64) * (1.0 / (1 << 53))


class Launch(NamedTuple):
    """A kernel and its compiler options."""

    kernel: Any
    warps: int
    walks_splits: bool = True  # one program per row; otherwise one per split

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "enable_fp_fusion": False}

    def constants(self, vocab: int) -> dict[str, int]:
        block = {"splits_block": triton.next_power_of_2(triton.cdiv(vocab, SPLIT))} if self.walks_splits else {}
        return {"split": SPLIT} | block


LAUNCHES = {
    "weigh": Launch(weigh_splits, 4, walks_splits=False),
    "cut": Launch(cut_rows, 16),
    "draw": Launch(draw_rows, 4),
}
