"""Follows the plan of `orca up --slo-latency-ms` while the system runs: checks, changes, and what people read about it.

    read lengths and latencies from the pool -> check if due (checking.py) -> decide (planner/follow) -> apply -> report

The state is written to `slo.json` in the data folder. Each start plans from scratch, so nothing reads it back.
"""

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orca.cli.up.planned import plan_options
from orca.cli.up.settings import UpSettings
from orca.cli.up.slo.applying import PlanChange, change_to, command_with_plan, layers_of, write_bounds
from orca.cli.up.slo.checking import CheckFailed, CheckOrder, check_apart
from orca.cli.up.slo.lengths import read_counts
from orca.cli.up.slo.start import PLAN_FILE, RECOMMENDED_FILE, STATE_FILE, PlanOrder, PoolAccess, plan_limits
from orca.core.domain.errors import BadValue, PoolUnavailable, SettingError
from orca.core.process.settings import with_texts
from orca.core.process.whole_file import write_whole
from orca.planner.follow.check import PlanCheck
from orca.planner.follow.follow import Observed, begin, follow, is_check_due
from orca.planner.follow.measured import AnswersOfPlan
from orca.planner.follow.state import FollowState, Replan, state_to_json
from orca.planner.profile.profile import Profile
from orca.planner.search.device_layouts import Shape
from orca.planner.search.plan import Plan, to_json
from orca.planner.workload.counted import lengths_now
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import HALF_LIFE_S
from orca.pool.records import LengthCounts

POLL_S = 30.0
"""Seconds between two looks at the pool. Each one reads some kilobytes."""

