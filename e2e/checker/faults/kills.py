"""Kills and freezes at moments drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass

from checker.faults.injector import Injector, PlannedFault, plan_faults
from checker.runs.run import Scene

MOMENT_WITHIN_S = 150.0
"""A fault waits so long for its moment: for a repair, and a minute's peace for a part that died too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """A disturbance (see checker.runs.run.Disturb)."""

    count: int
    freezes: bool
    settle_s: float  # parts younger than this are spared
    tokens_between: int  # most tokens heard between the last repair and the next fault

    async def __call__(self, scene: Scene) -> None:
        planned = plan_faults(
            seed=scene.settings.seed,
            kills=self.count,
            roles=scene.roles,
            freezes=self.freezes,
            tokens_between=self.tokens_between,
        )
        injector = make_injector(scene, settle_s=self.settle_s)
        for fault in planned:
            await inject(scene, injector, fault, of=len(planned))


def make_injector(
    scene: Scene, *, settle_s: float, is_worst_moment: Callable[[PlannedFault], bool] = lambda _: False
) -> Injector:
    """The hand that does faults to the system of the scene."""
    client = scene.client
    return Injector(
        scene.system,
        scene.history,
        in_flight=client.in_flight,
        tokens_heard=lambda: client.tokens_heard,
        settle_s=settle_s,
        is_worst_moment=is_worst_moment,
    )


async def inject(scene: Scene, injector: Injector, fault: PlannedFault, *, of: int) -> None:
    """Do a fault at its moment, and say so; or that it found none."""
    what = f"{fault.kind} {'+'.join(fault.roles)}"
    if await injector.inject(fault, limit_s=MOMENT_WITHIN_S):
        scene.tell(f"fault {injector.done} of {of}: {what}")
    else:
        scene.tell(f"no moment for {what} within {MOMENT_WITHIN_S:g} s")
