"""`python -m checker leavers`: clients that leave a real system at random moments (see checker.clients.leaving).

Other clients stay at the same time and are judged as in every run.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass

from checker.clients.leaving import Departure, leave_at_random
from checker.history.records import Strangers
from checker.runs.context import RunContext
from checker.systems.pool_reader import read_log

FREE_WITHIN_S = 60.0
LOOK_S = 0.05
STAY_OF_REAL_S = 3.0
TOKENS = 800
"""Tokens of a leaver's call on a real system. Its client stays for `STAY_OF_REAL_S` at most, too short for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leavers:
    """A disturbance (see checker.runs.context.Disturbance).

    Rules judge later, with the system at rest, that nothing is left of these clients.
    """

    clients: int

    async def __call__(self, context: RunContext) -> None:
        plan = next(plan for plan in context.plans if plan.path == "/v1/completions")
        body = {"model": plan.body["model"], "prompt": plan.body["prompt"], "max_tokens": TOKENS, "ignore_eos": True}
        places = [(host, int(port)) for host, _, port in (url[7:].rpartition(":") for url in context.system.urls)]
        async with asyncio.TaskGroup() as tasks:
            waits: list[asyncio.Task[float]] = []

            def on_left(departure: Departure) -> None:
                if departure.request_id is not None:
                    waits.append(tasks.create_task(_free_s(context, departure.request_id, departure.at_s)))

            seed = context.settings.seed
            gone = await leave_at_random(
                places, clients=self.clients, seed=seed, body=body, stay_s_max=STAY_OF_REAL_S, on_left=on_left
            )
        sent = sum(departure.is_sent for departure in gone)
        context.history.add(Strangers(at=time.monotonic(), calls=sent))
        seconds = sorted(wait.result() for wait in waits)
        context.report(f"{self.clients} clients left, {len(seconds)} of them after the headers of an answer")
        if len(seconds) > 1:
            p99 = statistics.quantiles(seconds, n=100)[98]
            median = statistics.median(seconds)
            context.report(
                f"their requests had ended after {median:.2f} s (median), {p99:.2f} s (p99), {seconds[-1]:.2f} s"
            )


async def _free_s(context: RunContext, request_id: str, left_s: float) -> float:
    """Return the time from a client's departure to the end of its request in the pool. Raises: TimeoutError."""
    async with asyncio.timeout(FREE_WITHIN_S):
        while True:
            log = await read_log(context.pool, f"{request_id}.0", at=time.monotonic())
            if log is not None and log.reason is not None:
                return time.monotonic() - left_s
            await asyncio.sleep(LOOK_S)
