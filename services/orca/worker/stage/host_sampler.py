"""Samples the next token of each request from its logits on the host, all rows of a step at once.

The order of effects is that of core.domain.request.SamplingParams: logit_bias, min_tokens mask, repetition, presence
and frequency penalty, token mask, temperature, top_k, top_p, min_p. Temperature 0 takes the largest logit after them.
Otherwise u = uniform(seed, index) (random_numbers.py) picks the first token, in order of token id, whose cumulated
probability exceeds u; probabilities are float64.

top_k, top_p and min_p each set a floor: logits below it are dropped. Equal logits are kept or dropped together, so the
result does not depend on the order in which a sort leaves ties. The share top_p is measured on the distribution that
top_k leaves.

A row that the model computed wrongly has no such token: a NaN or +inf among the tokens that logit_bias and the masks
leave, or no finite logit there. Its largest logit after the masks is then not a finite number, and is the one that is
chosen. So one look at the chosen logit finds such a row. It must be a logit after the masks: a masked token counts as
-inf, whatever the model computed for it.

Log probabilities are those of the model: log_softmax of the raw logits, before everything above (as OpenAI and vLLM
report them).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orca.core.domain.request import Logprob, SamplingParams
from orca.kernels.contract.transfer import to_device
from orca.kernels.device import kernels_of
from orca.worker.stage.random_numbers import uniforms

# Tokens within which most distributions reach top_p; only for rows that do not, all tokens are sorted.
_TOP_P_CANDIDATES = 512

# So cold that only equal logits share probability; any colder, float64 overflows and every probability is NaN.
_TEMPERATURE_LEAST = 1e-9


class TokenCounts:
    """The tokens of a request as its penalties need them, updated token by token.

    They are the distinct tokens of prompt and output, each with its number of occurrences in the output.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._place: dict[int, int] = {}
        self._tokens = np.empty(max(16, len(prompt) + len(output)), np.int64)
        self._counts = np.zeros(len(self._tokens), np.float32)
        for token in prompt:
            self._find(token)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count a token of the output."""
        place = self._find(token)  # may move the counts to a larger array
        self._counts[place] += 1

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Occurrences in the output of each of `tokens`; 0 for those of the prompt only."""
        return self._counts[: len(self._place)]

    def _find(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * place)
            self._counts = np.concatenate((self._counts, np.zeros(place, np.float32)))
        self._tokens[place] = token
        return place


@dataclass(slots=True)
class SamplingState:
    """One request on the stage that samples."""

    params: SamplingParams
    masked: tuple[int, ...]  # EOS and stop ids: not allowed before min_tokens
    counts: TokenCounts | None = None  # None: no penalty is set
    never: Sequence[int] = ()  # tokens that the model must not draw
    bias: NDArray[np.float32] = field(init=False)
    bias_tokens: NDArray[np.int64] = field(init=False)
    is_greedy: bool = field(init=False)
    _raw_from: float = field(init=False)  # index of the first token that is sampled from the raw logits

    def __post_init__(self) -> None:
        self.is_greedy = self.params.temperature <= 0
        # The largest raw logit is rarely one of `never`: greedy rows look at it afterwards.
        is_masked = bool(self.never) and not self.is_greedy
        is_changed = bool(self.params.logit_bias) or self.counts is not None or is_masked
        self._raw_from = math.inf if is_changed else self.params.min_tokens
        self.bias_tokens = np.array([token for token, _ in self.params.logit_bias], np.int64)
        self.bias = np.array([value for _, value in self.params.logit_bias], np.float32)

    @classmethod
    def start(
        cls,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_length: int,
        eos_token_ids: Sequence[int],
        never: Sequence[int] = (),
    ) -> "SamplingState":
        """Return the state of a request that starts, or starts again, with `tokens`: prompt and output so far."""
        # A token mask has EOS and stop ids wherever they may be drawn.
        masked = () if params.has_token_mask else tuple(sorted({*eos_token_ids, *params.stop_token_ids}))
        is_penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        counts = TokenCounts(tokens[:prompt_length], tokens[prompt_length:]) if is_penalised else None
        return cls(params, masked, counts, never)

    def changes_logits(self, index: int) -> bool:
        """Return whether the token with this index is sampled from changed logits."""
        return index < self._raw_from

    def masked_at(self, index: int) -> tuple[int, ...]:
        """Return the tokens that must not be drawn as the token with this index."""
        masked = self.masked if index < self.params.min_tokens else ()
        return (*masked, *self.never)


@dataclass(slots=True)
class Draw:
    """A row of logits to sample from: it gives the `index`-th generated token of its request."""

    state: SamplingState
    index: int
    mask: NDArray[np.uint32] | None = None  # tokens that may be drawn (masks/request_mask.py); None: all

    @property
    def changes_logits(self) -> bool:
        """Return whether the token is sampled from changed logits."""
        return self.mask is not None or self.state.changes_logits(self.index)


class DrawnTokens(NamedTuple):
    """The tokens of some rows, in row order."""

    tokens: list[int]
    no_number: list[int]  # rows whose token means nothing: the model's numbers overflowed


