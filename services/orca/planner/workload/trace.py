"""Request traces as in the paper: lengths from a distribution, arrivals by a Poisson process (ORCA, section 6.2).

Pure and seeded: the same settings and seed give the same trace on every machine. Lengths and arrivals come from two
streams of random numbers. So traces that differ only in their rate contain the same requests in the same order, and
their arrival times differ by a factor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from random import Random
from types import MappingProxyType

from orca.core.domain.request import SamplingParams
from orca.planner.workload.length_parts import PartsByLength
from orca.planner.workload.lengths import Lengths, Range
from orca.planner.workload.workload import Workload

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
"""Sampling of every request of a measurement: the same tokens each time, exactly as many as wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """The settings that determine a trace."""

    requests: int  # how many
    prompt_tokens: Lengths  # the paper's number of input tokens
    new_tokens: Lengths  # the paper's max_gen_tokens: each request generates exactly this number
    rate: float | None = None  # requests per second of the Poisson process; None: all arrive at 0
    seed: int = 0
    # Both lengths are drawn from it, as pairs; `prompt_tokens` and `new_tokens` are its two distributions then.
    joint: Workload | None = None
    # Requests in a row whose lengths are spread evenly over `joint`; None: each length is drawn by itself.
    stratum: int | None = None

    @staticmethod
    def of_workload(
        workload: Workload, *, requests: int, rate: float | None = None, seed: int = 0, stratum: int | None = None
    ) -> "TraceSpec":
        """Return the settings of a trace with the lengths of a workload, in pairs."""
        return TraceSpec(
            requests=requests,
            prompt_tokens=workload.prompts,
            new_tokens=workload.outputs,
            rate=rate,
            seed=seed,
            joint=workload,
            stratum=stratum,
        )

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"a trace has at least one request, not {self.requests}")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"an arrival rate is above 0 requests/s, not {self.rate}")
        if self.stratum is not None and (self.stratum < 1 or self.joint is None):
            raise ValueError(f"a stratum has at least one request, not {self.stratum}, and needs pairs of lengths")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    index: int  # position in order of arrival, from 0
    arrival_s: float  # seconds after the start of the trace
    prompt_tokens: int
    new_tokens: int
    deadline_ms: int | None = None  # from its arrival; None: it has no deadline

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
    for index, (prompt_tokens, new_tokens) in enumerate(islice(_lengths(spec, lengths), spec.requests)):
        if spec.rate is not None:
            arrival_s += gaps.expovariate(1.0) / spec.rate
        requests.append(TraceRequest(index, arrival_s, prompt_tokens, new_tokens))
    return Trace(spec, tuple(requests))


def _lengths(spec: TraceSpec, numbers: Random) -> Iterator[tuple[int, int]]:
    """Yield prompt and output tokens without end."""
    joint = spec.joint
    if joint is not None and spec.stratum is not None:
        parts = PartsByLength(joint.parts)
        while True:
            yield from parts.stratified(spec.stratum, numbers)
    while True:
        if joint is None:
            yield spec.prompt_tokens.draw(numbers), spec.new_tokens.draw(numbers)
        else:
            yield joint.sample(numbers)
