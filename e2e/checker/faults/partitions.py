"""Cuts each link of a system, both ways and one way, for longer than its leases and pings, and then restores it."""

import asyncio
import time
from dataclasses import dataclass

from checker.history.records import Fault
from checker.runs.context import RunContext
from checker.systems.spread import LinkCut

LINKS = (
    # Longer than the seat's lease (3 s), a reader's (5 s), and a frozen peer's detection by pings (7 s).
    ("scheduler", "redis", "all", 6.0),
    ("gateway", "redis", "all", 8.0),
    ("scheduler", "stage0", "all", 10.0),
    ("scheduler", "stage1", "all", 10.0),
    ("stage0", "stage1", "control", 10.0),
    # No pings on this link: a step without progress shows the cut, after 10 s.
    ("stage0", "stage1", "data", 25.0),
)
TOKENS_WITHIN_S = 150.0
TOKENS_WANTED = 40


@dataclass(frozen=True, slots=True)
class Partition:
    """Cuts of one link, in one or both directions, for some time."""

    cuts: tuple[LinkCut, ...]
    seconds: float

    @property
    def name(self) -> str:
        first = self.cuts[0]
        arrow = "<>" if len(self.cuts) > 1 else ">"
        part = "" if first.part == "all" else f" {first.part}"
        return f"{first.sender} {arrow} {first.receiver}{part}"


def plan_partitions() -> list[Partition]:
    """Plan cuts of each link: both directions, and each direction alone."""
    planned: list[Partition] = []
    for one, other, part, seconds in LINKS:
        there, back = LinkCut(one, other, part), LinkCut(other, one, part)
        planned += [Partition(cuts, seconds) for cuts in ((there, back), (there,), (back,))]
    return planned


@dataclass(frozen=True, slots=True)
class Partitions:
    """A disturbance (see checker.runs.context.Disturbance) of a SpreadSystem."""

    rounds: int = 1

    async def __call__(self, context: RunContext) -> None:
        planned = plan_partitions() * self.rounds
        for number, partition in enumerate(planned):
            has_tokens = await _wait_for_tokens(context)
            at, in_flight = time.monotonic(), context.client.in_flight()
            targets, seconds = (partition.name,), partition.seconds
            context.history.add(
                Fault(at=at, number=number, kind="cut", targets=targets, pids=(), in_flight=in_flight, seconds=seconds)
            )
            for cut in partition.cuts:
                cut.apply()
            await asyncio.sleep(seconds)
            for cut in partition.cuts:
                cut.heal()
            note = "" if has_tokens else " (no tokens came before it)"
            context.report(f"cut {number + 1} of {len(planned)}: {partition.name} for {seconds:g} s{note}")
        await _wait_for_tokens(context)


async def _wait_for_tokens(context: RunContext) -> bool:
    """Wait until tokens flow again. Returns: False if they did not within the limit."""
    wanted, ends = context.client.tokens_received + TOKENS_WANTED, time.monotonic() + TOKENS_WITHIN_S
    while context.client.tokens_received < wanted:
        context.system.check_up()
        if time.monotonic() > ends:
            return False
        await asyncio.sleep(0.05)
    return True
