"""`orca plan --profile FILE --devices N --latency-ms N` finds the schedule with the most throughput within a bound.

It searches every strategy and layout by formulas, and judges the best points with the real scheduler on simulated
stages. The plan is written as JSON, with the best alternatives. Nothing is started and nothing is changed.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from orca.cli.job_result import ResultSettings, keep_result, with_pool
from orca.core.domain.errors import BadValue, PoolUnavailable, SettingError
from orca.core.job_files import PLAN_FILE, SHORTFALL_FILE, SUMMARY_FILE
from orca.core.process.settings import check_bounds, read_settings, require, required, setting
from orca.core.process.whole_file import write_whole
from orca.planner.pictures.curves import draw
from orca.planner.pictures.timeline import draw_timeline
from orca.planner.profile.profile import Profile, read_profile
from orca.planner.search.device_layouts import MEMORY_SHARE, DeviceMemory, Shape
from orca.planner.search.goal import KINDS, PlanGoal
from orca.planner.search.plan import Plan, lines, to_json
from orca.planner.search.planner import NothingFits, Outcome, PlanProblem
from orca.planner.search.profiled_problem import HOST_US, find_plan, profiled_problem
from orca.planner.search.strategies import STRATEGIES
from orca.planner.search.timeline_of import timeline_of
from orca.planner.workload.counted import ANSWERS_MIN, counted_workload
from orca.planner.workload.lengths_file import read_workload
from orca.planner.workload.tasks import TASKS, task_lines, task_workload
from orca.planner.workload.workload import Workload, parse_workload
from orca.pool.api import RequestPool
from orca.pool.length_bins import HALF_LIFE_S
from orca.pool.records import LengthCounts
from orca.worker.parallel.stage_layers import read_layers

PREFIX = "ORCA_PLAN_"

NUMBER_MAX = 1e9
"""Largest value of options that are plain numbers: far above any that makes sense."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(ResultSettings):
    """The options of `orca plan`."""

    profile: str = required("file of a profile, as `orca profile` writes it")
    devices: int = setting(
        0, "devices of a group: GPUs, or rank processes on CPUs; 0 means as many as were measured together", least=0
    )
    latency_ms: float | None = setting(
        None, "bound on the latency, in milliseconds; unset: the most throughput is wanted, whatever the latency"
    )
    percentile: int = setting(99, "share of the answers that the bounds hold for, in percent, from 50 to 99")
    kind: str = setting(
        "sequence",
        "sequence: from the first step to the last token of an answer whose length is the percentile; requests: from"
        " submission to the last token, over all answers at the arrival rate",
        choices=KINDS,
    )
    rate: float | None = setting(None, "arrival rate in requests per second, for the kind requests")
    ttft_ms: float | None = setting(None, "further bound on the time to the first token, in milliseconds")
    tpot_ms: float | None = setting(None, "further bound on the mean time between tokens, in milliseconds")
    margin_percent: float = setting(0.0, "tightens every bound by so much", least=0)
    task: str | None = setting(
        None, "lengths of a task of the ExeGPT paper (Table 3): truncated normal", choices=tuple(TASKS)
    )
    lengths: str | None = setting(
        None,
        "file with the lengths of past requests: CSV with the columns prompt,output, JSON lines with prompt_tokens and"
        " output_tokens, the output of `orca pool lengths --json`, or a public trace of Azure or Mooncake",
    )
    workload: str | None = setting(
        None, "lengths as PROMPT/OUTPUT, such as 32:512/1:128: uniform from N to M, or normal as N:M:MEAN:SD"
    )
    counted: bool = setting(False, f"the lengths of the answers that the pool has counted, at least {ANSWERS_MIN}")
    lengths_scale: float = setting(1.0, "factor of the lengths of task and lengths, for smaller models")
    strategies: tuple[str, ...] = setting(
        tuple(STRATEGIES), "comma-separated strategies to search", choices=tuple(STRATEGIES)
    )
    stages: int | None = setting(None, "only layouts with so many stages", least=1)
    tensor: int | None = setting(None, "only layouts with so many ranks in a stage", least=1)
    layers: str | None = setting(None, "only this division of the layers, such as 10,6; stages must be unset or equal")
    max_batch_size: int | None = setting(
        None, "most requests in a batch, under rra in a micro-batch; unset: as many as the slots hold", least=1
    )
    slots: int | None = setting(
        None, "KV slots of a group in tokens; unset: as many as the memory has room for", least=1
    )
    least_slots: int | None = setting(
        None,
        "only layouts whose memory has room for so many KV slots, such as a pool has promised to a request; unset: all",
        least=1,
    )
    memory_gib: float | None = setting(
        None, "memory of a device for weights and KV cache in GiB; unset: as when the profile was measured"
    )
    memory_share: float = setting(
        MEMORY_SHARE, "share of the memory left by the weights that KV slots get, as for the worker"
    )
    max_model_len: int | None = setting(
        None, "longest prompt and output together in tokens; unset means the model's own", least=1
    )
    prefetch: int = setting(1, "as for the scheduler: 1 submits one more batch before the oldest was read", least=0)
    host_us: float = setting(
        HOST_US, "microseconds from a result to the next step at stage 0; prefetch hides them", least=0
    )
    seed: int = setting(0, "seed of the simulated requests")
    out: str = setting("plan.json", "file for the plan")
    pictures: str | None = setting(
        None, "folder for pareto.svg (throughput over latency) and timeline.svg (a few cycles of the schedule)"
    )

    def __post_init__(self) -> None:
        # super() does not find the class of a dataclass with slots.
        ResultSettings.__post_init__(self)
        check_bounds(self)
        require(self.prefetch <= 1, self, "prefetch", "0 or 1")
        require(0 < self.memory_share <= 1, self, "memory_share", "above 0, at most 1")
        for name in ("lengths_scale", "memory_gib", "rate", "host_us"):
            value = getattr(self, name)
            is_good = value is None or (value <= NUMBER_MAX and (value > 0 or name == "host_us"))
            require(is_good, self, name, f"a number above 0 and at most {NUMBER_MAX:,.0f}")
        require(bool(self.strategies), self, "strategies", f"any of {', '.join(STRATEGIES)}")
        given = [name for name in ("task", "lengths", "workload", "counted") if getattr(self, name)]
        if len(given) != 1:
            what = "none is given" if not given else f"{' and '.join(given)} are given"
            ways = "--task, --lengths, --workload and --counted"
            raise BadValue("workload", f"{what}: name the lengths by one of {ways}")
        is_scaled = self.lengths_scale != 1
        require(not (is_scaled and self.workload is not None), self, "lengths_scale", "for a stated workload")
        require(not (is_scaled and self.counted), self, "lengths_scale", "for the lengths that a pool has counted")
        if self.counted and self.pool is None:
            raise BadValue("counted", "needs a pool: give --pool")
        self.goal()

    def goal(self) -> PlanGoal:
        """Return the bounds. Raises: BadValue that names the setting."""
        return PlanGoal(
            latency_ms=inf if self.latency_ms is None else self.latency_ms,
            percentile=self.percentile,
            kind=self.kind,
            rate=self.rate,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            margin_percent=self.margin_percent,
        )

    def memory(self, profile: Profile) -> DeviceMemory:
        """Return the memory of a group. Args: profile: has the default."""
        given = self.memory_gib
        return DeviceMemory(
            slots=self.slots,
            device_bytes=profile.device_bytes if given is None else int(given * (1 << 30)),
            share=self.memory_share,
            least_slots=self.least_slots,
        )

    def lengths_wanted(self) -> tuple[Workload, list[str]]:
        """Return the lengths of the requests, and lines that describe them. Raises: SettingError, PoolUnavailable."""
        if self.task is not None:
            try:
                found = task_workload(self.task, self.lengths_scale, rate=self.rate)
            except ValueError as error:
                raise SettingError(f"setting lengths_scale: {error}") from error
            return found, task_lines(self.task, self.lengths_scale)
        if self.lengths is not None:
            found = read_workload(Path(self.lengths), scale=self.lengths_scale)
            return found, found.lines()
        if self.counted:
            found = _counted_workload(with_pool(self, os.environ, _count))
            return found, found.lines()
        assert self.workload is not None
        try:
            stated = parse_workload(self.workload)
        except ValueError as error:
            raise SettingError(f"setting workload: {error}") from error
        return stated, stated.lines()


