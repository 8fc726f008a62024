"""Computes the figures of a run from the outcomes of its requests: pure arithmetic, no clock, no network.

The paper's own figure is the median normalised latency: a request's end-to-end latency divided by the number of tokens
it generated, the median over all requests (ORCA, section 6.2, Figure 10).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """The outcome of one request for its client. Times are seconds after the start of the trace."""

    index: int
    prompt_tokens: int
    new_tokens: int  # wanted, and received if `error` is None
    arrival_s: float  # due time in the trace; latencies count from here, even if the client was late
    sent_s: float
    token_s: tuple[float, ...] = ()  # time of each token; fewer entries if the server puts several in one event
    token_ids: tuple[int, ...] = ()  # empty if the server does not report them
    end_s: float = 0.0
    error: str | None = None  # reason of a failure; None for a request that got exactly its tokens

    @property
    def latency_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def normalised_s(self) -> float:
        """Latency per generated token."""
        return self.latency_s / self.new_tokens


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean and the percentiles of a quantity over many requests or tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The figures of one run. Failed requests count in `errors` and nowhere else."""

    requests: int  # that got all their tokens
    errors: dict[str, int]  # reason -> requests
    duration_s: float  # from the first arrival to the last end
    requests_per_s: float
    tokens_per_s: float  # generated ones
    prompt_tokens_per_s: float
    ttft_s: Spread | None  # time to first token; the spreads are None when no request succeeded
    inter_token_s: Spread | None  # between two tokens of a request; None also when all requests had one token
    latency_s: Spread | None  # end to end
    normalised_s: Spread | None  # latency per generated token; p50 is the y axis of the paper's Figure 10
    client_lag_s: float  # largest delay between due time and sending: if it is not small, the client was too slow


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value with `share` (0 to 1) of the sorted `values` below it, interpolated linearly."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def spread(values: Iterable[float]) -> Spread | None:
    """Return mean and percentiles; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(mean=fmean(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


def summarise(outcomes: Sequence[RequestOutcome]) -> RunReport:
    """Return the figures of a run of at least one request."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    start_s = min(outcome.arrival_s for outcome in outcomes)
    duration_s = max((outcome.end_s for outcome in good), default=start_s) - start_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return RunReport(
        requests=len(good),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        tokens_per_s=sum(outcome.new_tokens for outcome in good) * per_s,
        prompt_tokens_per_s=sum(outcome.prompt_tokens for outcome in good) * per_s,
        ttft_s=spread(outcome.token_s[0] - outcome.arrival_s for outcome in good),
        inter_token_s=spread(after - before for outcome in good for before, after in pairwise(outcome.token_s)),
        latency_s=spread(outcome.latency_s for outcome in good),
        normalised_s=spread(outcome.normalised_s for outcome in good),
        client_lag_s=max(outcome.sent_s - outcome.arrival_s for outcome in outcomes),
    )
