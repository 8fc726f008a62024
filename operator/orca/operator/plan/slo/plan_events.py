"""Events about the plan in force, from its status before and after a reconcile: pure.

They follow from the status alone, so an operator that starts again repeats none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from orca.operator.domain.resource import Json


@dataclass(frozen=True, slots=True)
class PlanEvent:
    reason: str
    message: str
    is_warning: bool = False


def plan_events(before: Json, now: Json) -> Iterator[PlanEvent]:
    """Yield the Events of a change. Args: before, now: field `plan` of the status; empty without a plan."""
    if not now:
        if before:
            yield PlanEvent("PlanChanged", "the defaults serve: no plan is in force any more", is_warning=True)
        return
    if now["controls"] != before.get("controls"):
        yield PlanEvent("PlanChanged", _with_reason(now["summary"], now))
    recommended = now.get("recommended")
    if recommended is not None and _schedule(recommended) != _schedule(before.get("recommended") or ""):
        yield PlanEvent("PlanRecommended", _with_reason(recommended, now))
    problem = now.get("problem")
    if problem is not None and before.get("problem") is None:
        yield PlanEvent("PlanNotChecked", problem, is_warning=True)


def _with_reason(text: str, shown: Json) -> str:
    reason = shown.get("reason")
    return text if reason is None else f"{text}; {reason}"


def _schedule(description: str) -> str:
    """Return a plan in one line without its figures, which change with every check."""
    return description.partition("; predicted ")[0]
