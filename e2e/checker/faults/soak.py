"""Hours of all faults, in cycles: faults to one role and a burst of calls, then a quiet time to measure growth.

Only one role gets faults in a cycle and the roles take turns, so the others live through several quiet times. Cancels,
deadlines and clients that drop their connection and resume are part of the load as in every run.
"""

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, replace

from checker.faults.injector import Injector, plan_faults
from checker.faults.kills import inject, make_injector
from checker.runs.context import RunContext
from checker.systems.sampler import Sampler

FAULTS_PER_CYCLE = 2
QUEUE_MAX = 12
"""Requests that may wait in a soak's pool."""
BURST = 4 * QUEUE_MAX
"""Number of calls at once, so that the gateway has to refuse some."""
TOKENS_BETWEEN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """A disturbance (see checker.runs.context.Disturbance)."""

    minutes: float
    quiet_s: float  # after the faults of each cycle

    async def __call__(self, context: RunContext) -> None:
        sampler = Sampler(context.system, context.history, context.http, context.pool)
        injector = make_injector(context, settle_s=1.0)
        chance = random.Random(f"{context.settings.seed} soak")
        began, cycle = time.monotonic(), 0
        async with sampler.running():
            while time.monotonic() < began + self.minutes * 60:
                role = context.roles[cycle % len(context.roles)]
                await _disturb(context, injector, role, seed=chance.getrandbits(32))
                await _send_burst(context, cycle)
                sampler.is_quiet = True
                await _watch(context, self.quiet_s)
                sampler.is_quiet = False
                cycle += 1
                context.report(
                    f"cycle {cycle} ({role}), {(time.monotonic() - began) / 60:.1f} min: {context.history.summary}"
                )


async def _disturb(context: RunContext, injector: Injector, role: str, *, seed: int) -> None:
    planned = plan_faults(seed=seed, kills=FAULTS_PER_CYCLE, roles=(role,), freezes=True, tokens_between=TOKENS_BETWEEN)
    for fault in planned:
        await inject(context, injector, fault, of=injector.done + 1)


async def _send_burst(context: RunContext, cycle: int) -> None:
    """Make a burst of calls at once, each to its end, with retries after refusals."""
    burst = itertools.islice(itertools.cycle(context.plans), BURST)
    named = (replace(plan, name=f"{plan.name}~crowd{cycle}-{number}") for number, plan in enumerate(burst))
    await asyncio.gather(*map(context.run_call, named))


async def _watch(context: RunContext, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        context.system.check_up()
        await asyncio.sleep(1.0)
