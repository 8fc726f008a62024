"""Kills and freezes at moments drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass

from checker.faults import Injector, PlannedFault, plan_faults
from checker.run import Scene

MOMENT_WITHIN_S = 150.0
"""A fault waits so long for its moment: for a repair, and a minute's peace for a part that died too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """A disturbance (see run.Disturb)."""

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
        await inject_all(scene, planned, settle_s=self.settle_s)


async def inject_all(
    scene: Scene,
    planned: list[PlannedFault],
    *,
    settle_s: float,
    is_worst_moment: Callable[[PlannedFault], bool] = lambda _: False,
) -> None:
    """One after the other, each at its moment; says what is done and what found no moment."""
    client = scene.client
    injector = Injector(
        scene.system,
        scene.history,
        in_flight=client.in_flight,
        tokens_heard=lambda: client.tokens_heard,
        settle_s=settle_s,
        is_worst_moment=is_worst_moment,
    )
    for fault in planned:
        what = f"{fault.kind} {'+'.join(fault.roles)}"
        if await injector.inject(fault, limit_s=MOMENT_WITHIN_S):
            scene.tell(f"fault {injector.done} of {len(planned)}: {what}")
        else:
            scene.tell(f"no moment for {what} within {MOMENT_WITHIN_S:g} s")
