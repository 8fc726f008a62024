"""The time of real steps, on the processes of a service, against the time that a profile predicts for them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.parts.stage_processes import Stages, engine_for
from orca.bench.plan.service_steps import ServiceSteps, StepKind, kind_of
from orca.bench.plan.wake_ups import WakeUps, measure_wake_ups
from orca.core.domain.model import load_model_info
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.domain.step import Step, StepResult
from orca.planner.profile.profile import Profile
from orca.planner.profile.profile_cost import stage_costs
from orca.planner.profile.step_shape import ShapeCost
from orca.planner.simulate.outcomes import percentile

_SLOTS = 16_384
_WARM_UP_BURSTS = 2
_BURSTS_MAX = 400
GOAL_MEDIAN, GOAL_P95 = 0.05, 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A real step, as it was measured and as it was predicted."""

    kind: StepKind
    rows: int
    tokens: int
    measured_us: float  # from its control message on the stage to its output
    predicted_us: float

    @property
    def error(self) -> float:
        """The relative error: above 0 if the profile predicts too much."""
        return self.predicted_us / self.measured_us - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutErrors:
    """The steps of one model on a stage of some ranks."""

    model: str
    ranks: int
    threads: int  # of each rank
    steps: Sequence[TimedStep]
    spread: float  # of the repeats of one step in the profile, median over the steps: what no prediction can know
    wake_ups: WakeUps  # of the machine at that time

    def of(self, kind: StepKind | None) -> list[float]:
        """Return the errors of one kind of steps, or of all."""
        return [step.error for step in self.steps if kind in (None, step.kind)]


def compare(model: Path, profile: Profile, *, ranks: int, steps: int, seed: int, folder: Path) -> LayoutErrors:
    """Time steps on real processes.

    Args:
        profile: of this model on this machine, with these ranks.
        steps: how many to compare; a third of each kind.
        folder: for logs.
    Raises: EngineError if a process fails; SettingError if the profile has no such ranks.
    """
    [cost] = stage_costs(profile, (profile.key.num_layers,), ranks)
    threads = profile.key.threads
    group = Stages(
        model,
        stages=1,
        tensor=ranks,
        log_folder=folder,
        slots=_SLOTS,
        flags=("--threads", str(threads), "--dtype", profile.key.dtype),
    )
    try:
        timed = asyncio.run(_time(group, model, cost, steps, seed))
    finally:
        group.stop()
    return LayoutErrors(
        model=model.name,
        ranks=ranks,
        threads=threads,
        steps=timed,
        spread=_spread(profile),
        wake_ups=measure_wake_ups(),
    )


def joined(rounds: Sequence[LayoutErrors]) -> LayoutErrors:
    """Return the steps of some rounds of one layout as one."""
    steps = [step for each in rounds for step in each.steps]
    wake_ups = WakeUps(
        median_us=median(each.wake_ups.median_us for each in rounds),
        p90_us=median(each.wake_ups.p90_us for each in rounds),
    )
    return replace(rounds[0], steps=steps, spread=median(each.spread for each in rounds), wake_ups=wake_ups)


def _spread(profile: Profile) -> float:
    curves = [stack.rest for degree in profile.degrees for stack in degree.stacks]
    return median(time.spread for curve in curves for time in curve.times)


async def _time(group: Stages, model: Path, cost: ShapeCost, wanted: int, seed: int) -> list[TimedStep]:
    engine = engine_for(group.addresses, prefetch=0, uses_local_links=True, block_tokens=DEFAULT_BLOCK_TOKENS)
    found: dict[StepKind, list[TimedStep]] = {kind: [] for kind in StepKind}
    random = Random(seed)
    try:
        epoch = group.next_epoch()
        service = ServiceSteps(load_model_info(model), await engine.form(epoch), epoch, random)
        results = engine.results()
        for burst in range(_BURSTS_MAX):
            for step in service.burst():
                predicted_us = cost.stage_us(step)
                await engine.submit(step)
                result = await anext(results)
                service.receive(result)
                if burst >= _WARM_UP_BURSTS:
                    found[kind_of(step)].append(_timed(step, result, predicted_us))
            if all(len(each) >= -(-wanted // len(StepKind)) for each in found.values()):
                break
    finally:
        await engine.close()
    chosen = [random.sample(each, min(len(each), -(-wanted // len(StepKind)))) for each in found.values()]
    return [step for each in chosen for step in each]


def _timed(step: Step, result: StepResult, predicted_us: float) -> TimedStep:
    timing = result.timing
    assert timing is not None
    return TimedStep(
        kind=kind_of(step),
        rows=len(step.rows),
        tokens=step.tokens,
        measured_us=(timing.end_ns - timing.received_ns) / 1000,
        predicted_us=predicted_us,
    )


def lines(errors: Sequence[LayoutErrors]) -> list[str]:
    """Return a table: for each kind of steps the median and the 95th percentile of the error, and its bias."""
    found = [
        f"{'model':<14}{'ranks':>6}  {'steps':<9}{'count':>6}{'median ms':>11}{'error p50':>11}{'p95':>8}{'bias':>8}"
    ]
    for layout in errors:
        for kind in (*StepKind, None):
            signed = layout.of(kind)
            if not signed:
                continue
            sizes = sorted(map(abs, signed))
            took_ms = median(step.measured_us for step in layout.steps if kind in (None, step.kind)) / 1000
            found.append(
                f"{layout.model:<14}{layout.ranks:>6}  {kind or 'all':<9}{len(signed):>6}{took_ms:>11.2f}"
                f"{median(sizes):>11.1%}{percentile(sizes, 0.95):>8.1%}{median(signed):>+8.1%}"
            )
        wakes = layout.wake_ups
        found.append(
            f"{layout.model:<14}{layout.ranks:>6}  repeats of one step differ by {layout.spread:.1%}; a round trip"
            f" between two processes takes {wakes.median_us:.0f} us, p90 {wakes.p90_us:.0f} us"
        )
    found.append(f"goals: error p50 at most {GOAL_MEDIAN:.0%}, p95 at most {GOAL_P95:.0%}")
    return found


def to_json(errors: Sequence[LayoutErrors]) -> list[dict[str, Any]]:
    """Return every step as plain data."""
    return [
        {
            "model": layout.model,
            "ranks": layout.ranks,
            "threads": layout.threads,
            "kind": step.kind.value,
            "rows": step.rows,
            "tokens": step.tokens,
            "measured_us": step.measured_us,
            "predicted_us": step.predicted_us,
        }
        for layout in errors
        for step in layout.steps
    ]


def figures(errors: Sequence[LayoutErrors]) -> list[Measured]:
    """Return the errors as figures: all steps, and each kind."""
    found = []
    for layout in errors:
        where: dict[str, Setting] = {"model": layout.model, "ranks": layout.ranks, "threads": layout.threads}
        found.append(measured("Spread of the repeats of one step", layout.spread, "%", where, scale=100))
        for name, us in (("median", layout.wake_ups.median_us), ("p90", layout.wake_ups.p90_us)):
            found.append(measured(f"Round trip between two processes, {name}", us, "us", where))
        for kind in (None, *StepKind):
            signed = layout.of(kind)
            if not signed:
                continue
            sizes, runs = sorted(map(abs, signed)), len(signed)
            settings = where | {"steps": kind.value if kind is not None else "all"}
            for what, value in (
                ("Error of predicted step times, median", median(sizes)),
                ("Error of predicted step times, p95", percentile(sizes, 0.95)),
                ("Bias of predicted step times, median", median(signed)),
            ):
                found.append(measured(what, value, "%", settings, scale=100, runs=runs))
    return found