def main(argv: Sequence[str]) -> int:
    """Make a plan and write it.

    Returns: 0; 1 if no schedule meets the goal, and the plan is the one that comes closest, unless the pool keeps it
        for the operator; 1 if the pool does not answer.
    Raises: SettingError.
    """
    settings = parse_settings(argv, os.environ)
    out = Path(settings.out)
    _check_file(out)
    pictures = None if settings.pictures is None else _make_folder(Path(settings.pictures))
    profile = read_profile(Path(settings.profile))
    try:
        return _plan(settings, profile, out, pictures)
    except PoolUnavailable as error:
        _report(f"the pool does not answer: {error}")
        return 1


def _plan(settings: PlanSettings, profile: Profile, out: Path, pictures: Path | None) -> int:
    """Make the plan. Returns: as main. Raises: SettingError, PoolUnavailable."""
    workload, described = settings.lengths_wanted()
    for line in described:
        _report(line)
    if 0 < workload.answers < ANSWERS_MIN:
        _report(f"these are fewer than {ANSWERS_MIN} answers: percentiles of so few are a matter of chance")
    problem = _problem(settings, profile, workload)
    try:
        outcome, plan = find_plan(problem, profile, _report, seed=settings.seed)
    except NothingFits as error:
        raise SettingError(str(error)) from error
    write_whole(out, to_json(plan))
    if pictures is not None:
        _draw(pictures, outcome, plan)
    print("\n".join(lines(plan)))
    print(plan.describe(), flush=True)
    keep_result(settings, _files(plan), os.environ)
    if plan.is_met:
        return 0
    print(f"orca plan: {plan.shortfall()}. The plan is the schedule that comes closest", file=sys.stderr)
    # The operator reads from the plan whether it meets the goal.
    return 0 if settings.result_key is not None else 1


