"""Request traces as in the paper: lengths from a uniform distribution, arrivals by a Poisson process (ORCA, section
6.2). Lengths may also come from a truncated normal distribution (ExeGPT, section 7.1).

Pure and seeded: the same settings and seed give the same trace on every machine. Lengths and arrivals come from two
streams of random numbers. So traces that differ only in their rate contain the same requests in the same order, and
their arrival times differ by a factor.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from types import MappingProxyType
from typing import Protocol

from orca.core.domain.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
"""Sampling of every request of a measurement: the same tokens each time, exactly as many as wanted."""

DEVIATION_MAX = 1_000_000
"""Largest standard deviation of lengths: far above it, all lengths have the same share, which rounding loses."""

LENGTH_MAX = 2**31 - 1
"""Largest length in tokens: more than the longest context that any part of Orca accepts."""


class Lengths(Protocol):
    """A distribution of lengths in tokens. Its text is shown in reports."""

    def draw(self, numbers: Random) -> int:
        """Return the next length, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """A uniform distribution over whole numbers, both ends included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a range of lengths needs 1 <= low <= high, not {self.low}..{self.high}")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"U({self.low},{self.high})"

    def draw(self, numbers: Random) -> int:
        return numbers.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedNormal:
    """A normal distribution that is cut off at both ends and rounded to whole numbers; both ends are included.

    `mean` and `deviation` are those of the whole normal distribution. The lengths have the same mean only if both ends
    are equally far from it, and they always deviate less.
    """

    mean: float
    deviation: float  # standard deviation
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a range of lengths needs 1 <= low <= high, not {self.low}..{self.high}")
        # With a mean outside, only a tail would be left, and rounding errors would decide the lengths.
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"the mean of lengths from {self.low} to {self.high} must be one of them, not {self.mean:g}"
            )
        if not 0 < self.deviation <= DEVIATION_MAX:
            raise ValueError(
                f"a standard deviation of lengths is above 0 and at most {DEVIATION_MAX:,}, not {self.deviation:g}"
            )

    def __str__(self) -> str:
        return f"N({self.mean:g},{self.deviation:g};{self.low},{self.high})"

    def draw(self, numbers: Random) -> int:
        # The inverse of the distribution function takes one random number, however little the ends leave. Rejection
        # would take any number of them.
        normal = NormalDist(self.mean, self.deviation)
        least, most = normal.cdf(self.low - 0.5), normal.cdf(self.high + 0.5)
        share = least + (most - least) * numbers.random()
        # The inverse is not defined at 0 and 1, which rounding reaches.
        share = min(max(share, sys.float_info.min), 1 - sys.float_info.epsilon)
        return min(max(round(normal.inv_cdf(share)), self.low), self.high)


def parse_lengths(text: str) -> Lengths:
    """Read `32` or `32:512`, a Range, or `32:512:200:90`, a TruncatedNormal with its mean and standard deviation last.

    Raises: ValueError.
    """
    parts = text.split(":")
    try:
        ends, moments = [int(part) for part in parts[:2]], [float(part) for part in parts[2:]]
    except ValueError:
        ends, moments = [], []
    if not ends or len(moments) not in (0, 2):
        raise ValueError(f"lengths are N, N:M or N:M:MEAN:SD, in numbers, not {text!r}")
    if max(ends) > LENGTH_MAX:
        raise ValueError(f"a length is at most {LENGTH_MAX:,} tokens, not {max(ends)}")
    if not moments:
        return Range(ends[0], ends[-1])
    return TruncatedNormal(mean=moments[0], deviation=moments[1], low=ends[0], high=ends[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """The settings that determine a trace."""

    requests: int  # how many
    prompt_tokens: Lengths  # the paper's number of input tokens
    new_tokens: Lengths  # the paper's max_gen_tokens: each request generates exactly this number
    rate: float | None = None  # requests per second of the Poisson process; None: all arrive at 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"a trace has at least one request, not {self.requests}")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"an arrival rate is above 0 requests/s, not {self.rate}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    index: int  # position in order of arrival, from 0
    arrival_s: float  # seconds after the start of the trace
    prompt_tokens: int
    new_tokens: int

    @property
    def max_total_tokens(self) -> int:
        """The paper's max_tokens: the number of slots to reserve."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    spec: TraceSpec
    requests: tuple[TraceRequest, ...]

    @property
    def new_tokens(self) -> int:
        return sum(request.new_tokens for request in self.requests)

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the longest request: the minimum for the model's length and the slots."""
        return max(request.max_total_tokens for request in self.requests)

    def prompt(self, index: int, vocab_size: int) -> list[int]:
        """Return random token ids below `vocab_size` for a request's prompt, the same ones at every call.

        Two prompts share a prefix only by chance, so that a prefix cache changes no figure.
        """
        numbers = Random(f"{self.spec.seed}/prompt/{index}")
        return numbers.choices(range(vocab_size), k=self.requests[index].prompt_tokens)


PRESETS: Mapping[str, tuple[Range, Range]] = MappingProxyType(
    {
        "paper": (Range(32, 512), Range(1, 128)),  # ORCA, section 6.2
        "small": (Range(16, 128), Range(1, 64)),  # for models and machines a thousand times smaller
    }
)
"""Name -> (prompt tokens, new tokens)."""


def generate(spec: TraceSpec) -> Trace:
    """Draw a trace. Source: ORCA, section 6, second scenario."""
    lengths, gaps = Random(f"{spec.seed}/lengths"), Random(f"{spec.seed}/arrivals")
    requests, arrival_s = [], 0.0
    for index in range(spec.requests):
        if spec.rate is not None:
            arrival_s += gaps.expovariate(1.0) / spec.rate
        prompt_tokens = spec.prompt_tokens.draw(lengths)
        new_tokens = spec.new_tokens.draw(lengths)
        requests.append(TraceRequest(index, arrival_s, prompt_tokens, new_tokens))
    return Trace(spec, tuple(requests))
