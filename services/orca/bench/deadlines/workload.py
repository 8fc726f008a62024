"""Requests with deadlines: lengths of a trace, and a deadline of some times the own time of each request.

Pure and seeded, as traces are. The own time of a request is the time that it takes if it is alone in the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.workload.lengths import Lengths, Range
from orca.planner.workload.trace import Trace, TraceRequest, TraceSpec, generate

SLACK = (2.0, 20.0)
"""Least and most times of its own time that a request has until its deadline."""

SOLO_TOKENS = 33
"""Generated tokens of a request that runs alone to measure own times."""


@dataclass(frozen=True, slots=True)
class OwnTime:
    """The time that a request takes alone in the engine, by its lengths."""

    first_s: float  # until the first token, for a prompt without tokens
    prompt_token_s: float
    step_s: float  # between two tokens

    def until_first_s(self, prompt_tokens: int) -> float:
        return self.first_s + self.prompt_token_s * prompt_tokens

    def until_end_s(self, request: TraceRequest) -> float:
        return self.until_first_s(request.prompt_tokens) + self.step_s * (request.new_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineMix:
    """The requests of a run: their lengths, and which of them have a deadline."""

    prompt_tokens: Lengths
    new_tokens: Lengths
    without_deadline: float = 0.0  # share of requests
    long: float = 0.0  # share of requests whose prompts and outputs are `LONG_FACTOR` times as long

    def spec(self, *, requests: int, rate: float | None, seed: int) -> TraceSpec:
        return TraceSpec(
            requests=requests, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, rate=rate, seed=seed
        )


LONG_FACTOR = 10


def solo_traces(mix: DeadlineMix) -> tuple[Trace, Trace]:
    """Return two traces of one request each: with the shortest prompt of the lengths, and with the longest one."""
    drawn = generate(mix.spec(requests=1_000, rate=None, seed=0)).requests
    lengths = min(each.prompt_tokens for each in drawn), max(each.prompt_tokens for each in drawn)
    short, long = (
        generate(TraceSpec(requests=1, prompt_tokens=Range(each, each), new_tokens=Range(SOLO_TOKENS, SOLO_TOKENS)))
        for each in lengths
    )
    return short, long


def own_time(short: Sequence[RequestOutcome], long: Sequence[RequestOutcome]) -> OwnTime:
    """Return the own times that requests show which ran one by one. Args: short, long: of `solo_traces`, repeated."""
    prompts = short[0].prompt_tokens, long[0].prompt_tokens
    firsts = [median(each.token_s[0] - each.arrival_s for each in outcomes) for outcomes in (short, long)]
    token_s = max(0.0, firsts[1] - firsts[0]) / max(1, prompts[1] - prompts[0])
    steps = [(each.token_s[-1] - each.token_s[0]) / (len(each.token_s) - 1) for each in (*short, *long)]
    return OwnTime(max(0.0, firsts[0] - token_s * prompts[0]), token_s, median(steps))


def saturated_trace(mix: DeadlineMix, *, requests: int, seed: int) -> Trace:
    """Return requests without deadlines that all arrive at once."""
    return _with_long(generate(mix.spec(requests=requests, rate=None, seed=seed)), mix, seed)


def deadline_trace(mix: DeadlineMix, own: OwnTime, *, requests: int, rate: float, seed: int) -> Trace:
    """Return a trace in which requests have deadlines.

    Traces that differ only in their rate have the same requests, with the same deadlines after their arrivals.
    """
    trace = _with_long(generate(mix.spec(requests=requests, rate=rate, seed=seed)), mix, seed)
    slack, has_none = Random(f"{seed}/slack"), Random(f"{seed}/without deadline")
    found = []
    for request in trace.requests:
        deadline_ms = max(1, round(1_000 * slack.uniform(*SLACK) * own.until_end_s(request)))
        found.append(request if has_none.random() < mix.without_deadline else replace(request, deadline_ms=deadline_ms))
    return Trace(trace.spec, tuple(found))


def _with_long(trace: Trace, mix: DeadlineMix, seed: int) -> Trace:
    if not mix.long:
        return trace
    numbers = Random(f"{seed}/long")
    found = (_longer(each) if numbers.random() < mix.long else each for each in trace.requests)
    return Trace(trace.spec, tuple(found))


def _longer(request: TraceRequest) -> TraceRequest:
    return replace(
        request, prompt_tokens=LONG_FACTOR * request.prompt_tokens, new_tokens=LONG_FACTOR * request.new_tokens
    )
