"""Plans and checks with figures that a test states."""

from dataclasses import replace
from typing import Any

from orca.planner.follow.check import VERSION as CHECK_VERSION
from orca.planner.follow.check import PlanCheck
from orca.planner.search.plan import (
    VERSION,
    Plan,
    PlannedBounds,
    PlannedDevice,
    PlannedFigures,
    PlannedGoal,
    PlannedSchedule,
    PlannedWorkload,
)
from support.planner.profiles import key

BOUND_MS = 8000.0


def figures(throughput: float = 6.0, latency_s: float | None = 7.0) -> PlannedFigures:
    return PlannedFigures(throughput=throughput, latency_s=latency_s, ttft_s=0.5, tpot_s=0.05)


def lengths(answers: int = 1000, **changes: Any) -> PlannedWorkload:
    defaults: dict[str, Any] = {
        "source": "the pool" if answers else "stated",
        "cut_share": 0.0,
        "prompt_mean": 100.0,
        "prompt_p99": 200,
        "output_mean": 50.0,
        "output_p99": 120,
    }
    return PlannedWorkload(answers=answers, **defaults | changes)


def plan(
    batch: int = 8,
    *,
    throughput: float = 6.0,
    latency_s: float | None = 7.0,
    workload: PlannedWorkload | None = None,
    stages: int = 1,
) -> Plan:
    """Return a plan of iteration with a batch; it meets the goal of BOUND_MS if its latency does."""
    found = figures(throughput, latency_s)
    return Plan(
        version=VERSION,
        release="0",
        device=PlannedDevice(key=replace(key(), stacks=(replace(key().stacks[0], layers=4 * stages),))),
        goal=PlannedGoal(
            latency_ms=BOUND_MS,
            percentile=99,
            kind="sequence",
            rate=None,
            ttft_ms=None,
            tpot_ms=None,
            margin_percent=0.0,
        ),
        workload=workload or lengths(),
        schedule=PlannedSchedule(
            policy="iteration",
            layers=(4,) * stages,
            ranks=1,
            prefetch=1,
            slots=None,
            bounds=PlannedBounds(max_batch_size=batch),
            expected=found,
            simulated=found,
        ),
        is_met=found.latency_s is not None and found.latency_s * 1000 <= BOUND_MS,
        fewest_devices=None,
        alternatives=(),
        evaluated=1,
        points=1,
    )


def check(
    current: PlannedFigures | None, best: Plan | None, *, workload: PlannedWorkload | None = None, complaint: str = ""
) -> PlanCheck:
    """Return a check; the plan in force meets the goal if its latency does."""
    is_met = current is not None and current.latency_s is not None and current.latency_s * 1000 <= BOUND_MS
    return PlanCheck(
        version=CHECK_VERSION,
        workload=workload or lengths(),
        current=current,
        is_met=is_met,
        best=best,
        complaint=complaint,
    )
