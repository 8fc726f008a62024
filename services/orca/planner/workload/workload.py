"""A workload: the joint distribution of prompt and output lengths, and what the formulas need of it.

The lengths come from two stated distributions, from the bins in which a pool counts, or from a file (lengths_file.py).
Each is a mixture of parts in which prompt and output are independent of each other. Two stated distributions are one
part. A bin or a line of a file is a part with two ranges. So no table of all pairs is ever made.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import sqrt
from random import Random

from orca.core.domain.errors import SettingError
from orca.planner.workload.length_parts import LengthPart, PartsByLength
from orca.planner.workload.lengths import PMF_POINTS, Lengths, Range, mean_of, parse_lengths

BIN_POINTS = 64
"""Most lengths that represent one part's outputs, or prompts, where there are several parts."""

PAIRS = 1024
"""Pairs that represent the joint distribution where an expected value has no closed form."""


@dataclass(frozen=True, eq=False)
class Marginal:
    """The distribution of one of the two lengths, as a table. It is a `Lengths`, so traces can draw from it."""

    lengths: tuple[int, ...]  # rising
    shares: tuple[float, ...]  # of each length; they sum to 1
    text: str  # for reports

    @staticmethod
    def of(weights: Mapping[int, float], text: str) -> "Marginal":
        """Return the table of lengths with these weights, thinned to PMF_POINTS."""
        total = sum(weights.values())
        lengths = sorted(weights)
        size = -(-len(lengths) // PMF_POINTS)
        groups = [lengths[first : first + size] for first in range(0, len(lengths), size)]
        shares = tuple(sum(weights[length] for length in group) / total for group in groups)
        return Marginal(tuple(group[len(group) // 2] for group in groups), shares, text)

    def __str__(self) -> str:
        return self.text

    @property
    def low(self) -> int:
        return self.lengths[0]

    @property
    def high(self) -> int:
        return self.lengths[-1]

    @cached_property
    def cumulative(self) -> tuple[float, ...]:
        """The share of all lengths up to each one."""
        return tuple(accumulate(self.shares))

    @cached_property
    def mean(self) -> float:
        return self.expect(float)

    @cached_property
    def deviation(self) -> float:
        """The standard deviation."""
        return sqrt(max(self.expect(lambda length: length * length) - self.mean**2, 0.0))

    def expect(self, value: Callable[[int], float]) -> float:
        """Return the expected value of a function of the length."""
        return sum(share * value(length) for length, share in zip(self.lengths, self.shares, strict=True))

    def percentile(self, percent: float) -> int:
        """Return the smallest length such that at least so many per cent of all lengths are not longer."""
        # Sums of shares are exact to about 1e-13 only.
        place = bisect_left(self.cumulative, percent / 100 - 1e-12)
        return self.lengths[min(place, len(self.lengths) - 1)]

    def draw(self, numbers: Random) -> int:
        return self.quantile(numbers.random())

    def quantile(self, share: float) -> int:
        return self.lengths[min(bisect_left(self.cumulative, share), len(self.lengths) - 1)]

    def pmf(self, points: int = PMF_POINTS) -> Mapping[int, float]:
        assert points >= len(self.lengths), "a table has as many points as it was made with"
        return dict(zip(self.lengths, self.shares, strict=True))

    def strata(self, count: int) -> tuple[float, ...]:
        """Return the mean lengths of `count` groups of equal share, shortest first."""
        if count not in self._strata:
            self._strata[count] = self._find_strata(count)
        return self._strata[count]

    @cached_property
    def _strata(self) -> dict[int, tuple[float, ...]]:
        return {}

    def _find_strata(self, count: int) -> tuple[float, ...]:
        sums, filled, group = [0.0] * count, 0.0, 0
        for length, share in zip(self.lengths, self.shares, strict=True):
            left = share * count
            while left > 0:
                taken = left if group == count - 1 else min(left, group + 1 - filled)
                sums[group] += taken * length
                filled, left = filled + taken, left - taken
                if filled >= group + 1 - 1e-12 and group < count - 1:
                    group += 1
        return tuple(sums)


@dataclass(frozen=True, eq=False)
class Workload:
    """The lengths of the requests that a plan is made for.

    Everything that formulas ask for is computed once and kept, so a point of a search pays for its own sums only.
    """

    parts: tuple[LengthPart, ...]
    source: str  # where the lengths come from, for reports
    answers: int = 0  # finished answers that were counted; 0 if the lengths are stated
    cut_share: float = 0.0  # share of the answers that max_tokens cut; they count with the length at the cut
    rate: float | None = None  # requests per second that arrive; None: unknown

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a workload has at least one request")
        if not all(part.weight > 0 for part in self.parts):
            raise ValueError("the weights of a workload are above 0")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"an arrival rate is above 0 requests/s, not {self.rate}")

    @staticmethod
    def of_lengths(prompts: Lengths, outputs: Lengths, *, source: str = "", rate: float | None = None) -> "Workload":
        """Return the workload of two stated distributions, independent of each other."""
        text = source or f"{prompts} in, {outputs} out"
        return Workload((LengthPart(1.0, prompts, outputs),), text, rate=rate)

    @staticmethod
    def of_cells(
        cells: Iterable[tuple[Range, Range, float]],
        *,
        source: str,
        answers: int = 0,
        cut_share: float = 0.0,
        rate: float | None = None,
        length_max: int | None = None,
    ) -> "Workload":
        """Return the workload of counted bins: prompts, outputs, and weight. Lengths spread evenly in a bin.

        Args: length_max: the longest length that there can be, since the last bin may reach beyond it.
        """
        parts = tuple(
            LengthPart(weight, _cut(prompts, length_max), _cut(outputs, length_max))
            for prompts, outputs, weight in cells
            if weight > 0
        )
        return Workload(parts, source, answers, cut_share, rate)

    @cached_property
    def outputs(self) -> Marginal:
        """The distribution of output tokens."""
        return Marginal.of(self._weights(lambda part: part.outputs), f"outputs of {self.source}")

    @cached_property
    def prompts(self) -> Marginal:
        """The distribution of prompt tokens; of sources with an encoder-decoder model."""
        return Marginal.of(self._weights(lambda part: part.prompts), f"prompts of {self.source}")

    @cached_property
    def mean_prompts(self) -> tuple[float, ...]:
        """The mean prompt of the answers of each length in `outputs.lengths`."""
        weights: dict[int, float] = {}
        sums: dict[int, float] = {}
        for lengths, (weight, prompts) in self._by_outputs().items():
            for length, share in lengths.pmf(_points(self.parts)).items():
                weights[length] = weights.get(length, 0.0) + weight * share
                sums[length] = sums.get(length, 0.0) + prompts * share
        places = [min(bisect_left(self.outputs.lengths, length), len(self.outputs.lengths) - 1) for length in weights]
        merged = [[0.0, 0.0] for _ in self.outputs.lengths]
        for place, length in zip(places, weights, strict=True):
            merged[place][0] += weights[length]
            merged[place][1] += sums[length]
        return tuple(total / weight if weight else self.prompts.mean for weight, total in merged)

    @cached_property
    def correlation(self) -> float:
        """The correlation of prompt and output lengths, -1 to 1; 0 if one of them does not vary."""
        spread = self.prompts.deviation * self.outputs.deviation
        if spread <= 1e-9:
            return 0.0
        products = sum(prompts * mean_of(outputs) for outputs, (_, prompts) in self._by_outputs().items())
        product = products / self._ends[-1]
        return min(max((product - self.prompts.mean * self.outputs.mean) / spread, -1.0), 1.0)

    @cached_property
    def longest(self) -> int:
        """The most tokens of one request, prompt and output together."""
        return max(part.prompts.high + part.outputs.high for part in self.parts)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """PAIRS pairs of prompt and output tokens that represent the joint distribution, all with the same weight.

        Their outputs are evenly spaced quantiles. Their prompts are those of a low-discrepancy sequence, so that both
        lengths together fill the distribution evenly.
        """
        parts = PartsByLength(self.parts)
        return tuple(parts.pair_at((number + 0.5) / PAIRS, _reversed_bits(number)) for number in range(PAIRS))

    def sample(self, numbers: Random) -> tuple[int, int]:
        """Draw the prompt and output tokens of one request."""
        part = self.parts[0]
        if len(self.parts) > 1:
            place = bisect_left(self._ends, numbers.random() * self._ends[-1])
            part = self.parts[min(place, len(self.parts) - 1)]
        return part.prompts.draw(numbers), part.outputs.draw(numbers)

    def check_fits(self, max_model_len: int, *, is_encoder_decoder: bool = False) -> None:
        """Check that the model allows all requests. Raises: SettingError with both lengths.

        A target of an encoder-decoder model begins with a start token, which counts too.
        """
        longest = self.longest + is_encoder_decoder
        if longest > max_model_len:
            raise SettingError(
                f"the workload ({self.source}) has requests of up to {longest} tokens, prompt and output together, and "
                f"the model allows {max_model_len}: scale the lengths down, or leave the long requests out"
            )

    def lines(self) -> list[str]:
        """Return a description for reports: source, lengths, correlation, and answers cut by max_tokens."""
        counted = f", {self.answers:,} answers" if self.answers else ""
        lines = [f"workload: {self.source}{counted}"]
        for name, marginal in (("prompt", self.prompts), ("output", self.outputs)):
            lines.append(
                f"{name} tokens: mean {marginal.mean:.1f}, deviation {marginal.deviation:.1f}, p50 "
                f"{marginal.percentile(50)}, p99 {marginal.percentile(99)}, {marginal.low} to {marginal.high}"
            )
        lines.append(f"correlation of prompt and output tokens: {self.correlation:.2f}")
        if self.cut_share:
            lines.append(f"cut by max_tokens: {self.cut_share:.1%} of the answers, counted with the length at the cut")
        return lines

    @cached_property
    def _ends(self) -> Sequence[float]:
        return list(accumulate(part.weight for part in self.parts))

    def _weights(self, lengths_of: Callable[[LengthPart], Lengths]) -> dict[int, float]:
        """Return the weight of each length. Parts of the same lengths are spread together, once."""
        parts: dict[Lengths, float] = {}
        for part in self.parts:
            lengths = lengths_of(part)
            parts[lengths] = parts.get(lengths, 0.0) + part.weight
        weights: dict[int, float] = {}
        for lengths, weight in parts.items():
            for length, share in lengths.pmf(_points(self.parts)).items():
                weights[length] = weights.get(length, 0.0) + weight * share
        return weights

    def _by_outputs(self) -> dict[Lengths, tuple[float, float]]:
        """Return the weight of each distribution of outputs, and the weighted sum of its prompts."""
        means = {prompts: mean_of(prompts) for prompts in {part.prompts for part in self.parts}}
        found: dict[Lengths, tuple[float, float]] = {}
        for part in self.parts:
            weight, prompts = found.get(part.outputs, (0.0, 0.0))
            found[part.outputs] = weight + part.weight, prompts + part.weight * means[part.prompts]
        return found


def parse_workload(text: str) -> Workload:
    """Read `PROMPT/OUTPUT`, each in the syntax of `parse_lengths`, such as `128/1:320:128:68`. Raises: ValueError."""
    prompts, separator, outputs = text.partition("/")
    if not separator:
        raise ValueError(f"lengths are PROMPT/OUTPUT, such as 32:512/1:128, not {text!r}")
    return Workload.of_lengths(parse_lengths(prompts), parse_lengths(outputs))


def _points(parts: Sequence[LengthPart]) -> int:
    return PMF_POINTS if len(parts) == 1 else BIN_POINTS


def _cut(lengths: Range, length_max: int | None) -> Range:
    if length_max is None or lengths.high <= length_max:
        return lengths
    return Range(min(lengths.low, length_max), length_max)


def _reversed_bits(number: int) -> float:
    """Return a number of the van der Corput sequence, 0 to 1: the bits of `number` mirrored at the point."""
    return (int(f"{number:032b}"[::-1], 2) + 0.5) / 2**32
