"""Hours of everything, in cycles: faults to one role and a crowd at the door, then a quiet time in which growth shows.

Only one role has faults in a cycle and the roles take turns, so the others live on over several quiet times. Cancels,
deadlines, clients that hang up and come back are part of the load as in every run.
"""

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, replace

from checker.faults.injector import Injector, plan_faults
from checker.faults.kills import inject, make_injector
from checker.runs.run import Scene
from checker.systems.sampler import Sampler

FAULTS_PER_CYCLE = 2
QUEUE_MAX = 12
"""Requests that may wait in a soak's pool."""
CROWD = 4 * QUEUE_MAX
"""Calls at once, so that the door has to refuse some."""
TOKENS_BETWEEN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """A disturbance (see checker.runs.run.Disturb)."""

    minutes: float
    quiet_s: float  # behind the faults of each cycle

    async def __call__(self, scene: Scene) -> None:
        sampler = Sampler(scene.system, scene.history, scene.http, scene.pool)
        injector = make_injector(scene, settle_s=1.0)
        chance = random.Random(f"{scene.settings.seed} soak")
        began, cycle = time.monotonic(), 0
        async with sampler.running():
            while time.monotonic() < began + self.minutes * 60:
                role = scene.roles[cycle % len(scene.roles)]
                await _disturb(scene, injector, role, seed=chance.getrandbits(32))
                await _crowd(scene, cycle)
                sampler.is_quiet = True
                await _watch(scene, self.quiet_s)
                sampler.is_quiet = False
                cycle += 1
                scene.tell(
                    f"cycle {cycle} ({role}), {(time.monotonic() - began) / 60:.1f} min: {scene.history.standing}"
                )


async def _disturb(scene: Scene, injector: Injector, role: str, *, seed: int) -> None:
    planned = plan_faults(seed=seed, kills=FAULTS_PER_CYCLE, roles=(role,), freezes=True, tokens_between=TOKENS_BETWEEN)
    for fault in planned:
        await inject(scene, injector, fault, of=injector.done + 1)


async def _crowd(scene: Scene, cycle: int) -> None:
    """All at once; each is followed to its end, refusals waited out."""
    crowd = itertools.islice(itertools.cycle(scene.plans), CROWD)
    named = (replace(plan, name=f"{plan.name}~crowd{cycle}-{number}") for number, plan in enumerate(crowd))
    await asyncio.gather(*map(scene.follow, named))


async def _watch(scene: Scene, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        scene.system.check_up()
        await asyncio.sleep(1.0)
