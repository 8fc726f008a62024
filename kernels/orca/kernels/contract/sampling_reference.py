"""Sampling row by row in plain PyTorch and float64: the meaning that sampling.py is tested against.

Bias, mask of min_tokens and penalties are float32, as there; each value is rounded once for each of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from orca.kernels.contract.sampling_lines import COUNT_MAX, TEMPERATURE_LEAST, Integer, Number, SamplingLines

_WORD = (1 << 32) - 1


class Drawn(NamedTuple):
    """What came of a row."""

    token: int
    logprob: float
    u: float  # 0 of a greedy row
    kept: Tensor  # [vocab] bool: what is not cut; one token of a greedy row
    cumulated: Tensor  # [vocab] float64: probabilities of what is kept, summed in order of ids; the last one is 1
    edge: float  # how near to top_p the floor could have been another one, as a share of the weight; 1 without top_p

    def allows(self, token: int, margin: float) -> bool:
        """Whether a cumulated probability that is wrong by the margin could have drawn this token.

        A floor may then be another one, too, which moves the kept tokens' probabilities by a few times as much.
        """
        is_at_edge = self.edge < margin
        low = float(self.cumulated[token - 1]) if token else 0.0
        high, allowance = float(self.cumulated[token]), 4 * margin if is_at_edge else margin
        return (is_at_edge or high > low) and low - allowance <= self.u <= high + allowance


def sample_reference(logits: Tensor, lines: Tensor, indices: Tensor, state: SamplingLines) -> list[Drawn | None]:
    """One token for each row, None for those of line -1; counted and fed on in `state`. Args: as of `sample`."""
    return [
        None if line < 0 else _sample_row(row.float(), line, index, state)
        for row, line, index in zip(logits, lines.tolist(), indices.tolist(), strict=True)
    ]


def _sample_row(logits: Tensor, line: int, index: int, state: SamplingLines) -> Drawn:
    numbers, integers = state.numbers[line].tolist(), state.integers[line].tolist()
    values = changed(logits, line, index, state)
    temperature = numbers[Number.TEMPERATURE]
    scaled = values.double() / max(temperature, TEMPERATURE_LEAST)
    scaled -= scaled.max()
    edge = 1.0
    if temperature <= 0:
        kept, u = torch.zeros_like(scaled, dtype=torch.bool), 0.0
        kept[values.argmax()] = True
    else:
        floor, edge = _floor(scaled, integers[Integer.TOP_K], numbers[Number.TOP_P], numbers[Number.MIN_P])
        kept, u = scaled >= floor, uniform(integers[Integer.SEED], index)
    weights = torch.where(kept, scaled.exp(), 0.0)
    cumulated = (weights / weights.sum()).cumsum(0)
    cumulated /= cumulated[-1].clone()
    token = int(torch.searchsorted(cumulated, u, right=True))
    state.last_tokens[line] = token
    count_row = integers[Integer.COUNT_ROW] - 1
    if count_row >= 0 and int(state.counts[count_row, token]) & COUNT_MAX < COUNT_MAX:
        state.counts[count_row, token] += 1
    return Drawn(token, float(logits.double().log_softmax(0)[token]), u, kept, cumulated, edge)


def changed(logits: Tensor, line: int, index: int, state: SamplingLines) -> Tensor:
    """A row's logits [vocab] float32 after bias, mask of min_tokens, and penalties."""
    numbers, integers = state.numbers[line], state.integers[line].tolist()
    values = logits.clone()
    biases, masked = integers[Integer.BIASES], integers[Integer.MASKED]
    values[state.bias_tokens[line, :biases].long()] += state.bias[line, :biases]
    if index < integers[Integer.MIN_TOKENS]:
        values[state.masked[line, :masked].long()] = float("-inf")
    count_row = integers[Integer.COUNT_ROW] - 1
    if count_row >= 0:
        known = state.counts[count_row].int()
        count = (known & COUNT_MAX).float()
        repetition = numbers[Number.REPETITION]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(known != 0, repeated, values)
        values = values - numbers[Number.PRESENCE] * (count > 0) - numbers[Number.FREQUENCY] * count
    return values


def _floor(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, float]:
    """The least of `scaled` that is kept, and `Drawn.edge`. Args: scaled: [vocab] float64, the largest 0."""
    floor, edge = scaled.new_tensor(float("-inf")), 1.0
    ordered = scaled.sort(descending=True).values
    if 0 < top_k < len(scaled):
        floor = ordered[top_k - 1]
    if top_p < 1:
        weights = ordered.exp().masked_fill(ordered < floor, 0.0)
        shares = weights.cumsum(0) / weights.sum()
        last = min(int((shares < top_p).sum()), len(shares) - 1)
        floor = torch.maximum(ordered[last], floor)
        # Equal logits stand or fall together, so only the last of them is where the floor may be.
        is_last = torch.cat((ordered[1:] < ordered[:-1], ordered.new_ones(1, dtype=torch.bool)))
        edge = float((shares[is_last] - top_p).abs().min())
    if min_p > 0:
        floor = torch.maximum(floor, scaled.new_tensor(min_p).log())
    return floor, edge


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1): the first 53 bits of Philox4x32-10 (Salmon et al., SC 2011), key seed, counter index."""
    c0, c1, c2, c3 = index & _WORD, index >> 32, 0, 0
    k0, k1 = seed & _WORD, seed >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return float((c0 << 32 | c1) >> 11) * 2.0**-53
