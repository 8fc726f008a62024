"""The figures of a group under load, from the times of its answers, whether they are real or simulated.

A saturated run begins with a group that is empty and ends with one that runs empty. Both are cut off. What is left is
the part in which as many requests enter as leave.

Latencies are those of the answers that enter in it. If those that end in it counted, long ones would be missing at its
begin. An answer that has not ended at its end counts as longer than until then (Kaplan and Meier, 1958). The time
between tokens is that of the answers that end in it: only these have all their tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orca.core.domain.errors import SettingError
from orca.planner.workload.percentiles import at_percent

REQUESTS_MIN = 20
"""Fewest finished requests of a steady state: below them a percentile says nothing. So no single request of those that
begin in it may stand for more than one of so many."""

WARM_UP = 0.25
"""Share of the requests that belong to the begin."""


class NoSteadyState(SettingError):
    """A run with too few requests for a steady state."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The times of one answer in the group, in seconds of one clock."""

    first_s: float  # its first step was submitted
    first_token_s: float  # the step that drew its first token returned
    end_s: float  # the step that drew its last token returned
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyFigures:
    """The figures of a steady state. Latencies are percentiles over all its answers, without the time in the queue."""

    requests: int  # that finished in it
    throughput: float  # of these, requests per second
    sequence_s: float  # first step to last token
    first_token_s: float  # first step to first token
    token_s: float  # an answer's mean time between two tokens; 0 if all answers have one token


def saturated_window(answers: Sequence[TimedAnswer], warm_up: float = WARM_UP) -> tuple[float, float]:
    """Return begin and end of the steady state of a saturated run: both are ends of answers.

    Answers end in groups, at worst one group in a cycle. From the end of one group to that of another there are whole
    cycles. The last request enters when the window ends.
    """
    ends = sorted(answer.end_s for answer in answers)
    last_entry_s = max(answer.first_s for answer in answers)
    from_s = ends[int(warm_up * len(ends))]
    return from_s, max((end_s for end_s in ends if end_s <= last_entry_s), default=from_s)


def steady_figures(answers: Sequence[TimedAnswer], *, percent: float = 99) -> SteadyFigures:
    """Return the figures of the steady state of a saturated run. Raises: NoSteadyState if it is too short for one."""
    from_s, until_s = saturated_window(answers)
    counted = [answer for answer in answers if from_s < answer.end_s <= until_s]
    check_enough(len(counted), len(answers))
    longer = [(each.end_s - each.first_token_s) / (each.tokens - 1) for each in counted if each.tokens > 1]
    return SteadyFigures(
        requests=len(counted),
        throughput=len(counted) / (until_s - from_s),
        sequence_s=percentile_of_spans([(each.first_s, each.end_s) for each in answers], from_s, until_s, percent),
        first_token_s=percentile_of_spans(
            [(each.first_s, each.first_token_s) for each in answers], from_s, until_s, percent
        ),
        token_s=at_percent(longer, percent) if longer else 0.0,
    )


def percentile_of_spans(spans: Iterable[tuple[float, float]], from_s: float, until_s: float, percent: float) -> float:
    """Return a percentile of the lengths of the spans that begin in a window.

    A span that ends after the window is known to be longer than its part in it, and no more.

    Args: spans: begin and end of each, in seconds; an end may be infinite.
    Raises: NoSteadyState if too few spans begin in the window, or too few of the long ones end in it: one span would
        stand for more than one of `REQUESTS_MIN`.
    """
    lengths = sorted(
        (min(end_s, until_s) - begin_s, end_s > until_s) for begin_s, end_s in spans if from_s <= begin_s < until_s
    )
    share, left = 1.0, len(lengths)
    for length_s, is_cut in lengths:
        if not is_cut:
            weight = share / left
            if weight * REQUESTS_MIN > 1 + 1e-9:
                break
            share -= weight
            if share <= (1 - percent / 100) * (1 + 1e-9):
                return length_s
        left -= 1
    raise NoSteadyState("too few requests begin in the steady state and end in it, too: run more requests")


def check_enough(counted: int, requests: int) -> None:
    """Raises: NoSteadyState if so few requests finished in the steady state that a percentile says nothing."""
    if counted < REQUESTS_MIN:
        raise NoSteadyState(
            f"{counted} of {requests} requests finished in the steady state, which needs {REQUESTS_MIN}: "
            "run more requests"
        )
