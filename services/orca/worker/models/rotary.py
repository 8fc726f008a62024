"""Rotary position embedding (RoPE) with the scalings that configs ask for, as Hugging Face computes them.

Each pair of dimensions (j, j + head_dim / 2) of every query and key is rotated by position x frequency_j. Weights are
read so that the two are neighbours (Columns.pairs): a pair is a complex number, and a rotation, here a turn, is one
product. Scores do not depend on the order of the dimensions.

Frequencies are fixed, except for two kinds of scaling, `dynamic` and `longrope`: theirs depend on the length of the
sequence when the position was computed. That length is max(prompt length, position + 1). It depends neither on the
chunks of a prompt nor on a restart of the request, so the same position gets the same turn in every schedule. Requests
of such a model share no blocks: prompts of two lengths turn the same tokens differently.
"""

import math

import torch
from torch import Tensor

from orca.core.domain.rope_options import LENGTH_TYPES
from orca.worker.models.config import Rope


class Rotary:
    """Computes the turns of a step's positions, in float32.

    Args:
        head_dim: even.
    """

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._factor = _amplitude(rope)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._exponents = exponents.to(device)
        self._frequencies, self._long_frequencies = (
            None if frequencies is None else frequencies.to(device) for frequencies in _frequencies(rope, exponents)
        )
        # Turns of the first positions, [positions, 1, head_dim / 2].
        self._table = torch.empty(0, 1, head_dim // 2, dtype=torch.complex64, device=device)

    @property
    def needs_lengths(self) -> bool:
        """Return whether a turn depends on the length of the sequence as well as on the position."""
        return self._rope.kind in LENGTH_TYPES

    def turns(self, positions: Tensor, prompt_lengths: Tensor | None, *, longest: int) -> Tensor:
        """Return the turns of a step's tokens.

        Args:
            positions: [tokens] int64.
            prompt_lengths: [tokens], of each token's request; required if `needs_lengths`.
            longest: greater than all positions.
        Returns: [tokens, 1, head_dim / 2] complex64.
        """
        if self.needs_lengths:
            return self._computed(positions, prompt_lengths)[:, None]
        return self.table(longest).index_select(0, positions)

    def table(self, longest: int) -> Tensor:
        """Return the turns of the first positions, at least `longest` of them: [positions, 1, head_dim / 2].

        They must depend on positions alone.
        """
        assert not self.needs_lengths
        if longest > len(self._table):
            # Twice as many, so that a request which grows token by token causes few new tables.
            positions = torch.arange(max(2 * longest, 256), device=self._exponents.device)
            self._table = self._computed(positions, None)[:, None]
        return self._table

    def _computed(self, positions: Tensor, prompt_lengths: Tensor | None) -> Tensor:
        """Return the turns, [tokens, head_dim / 2]."""
        angles = positions[:, None].float() * self._frequencies_of(positions, prompt_lengths)
        return torch.polar(angles.new_full((), self._factor).expand_as(angles), angles)

    def _frequencies_of(self, positions: Tensor, prompt_lengths: Tensor | None) -> Tensor:
        """Return [head_dim / 2], or [tokens, head_dim / 2] if they depend on the length."""
        assert self._frequencies is not None
        if not self.needs_lengths:
            return self._frequencies
        assert prompt_lengths is not None
        rope, lengths = self._rope, torch.maximum(prompt_lengths, positions + 1)
        if rope.kind == "longrope":
            assert self._long_frequencies is not None
            is_long = (lengths > rope.original_max_positions)[:, None]
            return torch.where(is_long, self._long_frequencies, self._frequencies)
        # NTK-aware: beyond max_positions, a longer sequence lowers all frequencies by raising their base.
        factor, dim = rope.factor or 1.0, self._head_dim
        stretch = factor * lengths.clamp(min=rope.max_positions) / rope.max_positions - (factor - 1)
        base = rope.theta * stretch ** (dim / (dim - 2))
        return 1.0 / base[:, None] ** self._exponents


def _frequencies(rope: Rope, exponents: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the frequency of each pair of dimensions, [head_dim / 2]; for longrope also those of long sequences."""
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / (rope.factor or 1.0), None
    if rope.kind == "llama3":
        return _llama3(rope, plain), None
    if rope.kind == "yarn":
        return _yarn(rope, plain, len(exponents) * 2), None
    if rope.kind == "longrope":
        short, long = torch.tensor(rope.short_factors), torch.tensor(rope.long_factors)
        return 1.0 / (short * rope.theta**exponents), 1.0 / (long * rope.theta**exponents)
    return plain, None


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Slow long waves by `factor`, keep short ones, and blend those between (Llama 3.1)."""
    factor = rope.factor or 1.0
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    slowed = torch.where(wavelength > longest, plain / factor, plain)
    blend = rope.original_max_positions / wavelength - rope.low_freq_factor
    blend = blend / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * slowed / factor + blend * slowed
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, blended, slowed)


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Extrapolate fast pairs and interpolate slow ones, with a linear ramp between (YaRN, arXiv:2309.00071, 3.2)."""

    def pair_of(turns: float) -> float:
        """Return the pair that makes `turns` full rotations over the pretraining length."""
        ratio = math.log(rope.original_max_positions / (turns * 2 * math.pi))
        return head_dim * ratio / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain / _scale(rope) * (1 - kept) + plain * kept


def _scale(rope: Rope) -> float:
    """Return the longest sequence length divided by the pretraining length."""
    return rope.factor if rope.factor is not None else rope.max_positions / rope.original_max_positions


def _amplitude(rope: Rope) -> float:
    """Return the factor of cos and sin: yarn and longrope sharpen the scores of longer sequences."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    scale = _scale(rope)
    if scale <= 1:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(scale) / math.log(rope.original_max_positions))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * math.log(scale) + 1) / (0.1 * rope.mscale_all_dim * math.log(scale) + 1)
    return 0.1 * math.log(scale) + 1
