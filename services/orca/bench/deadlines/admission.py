"""Wrong verdicts of admission: calls that a gateway would refuse for their deadlines, and what becomes of them.

Every request runs, and a gateway's rules judge it when it arrives (gateway/limits/overload.py). So each verdict stands
beside what became of the request. The queue is that of a gateway that refuses nothing.

A false refusal is a request that would be refused and ends in time. A false acceptance is one that is accepted and is
late.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orca.bench.deadlines.choices import OrderChoice
from orca.bench.deadlines.compare import ComparisonPlan, Report, survey, trace_at
from orca.bench.deadlines.engines import SimulatedRuns
from orca.bench.deadlines.score import counted_requests, is_in_time
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.core.domain.request import Request
from orca.gateway.errors import ApiError
from orca.gateway.limits.overload import Overload
from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.simulate.simulated_run import parent_id
from orca.planner.workload.trace import Trace
from orca.pool.api import RequestPool
from orca.pool.order.order_class import DeadlineKind, class_of

CONNECTIONS_MAX = 1_000
"""Connections of the gateway: it refuses nothing for these here."""


@dataclass(slots=True)
class AdmissionProbe:
    """Judges each request of a run as a gateway would, and refuses none."""

    refused: set[str] = field(default_factory=set)  # parents
    _overload: Overload | None = None

    async def judge(self, pool: RequestPool, request: Request) -> None:
        """Judge a request that comes now."""
        if self._overload is None:
            self._overload = Overload(pool, asyncio.get_running_loop().time, CONNECTIONS_MAX)
        await self._overload.check()  # polls the pool, as every call does
        if request.deadline_ms is None:
            return
        try:
            self._overload.check_deadline(request.deadline_ms, of=class_of(request, DeadlineKind.END))
            self._overload.check_run_time(request, DeadlineKind.END, request.deadline_ms, "deadline_ms")
        except ApiError:
            self.refused.add(request.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionScore:
    """The verdicts of one run. They count the requests that a score of the run counts (score.py)."""

    choice: OrderChoice
    load: float
    requests: int
    refused: int
    refused_in_time: int  # false refusals
    accepted_late: int  # false acceptances


def measure_admission(runs: SimulatedRuns, plan: ComparisonPlan, report: Report) -> list[AdmissionScore]:
    """Run every order at every load, once per seed. Raises: OrcaError."""
    found = []
    for seed in plan.seeds:
        surveyed = survey(runs, plan.mix, requests=plan.requests, seed=seed)
        for choice in plan.choices:
            simulation = replace(runs.simulation, rules=choice.rules)
            for load in plan.loads:
                trace = trace_at(plan, surveyed, load)
                probe = AdmissionProbe()
                outcomes = simulation.run("iteration", runs.max_batch_size, trace, on_arrival=probe.judge)
                found.append(admission_score(choice, load, trace, outcomes, probe.refused))
            report(f"seed {seed}, {choice.name}: {len(plan.loads)} loads done")
    return found


def admission_score(
    choice: OrderChoice, load: float, trace: Trace, outcomes: Sequence[RequestOutcome], refused: set[str]
) -> AdmissionScore:
    """Compare verdicts with outcomes.

    Args: refused: parents of the requests that a gateway would refuse.
    Raises: OrcaError if no request counts.
    """
    verdicts = [
        (parent_id(request) in refused, is_in_time(request, outcome))
        for request, outcome in counted_requests(trace, outcomes)
    ]
    return AdmissionScore(
        choice=choice,
        load=load,
        requests=len(verdicts),
        refused=sum(is_refused for is_refused, _ in verdicts),
        refused_in_time=verdicts.count((True, True)),
        accepted_late=verdicts.count((False, False)),
    )


QUANTITIES: Sequence[tuple[str, Callable[[AdmissionScore], int]]] = (
    ("Calls that admission refuses", lambda score: score.refused),
    ("Refused, but in time", lambda score: score.refused_in_time),
    ("Accepted, but late", lambda score: score.accepted_late),
)
"""Name and count of each quantity: a share of the requests that count."""


def lines(scores: Sequence[AdmissionScore]) -> list[str]:
    """Return a table for a terminal, of all seeds together."""
    found = [f"{'load':<6}{'order':<20}" + "".join(f"{name + ', %':>34}" for name, _ in QUANTITIES)]
    for load, choice, group in _groups(scores):
        shares = (100 * sum(map(count, group)) / sum(each.requests for each in group) for _, count in QUANTITIES)
        found.append(f"{load:<6g}{choice.name:<20}" + "".join(f"{share:>34.3g}" for share in shares))
    return found


def figures(scores: Sequence[AdmissionScore], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the shares as figures for the benchmark pages: medians over the seeds."""
    return [
        measured(
            name,
            [count(each) / each.requests for each in group],
            "%",
            {**settings, "load": load, "order": choice.order.value, "eta_percent": choice.eta_percent},
            scale=100,
        )
        for load, choice, group in _groups(scores)
        for name, count in QUANTITIES
    ]


def _groups(scores: Sequence[AdmissionScore]) -> Iterable[tuple[float, OrderChoice, list[AdmissionScore]]]:
    keys = dict.fromkeys((each.load, each.choice) for each in scores)
    for load, choice in sorted(keys, key=lambda key: key[0]):
        yield load, choice, [each for each in scores if (each.load, each.choice) == (load, choice)]