DRIFT_SHOWN = 0.10
"""Change of a length since the plan was made from which a line names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSystem:
    """The system that is followed, and what its start has found."""

    order: PlanOrder
    profile: Profile
    plan: Plan | None  # in force; None: the defaults serve
    settings: UpSettings  # that the system runs with, a result of `with_layout`
    pool: PoolAccess
    folder: Path  # the data folder
    argv: Sequence[str]  # the options of this start


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """The ways in which a follower changes the system, and learns about it."""

    with_layout: Callable[[UpSettings], UpSettings]  # chooses every unset option
    restart_schedulers: Callable[[UpSettings], Awaitable[None]]
    report: Callable[[str], None]
    check: Callable[[CheckOrder], Awaitable[PlanCheck]] = check_apart
    read: Callable[[str, str, Mapping[str, str]], Awaitable[tuple[LengthCounts, LatencyCounts]]] = read_counts


class Follower:
    """Follows one system; `run` is one task of `orca up`."""

    def __init__(self, system: FollowedSystem, hands: Hands) -> None:
        self._system = system
        self._hands = hands
        self._settings = system.settings
        self._replan = Replan(system.order.settings.replan)
        self._is_pool_away = False
        self._answers = AnswersOfPlan(system.order.goal)
        self._unwritten: set[str] = set()  # names of files that cannot be written at present
        self.state: FollowState | None = None

    async def run(self) -> None:
        """Follow until cancelled. Whatever goes wrong is reported, and the system serves on as it is."""
        while True:
            try:
                await self.step()
            except Exception as error:
                self._hands.report(f"slo: the plan could not be followed, and is tried again: {error!r}")
            await asyncio.sleep(POLL_S)

    async def step(self) -> None:
        """Look once, and do what is due."""
        counts = await self._read()
        if counts is None:
            return
        try:
            await self._follow(*counts)
        except (CheckFailed, OSError) as error:
            self._hands.report(f"slo: {error}; the next check is in ten minutes")

    async def _read(self) -> tuple[LengthCounts, LatencyCounts] | None:
        """Return what the pool has counted; None if it does not answer, which is reported once."""
        system = self._system
        try:
            environment = {**os.environ, **system.pool.login}
            counts = await self._hands.read(system.pool.url, system.order.model.revision, environment)
        except (PoolUnavailable, SettingError) as error:
            if not self._is_pool_away:
                self._hands.report(f"slo: the pool does not tell the latencies of answers: {error}")
            self._is_pool_away = True
            return None
        self._is_pool_away = False
        return counts

    async def _follow(self, lengths: LengthCounts, latencies: LatencyCounts) -> None:
        system, awake_ms = self._system, latencies.awake_ms
        if self.state is None:
            self.state = FollowState() if system.plan is None else begin(system.plan, awake_ms)
        before, observed = self.state, self._observe(self.state, latencies)
        if not is_check_due(before, awake_ms):
            self._record(follow(before, observed))
            return
        # Whatever fails from here on is not tried again at once.
        self.state = replace(before, checked_ms=awake_ms)
        workload = lengths_now(lengths, system.order.workload, half_life_s=HALF_LIFE_S)
        if workload is None:
            self._record(replace(follow(before, observed), checked_ms=awake_ms))
            return
        order = CheckOrder(
            profile=system.profile,
            workload=workload,
            goal=system.order.goal,
            limits=plan_limits(system.order, system.profile),
            plan=before.plan,
            is_searching=self._replan is not Replan.OFF or before.plan is None,
        )
        check = await self._hands.check(order)
        of_layout = await self._check_layout(order, check)
        # The checks may have taken a quarter of an hour. What changes, changes now.
        if (counts := await self._read()) is not None:
            observed = self._observe(before, counts[1])
        state = self._decide(before, observed, check, of_layout)
        if state.plan is not None and state.plan is not before.plan:
            await self._apply(state.plan)
            self._write(PLAN_FILE, to_json(state.plan))
        self._record(state)
        self._tell(before, state)

    def _observe(self, state: FollowState, latencies: LatencyCounts) -> Observed:
        groups = self._system.order.settings.replicas
        measured = self._answers.figures(latencies, since_ms=state.since_ms, groups=groups, half_life_s=HALF_LIFE_S)
        return Observed(awake_ms=latencies.awake_ms, replan=self._replan, measured=measured)

    async def _check_layout(self, order: CheckOrder, check: PlanCheck) -> PlanCheck | None:
        """Search the best plan of the running layout, if the best one of all needs another layout after a miss.

        The former is in force without a restart. The latter is for a person to start.
        Returns: None if nobody would use it.
        """
        if self._replan is not Replan.AUTO or not check.is_trusted or self._is_applicable(check.best):
            return None
        if order.plan is not None and check.is_met:
            return None
        try:
            found = await self._hands.check(replace(order, limits=replace(order.limits, shape=self._running_shape())))
        except CheckFailed:
            return None
        return found if found.best is not None and self._is_applicable(found.best) else None

    def _decide(
        self, before: FollowState, observed: Observed, check: PlanCheck, of_layout: PlanCheck | None
    ) -> FollowState:
        """Return the next state. Args: of_layout: with the best plan of the running layout, if that is wanted."""
        best = check.best
        if of_layout is None:
            return follow(before, replace(observed, check=check, is_applicable=self._is_applicable(best)))
        state = follow(before, replace(observed, check=of_layout))
        if state.is_met or best is None or not best.is_met:
            return state
        reason = "no schedule of the running layout meets the goal, and the closest one serves"
        return replace(state, recommended=best, is_infeasible=False, reason=reason)

    def _is_applicable(self, plan: Plan | None) -> bool:
        if plan is None:
            return True
        planned = self._planned(plan)
        num_layers = self._system.order.model.num_layers
        return (
            planned is not None and change_to(self._settings, planned, num_layers=num_layers) is not PlanChange.LAYOUT
        )

    def _planned(self, plan: Plan) -> UpSettings | None:
        """Return the settings that run a plan; None if it breaks a rule of the options."""
        try:
            return self._hands.with_layout(with_texts(self._system.order.settings, plan_options(plan)))
        except BadValue:
            return None

    def _running_shape(self) -> Shape:
        settings, num_layers = self._settings, self._system.order.model.num_layers
        return Shape(stages=settings.stages, ranks=settings.tensor, layers=layers_of(settings, num_layers))

    async def _apply(self, plan: Plan) -> None:
        """Put a plan in force whose layout is the running one. Raises: OSError."""
        settings, system = self._planned(plan), self._system
        assert settings is not None, "the plan is applicable"
        change = change_to(self._settings, settings, num_layers=system.order.model.num_layers)
        write_bounds(system.folder, settings)
        self._settings = settings
        if change is PlanChange.SCHEDULERS:
            await self._hands.restart_schedulers(settings)

    def _record(self, state: FollowState) -> None:
        self.state = state
        self._write(STATE_FILE, state_to_json(state))

    def _write(self, name: str, content: bytes) -> None:
        """Write a file for people. Nothing depends on it, so a full disk is only reported, once until it is over."""
        file = self._system.folder / name
        try:
            write_whole(file, content)
            self._unwritten.discard(name)
        except OSError as error:
            if name not in self._unwritten:
                self._hands.report(f"slo: {file} cannot be written: {error.strerror}")
            self._unwritten.add(name)

    def _tell(self, before: FollowState, state: FollowState) -> None:
        """Report what a check has found."""
        report = self._hands.report
        if state.plan is not before.plan:
            report(f"slo: {'a' if before.plan is None else 'another'} plan is in force: {state.reason}")
        elif state.plan is not None and not state.is_met:
            report(f"slo: WARNING: {state.reason}")
        report(f"slo: {state.describe()}{_drift(state)}")
        recommended = state.recommended
        if recommended is None:
            return
        known = before.recommended
        if known is None or not known.schedule.runs_as(recommended.schedule):
            file = self._system.folder / RECOMMENDED_FILE
            write_whole(file, to_json(recommended))
            command = shlex.join(command_with_plan(self._system.argv, recommended, file))
            report(f"slo: recommended: {recommended.describe()}; {state.reason}; to run it: {command}")


def _drift(state: FollowState) -> str:
    """Return the change of lengths since the plan was made, if it is large."""
    drift = state.drift
    ratios = () if drift is None else (drift.prompt_mean, drift.output_mean, drift.output_p99)
    if drift is None or all(abs(ratio - 1) < DRIFT_SHOWN for ratio in ratios):
        return ""
    return f"; lengths since then: {drift.describe()}"
