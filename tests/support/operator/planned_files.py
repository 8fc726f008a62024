"""Results of the Jobs of a plan for spec.slo, as `orca profile`, `orca plan` and `orca follow` leave them."""

import json
from typing import Any

from orca.core.job_files import (
    PLAN_FILE,
    PROFILE_FILE,
    REPORT_FILE,
    SHORTFALL_FILE,
    STATE_FILE,
    SUMMARY_FILE,
    read_files,
    to_body,
)
from orca.core.plan_report import PlanReport, ReportedFigures, ReportedLengths, report_to_text
from orca.operator.domain.resource import Json

ITERATION: Json = {
    "policy": "iteration",
    "layers": [3, 3],
    "ranks": 1,
    "bounds": {"max_batch_size": 9, "max_batch_tokens": 57, "encode_batch": None, "decode_steps": None},
}
RRA: Json = {
    "policy": "rra",
    "layers": [3, 3],
    "ranks": 2,
    "bounds": {
        "max_batch_size": 32,
        "max_batch_tokens": None,
        "encode_batch": 12,
        "decode_steps": 9,
        "decode_batch": 40,
        "encode_tokens": None,
        "threshold_percent": 20,
    },
}
SUMMARY = (
    "RRA, B_E 12, N_D 9, 2 stages x 2 ranks; predicted 99 % in 7.4 s at 6.1 requests/s; planned from 12,000 answers"
)


def profile_body() -> bytes:
    return to_body({PROFILE_FILE: "{}"})


def plan_body(
    schedule: Json = ITERATION, *, shortfall: str | None = None, summary: str = SUMMARY, threads: int = 2
) -> bytes:
    """Args: shortfall: of a plan that does not meet the goal."""
    files = {
        PLAN_FILE: json.dumps({"schedule": schedule, "device": {"key": {"threads": threads}}}),
        SUMMARY_FILE: summary,
    }
    return to_body(files if shortfall is None else files | {SHORTFALL_FILE: shortfall})


def schedule(**changes: Any) -> Json:
    """Return a schedule with changed bounds."""
    return {**ITERATION, "bounds": {**ITERATION["bounds"], **changes}}


def report(
    *,
    latency_s: float = 7.4,
    throughput: float = 6.1,
    output_mean: float = 64.0,
    is_new: bool = False,
    reason: str = "the plan meets the goal on the lengths of now",
    recommended: str | None = None,
) -> str:
    """Return the report of a check. Args: output_mean: of now; the plan was made for 64 tokens."""
    planned = ReportedLengths(answers=0, prompt_mean=272.0, output_mean=64.0, output_p99=127)
    return report_to_text(
        PlanReport(
            planned_lengths=planned,
            lengths=ReportedLengths(answers=12_000, prompt_mean=272.0, output_mean=output_mean, output_p99=127),
            predicted=ReportedFigures(throughput=throughput, latency_s=latency_s, ttft_s=0.31, tpot_s=0.0144),
            is_met=True,
            is_infeasible=False,
            is_new=is_new,
            reason=reason,
            recommended=recommended,
        )
    )


def check_body(schedule: Json = ITERATION, *, report_text: str | None = None, **of_plan: Any) -> bytes:
    """Return the result of a check. Args: report_text: None for that of a plan that stays. of_plan: as of plan_body."""
    files = read_files(plan_body(schedule, **of_plan))
    return to_body(files | {REPORT_FILE: report_text or report(), STATE_FILE: "{}"})
