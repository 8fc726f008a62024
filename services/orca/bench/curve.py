"""Latency against throughput: the curves of the paper's Figures 10 and 11, one per policy and max batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.report import to_json
from orca.planner.simulate.outcomes import RunReport
from orca.scheduler.policy.policy import BatchBounds
from orca.scheduler.policy.request_level import RequestLevelPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One run: a trace at one arrival rate through one configuration."""

    policy: str  # its name
    scheduling: str  # full description of the policy, with the habits or controls in force
    max_batch_size: int
    rate: float | None  # requests/s; None: all at once
    report: RunReport

    @property
    def curve(self) -> str:
        """The label of its curve: the paper's `orca(16)` or `ft(16)` with our names of the policies."""
        return f"{self.policy}({self.max_batch_size})"

    def latency_s(self, *, is_normalised: bool) -> float:
        """Return the median end-to-end latency, per generated token if normalised; NaN if no request succeeded."""
        values = self.report.normalised_s if is_normalised else self.report.latency_s
        return float("nan") if values is None else values.p50


def lines(points: Sequence[CurvePoint], *, is_normalised: bool) -> list[str]:
    """Return a table of all curves, one after the other."""
    latency = "median ms/token" if is_normalised else "median latency ms"
    rows = [f"{'curve':<22}{'rate':>8}{'requests/s':>12}{'tokens/s':>10}{latency:>19}{'p99 TTFT ms':>13}{'failed':>8}"]
    for _, curve in groupby(points, key=lambda point: point.curve):
        for point in curve:
            report = point.report
            rate = "at once" if point.rate is None else f"{point.rate:g}"
            ttft = "-" if report.ttft_s is None else f"{1000 * report.ttft_s.p99:.0f}"
            rows.append(
                f"{point.curve:<22}{rate:>8}{report.requests_per_s:>12.2f}{report.tokens_per_s:>10.1f}"
                f"{1000 * point.latency_s(is_normalised=is_normalised):>19.1f}{ttft:>13}"
                f"{sum(report.errors.values()):>8}"
            )
    return rows


def side_by_side(points: Sequence[CurvePoint], *, is_normalised: bool) -> list[str]:
    """Return a table with a row for each arrival rate and two columns for each curve; no lines for one curve alone.

    The paper compares throughputs at one latency (section 6.2). Here such a ratio would depend on which rates were
    measured, so the points of the curves are shown as they are.
    """
    labels = list(dict.fromkeys(point.curve for point in points))
    if len(labels) < 2:
        return []
    latency = "ms/token" if is_normalised else "ms"
    found = {(point.rate, point.curve): point for point in points}
    rows = [
        f"requests/s, and median {latency}, of each curve:",
        f"{'rate':>8}" + "".join(f"{label:>25}" for label in labels),
    ]
    for rate in dict.fromkeys(point.rate for point in points):
        row = f"{'at once' if rate is None else f'{rate:g}':>8}"
        for label in labels:
            point = found.get((rate, label))
            if point is None:
                row += f"{'-':>15}{'-':>10}"
            else:
                latency_s = point.latency_s(is_normalised=is_normalised)
                row += f"{point.report.requests_per_s:>15.2f}{1000 * latency_s:>10.1f}"
        rows.append(row)
    return rows


def points_json(points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    """Return the points as plain data."""
    return [
        {
            "policy": point.policy,
            "scheduling": point.scheduling,
            "max_batch_size": point.max_batch_size,
            "rate_per_s": point.rate,
            "report": to_json(point.report),
        }
        for point in points
    ]


def figures(points: Sequence[CurvePoint], settings: Mapping[str, Setting], *, is_normalised: bool) -> list[Measured]:
    """Return the points as records of a sweep with these settings."""
    usual = ("iteration", RequestLevelPolicy().describe(BatchBounds(max_batch_size=1)))
    found = []
    for point in points:
        report = point.report
        chosen = {
            **settings,
            "policy": point.policy,
            "baseline": None if point.scheduling in usual or point.policy == "rra" else point.scheduling,
            "max_batch": point.max_batch_size,
            "rate_per_s": point.rate,
        }
        if point.policy == "rra":
            chosen["cycle"] = point.scheduling
        latency = "Median time per token" if is_normalised else "Median latency"
        found.append(measured("Requests per second", report.requests_per_s, "requests/s", chosen))
        if report.ttft_s is not None:
            latency_s = point.latency_s(is_normalised=is_normalised)
            found.append(measured(latency, latency_s, "ms", chosen, scale=1000))
            found.append(measured("Time to first token, p99", report.ttft_s.p99, "ms", chosen, scale=1000))
    return found
