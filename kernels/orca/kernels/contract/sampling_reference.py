"""A reference of sampling, row by row in plain PyTorch and float64. gpu/sampling.py is tested against it.

Bias, mask of min_tokens and penalties are computed in float32, as on the device; each of them rounds a value once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from orca.kernels.contract.sampling_lines import COUNT_MAX, TEMPERATURE_LEAST, FloatColumn, IntColumn, SamplingLines

_WORD = (1 << 32) - 1


class ReferenceDraw(NamedTuple):
    """The result for one row."""

    token: int
    logprob: float
    u: float  # the random number; 0 for a greedy row
    kept: Tensor  # [vocab] bool: tokens that are not cut; one token for a greedy row
    cumulated: Tensor  # [vocab] float64: probabilities of kept tokens, summed in order of ids; the last one is 1
    edge: float  # distance of the nearest other cut to top_p, as a fraction of the weight; 1 without top_p

    def allows(self, token: int, margin: float) -> bool:
        """Return whether cumulated probabilities with an error up to the margin could have drawn this token.

        The error may also move the floor, which changes the probabilities of kept tokens by a few times the margin.
        """
        is_at_edge = self.edge < margin
        low = float(self.cumulated[token - 1]) if token else 0.0
        high, allowance = float(self.cumulated[token]), 4 * margin if is_at_edge else margin
        return (is_at_edge or high > low) and low - allowance <= self.u <= high + allowance


def sample_reference(
    logits: Tensor, lines: Tensor, indices: Tensor, state: SamplingLines
) -> list[ReferenceDraw | None]:
    """Draw one token for each row, count it and store it in `state`; None for rows with line -1. Args: as `sample`."""
    return [
        None if line < 0 else _sample_row(row.float(), line, index, state)
        for row, line, index in zip(logits, lines.tolist(), indices.tolist(), strict=True)
    ]


def _sample_row(logits: Tensor, line: int, index: int, state: SamplingLines) -> ReferenceDraw:
    numbers, integers = state.numbers[line].tolist(), state.integers[line].tolist()
    values = adjusted_logits(logits, line, index, state)
    temperature = numbers[FloatColumn.TEMPERATURE]
    scaled = values.double() / max(temperature, TEMPERATURE_LEAST)
    scaled -= scaled.max()
    edge = 1.0
    if temperature <= 0:
        kept, u = torch.zeros_like(scaled, dtype=torch.bool), 0.0
        kept[values.argmax()] = True
    else:
        floor, edge = _floor(scaled, integers[IntColumn.TOP_K], numbers[FloatColumn.TOP_P], numbers[FloatColumn.MIN_P])
        kept, u = scaled >= floor, uniform(integers[IntColumn.SEED], index)
    weights = torch.where(kept, scaled.exp(), 0.0)
    cumulated = (weights / weights.sum()).cumsum(0)
    cumulated /= cumulated[-1].clone()
    token = int(torch.searchsorted(cumulated, u, right=True))
    state.last_tokens[line] = token
    count_row = integers[IntColumn.COUNT_ROW] - 1
    if count_row >= 0 and int(state.counts[count_row, token]) & COUNT_MAX < COUNT_MAX:
        state.counts[count_row, token] += 1
    return ReferenceDraw(token, float(logits.double().log_softmax(0)[token]), u, kept, cumulated, edge)


def adjusted_logits(logits: Tensor, line: int, index: int, state: SamplingLines) -> Tensor:
    """Return a row's logits [vocab] float32 after bias, mask of min_tokens, and penalties."""
    numbers, integers = state.numbers[line], state.integers[line].tolist()
    values = logits.clone()
    biases, masked = integers[IntColumn.BIASES], integers[IntColumn.MASKED]
    values[state.bias_tokens[line, :biases].long()] += state.bias[line, :biases]
    if index < integers[IntColumn.MIN_TOKENS]:
        values[state.masked[line, :masked].long()] = float("-inf")
    count_row = integers[IntColumn.COUNT_ROW] - 1
    if count_row >= 0:
        known = state.counts[count_row].int()
        count = (known & COUNT_MAX).float()
        repetition = numbers[FloatColumn.REPETITION]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(known != 0, repeated, values)
        values = values - numbers[FloatColumn.PRESENCE] * (count > 0) - numbers[FloatColumn.FREQUENCY] * count
    return values


def _floor(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, float]:
    """Return the smallest kept value of `scaled`, and `ReferenceDraw.edge`.

    Args: scaled: [vocab] float64; the largest is 0.
    """
    floor, edge = scaled.new_tensor(float("-inf")), 1.0
    ordered = scaled.sort(descending=True).values
    if 0 < top_k < len(scaled):
        floor = ordered[top_k - 1]
    if top_p < 1:
        weights = ordered.exp().masked_fill(ordered < floor, 0.0)
        shares = weights.cumsum(0) / weights.sum()
        last = min(int((shares < top_p).sum()), len(shares) - 1)
        floor = torch.maximum(ordered[last], floor)
        # Equal logits are kept or cut together, so the floor can only be at the last of them.
        is_last = torch.cat((ordered[1:] < ordered[:-1], ordered.new_ones(1, dtype=torch.bool)))
        edge = float((shares[is_last] - top_p).abs().min())
    if min_p > 0:
        floor = torch.maximum(floor, scaled.new_tensor(min_p).log())
    return floor, edge


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1): the first 53 bits of Philox4x32-10 (Salmon et al., SC 2011) for key seed and counter
    index."""
    c0, c1, c2, c3 = index & _WORD, index >> 32, 0, 0
    k0, k1 = seed & _WORD, seed >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return float((c0 << 32 | c1) >> 11) * 2.0**-53
