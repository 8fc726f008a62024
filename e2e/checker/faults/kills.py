"""Kills and freezes at moments drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass

from checker.faults.injector import Injector, PlannedFault, plan_faults
from checker.runs.context import RunContext

MOMENT_WITHIN_S = 150.0
"""Longest wait for the moment of a fault: enough for a repair, and for a minute's pause of a part that died often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """A disturbance (see checker.runs.context.Disturbance)."""

    count: int
    freezes: bool
    settle_s: float  # younger parts get no fault
    tokens_between: int  # most tokens between the last repair and the next fault

    async def __call__(self, context: RunContext) -> None:
        planned = plan_faults(
            seed=context.settings.seed,
            kills=self.count,
            roles=context.roles,
            freezes=self.freezes,
            tokens_between=self.tokens_between,
        )
        injector = make_injector(context, settle_s=self.settle_s)
        for fault in planned:
            await inject(context, injector, fault, of=len(planned))


def make_injector(
    context: RunContext, *, settle_s: float, is_worst_moment: Callable[[PlannedFault], bool] = lambda _: False
) -> Injector:
    """Return an injector of faults into the system of a run."""
    client = context.client
    return Injector(
        context.system,
        context.history,
        in_flight=client.in_flight,
        tokens_received=lambda: client.tokens_received,
        settle_s=settle_s,
        is_worst_moment=is_worst_moment,
    )


async def inject(context: RunContext, injector: Injector, fault: PlannedFault, *, of: int) -> None:
    """Inject a fault at its moment, and report it; or report that the moment did not come."""
    what = f"{fault.kind} {'+'.join(fault.roles)}"
    if await injector.inject(fault, limit_s=MOMENT_WITHIN_S):
        context.report(f"fault {injector.done} of {of}: {what}")
    else:
        context.report(f"no moment for {what} within {MOMENT_WITHIN_S:g} s")
