"""A rolling upgrade under load from the last release to this one, and the rollback, part by part, with kills between.

Gateways and groups take turns, so both releases serve side by side for half of the time. The parts of a group are
handed over one by one, so that schedulers work with stages of the other release. Each unit is followed by checks. A key
and a request must give the same bytes at the gateways of both releases, and a schema number must wait for all parts.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from checker.clients.workload import COMPLETIONS, PlannedCall
from checker.faults.injector import PlannedFault, plan_faults
from checker.faults.kills import inject, make_injector
from checker.faults.replays import check_replays
from checker.history.records import Checked, HandedOver
from checker.runs.context import RunContext
from checker.systems.checkouts import Release
from checker.systems.layout import GATEWAYS, parts_of
from checker.systems.rolling import SCHEMA_OF_GRAMMARS, RollingSystem
from checker.systems.system import poll, wait_for

UNITS: tuple[tuple[str, ...], ...] = (("gateway",), parts_of(0), ("gateway-1",), parts_of(1))
"""Parts to hand over between two checks; after the second unit, each release has one gateway and one group."""

FLOWS_WITHIN_S = 150.0
FORMS_WITHIN_S = 300.0
RAISES_WITHIN_S = 30.0
"""A part that has ended counts until the end of its lease, 3 s."""
DRAINED_OF_NEWER_S = 240.0
REFUSES_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingUpgrade:
    """A disturbance (see checker.runs.context.Disturbance) of a RollingSystem."""

    kills: int  # during the hand-over of each unit
    questions: int = 4  # calls that both gateways replay after each unit
    has_rollback: bool = True

    async def __call__(self, context: RunContext) -> None:
        system = context.system
        assert isinstance(system, RollingSystem)
        releases = system.releases
        ways = [releases.after, releases.before] if self.has_rollback else [releases.after]
        faults = self._faults(context, len(ways))
        # The number can be raised only after the old release has left, and is lowered before it comes back.
        numbers = SchemaNumber(context, system)
        for release in ways:
            if release == releases.before:
                await numbers.check_lower()
            for unit in UNITS:
                await self._hand_over(context, system, unit, release, [next(faults) for _ in range(self.kills)])
                await check_replays(context, count=self.questions)
                await check_refused_grammars(context, system)
                if release == releases.after:
                    await numbers.check_raise(has_older_parts=unit != UNITS[-1])
            if numbers.has_raised and context.settings.prompt_source.constraints:
                # Only now, between the two ways, calls have grammars.
                await check_replays(context, count=self.questions * 4)

    def _faults(self, context: RunContext, ways: int) -> Iterator[PlannedFault]:
        kills = self.kills * len(UNITS) * ways
        seed = context.settings.seed
        return iter(plan_faults(seed=seed, kills=kills, roles=context.roles, freezes=False, tokens_between=60))

    async def _hand_over(
        self,
        context: RunContext,
        system: RollingSystem,
        unit: Sequence[str],
        release: Release,
        faults: list[PlannedFault],
    ) -> None:
        injector = make_injector(context, settle_s=1.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_hand_over_unit(context, system, unit, release))
            for fault in faults:
                tasks.create_task(inject(context, injector, fault, of=len(faults)))


async def _hand_over_unit(context: RunContext, system: RollingSystem, unit: Sequence[str], release: Release) -> None:
    for part in unit:
        # A hand-over proves something only while clients wait.
        await wait_for(context.client.in_flight, FLOWS_WITHIN_S, "a call that was accepted and is not over")
        began, in_flight = time.monotonic(), context.client.in_flight()
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
        context.history.add(handed)
        context.report(
            f"{part} is of the release {name}; it left in {handed.seconds:.1f} s, {len(in_flight)} in flight"
        )
        if "gateway" not in part:
            await _check_forming(context, system, unit)


async def _check_forming(context: RunContext, system: RollingSystem, group: Sequence[str]) -> None:
    """Check that a group of one release forms, and that a mixed group forms or gives the mixture as the reason."""
    scheduler = next(part for part in group if part.startswith("scheduler"))
    log = system.log_of(scheduler)
    seen = log.stat().st_size
    names = {part: system.releases.name_of(system.release_of(part)) for part in group}
    outcome = ""

    def is_decided() -> bool:
        nonlocal outcome
        system.check_up()
        outcome = forming_outcome(log.read_bytes()[seen:].decode(errors="replace"))
        return bool(outcome)

    try:
        await wait_for(is_decided, FORMS_WITHIN_S, "an epoch")
    except TimeoutError as error:
        outcome = str(error)
    is_mixed = len(set(names.values())) > 1
    subject = ", ".join(f"{part} {name}" for part, name in names.items())
    context.history.add(
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
        context.report(f"  {subject}: {outcome}")


def forming_outcome(lines: str) -> str:
    """Return `formed`, `refused: ...` for stages of another release, or an empty text, from a scheduler's log."""
    for line in lines.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message, reason = entry.get("message"), str(entry.get("reason", ""))
        if message == "epoch formed":
            return "formed"
        if message == "epoch over" and "release" in reason:
            return f"refused: {reason}"
    return ""


