"""A rolling upgrade under load from the last release to this one, and the rollback, part by part, with kills between.

Gateways and groups take turns, so both releases serve side by side for half of the way; the parts of a group are handed
over one by one, so schedulers meet stages of the other release. After each unit the system is asked by itself: whether
a key and a request are the same at the gateways of both, to the byte, and whether a schema number waits for all parts.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checker.faults.injector import PlannedFault, plan_faults
from checker.faults.kills import inject, make_injector
from checker.faults.retelling import ask_retelling
from checker.history.records import Checked, HandedOver
from checker.runs.run import Scene
from checker.systems.checkouts import Release
from checker.systems.layout import parts_of
from checker.systems.rolling import RollingSystem
from checker.systems.system import poll, wait_for

UNITS: tuple[tuple[str, ...], ...] = (("gateway",), parts_of(0), ("gateway-1",), parts_of(1))
"""What is handed over between two looks; behind the second one gateway and one group are of each release."""

FLOWS_WITHIN_S = 150.0
FORMS_WITHIN_S = 300.0
RAISES_WITHIN_S = 30.0
"""A part that has left is waited for until its lease is over, 3 s."""
DRAINED_OF_NEWER_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingUpgrade:
    """A disturbance (see checker.runs.run.Disturb) of a RollingSystem."""

    kills: int  # while each unit is handed over
    questions: int = 4  # calls that are told again by both gateways behind each unit
    has_rollback: bool = True

    async def __call__(self, scene: Scene) -> None:
        system = scene.system
        assert isinstance(system, RollingSystem)
        releases = system.releases
        ways = [releases.after, releases.before] if self.has_rollback else [releases.after]
        faults = self._faults(scene, len(ways))
        # A newer number can be raised only when the release before has left, and is lowered before it comes back.
        numbers = NumberInForce(scene, system)
        for release in ways:
            if release == releases.before:
                await numbers.ask_lower()
            for unit in UNITS:
                await self._hand_over(scene, system, unit, release, [next(faults) for _ in range(self.kills)])
                await ask_retelling(scene, count=self.questions)
                if release == releases.after:
                    await numbers.ask_raise(has_older_parts=unit != UNITS[-1])

    def _faults(self, scene: Scene, ways: int) -> Iterator[PlannedFault]:
        kills = self.kills * len(UNITS) * ways
        seed = scene.settings.seed
        return iter(plan_faults(seed=seed, kills=kills, roles=scene.roles, freezes=False, tokens_between=60))

    async def _hand_over(
        self, scene: Scene, system: RollingSystem, unit: Sequence[str], release: Release, faults: list[PlannedFault]
    ) -> None:
        injector = make_injector(scene, settle_s=1.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_hand_over_unit(scene, system, unit, release))
            for fault in faults:
                tasks.create_task(inject(scene, injector, fault, of=len(faults)))


async def _hand_over_unit(scene: Scene, system: RollingSystem, unit: Sequence[str], release: Release) -> None:
    for part in unit:
        # Proves something only while clients wait.
        await wait_for(scene.client.in_flight, FLOWS_WITHIN_S, "a call that was accepted and is not over")
        began, in_flight = time.monotonic(), scene.client.in_flight()
        code = await system.hand_over(part, release)
        name = system.releases.name_of(release)
        handed = HandedOver(
            at=began,
            part=part,
            release=name,
            in_flight=in_flight,
            seconds=time.monotonic() - began,
            exit_code=code,
        )
        scene.history.add(handed)
        scene.tell(f"{part} is of the release {name}; it left in {handed.seconds:.1f} s, {len(in_flight)} in flight")
        if "gateway" not in part:
            await _ask_forming(scene, system, unit)


async def _ask_forming(scene: Scene, system: RollingSystem, group: Sequence[str]) -> None:
    """A group of one release forms; a mixture forms, or says in a sentence that it is one."""
    scheduler = next(part for part in group if part.startswith("scheduler"))
    log = system.log_of(scheduler)
    seen = log.stat().st_size
    names = {part: system.releases.name_of(system.release_of(part)) for part in group}
    outcome = ""

    def is_decided() -> bool:
        nonlocal outcome
        system.check_up()
        outcome = what_forming_came_to(log.read_bytes()[seen:].decode(errors="replace"))
        return bool(outcome)

    try:
        await wait_for(is_decided, FORMS_WITHIN_S, "an epoch")
    except TimeoutError as error:
        outcome = str(error)
    is_mixed = len(set(names.values())) > 1
    subject = ", ".join(f"{part} {name}" for part, name in names.items())
    scene.history.add(
        Checked(
            at=time.monotonic(),
            rule="mixed_group_forms_or_says_why" if is_mixed else "group_forms",
            subject=subject,
            expected="formed, or refused in words" if is_mixed else "formed",
            found=outcome,
            is_right=outcome == "formed" or (is_mixed and outcome.startswith("refused")),
        )
    )
    if is_mixed:
        scene.tell(f"  {subject}: {outcome}")


def what_forming_came_to(lines: str) -> str:
    """Out of a scheduler's log: `formed`, `refused: ...` when stages of another release are the reason, or nothing."""
    for line in lines.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        message, reason = said.get("message"), str(said.get("reason", ""))
        if message == "epoch formed":
            return "formed"
        if message == "epoch over" and "release" in reason:
            return f"refused: {reason}"
    return ""


class NumberInForce:
    """The schema number of the pool, and whether it changes only when every part that lives knows the other one."""

    def __init__(self, scene: Scene, system: RollingSystem) -> None:
        self._scene = scene
        self._system = system
        self._older, self._newer = (release.schemas[1] for release in (system.releases.before, system.releases.after))
        self._is_raised = False

    async def ask_raise(self, *, has_older_parts: bool) -> None:
        """Ask for the newer number, or for one that nobody knows while both releases have the same."""
        number = max(self._newer, self._older + 1)
        may_change = number == self._newer and not has_older_parts
        await self._ask(number, may_change=may_change)
        self._is_raised = may_change

    async def ask_lower(self) -> None:
        """Before a rollback: the older number again, and no record of the newer one left."""
        if not self._is_raised:
            return
        await self._ask(self._older, may_change=True)

        async def is_drained() -> bool:
            said = await self._system.pool(self._system.releases.after, "stats")
            return any(line.split() == ["newer_records", "0"] for line in said.splitlines())

        is_right = await poll(is_drained, DRAINED_OF_NEWER_S)
        self._note("newer records before the rollback", "none left", "none left" if is_right else "some", is_right)

    async def _ask(self, number: int, *, may_change: bool) -> None:
        wanted = f"schema {number} is in force" if may_change else "stays in force"
        said = ""

        async def is_answered() -> bool:
            nonlocal said
            said = await self._system.pool(self._system.releases.after, "schema", str(number))
            # Until a lease is over the answer may still be no; and a pool that a fault took away answers nothing.
            return wanted in said or (not may_change and " is in force" in said)

        await poll(is_answered, RAISES_WITHIN_S)
        self._note(f"orca pool schema {number}", wanted, said, wanted in said)
        self._scene.tell(f"  orca pool schema {number}: {said}")

    def _note(self, subject: str, expected: str, found: str, is_right: bool) -> None:
        self._scene.history.add(
            Checked(
                at=time.monotonic(),
                rule="number_waits_for_all",
                subject=subject,
                expected=expected,
                found=found,
                is_right=is_right,
            )
        )
