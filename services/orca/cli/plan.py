"""`orca plan --profile FILE --devices N --latency-ms N` finds the schedule with the most throughput within a bound.

It searches every strategy and layout by formulas, and judges the best points with the real scheduler on simulated
stages. The plan is written as JSON, with the best alternatives. Nothing is started and nothing is changed.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orca.cli.job_result import keep_result, result_folder, with_pool
from orca.cli.search_settings import STATED_FORM, SearchSettings, read_stated, require_number
from orca.core.domain.errors import BadValue, PoolUnavailable, SettingError
from orca.core.process.settings import read_settings, require, setting
from orca.core.process.whole_file import write_whole
from orca.planner.follow.check import limited_problem
from orca.planner.follow.files import first_files
from orca.planner.pictures.curves import draw
from orca.planner.pictures.timeline import draw_timeline
from orca.planner.profile.profile import Profile, read_profile
from orca.planner.search.plan import Plan, lines, to_json
from orca.planner.search.planner import NothingFits, Outcome
from orca.planner.search.profiled_problem import find_plan
from orca.planner.search.timeline_of import timeline_of
from orca.planner.workload.counted import counted_workload
from orca.planner.workload.lengths_file import read_workload
from orca.planner.workload.tasks import TASKS, task_lines, task_workload
from orca.planner.workload.workload import Workload
from orca.pool.api import RequestPool
from orca.pool.length_bins import HALF_LIFE_S
from orca.pool.measured import ANSWERS_MIN
from orca.pool.records import LengthCounts

PREFIX = "ORCA_PLAN_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(SearchSettings):
    """The options of `orca plan`."""

    task: str | None = setting(
        None, "lengths of a task of the ExeGPT paper (Table 3): truncated normal", choices=tuple(TASKS)
    )
    lengths: str | None = setting(
        None,
        "file with the lengths of past requests: CSV with the columns prompt,output, JSON lines with prompt_tokens and"
        " output_tokens, the output of `orca pool lengths --json`, or a public trace of Azure or Mooncake",
    )
    workload: str | None = setting(None, f"lengths as {STATED_FORM}")
    counted: bool = setting(False, f"the lengths of the answers that the pool has counted, at least {ANSWERS_MIN}")
    lengths_scale: float = setting(1.0, "factor of the lengths of task and lengths, for smaller models")
    out: str = setting("plan.json", "file for the plan")
    pictures: str | None = setting(
        None, "folder for pareto.svg (throughput over latency) and timeline.svg (a few cycles of the schedule)"
    )

    def __post_init__(self) -> None:
        # super() does not find the class of a dataclass with slots.
        SearchSettings.__post_init__(self)
        require_number(self, "lengths_scale")
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
        stated = read_stated(self.workload)
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
    pictures = None if settings.pictures is None else result_folder(settings.pictures, "pictures")
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
    problem = limited_problem(profile, workload, settings.goal(), settings.limits(profile))
    try:
        outcome, plan = find_plan(problem, profile, _report, seed=settings.seed)
    except NothingFits as error:
        raise SettingError(str(error)) from error
    write_whole(out, to_json(plan))
    if pictures is not None:
        _draw(pictures, outcome, plan)
    print("\n".join(lines(plan)))
    print(plan.describe(), flush=True)
    keep_result(settings, first_files(plan), os.environ)
    if plan.is_met:
        return 0
    print(f"orca plan: {plan.shortfall()}. The plan is the schedule that comes closest", file=sys.stderr)
    # The operator reads from the plan whether it meets the goal.
    return 0 if settings.result_key is not None else 1


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


def _report(text: str) -> None:
    print(f"orca plan: {text}", file=sys.stderr, flush=True)
