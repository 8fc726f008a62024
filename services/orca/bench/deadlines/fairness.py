"""The longest waits under overload, with requests that have no deadline and requests that are long.

A request waits from its arrival until its first token, or until its end if it got none. A request without a deadline
is promised to wait at most its own wait under order arrival, the patience, and the longest run: what runs goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orca.bench.deadlines.choices import OrderChoice
from orca.bench.deadlines.compare import Report, Surveyed, survey
from orca.bench.deadlines.engines import OrderedRuns
from orca.bench.deadlines.workload import DeadlineMix, deadline_trace
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.core.domain.errors import OrcaError
from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.workload.trace import Trace, TraceRequest
from orca.pool.order.order_rules import Order

WITHOUT_DEADLINE, LONG = 0.1, 0.05
"""Shares of requests that have no deadline, and that are ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessPlan:
    """The run that measures the waits, once per order."""

    mix: DeadlineMix
    choices: Sequence[OrderChoice]  # without arrival, with which each is compared
    load: float  # multiple of the capacity
    seconds: float  # in which requests arrive
    requests: int  # of the run that measures the capacity
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindWaits:
    """The longest waits of one kind of requests under one order."""

    order: str
    deadline: str
    length: str
    requests: int
    by_arrival_s: float  # longest wait under order arrival
    longest_s: float
    promised_s: float | None  # the longest promise; None: requests with a deadline have none
    broken: int | None  # requests that waited longer than was promised to them
    closest_s: float | None  # least time between a wait and its promise; below 0 if one is broken


def run_fairness(runs: OrderedRuns, plan: FairnessPlan, report: Report) -> list[KindWaits]:
    """Run one trace under arrival and under each other order. Raises: OrcaError."""
    found = survey(runs, plan.mix, requests=plan.requests, seed=plan.seed)
    trace = _trace(plan, found)
    report(f"{len(trace.requests)} requests in {plan.seconds:g} s, {found.capacity_per_s:.3g} requests/s of capacity")
    [by_arrival] = runs.run(OrderChoice(order=Order.ARRIVAL), [trace])
    waits = []
    for choice in plan.choices:
        [outcomes] = runs.run(choice, [trace])
        waits += waits_of(trace, choice, by_arrival, outcomes)
        report(f"{choice.name} done")
    return waits


def _trace(plan: FairnessPlan, found: Surveyed) -> Trace:
    rate = plan.load * found.capacity_per_s
    trace = deadline_trace(
        plan.mix, found.own, requests=round(1.2 * rate * plan.seconds) + 20, rate=rate, seed=plan.seed
    )
    return Trace(trace.spec, tuple(each for each in trace.requests if each.arrival_s < plan.seconds))


def waits_of(
    trace: Trace, choice: OrderChoice, by_arrival: Sequence[RequestOutcome], outcomes: Sequence[RequestOutcome]
) -> list[KindWaits]:
    """Return the longest waits of each kind.

    Args: by_arrival: the outcomes of the same trace under order arrival.
    Raises: OrcaError if a request without a deadline has not got all its tokens.
    """
    longest_run_s = max(each.end_s - each.token_s[0] for each in outcomes if each.token_s)
    extra_s = choice.patience_s + longest_run_s
    kinds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for request, before, now in zip(trace.requests, by_arrival, outcomes, strict=True):
        if request.deadline_ms is None and now.error is not None:
            raise OrcaError(f"a request without a deadline failed: {now.error}")
        kinds.setdefault(_kind(trace, request), []).append((wait_s(before), wait_s(now)))
    found = []
    for (deadline, length), waits in sorted(kinds.items()):
        is_promised = deadline == "none"
        left = [before + extra_s - now for before, now in waits]
        found.append(
            KindWaits(
                order=choice.name,
                deadline=deadline,
                length=length,
                requests=len(waits),
                by_arrival_s=max(before for before, _ in waits),
                longest_s=max(now for _, now in waits),
                promised_s=max(before for before, _ in waits) + extra_s if is_promised else None,
                broken=sum(each < 0 for each in left) if is_promised else None,
                closest_s=min(left) if is_promised else None,
            )
        )
    return found


def wait_s(outcome: RequestOutcome) -> float:
    """Return the time until the first token, or until the end of a request without one."""
    return (outcome.token_s[0] if outcome.token_s else outcome.end_s) - outcome.arrival_s


def _kind(trace: Trace, request: TraceRequest) -> tuple[str, str]:
    is_long = request.prompt_tokens > trace.spec.prompt_tokens.high or request.new_tokens > trace.spec.new_tokens.high
    return "none" if request.deadline_ms is None else "2 to 20 x own time", "ten times" if is_long else "usual"


def lines(waits: Sequence[KindWaits]) -> list[str]:
    """Return a table for a terminal."""
    head = (
        f"{'order':<20}{'deadline':<20}{'length':<12}{'requests':>10}{'by arrival':>12}{'longest':>10}{'promised':>10}"
    )
    found = [f"{head}{'broken':>8}"]
    for each in waits:
        kind = f"{each.order:<20}{each.deadline:<20}{each.length:<12}{each.requests:>10}"
        promised, broken = _or_none(each.promised_s, ".1f"), _or_none(each.broken, "d")
        found.append(f"{kind}{each.by_arrival_s:>12.1f}{each.longest_s:>10.1f}{promised:>10}{broken:>8}")
    return found


def _or_none(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def to_json(waits: Iterable[KindWaits]) -> list[dict[str, Any]]:
    """Return the waits as plain data."""
    return [asdict(each) for each in waits]


def figures(waits: Iterable[KindWaits], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the waits as figures for the benchmark pages."""
    found = []
    for each in waits:
        chosen = {**settings, "order": each.order, "deadline": each.deadline, "length": each.length}
        found.append(measured("Longest wait under order arrival", each.by_arrival_s, "s", chosen))
        found.append(measured("Longest wait", each.longest_s, "s", chosen))
        if each.promised_s is not None and each.broken is not None:
            found.append(measured("Longest wait promised", each.promised_s, "s", chosen))
            found.append(measured("Requests that waited longer than promised", each.broken, "requests", chosen))
    return found
