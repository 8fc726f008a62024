"""The plan in force as the status shows it, for people and for programs: pure.

Latencies are at the percentile of the goal. Throughput is that of one group. Numbers are whole, in the units of the
spec, and have three digits: more of them would change with every answer.
"""

from collections.abc import Mapping
from typing import Any

from orca.core.plan_report import PlanReport, ReportedFigures, ReportedLengths, one_line
from orca.operator.domain.objects import condition, seconds, timestamp
from orca.operator.domain.observation import Observation, PlanInForce
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.planned import PlannedService
from orca.operator.plan.slo.conditions import MET, MISSED, SLO_MET
from orca.operator.plan.slo.measuring import measure
from orca.pool.measured import MeasuredFigures

REFRESH_S = 60.0
"""Seconds for which measured figures stay in the status. They change with every answer, and each write of the status
reaches everybody who watches the resource."""

_OF_MEASUREMENT = ("summary", "measured", "errorPercent", "measuredAt")
"""Fields that change with measured figures."""


def plan_status(observation: Observation, problem: str | None) -> Json | None:
    """Return the field `plan` of the status; None if no plan is in force. Args: problem: of the checks."""
    found = observation.plan_in_force
    if found is None:
        return None
    measured = measure(observation)
    shown: Json = {"summary": _summary(found.planned, measured), "controls": _controls(found.planned)}
    if found.report is not None:
        shown |= _of_report(found.report)
    if measured is not None:
        shown |= _of_measured(found, measured, observation.now_s)
    if found.following is not None and found.following.notes.check:
        notes = found.following.notes
        shown |= {"checks": notes.check, "checkedAt": timestamp(notes.checked_s)}
    if problem is not None:
        shown["problem"] = one_line(problem)
    return shown


def read_plan_status(status: Mapping[str, Any]) -> Json:
    """Return the field `plan` of a status; empty if there is no plan, or if it is not from this release."""
    found = status.get("plan")
    return found if isinstance(found, dict) else {}


def with_young_figures(written: Json, before: Mapping[str, Any], now_s: float) -> Json:
    """Return the status with the measured figures of before, if they are young and nothing else has changed."""
    new, old = read_plan_status(written), read_plan_status(before)
    if "measuredAt" not in new or "measuredAt" not in old or _without_measured(new) != _without_measured(old):
        return written
    new_verdict, verdict = (condition({"status": each}, SLO_MET) for each in (written, before))
    reasons = {new_verdict.get("reason"), verdict.get("reason")}
    # Figures at the bound may be on the other side of it with every answer.
    if len(reasons) > 1 and reasons != {MET, MISSED}:
        return written
    if not 0 <= now_s - seconds(old["measuredAt"]) < REFRESH_S:
        return written
    kept = {name: verdict[name] for name in ("status", "reason", "message", "lastTransitionTime") if name in verdict}
    conditions = [each | kept if each["type"] == SLO_MET else each for each in written["conditions"]]
    return {**written, "plan": old, "conditions": conditions}


def _without_measured(shown: Json) -> Json:
    return {name: value for name, value in shown.items() if name not in _OF_MEASUREMENT}


def _summary(planned: PlannedService, measured: MeasuredFigures | None) -> str:
    """Return the plan in one line, with measured figures after the predicted ones."""
    if measured is None:
        return planned.summary
    head, origin, workload = planned.summary.rpartition("; planned from ")
    predicted = head if origin else workload
    return f"{predicted}, {measured.describe()}{origin}{workload if origin else ''}"


def _controls(planned: PlannedService) -> Json:
    """Return what runs, by the names of the spec."""
    rra = planned.rra
    controls = {
        "policy": planned.policy,
        "stages": len(planned.layers),
        "tensor": planned.tensor,
        "stageLayers": list(planned.layers),
        "threads": planned.threads,
        "maxBatchSize": planned.max_batch_size,
        "maxBatchTokens": planned.max_batch_tokens or None,
        "encodeBatch": None if rra is None else rra.encode_batch,
        "decodeSteps": None if rra is None else rra.decode_steps,
        "decodeBatch": None if rra is None else rra.decode_batch,
        "encodeTokens": None if rra is None else rra.encode_tokens,
        "thresholdPercent": None if rra is None else rra.threshold_percent,
    }
    return _given(controls)


def _of_report(report: PlanReport) -> Json:
    lengths, planned = report.lengths, report.planned_lengths
    drift = {
        "promptMeanPercent": _percent(lengths.prompt_mean, planned.prompt_mean),
        "outputMeanPercent": _percent(lengths.output_mean, planned.output_mean),
        "outputP99Percent": _percent(lengths.output_p99, planned.output_p99),
    }
    shown = {
        "predicted": None if report.predicted is None else _figures(report.predicted),
        "workload": _lengths(lengths),
        "drift": _given(drift),
        "reason": report.reason,
        "recommended": report.recommended,
    }
    return _given(shown)


def _of_measured(found: PlanInForce, measured: MeasuredFigures, now_s: float) -> Json:
    predicted = None if found.report is None or found.report.predicted is None else found.report.predicted.latency_s
    shown = {
        "measured": {"answers": measured.answers, **_figures(measured)},
        "errorPercent": None if predicted is None else _percent(measured.latency_s, predicted),
        "measuredAt": timestamp(now_s),
    }
    return _given(shown)


def _figures(figures: ReportedFigures | MeasuredFigures) -> Json:
    shown = {
        "latencyMs": _milliseconds(figures.latency_s),
        "ttftMs": _milliseconds(figures.ttft_s),
        "tpotMs": _milliseconds(figures.tpot_s),
        "requestsPerMinute": _three_digits(60 * figures.throughput),
    }
    return _given(shown)


def _lengths(lengths: ReportedLengths) -> Json:
    return {
        "answers": lengths.answers,
        "promptMeanTokens": _three_digits(lengths.prompt_mean),
        "outputMeanTokens": _three_digits(lengths.output_mean),
        "outputP99Tokens": lengths.output_p99,
    }


def _milliseconds(value_s: float | None) -> int | None:
    return None if value_s is None else _three_digits(1000 * value_s)


def _three_digits(value: float) -> int:
    """Return a number with three digits; 1 for less, since 0 would say that there is nothing."""
    return max(int(value > 0), round(float(f"{value:.3g}")))


def _percent(value: float, of: float) -> int | None:
    """Return how far a value is above another, in percent; None without another."""
    return round(100 * (value / of - 1)) if of else None


def _given(values: Mapping[str, Any]) -> Json:
    return {name: value for name, value in values.items() if value is not None}