def sample(
    logits: Tensor,
    draws: Sequence[Draw],
    argmax: NDArray[np.int64] | None = None,
    numbers: NDArray[np.float32] | None = None,
) -> DrawnTokens:
    """Sample one token for each row. The caller counts them (`TokenCounts.add`).

    Args:
        logits: [rows, vocab] float32; not changed.
        draws: one for each row.
        argmax: [rows], the place of the first largest logit of each row, if it is known; of a NaN, if there is one.
        numbers: `logits` as an array, if there is one: a step of a recorded size calls nothing of PyTorch.
    """
    changed = [row for row, draw in enumerate(draws) if draw.changes_logits]
    if changed:
        argmax = numbers = None
        logits = logits.clone()
        _apply_bias(logits, draws, changed)
        _apply_mask(logits, draws, changed)
        _apply_penalties(logits, draws, changed)
        _apply_token_masks(logits, draws, changed)
    tokens = _choose(logits, draws, argmax)
    for row, draw in enumerate(draws):
        if tokens[row] in draw.state.never:  # a greedy row
            others = logits[row : row + 1].clone()
            others[0, list(draw.state.never)] = float("-inf")
            [tokens[row]] = _as_ints(kernels_of(logits.device).argmax(others))
    numbers = logits.cpu().numpy() if numbers is None else numbers
    return DrawnTokens(tokens, _rows_without_number(numbers, tokens))


def _choose(logits: Tensor, draws: Sequence[Draw], argmax: NDArray[np.int64] | None) -> list[int]:
    """Choose by temperature, top_k, top_p and min_p. Args: logits: after bias, penalties and masks."""
    random = [row for row, draw in enumerate(draws) if not draw.state.is_greedy]
    if len(random) == len(draws):
        return _as_ints(_draw(logits, draws))
    tokens = _as_ints(kernels_of(logits.device).argmax(logits) if argmax is None else argmax)
    if not random:
        return tokens
    rows = torch.tensor(random, device=logits.device)
    own = _as_ints(_draw(logits.index_select(0, rows), [draws[row] for row in random]))
    for row, token in zip(random, own, strict=True):
        tokens[row] = token
    return tokens


def _rows_without_number(logits: NDArray[np.float32], tokens: Sequence[int]) -> list[int]:
    """Return the rows whose chosen logit is infinite or NaN.

    Args:
        logits: [rows, vocab], after bias, penalties and masks.
        tokens: the token that was chosen for each row.
    """
    chosen = logits[np.arange(len(tokens)), tokens]
    return [row for row, number in enumerate(chosen.tolist()) if not math.isfinite(number)]


class Scores(NamedTuple):
    """Log probabilities of some rows' tokens and of the most likely alternatives, on the device of the logits."""

    tokens: Tensor  # [rows] int64
    chosen: Tensor  # [rows]
    top_tokens: Tensor  # [rows, most]
    top: Tensor  # [rows, most]

    def read(self, tops: Sequence[int]) -> list[Logprob]:
        """Return them as numbers. Args: tops: the number of alternatives to report for each row."""
        parts = (each.tolist() for each in self)
        return [
            Logprob(token, score, tuple(zip(ids[:top], values[:top], strict=True)))
            for token, score, ids, values, top in zip(*parts, tops, strict=True)
        ]


