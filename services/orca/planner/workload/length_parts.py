"""The parts of a workload, and pairs of lengths by their place in it."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from orca.planner.workload.lengths import Lengths


@dataclass(frozen=True, slots=True)
class LengthPart:
    """Requests whose prompt and output lengths are independent of each other."""

    weight: float  # above 0; shares are relative to the sum of all weights
    prompts: Lengths
    outputs: Lengths


class PartsByLength:
    """Parts by rising outputs, so that a share of all requests is a place among their outputs."""

    def __init__(self, parts: Sequence[LengthPart]) -> None:
        self._parts = sorted(parts, key=lambda part: (part.outputs.low, part.outputs.high, part.prompts.low))
        total = sum(part.weight for part in parts)
        self._ends = list(accumulate(part.weight / total for part in self._parts))

    def pair_at(self, share: float, prompt_share: float) -> tuple[int, int]:
        """Return prompt and output tokens at a share of all outputs, and at a share of the prompts of that part."""
        index = min(bisect_left(self._ends, share), len(self._parts) - 1)
        part, start = self._parts[index], self._ends[index - 1] if index else 0.0
        within = min(max((share - start) / (self._ends[index] - start), 0.0), 1.0)
        return part.prompts.quantile(prompt_share), part.outputs.quantile(within)

    def stratified(self, count: int, numbers: Random) -> list[tuple[int, int]]:
        """Draw prompt and output tokens of `count` requests, in random order.

        Each of `count` equal shares of the outputs has one of them. The places among the prompts of its part are as
        even (a Latin hypercube). So a percentile of few requests is near that of the workload, also if long outputs are
        rare.
        """
        prompts = numbers.sample(range(count), count)
        pairs = [
            self.pair_at((number + numbers.random()) / count, (prompt + numbers.random()) / count)
            for number, prompt in enumerate(prompts)
        ]
        numbers.shuffle(pairs)
        return pairs
