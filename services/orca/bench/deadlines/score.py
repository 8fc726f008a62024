"""The figures of a run of requests with deadlines: pure arithmetic on the outcomes of its requests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orca.core.domain.errors import OrcaError
from orca.planner.simulate.outcomes import RequestOutcome, percentile
from orca.planner.workload.trace import Trace, TraceRequest
from orca.pool.order.order_rules import LATE

MISSES = ("late", "refused", "dropped", "deadline")
"""Causes of a miss: the answer ended late, the gateway refused the call, the request ended as too late while it waited,
or its deadline ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineScore:
    """The figures of one run. They count the requests whose deadlines lie between the warm-up and the last arrival.

    The warm-up is as long as the longest time that a request has until its deadline. An engine that was idle serves
    everybody in time for so long.
    """

    requests: int  # that count
    goodput_per_s: float  # answers that ended in time, per second
    utility_per_s: float  # sum of 1 / tokens of these answers, prompt and output together: the utility of the paper
    in_time: float  # share of the requests that count
    first_token_p99_s: float | None  # of requests that got a first token; None if none did
    no_token: float  # share of the requests that count and got no token
    late_tokens: float  # share of the generated tokens that belong to no answer in time
    misses: dict[str, int]  # cause -> requests that did not end in time; `MISSES` has the causes


def score(trace: Trace, outcomes: Sequence[RequestOutcome]) -> DeadlineScore:
    """Return the figures of a run.

    Raises: OrcaError if no deadline lies in the time that counts, or a request failed for another cause than `MISSES`.
    """
    begin_s, end_s = counted_s(trace)
    counted = counted_requests(trace, outcomes)
    answers = [outcome for request, outcome in counted if is_in_time(request, outcome)]
    firsts = sorted(outcome.token_s[0] - outcome.arrival_s for _, outcome in counted if outcome.token_s)
    tokens = sum(len(outcome.token_s) for _, outcome in counted)
    misses = Counter(_miss(outcome) for request, outcome in counted if not is_in_time(request, outcome))
    span_s = end_s - begin_s
    return DeadlineScore(
        requests=len(counted),
        goodput_per_s=len(answers) / span_s,
        utility_per_s=sum(1 / (each.prompt_tokens + each.new_tokens) for each in answers) / span_s,
        in_time=len(answers) / len(counted),
        first_token_p99_s=percentile(firsts, 0.99) if firsts else None,
        no_token=1 - len(firsts) / len(counted),
        late_tokens=1 - sum(each.new_tokens for each in answers) / tokens if tokens else 0.0,
        misses=dict(misses),
    )


def counted_s(trace: Trace) -> tuple[float, float]:
    """Return the time that counts: from the end of the warm-up until the last arrival."""
    return max((request.deadline_ms or 0) for request in trace.requests) / 1000, trace.requests[-1].arrival_s


def counted_requests(trace: Trace, outcomes: Sequence[RequestOutcome]) -> list[tuple[TraceRequest, RequestOutcome]]:
    """Return the requests whose deadlines lie in the time that counts. Raises: OrcaError if there are none."""
    begin_s, end_s = counted_s(trace)
    counted = [
        (request, outcome)
        for request, outcome in zip(trace.requests, outcomes, strict=True)
        if request.deadline_ms is not None and begin_s <= due_s(request) < end_s
    ]
    if not counted:
        raise OrcaError(f"no deadline lies between the seconds {begin_s:.1f} and {end_s:.1f}: use more requests")
    return counted


def due_s(request: TraceRequest) -> float:
    """Return the deadline of a request that has one, in seconds after the start of the trace."""
    assert request.deadline_ms is not None, "a request without a deadline"
    return request.arrival_s + request.deadline_ms / 1000


def is_in_time(request: TraceRequest, outcome: RequestOutcome) -> bool:
    """Return true if a request with a deadline got all its tokens by then."""
    return outcome.error is None and outcome.end_s <= due_s(request)


def _miss(outcome: RequestOutcome) -> str:
    """Return the cause of a miss. Raises: OrcaError if it is none of `MISSES`."""
    error = outcome.error
    if error is None:
        return "late"
    if error.startswith("HTTP 429"):
        return "refused"
    if LATE in error:
        return "dropped"
    if "deadline" in error:
        return "deadline"
    raise OrcaError(f"a request failed: {error}")


def capacity_per_s(outcomes: Sequence[RequestOutcome]) -> float:
    """Return the requests per second of a saturated run, from the first tenth of all ends to the last one.

    Raises: OrcaError if a request failed, or the run is too short.
    """
    if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
        raise OrcaError(f"{len(failed)} requests failed while the capacity was measured: {failed[0]}")
    ends = sorted(outcome.end_s for outcome in outcomes)
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    if not ends[first] < ends[last]:
        raise OrcaError("too few requests to measure the capacity")
    return (last - first) / (ends[last] - ends[first])
