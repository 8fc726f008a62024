"""Latency against throughput: the curves of the paper's Figures 10 and 11, one per policy and max batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.report import RunReport, to_json
from orca.scheduler.policy.request_level import RequestLevelPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One run: a trace at one arrival rate through one configuration."""

    policy: str  # `iteration` or `request_level`
    scheduling: str  # full description of the policy, with the habits that are in force
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


def best_throughput(points: Sequence[CurvePoint], policy: str, *, within_s: float, is_normalised: bool = True) -> float:
    """Return the requests/s of the policy's best run with a median latency of at most `within_s`; 0 if there is none.

    The paper compares at one latency: the throughput that each system reaches without exceeding it (section 6.2).
    """
    return max(
        (
            point.report.requests_per_s
            for point in points
            if point.policy == policy and point.latency_s(is_normalised=is_normalised) <= within_s
        ),
        default=0.0,
    )


def comparison(points: Sequence[CurvePoint], *, is_normalised: bool) -> list[str]:
    """Compare iteration-level and request-level at one latency: twice the lowest measured one, as in the paper."""
    lowest = min(point.latency_s(is_normalised=is_normalised) for point in points)
    if {point.policy for point in points} != {"iteration", "request_level"} or not lowest > 0:
        return []
    bound = 2 * lowest
    ours, theirs = (
        best_throughput(points, policy, within_s=bound, is_normalised=is_normalised)
        for policy in ("iteration", "request_level")
    )
    ratio = f"{ours / theirs:.1f} times as many" if theirs else "request_level never meets it"
    unit = "ms/token" if is_normalised else "ms"
    return [f"at a median of at most {1000 * bound:.1f} {unit}: {ours:.2f} requests/s against {theirs:.2f}: {ratio}"]


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
    usual = ("iteration", RequestLevelPolicy().describe())
    found = []
    for point in points:
        report = point.report
        chosen = {
            **settings,
            "policy": point.policy,
            "baseline": None if point.scheduling in usual else point.scheduling,
            "max_batch": point.max_batch_size,
            "rate_per_s": point.rate,
        }
        latency = "Median time per token" if is_normalised else "Median latency"
        found.append(measured("Requests per second", report.requests_per_s, "requests/s", chosen))
        if report.ttft_s is not None:
            latency_s = point.latency_s(is_normalised=is_normalised)
            found.append(measured(latency, latency_s, "ms", chosen, scale=1000))
            found.append(measured("Time to first token, p99", report.ttft_s.p99, "ms", chosen, scale=1000))
    return found
