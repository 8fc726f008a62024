"""Each link of a system is cut, both ways and one way, for longer than every lease and ping behind it, then heals."""

import asyncio
import time
from dataclasses import dataclass

from checker.history.records import Fault
from checker.runs.run import Scene
from checker.systems.spread import Cut

LINKS = (
    # Longer than the seat's lease (3 s), a reader's (5 s), and a frozen peer's detection by pings (7 s).
    ("scheduler", "redis", "all", 6.0),
    ("gateway", "redis", "all", 8.0),
    ("scheduler", "stage0", "all", 10.0),
    ("scheduler", "stage1", "all", 10.0),
    ("stage0", "stage1", "control", 10.0),
    # Nobody pings it: a step that is out while nothing moves shows it, after 10 s.
    ("stage0", "stage1", "data", 25.0),
)
CALM_WITHIN_S = 150.0
TOKENS_OF_CALM = 40


@dataclass(frozen=True, slots=True)
class Partition:
    """Some ways of one link, cut for some time."""

    cuts: tuple[Cut, ...]
    seconds: float

    @property
    def name(self) -> str:
        first = self.cuts[0]
        arrow = "<>" if len(self.cuts) > 1 else ">"
        part = "" if first.part == "all" else f" {first.part}"
        return f"{first.sender} {arrow} {first.receiver}{part}"


def plan_partitions() -> list[Partition]:
    """Each link cut both ways, and each way alone."""
    planned: list[Partition] = []
    for one, other, part, seconds in LINKS:
        there, back = Cut(one, other, part), Cut(other, one, part)
        planned += [Partition(cuts, seconds) for cuts in ((there, back), (there,), (back,))]
    return planned


@dataclass(frozen=True, slots=True)
class Partitions:
    """A disturbance (see checker.runs.run.Disturb) of a SpreadSystem."""

    rounds: int = 1

    async def __call__(self, scene: Scene) -> None:
        planned = plan_partitions() * self.rounds
        for number, partition in enumerate(planned):
            is_calm = await _calm(scene)
            at, in_flight = time.monotonic(), scene.client.in_flight()
            targets, seconds = (partition.name,), partition.seconds
            scene.history.add(
                Fault(at=at, number=number, kind="cut", targets=targets, pids=(), in_flight=in_flight, seconds=seconds)
            )
            for cut in partition.cuts:
                cut.do()
            await asyncio.sleep(seconds)
            for cut in partition.cuts:
                cut.heal()
            note = "" if is_calm else " (no tokens had come before it)"
            scene.tell(f"cut {number + 1} of {len(planned)}: {partition.name} for {seconds:g} s{note}")
        await _calm(scene)


async def _calm(scene: Scene) -> bool:
    """Whether tokens flow again."""
    wanted, ends = scene.client.tokens_heard + TOKENS_OF_CALM, time.monotonic() + CALM_WITHIN_S
    while scene.client.tokens_heard < wanted:
        scene.system.check_up()
        if time.monotonic() > ends:
            return False
        await asyncio.sleep(0.05)
    return True