def _files(plan: Plan) -> dict[str, str]:
    found = {PLAN_FILE: to_json(plan).decode(), SUMMARY_FILE: plan.describe()}
    return found if plan.is_met else found | {SHORTFALL_FILE: plan.shortfall()}


def _counted_workload(counts: LengthCounts) -> Workload:
    """Raises: SettingError if too few answers were counted."""
    if counts.answers < ANSWERS_MIN:
        raise SettingError(
            f"setting counted: the pool has counted {counts.answers} answers in the last four hours, and a plan needs"
            f" {ANSWERS_MIN}"
        )
    return counted_workload(counts, half_life_s=HALF_LIFE_S, source="the pool")


async def _count(pool: RequestPool) -> LengthCounts:
    """Return the lengths of the answers of the model in force."""
    revision = (await pool.stats()).revision
    return LengthCounts(periods=()) if revision is None else await pool.lengths(revision)


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> PlanSettings:
    """Read the settings. Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        PlanSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca plan",
        description="Find the schedule with the most throughput within a latency bound.",
    )


def _problem(settings: PlanSettings, profile: Profile, workload: Workload) -> PlanProblem:
    layers = None
    if settings.layers is not None:
        stages = settings.stages or settings.layers.count(",") + 1
        layers = read_layers(settings.layers, stages=stages, num_layers=profile.key.num_layers)
    return profiled_problem(
        profile,
        workload,
        settings.goal(),
        devices=settings.devices or profile.key.devices,
        shape=Shape(stages=settings.stages, ranks=settings.tensor, layers=layers),
        memory=settings.memory(profile),
        max_model_len=settings.max_model_len,
        strategies=settings.strategies,
        max_batch_size=settings.max_batch_size,
        host_us=settings.host_us,
        prefetch=settings.prefetch,
    )


def _draw(folder: Path, outcome: Outcome, plan: Plan) -> None:
    pareto = draw(
        {name: points for name, points in outcome.front.items() if points},
        title=f"Throughput over latency (p{plan.goal.percentile})",
        x_title="Latency (s)",
        y_title="Throughput (requests/s)",
        log=("x",),
    )
    (folder / "pareto.svg").write_text(pareto)
    (folder / "timeline.svg").write_text(
        draw_timeline(timeline_of(outcome.chosen.candidate), title=plan.schedule.describe())
    )


def _check_file(out: Path) -> None:
    """Raises: SettingError if the plan could not be written: better now than after the search."""
    if out.is_dir():
        raise SettingError(f"setting out: {out} is a folder: give a file")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise SettingError(f"setting out: files cannot be written to the folder {out.parent}")


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"setting pictures: {folder} is no folder: {error.strerror}") from error
    return folder


def _report(text: str) -> None:
    print(f"orca plan: {text}", file=sys.stderr, flush=True)
