"""The options `--slo-...` of `orca up`: a latency bound, and what a plan for it starts from."""

import dataclasses
from collections.abc import Collection
from math import isfinite
from typing import TYPE_CHECKING

from orca.core.domain.errors import BadValue, SettingError
from orca.core.process.settings import setting
from orca.scheduler.settings import CYCLE_SETTINGS, BatchingSettings

if TYPE_CHECKING:
    from orca.planner.search.goal import PlanGoal

BOUND = "--slo-latency-ms"

REPLAN = ("auto", "recommend", "off")
"""The values of planner/follow/state.Replan: a start without a bound does not import the planner."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings(BatchingSettings):
    """The options of batching, with those of a plan that decides them."""

    slo_latency_ms: float | None = setting(
        None,
        "bound on the latency of an answer from its first step to its last token, in milliseconds; the start then"
        " measures the model, unless that was done before, and finds and runs the schedule with the most throughput"
        " within the bound; default: none",
    )
    slo_percentile: int = setting(99, "share of the answers that the bounds hold for, in percent, from 50 to 99")
    slo_ttft_ms: float | None = setting(None, "further bound on the time to the first token, in milliseconds")
    slo_tpot_ms: float | None = setting(None, "further bound on the mean time between tokens, in milliseconds")
    slo_margin_percent: float = setting(0.0, "tightens every bound by so much", least=0)
    slo_workload: str | None = setting(
        None,
        "lengths to plan for as PROMPT/OUTPUT, such as 32:512/1:128: one length N, uniform as N:M, or normal as"
        " N:M:MEAN:SD; default: those of the answers of the last four hours",
    )
    slo_lengths: str | None = setting(
        None, "file with the lengths to plan for, as --lengths of orca plan; default: as for --slo-workload"
    )
    slo_devices: int | None = setting(
        None,
        "devices of all groups together that the plan may use: with --device cuda GPUs, otherwise rank processes;"
        " default: the visible GPUs, or as many as there are processors for computing, but at most 4",
        least=1,
    )
    slo_profile: str | None = setting(
        None,
        "file of orca profile to plan from; default: the one of an earlier start in ~/.cache/orca/profiles, otherwise"
        " the model is measured",
    )

    replan: str = setting(
        "auto",
        "what becomes of a better plan while the system runs: auto puts it in force if the layout stays, recommend only"
        " prints it, off looks for none",
        choices=REPLAN,
    )

    def __post_init__(self) -> None:
        # super() does not find the class of a dataclass with slots.
        BatchingSettings.__post_init__(self)
        if self.slo_latency_ms is None:
            return
        for name in ("slo_latency_ms", "slo_ttft_ms", "slo_tpot_ms", "slo_margin_percent"):
            value = getattr(self, name)
            if value is not None and not isfinite(value):
                raise BadValue(name, f"{value:g} is not a number of milliseconds or percent")
        self.slo_goal()
        if self.policy == "request_level":
            raise BadValue("policy", f"a plan for {BOUND} is of iteration or rra, not request_level: leave it out")
        if self.slo_workload is not None and self.slo_lengths is not None:
            raise BadValue("slo_lengths", "--slo-workload gives the lengths, too: leave one of them out")

    def slo_goal(self) -> "PlanGoal":
        """Return the bounds; `slo_latency_ms` is given. Raises: BadValue that names the setting."""
        # A start without a bound needs nothing of the planner.
        from orca.planner.search.goal import PlanGoal

        assert self.slo_latency_ms is not None
        try:
            return PlanGoal(
                latency_ms=self.slo_latency_ms,
                percentile=self.slo_percentile,
                ttft_ms=self.slo_ttft_ms,
                tpot_ms=self.slo_tpot_ms,
                margin_percent=self.slo_margin_percent,
            )
        except BadValue as error:
            raise BadValue(f"slo_{error.name}", error.complaint) from error

    @property
    def _has_all_bounds(self) -> bool:
        """False if a plan will decide the bounds."""
        return self.slo_latency_ms is None


OPTIONS = frozenset("--" + name.replace("_", "-") for name in SloSettings.__annotations__)

_DECIDED = tuple(
    "--" + name.replace("_", "-")
    for name in ("max_batch_size", "max_batch_tokens", *CYCLE_SETTINGS)  # of the scheduler's settings
)


def check_given(given: Collection[str]) -> None:
    """Check the options of a command line, such as `--slo-devices`, against each other.

    Raises: SettingError that names an option of a plan without a bound, or one that contradicts a plan.
    """
    if BOUND not in given:
        for name in given:
            if name in OPTIONS:
                raise SettingError(f"setting {name}: it needs a latency bound, {BOUND}")
        return
    if "--plan" in given:
        raise SettingError(f"setting --plan: with {BOUND} the plan is made at the start: leave one of them out")
    for name in _DECIDED:
        if name in given:
            raise SettingError(f"setting {name}: the plan for {BOUND} decides it: leave it out")
