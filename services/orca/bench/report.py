"""Shows the figures of a run: as text, as plain data, and as records of a bench."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.planner.simulate.outcomes import RunReport


def to_json(report: RunReport) -> dict[str, Any]:
    """Return the report as plain data, in the units of its fields."""
    return asdict(report)


def figures(report: RunReport, settings: Mapping[str, Setting]) -> list[Measured]:
    """Return the report as records of a run with these settings."""
    found = [measured("Generated tokens per second", report.tokens_per_s, "tokens/s", settings)]
    for what, values in (("time to first token", report.ttft_s), ("time per token", report.normalised_s)):
        if values is not None:
            found.append(measured(f"Mean {what}", values.mean, "ms", settings, scale=1000))
            found.append(measured(f"{what.capitalize()}, p99", values.p99, "ms", settings, scale=1000))
    return found


def lines(report: RunReport) -> list[str]:
    """Return the report as a table for a terminal, with latencies in milliseconds."""
    rows = [
        f"requests   {report.requests:>10} done in {report.duration_s:.2f} s, {sum(report.errors.values())} failed",
        f"throughput {report.requests_per_s:>10.2f} requests/s",
        f"           {report.tokens_per_s:>10.1f} generated tokens/s, {report.prompt_tokens_per_s:.1f} prompt tokens/s",
        f"{'milliseconds':<26}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    for name, values in (
        ("time to first token", report.ttft_s),
        ("between tokens", report.inter_token_s),
        ("end to end", report.latency_s),
        ("end to end / token", report.normalised_s),
    ):
        if values is not None:
            numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
            rows.append(f"{name:<26}" + "".join(f"{1000 * number:>10.1f}" for number in numbers))
    rows += [f"{count} failed: {reason}" for reason, count in report.errors.items()]
    if report.client_lag_s > 0.1:
        rows.append(f"the client sent up to {report.client_lag_s:.2f} s late: it was too slow for this trace")
    return rows
