"""The plan: the schedule to run, what it promises, and what else was found. It is written to a file as JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from orca.core.domain.errors import BadValue, SettingError
from orca.core.strict_record import read_record_file, record_from_json, record_to_json
from orca.planner.profile.profile import MACHINE_FIELDS, MODEL_FIELDS, ProfileKey
from orca.planner.search.fewest_devices import DEVICES_MAX
from orca.planner.search.goal import PlanGoal, ScheduleLatencies
from orca.planner.search.planner import Candidate, Judged, Outcome
from orca.planner.simulate.layout import Layout
from orca.planner.workload.workload import Workload
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.policy import BatchBounds

VERSION = 2
"""Rises when the meaning or the fields of a plan change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGoal:
    """The goal that a plan was made for (goal.PlanGoal). Null means: no such bound."""

    latency_ms: float | None
    percentile: int
    kind: str
    rate: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    margin_percent: float

    def __post_init__(self) -> None:
        """Raises: ValueError for a goal that makes no sense."""
        try:
            self.goal()
        except BadValue as error:
            raise ValueError(f"{error.name}: {error.complaint}") from error

    @staticmethod
    def of(goal: PlanGoal) -> "PlannedGoal":
        values = dataclasses.asdict(goal)
        return PlannedGoal(**values | {"latency_ms": goal.latency_ms if isfinite(goal.latency_ms) else None})

    def goal(self) -> PlanGoal:
        values = dataclasses.asdict(self)
        return PlanGoal(**values | {"latency_ms": inf if self.latency_ms is None else self.latency_ms})

    def difference(self, wanted: "PlannedGoal") -> str | None:
        """Return the first of the fields that differs, with both values; None if none does."""
        for field in dataclasses.fields(self):
            own, other = getattr(self, field.name), getattr(wanted, field.name)
            if own != other:
                return f"{field.name} is {_shown(own)}, not {_shown(other)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """The lengths that a plan was made for."""

    source: str
    answers: int  # that were counted; 0 if the lengths are stated
    cut_share: float  # of the answers that max_tokens cut
    prompt_mean: float  # tokens
    prompt_p99: int
    output_mean: float
    output_p99: int

    @staticmethod
    def of(workload: Workload) -> "PlannedWorkload":
        return PlannedWorkload(
            source=workload.source,
            answers=workload.answers,
            cut_share=workload.cut_share,
            prompt_mean=workload.prompts.mean,
            prompt_p99=workload.prompts.percentile(99),
            output_mean=workload.outputs.mean,
            output_p99=workload.outputs.percentile(99),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """The model and the devices that a plan was made for. A device on CPUs is one rank process with its threads."""

    key: ProfileKey  # of the profile that the plan was made from

    def flags(self) -> dict[str, str]:
        """Return the options of `orca up` for these devices."""
        key = self.key
        found = {"device": key.device, "dtype": key.dtype, "threads": str(key.threads)}
        return found if key.quantization is None else found | {"quantization": key.quantization}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFigures:
    """The figures of a schedule, latencies at the percentile of the goal. A latency without end is null."""

    throughput: float  # requests per second
    latency_s: float | None
    ttft_s: float | None
    tpot_s: float | None

    @staticmethod
    def of(found: ScheduleLatencies, throughput: float) -> "PlannedFigures":
        latencies = (found.latency_s, found.ttft_s, found.tpot_s)
        latency_s, ttft_s, tpot_s = (each if isfinite(each) else None for each in latencies)
        return PlannedFigures(throughput=throughput, latency_s=latency_s, ttft_s=ttft_s, tpot_s=tpot_s)

    def describe(self, goal: PlanGoal) -> str:
        """Return the latencies that the goal bounds: `99 % within 7.4 s, first token within 300 ms`."""
        if self.latency_s is None:
            return "no latency has an end"
        words = [f"{goal.percentile} % within {self.latency_s:.3g} s"]
        if goal.ttft_ms is not None and self.ttft_s is not None:
            words.append(f"first token within {1000 * self.ttft_s:.3g} ms")
        if goal.tpot_ms is not None and self.tpot_s is not None:
            words.append(f"{1000 * self.tpot_s:.3g} ms between tokens")
        return ", ".join(words)

    def pressure(self, goal: PlanGoal) -> float:
        """Return how these figures press against a goal (PlanGoal.pressure)."""
        return goal.pressure(_Latencies(*(inf if each is None else each for each in self._latencies)))

    @property
    def _latencies(self) -> tuple[float | None, ...]:
        return self.latency_s, self.ttft_s, self.tpot_s


@dataclass(frozen=True, slots=True)
class _Latencies:
    latency_s: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBounds:
    """The bounds of batches, as `bounds_file` of a scheduler has them. What is null is off."""

    max_batch_size: int
    max_batch_tokens: int | None = None
    encode_batch: int | None = None
    decode_steps: int | None = None
    decode_batch: int | None = None
    encode_tokens: int | None = None
    threshold_percent: int | None = None

    @staticmethod
    def of(bounds: BatchBounds) -> "PlannedBounds":
        cycle = {} if bounds.cycle is None else dataclasses.asdict(bounds.cycle)
        return PlannedBounds(max_batch_size=bounds.max_batch_size, max_batch_tokens=bounds.max_batch_tokens, **cycle)

    def bounds(self) -> BatchBounds:
        """Return them as those of a scheduler."""
        values = self.settings()
        shared = {name: values.pop(name, None) for name in ("max_batch_size", "max_batch_tokens")}
        return BatchBounds(**shared, cycle=CycleControls(**values) if values else None)  # type: ignore[arg-type]

    def settings(self) -> dict[str, int]:
        """Return those that are on, by the names of the scheduler's settings."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSchedule:
    """A schedule: its strategy, its layout and its bounds, with the figures that were found for it."""

    policy: str
    layers: tuple[int, ...]  # of each stage
    ranks: int  # of each stage
    prefetch: int  # batches scheduled ahead
    slots: int | None  # KV slots of the group; null: as many as the memory has room for
    bounds: PlannedBounds
    expected: PlannedFigures  # by the formulas
    simulated: PlannedFigures | None  # with the real scheduler; null: not among the best ones

    @staticmethod
    def of(candidate: Candidate, judged: Judged | None) -> "PlannedSchedule":
        expected, layout = candidate.expected, candidate.placed.layout
        simulated = None
        if judged is not None:
            simulated = PlannedFigures.of(judged.judgement, judged.judgement.throughput)
        return PlannedSchedule(
            policy=candidate.strategy.name,
            layers=layout.layers,
            ranks=layout.ranks,
            prefetch=candidate.scenario.prefetch,
            slots=candidate.placed.capacity.slots if candidate.placed.capacity.is_chosen else None,
            bounds=PlannedBounds.of(candidate.bounds),
            expected=PlannedFigures.of(expected, expected.throughput),
            simulated=simulated,
        )

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def layout(self) -> Layout:
        return Layout(self.layers, self.ranks)

    def runs_as(self, other: "PlannedSchedule") -> bool:
        """Return true if both run in the same way, whatever their figures."""
        return self.flags() == other.flags()

    def describe(self) -> str:
        """Return the schedule in a few words: `RRA, B_E 12, N_D 9, 2 stages x 2 ranks`."""
        bounds = self.bounds
        if bounds.encode_batch is not None:
            words = [self.policy.upper(), f"B_E {bounds.encode_batch}", f"N_D {bounds.decode_steps}"]
        else:
            words = [self.policy, f"batch {bounds.max_batch_size}"]
        if bounds.max_batch_tokens is not None:
            words.append(f"{bounds.max_batch_tokens} tokens a step")
        stages = "1 stage" if self.stages == 1 else f"{self.stages} stages"
        words.append(stages if self.ranks == 1 else f"{stages} x {self.ranks} ranks")
        return ", ".join(words)

    def flags(self) -> dict[str, str]:
        """Return the options of `orca up` that run this schedule."""
        found = {"policy": self.policy, "stages": str(self.stages), "tensor": str(self.ranks)}
        found |= {"layers": ",".join(map(str, self.layers)), "prefetch": str(self.prefetch)}
        found |= {} if self.slots is None else {"slots": str(self.slots)}
        found |= {name: str(value) for name, value in self.bounds.settings().items()}
        # Prompts run whole. Without the option, `orca up` would choose a bound itself.
        return {"max_batch_tokens": "0"} | found if self.policy == "iteration" else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of a planner."""

    version: int
    release: str  # version of Orca
    device: PlannedDevice
    goal: PlannedGoal
    workload: PlannedWorkload
    schedule: PlannedSchedule  # the one to run
    is_met: bool  # it meets the goal in simulation; otherwise it is the one that comes closest
    fewest_devices: int | None  # if it is not met: so many would do by simulation; null: unknown, or none would
    alternatives: tuple[PlannedSchedule, ...]  # the best ones of each strategy and layout, most throughput first
    evaluated: int  # points that formulas have estimated
    points: int  # all there are

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version is {self.version}, this release reads {VERSION}")
        if self.schedule.simulated is None:
            raise ValueError("schedule.simulated must not be null")
        planned, own = sum(self.schedule.layers), self.device.key.num_layers
        if planned != own:
            raise ValueError(f"schedule.layers divide {planned} layers, and the model of device.key has {own}")

    @staticmethod
    def of(
        outcome: Outcome,
        goal: PlanGoal,
        workload: Workload,
        *,
        device: PlannedDevice,
        release: str,
        fewest_devices: int | None = None,
    ) -> "Plan":
        judged = {each.candidate.identity: each for each in outcome.judged}
        chosen = outcome.chosen.candidate
        others = [each for each in outcome.best if each.identity != chosen.identity]
        return Plan(
            version=VERSION,
            release=release,
            device=device,
            goal=PlannedGoal.of(goal),
            workload=PlannedWorkload.of(workload),
            schedule=PlannedSchedule.of(chosen, outcome.chosen),
            is_met=outcome.is_met,
            fewest_devices=fewest_devices,
            alternatives=tuple(PlannedSchedule.of(each, judged.get(each.identity)) for each in others),
            evaluated=outcome.evaluated,
            points=outcome.points,
        )

    @property
    def predicted(self) -> PlannedFigures:
        """The figures of the schedule in simulation, on the lengths that the plan was made for."""
        assert self.schedule.simulated is not None
        return self.schedule.simulated

    def describe(self, predicted: PlannedFigures | None = None, *, beside: str = "") -> str:
        """Return the plan in one line, as users see it in a status.

        Args:
            predicted: on other lengths; None: on those that the plan was made for.
            beside: follows the prediction, such as `, measured 7.65 s at 5.9`.
        """
        figures = predicted or self.predicted
        if figures.latency_s is None:
            promise = "predicted without end"
        else:
            promise = f"predicted {self.goal.percentile} % in {figures.latency_s:.3g} s"
        answers = self.workload.answers
        planned = f"{answers:,} answers" if answers else self.workload.source
        promise += f" at {figures.throughput:.3g} requests/s{beside}"
        return f"{self.schedule.describe()}; {promise}; planned from {planned}"

    def shortfall(self) -> str:
        """Return what a user should know about a goal that is not met, in one line."""
        goal, more = self.goal.goal(), self.fewest_devices
        devices = (
            f"{more} devices would meet it by simulation"
            if more
            else f"no larger number of devices up to {DEVICES_MAX} would"
        )
        best = self.predicted.describe(goal)
        return f"no schedule meets the goal ({goal.describe()}). Best achievable: {best}; {devices}"

    def check_model(self, wanted: ProfileKey) -> None:
        """Check that the plan is for a model. Raises: SettingError that names the first field that differs."""
        if (found := self.device.key.difference(wanted, MODEL_FIELDS)) is not None:
            raise SettingError(f"the plan is for another model: its {found}; make another plan with `orca plan`")

    def check_goal(self, wanted: PlanGoal) -> None:
        """Check that the plan is for a goal. Raises: SettingError that names the first bound that differs."""
        if (found := self.goal.difference(PlannedGoal.of(wanted))) is not None:
            raise SettingError(f"the plan is for another goal: its {found}; make another plan with `orca plan`")

    def other_machine(self, wanted: ProfileKey) -> str | None:
        """Return how the machine of the plan differs from the wanted one; None if it does not."""
        return self.device.key.difference(wanted, MACHINE_FIELDS)


def to_json(plan: Plan) -> bytes:
    """Return the file of a plan."""
    return record_to_json(plan)


def from_json(text: bytes, name: str) -> Plan:
    """Read a plan. Args: name: of the file, for errors. Raises: SettingError that names the field that is wrong."""
    return record_from_json(Plan, text, f"plan {name}")


def read_plan(file: Path) -> Plan:
    """Read the file of a plan. Raises: SettingError if it cannot be read, or has a wrong field."""
    return read_record_file(Plan, file, "plan")


def lines(plan: Plan) -> list[str]:
    """Return the table of a plan: the schedule to run, then the alternatives."""
    rows: list[Sequence[str]] = [("", "requests/s", f"p{plan.goal.percentile} s", "first s", "token ms", "formulas")]
    for number, each in enumerate((plan.schedule, *plan.alternatives)):
        rows.append((("* " if number == 0 else "  ") + each.describe(), *_figures(each)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _shown(value: float | str | None) -> str:
    """Return a bound for a message."""
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _figures(schedule: PlannedSchedule) -> tuple[str, ...]:
    """Return the simulated figures, or those of the formulas in brackets, then the formulas' throughput and latency."""
    found, expected = schedule.simulated or schedule.expected, schedule.expected
    values: Mapping[str, Any] = {
        "throughput": f"{found.throughput:.3g}",
        "latency": _seconds(found.latency_s),
        "first": _seconds(found.ttft_s),
        "token": "-" if found.tpot_s is None else f"{1000 * found.tpot_s:.3g}",
    }
    cells = tuple(values.values()) if schedule.simulated else tuple(f"({value})" for value in values.values())
    return (*cells, f"{expected.throughput:.3g} in {_seconds(expected.latency_s)} s")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