async def check_refused_grammars(context: RunContext, system: RollingSystem) -> None:
    """Check at each gateway, while no grammar may be stored, that a call with one gets a 400 that names its field."""
    source = context.settings.prompt_source
    if system.takes_grammars or not source.constraints:
        return
    constraint = source.constraints[0]
    body = {"model": source.model, "prompt": [5], "max_tokens": 5, **constraint}
    for name in GATEWAYS:
        url, found = f"http://{system.addresses[name]}{COMPLETIONS}", ""

        async def is_answered(url: str = url) -> bool:
            nonlocal found
            try:
                answer = await context.http.post(url, json=body)
            except httpx.HTTPError as error:
                found = repr(error)
                return False
            found = f"{answer.status_code} {answer.text}"
            # A gateway that has just started, or lost the pool, does not know the schema in force.
            return answer.status_code != 503

        await poll(is_answered, REFUSES_WITHIN_S)
        context.history.add(
            Checked(
                at=time.monotonic(),
                rule="grammars_wait_for_schema",
                subject=f"{name} {system.releases.name_of(system.release_of(name))}",
                expected=f"400 that names {', '.join(constraint)}",
                found=found,
                is_right=found.startswith("400") and all(field in found for field in constraint),
            )
        )


class SchemaNumber:
    """Checks that the schema number of the pool changes only when every living part knows the new one."""

    def __init__(self, context: RunContext, system: RollingSystem) -> None:
        self._context = context
        self._system = system
        self._older, self._newer = (release.schemas[1] for release in (system.releases.before, system.releases.after))
        self.has_raised = False

    async def check_raise(self, *, has_older_parts: bool) -> None:
        """Request the newer number, or an unknown one if both releases have the same, and check the answer."""
        number = max(self._newer, self._older + 1)
        may_change = number == self._newer and not has_older_parts
        await self._ask(number, may_change=may_change)
        self.has_raised = may_change
        self._system.takes_grammars |= may_change and number >= SCHEMA_OF_GRAMMARS

    async def check_lower(self) -> None:
        """Check before a rollback that the older number comes back and no record of the newer one is left."""
        if not self.has_raised:
            return
        self.has_raised = False
        self._system.takes_grammars = self._older >= SCHEMA_OF_GRAMMARS
        if not self._system.takes_grammars:
            # A call that is sent again before it is accepted would be refused.
            await wait_for(
                lambda: not self._context.client.waits_for_door(_has_grammar),
                FLOWS_WITHIN_S,
                "the end of calls at the door",
            )
        await self._ask(self._older, may_change=True)

        async def is_drained() -> bool:
            output = await self._system.pool(self._system.releases.after, "stats")
            return any(line.split() == ["newer_records", "0"] for line in output.splitlines())

        is_right = await poll(is_drained, DRAINED_OF_NEWER_S)
        self._record("newer records before the rollback", "none left", "none left" if is_right else "some", is_right)

    async def _ask(self, number: int, *, may_change: bool) -> None:
        wanted = f"schema {number} is in force" if may_change else "stays in force"
        output = ""

        async def is_answered() -> bool:
            nonlocal output
            output = await self._system.pool(self._system.releases.after, "schema", str(number))
            # Until a lease is over the answer may still be no, and a pool that is down after a fault does not answer.
            return wanted in output or (not may_change and " is in force" in output)

        await poll(is_answered, RAISES_WITHIN_S)
        self._record(f"orca pool schema {number}", wanted, output, wanted in output)
        self._context.report(f"  orca pool schema {number}: {output}")

    def _record(self, subject: str, expected: str, found: str, is_right: bool) -> None:
        self._context.history.add(
            Checked(
                at=time.monotonic(),
                rule="number_waits_for_all",
                subject=subject,
                expected=expected,
                found=found,
                is_right=is_right,
            )
        )


def _has_grammar(plan: PlannedCall) -> bool:
    return plan.has_grammar