def scores_of(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Score the tokens of some rows.

    Args:
        logits: as for `logprobs`.
        tokens: [rows] int64.
        most: the largest number of alternatives of any row.
    """
    scores = logits.log_softmax(dim=-1)
    top, top_tokens = scores.topk(min(most, logits.shape[1]), dim=-1)
    return Scores(tokens, scores.gather(1, tokens[:, None])[:, 0], top_tokens, top)


def logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Logprob]:
    """Return the log probability of each row's token, with the row's most likely alternatives.

    Args:
        logits: [rows, vocab] float32, raw.
        tokens: the chosen (or given) token of each row.
        tops: the number of alternatives to report for each row.
    """
    return scores_of(logits, torch.tensor(tokens, device=logits.device), max(tops)).read(tops)


def _apply_bias(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    biased = [row for row in rows if len(draws[row].state.bias)]
    if biased:
        index = _index(biased, [draws[row].state.bias_tokens for row in biased], logits.device)
        values = np.concatenate([draws[row].state.bias for row in biased])
        logits[index] += torch.from_numpy(values).to(logits.device)


def _apply_mask(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    masks = {row: masked for row in rows if (masked := draws[row].state.masked_at(draws[row].index))}
    if masks:
        ids = [np.array(masked, np.int64) for masked in masks.values()]
        logits[_index([*masks], ids, logits.device)] = float("-inf")


def _apply_penalties(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    states = [(row, draws[row].state, counts) for row in rows if (counts := draws[row].state.counts) is not None]
    if not states:
        return
    index = _index([row for row, _, _ in states], [counts.tokens for _, _, counts in states], logits.device)
    sizes = [len(counts.tokens) for _, _, counts in states]

    def spread(values: Sequence[float]) -> Tensor:
        """Repeat each request's value for each of its tokens."""
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

    params = [state.params for _, state, _ in states]
    repetition = spread([param.repetition_penalty for param in params])
    presence = spread([param.presence_penalty for param in params])
    frequency = spread([param.frequency_penalty for param in params])
    counted = torch.from_numpy(np.concatenate([counts.counts for _, _, counts in states])).to(logits.device)
    values = logits[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[index] = values - presence * (counted > 0) - frequency * counted


def _apply_token_masks(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    apply_token_masks(logits, {row: mask for row in rows if (mask := draws[row].mask) is not None})


def apply_token_masks(logits: Tensor, masks: Mapping[int, NDArray[np.uint32]]) -> None:
    """Leave out the tokens of rows that their masks do not allow, in place. Args: masks: by row; others have none."""
    if masks:
        rows, words = np.array([*masks], np.int64), np.stack([*masks.values()]).view(np.int32)
        device = logits.device
        kernels_of(device).mask_tokens(logits, to_device(rows, device), to_device(words, device))


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sample tokens for rows with a temperature above 0."""
    params = [draw.state.params for draw in draws]
    device = logits.device
    temperatures = [max(param.temperature, _TEMPERATURE_LEAST) for param in params]
    temperature = torch.tensor(temperatures, dtype=torch.float64, device=device)
    scaled = logits.double() / temperature[:, None]
    largest = scaled.amax(dim=-1, keepdim=True)  # NaN if any number is
    scaled -= largest  # the largest is 0: no overflow, and min_p is a plain floor
    floor = _floor(scaled, params)
    weights = scaled.exp()
    if floor is not None:
        weights.masked_fill_(scaled < floor[:, None], 0.0)
    cumulated = weights.cumsum(dim=-1)
    numbers = uniforms([param.seed for param in params], [draw.index for draw in draws])
    target = torch.from_numpy(numbers).to(device) * cumulated[:, -1]
    tokens = torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]
    # Rounding may raise the target to the total itself: then the right token is the last one with any weight.
    tokens = torch.minimum(tokens, torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())[:, 0])
    is_number = largest[:, 0].isfinite()
    # Otherwise every sum is NaN, and the search ends after the last token.
    return tokens if is_number.all() else torch.where(is_number, tokens, logits.argmax(dim=-1))


def _floor(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Return the least logit that each row keeps, from top_k, top_p and min_p; None if no row drops any.

    Args:
        scaled: [rows, vocab] float64, each row's largest 0.
    """
    vocab = scaled.shape[1]
    top_k = [min(param.top_k or vocab, vocab) for param in params]
    top_p = [param.top_p for param in params]
    min_p = [param.min_p for param in params]
    if min(top_k) == vocab and min(top_p) >= 1 and max(min_p) <= 0:
        return None
    device = scaled.device
    floor = torch.full((len(params),), float("-inf"), dtype=torch.float64, device=device)
    k_rows = [row for row, kept in enumerate(top_k) if kept < vocab]
    if k_rows:
        rows = torch.tensor(k_rows, device=device)
        kept = torch.tensor([top_k[row] for row in k_rows], device=device)
        largest = scaled.index_select(0, rows).topk(int(kept.max()), dim=-1).values
        floor[rows] = largest.gather(1, kept[:, None] - 1)[:, 0]
    p_rows = [row for row, share in enumerate(top_p) if share < 1]
    if p_rows:
        rows = torch.tensor(p_rows, device=device)
        shares = torch.tensor([top_p[row] for row in p_rows], dtype=torch.float64, device=device)
        floor[rows] = _top_p_floor(scaled.index_select(0, rows), floor[rows], shares)
    return torch.maximum(floor, torch.tensor(min_p, dtype=torch.float64, device=device).log())


def _top_p_floor(scaled: Tensor, cut: Tensor, shares: Tensor) -> Tensor:
    """Return, for each row, the least logit of the smallest set with `shares` of the weight above `cut`."""
    weights = scaled.exp().masked_fill_(scaled < cut[:, None], 0.0)
    wanted = shares * weights.sum(dim=-1)
    vocab = scaled.shape[1]
    values = scaled.topk(min(_TOP_P_CANDIDATES, vocab), dim=-1).values
    reached = values.exp().masked_fill_(values < cut[:, None], 0.0).cumsum(dim=-1)
    if bool((reached[:, -1] < wanted).any()) and values.shape[1] < vocab:
        values = scaled.sort(dim=-1, descending=True).values
        reached = values.exp().masked_fill_(values < cut[:, None], 0.0).cumsum(dim=-1)
    last = torch.searchsorted(reached, wanted[:, None]).clamp_(max=values.shape[1] - 1)
    return torch.maximum(values.gather(1, last)[:, 0], cut)


def _index(rows: Sequence[int], ids: Sequence[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index of (row, id) pairs: each row with each of its ids."""
    row = np.repeat(np.array(rows, np.int64), [len(part) for part in ids])
    return torch.from_numpy(row).to(device), torch.from_numpy(np.concatenate(ids)).to(device)


def _as_ints(tokens: Tensor | NDArray[np.int64]) -> list[int]:
    return [int(token) for token in tokens.tolist()]
