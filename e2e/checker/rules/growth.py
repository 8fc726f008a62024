"""Measures growth of an undisturbed system: samples of each part, a slope per role, and the rule over them. Pure.

A slope is the Theil-Sen estimator: the median, over pairs of samples, of the difference divided by the distance. A
burst or a garbage collection changes it little. Each process (a *life*) that lived long enough has a slope over its
steady samples only: those after its warm-up and without a fault. The slope of a role is the median of its lives.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from checker.history.records import Sample
from checker.rules.evidence import Evidence, Harm, Violation
from checker.systems.processes import role_of

SAMPLES_MAX = 150
"""Most samples of a life; more are thinned out evenly, because the number of pairs grows with the square."""

SAMPLES_MIN = 10

MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of a leak, which exceeds both values: noise in a short life is steep, a long life grows slowly."""

    per_hour: float
    room: float  # over a whole life


BOUNDS = {
    "rss_bytes": Bound(per_hour=16 * MIB, room=12 * MIB),
    "open_files": Bound(per_hour=20, room=80),
    "threads": Bound(per_hour=5, room=8),
    "connections": Bound(per_hour=20, room=80),
    "asyncio_tasks": Bound(per_hour=20, room=150),
    "used_memory_bytes": Bound(per_hour=8 * MIB, room=4 * MIB),
    "keys": Bound(per_hour=500, room=2000),
}
"""Bounds by resource. The load varies: `room` covers what it takes at one time and returns at another. A gateway has
between 0 and 24 open calls (`--open`), each with a socket and several tasks, and up to 32 connections to Redis. Redis
keeps the requests that ended in the last minute.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of one resource in one role."""

    role: str
    what: str
    lives: int  # processes that lived long enough
    hours: float  # of the longest life
    level: float  # median over all steady samples of these lives
    per_hour: float
    grown: float  # the slope times the longest life

    @property
    def is_leak(self) -> bool:
        bound = BOUNDS[self.what]
        return self.per_hour > bound.per_hour and self.grown > bound.room


def measure_growth(samples: Sequence[Sample], *, least_life_s: float) -> list[Growth]:
    """Measure the growth of each role.

    Args: least_life_s: from a life's first steady sample to its last; shorter lives are left out.
    """
    lives: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.is_steady:
            lives[role_of(sample.part), sample.pid].append(sample)
    by_role: defaultdict[str, list[list[Sample]]] = defaultdict(list)
    for (role, _), life in lives.items():
        if len(life) >= SAMPLES_MIN and life[-1].at - life[0].at >= least_life_s:
            by_role[role].append(life)
    return [found for role in sorted(by_role) for found in _of_role(role, by_role[role])]


def growth_table(growths: Sequence[Growth]) -> str:
    """Return a table for people, with memory in MiB."""
    if not growths:
        return "growth: no process lived long enough to measure it"
    head = f"  {'part':<11}{'counted':<19}{'lives':>6}{'longest, h':>12}{'level':>10}{'per hour':>11}"
    lines = ["growth in quiet times (memory in MiB)", head]
    for growth in growths:
        unit = MIB if growth.what.endswith("_bytes") else 1.0
        numbers = f"{growth.lives:>6}{growth.hours:>12.2f}{growth.level / unit:>10.1f}{growth.per_hour / unit:>+11.1f}"
        lines.append(f"  {growth.role:<11}{growth.what:<19}{numbers}{'  LEAK' if growth.is_leak else ''}")
    return "\n".join(lines)


def does_not_grow(evidence: Evidence) -> Iterator[Violation]:
    """Check that no role holds more and more of a resource under constant load."""
    for growth in measure_growth(evidence.samples, least_life_s=evidence.least_life_s):
        if growth.is_leak:
            bound = BOUNDS[growth.what]
            expected = f"{growth.role} {growth.what}: at most {bound.per_hour:g} more an hour, or {bound.room:g} in all"
            found = f"{growth.per_hour:.0f} an hour, {growth.grown:.0f} in {growth.hours:.2f} h"
            yield Violation(rule="does_not_grow", harm=Harm.LEAKED, expected=expected, found=found)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen slope in units of y per unit of x, for points in order of x; two must differ in x."""
    thinned = points[:: -(-len(points) // SAMPLES_MAX)]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(thinned, 2) if b[0] > a[0])


def _of_role(role: str, lives: Sequence[Sequence[Sample]]) -> Iterator[Growth]:
    hours = max(life[-1].at - life[0].at for life in lives) / 3600
    for what in BOUNDS:
        points = [[(sample.at / 3600, sample.held[what]) for sample in life if what in sample.held] for life in lives]
        slopes = [slope(life) for life in points if len(life) >= SAMPLES_MIN]
        if slopes:
            per_hour = statistics.median(slopes)
            yield Growth(
                role=role,
                what=what,
                lives=len(slopes),
                hours=hours,
                level=statistics.median(value for life in points for _, value in life),
                per_hour=per_hour,
                grown=per_hour * hours,
            )
