"""Results of the Jobs of a plan for spec.slo, as `orca profile` and `orca plan` leave them."""

import json
from typing import Any

from orca.core.job_files import PLAN_FILE, PROFILE_FILE, SHORTFALL_FILE, SUMMARY_FILE, to_body
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
