"""Measures a schedule exactly: the real scheduler on simulated stages, in its steady state (steady_state.py)."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from orca.core.domain.request import FinishReason, Request
from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.simulate.simulated_run import Simulation, parent_id
from orca.planner.simulate.steady_state import (
    WARM_UP,
    TimedAnswer,
    check_enough,
    percentile_of_spans,
    saturated_window,
)
from orca.planner.workload.percentiles import at_percent
from orca.planner.workload.trace import Trace
from orca.scheduler.observer import IterationRecord, Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactFigures:
    """The figures of a steady state. Latencies are percentiles over all its answers."""

    requests: int  # that finished in it
    throughput: float  # requests per second
    tokens_per_s: float  # generated ones
    sequence_s: float  # first step to last token
    request_s: float  # submission to last token
    first_token_s: float  # first step to first token
    request_first_token_s: float  # submission to first token
    token_s: float  # an answer's mean time between two tokens; 0 if all answers have one token
    step_requests: float  # rows of a step on average


class StepTimes(Observer):
    """Records the steps of each request, and the rows of each step; seconds of the loop's clock."""

    def __init__(self, trace: Trace) -> None:
        self.first_s: dict[str, float] = {}  # by parent: its first step was submitted
        self.last_s: dict[str, float] = {}  # by parent: its newest step returned
        self.rows: list[tuple[float, int]] = []  # time at which a step returned, and its rows
        self.is_over = asyncio.Event()  # the first request has ended and the last one has entered: no later step counts
        self._requests, self._first = len(trace.requests), parent_id(trace.requests[0])
        self._has_first_ended = False

    def iterated(self, record: IterationRecord) -> None:
        submitted_s, returned_s = record.submitted_ns / 1e9, record.returned_ns / 1e9
        for row in record.batch.rows:
            parent = row.request.request.parent
            self.first_s.setdefault(parent, submitted_s)
            self.last_s[parent] = returned_s
        self.rows.append((returned_s, len(record.batch.rows)))
        if self._has_first_ended and len(self.first_s) == self._requests:
            self.is_over.set()

    def ended(self, request: Request, reason: FinishReason, tokens: int) -> None:  # noqa: ARG002 - all observers have it
        self._has_first_ended = self._has_first_ended or request.parent == self._first


def measure_exact(
    simulation: Simulation,
    policy: str,
    max_batch_size: int,
    trace: Trace,
    *,
    percent: float = 99,
    warm_up: float = WARM_UP,
) -> ExactFigures:
    """Run a trace and return the figures of its steady state.

    A saturated trace (without a rate) is steady from `warm_up` of its ends on until its last request enters. A trace
    with a rate is steady between `warm_up` of its arrivals and the last one.

    Args:
        percent: the percentile of all latencies.
        warm_up: share of the requests that belong to the begin.
    Raises: SettingError if the trace cannot run here, or is too short to have a steady state.
    """
    steps = StepTimes(trace)
    outcomes = simulation.run(policy, max_batch_size, trace, steps, is_over=steps.is_over)
    # Outcomes count from the start of the trace, steps from that of the loop. Tokens can be read when a step returns.
    begin_s = steps.last_s[parent_id(outcomes[0])] - outcomes[0].end_s
    first_s = [steps.first_s[parent_id(outcome)] - begin_s for outcome in outcomes]
    timed = list(zip(outcomes, first_s, strict=True))
    if trace.spec.rate is None:
        answers = [TimedAnswer(first, _first_token_s(each), each.end_s, each.new_tokens) for each, first in timed]
        from_s, until_s = saturated_window(answers, warm_up)
    else:
        from_s = outcomes[int(warm_up * len(outcomes))].arrival_s
        until_s = outcomes[-1].arrival_s
    counted = [(outcome, first) for outcome, first in timed if from_s < outcome.end_s <= until_s]
    check_enough(len(counted), len(outcomes))

    def of_entered(spans: Iterable[tuple[float, float]]) -> float:
        return percentile_of_spans(spans, from_s, until_s, percent)

    def since_arrival(end_of: Callable[[RequestOutcome], float]) -> float:
        if trace.spec.rate is None:  # nobody arrives in the steady state
            return at_percent([end_of(outcome) - outcome.arrival_s for outcome, _ in counted], percent)
        return of_entered([(outcome.arrival_s, end_of(outcome)) for outcome in outcomes])

    span_s = until_s - from_s
    rows = [count for time_s, count in steps.rows if from_s < time_s - begin_s <= until_s]
    longer = [outcome for outcome, _ in counted if outcome.new_tokens > 1]
    return ExactFigures(
        requests=len(counted),
        throughput=len(counted) / span_s,
        tokens_per_s=sum(from_s < time_s <= until_s for outcome in outcomes for time_s in outcome.token_s) / span_s,
        sequence_s=of_entered([(first, outcome.end_s) for outcome, first in timed]),
        request_s=since_arrival(lambda outcome: outcome.end_s),
        first_token_s=of_entered([(first, _first_token_s(outcome)) for outcome, first in timed]),
        request_first_token_s=since_arrival(_first_token_s),
        token_s=at_percent([_token_s(outcome) for outcome in longer], percent) if longer else 0.0,
        step_requests=sum(rows) / max(len(rows), 1),
    )


def _first_token_s(outcome: RequestOutcome) -> float:
    return outcome.token_s[0] if outcome.token_s else inf


def _token_s(outcome: RequestOutcome) -> float:
    return (outcome.token_s[-1] - outcome.token_s[0]) / (outcome.new_tokens - 1)
