"""`orca follow --plan FILE --profile FILE --pool URL` checks the plan in force on the lengths of now, once.

It simulates the plan on what the pool has counted, searches for a better one, and decides by the rules of
planner/follow/follow.py. It changes nothing that runs: the operator, or a person, reads the decision from the files.
`orca up` follows its own plan (cli/up/slo/following.py).
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orca.cli.job_result import keep_result, result_folder, with_pool
from orca.cli.search_settings import STATED_FORM, SearchSettings, read_stated
from orca.core.domain.errors import BadValue, PoolUnavailable, SettingError
from orca.core.job_files import SHORTFALL_FILE
from orca.core.process.settings import read_settings, required, setting
from orca.core.process.whole_file import write_whole
from orca.planner.follow.files import check_files
from orca.planner.follow.single_check import CheckedPlan, FollowOrder, PoolCounts, check_once
from orca.planner.follow.state import FollowState, Replan, read_state
from orca.planner.profile.profile import read_profile
from orca.planner.search.plan import read_plan
from orca.pool.api import RequestPool
from orca.pool.measured import ANSWERS_MIN

PREFIX = "ORCA_FOLLOW_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowSettings(SearchSettings):
    """The options of `orca follow`."""

    plan: str = required("file of the plan in force, as `orca plan` writes it; the goal must be its goal")
    state: str | None = setting(
        None, "file state.json of the check before; unset, broken or of another plan: following begins with this check"
    )
    since_ms: int | None = setting(
        None,
        "awake time of the pool at which the plan came into force, in milliseconds; unset: as the state says, or now",
        least=0,
    )
    replan: str = setting(
        Replan.AUTO.value,
        "what becomes of a better plan: with auto it is the plan of the files, recommend only names it, off looks for"
        " none",
        choices=tuple(each.value for each in Replan),
    )
    groups: int = setting(1, "groups that serve; the measured throughput is divided by their number", least=1)
    workload: str | None = setting(
        None, f"lengths until the pool has counted {ANSWERS_MIN} answers, as {STATED_FORM}; unset: nothing is known"
    )
    out: str | None = setting(None, "folder for the files of the check; unset: they are only printed")

    def __post_init__(self) -> None:
        # super() does not find the class of a dataclass with slots.
        SearchSettings.__post_init__(self)
        if self.pool is None:
            raise BadValue("pool", "missing: a plan is checked on the answers that a pool has counted")

    def order(self) -> FollowOrder:
        """Read the files, and return the order for the check.

        Raises: SettingError that names a file or a setting, also for a plan of another model or another goal.
        """
        stated = None if self.workload is None else read_stated(self.workload)
        profile, plan, goal = read_profile(Path(self.profile)), read_plan(Path(self.plan)), self.goal()
        plan.check_model(profile.key)
        plan.check_goal(goal)
        if (difference := plan.other_machine(profile.key)) is not None:
            _report(f"the plan was made for another machine: its {difference}")
        return FollowOrder(
            profile=profile,
            goal=goal,
            limits=self.limits(profile),
            plan=plan,
            state=None if self.state is None else _read_known(Path(self.state)),
            stated=stated,
            replan=Replan(self.replan),
            since_ms=self.since_ms,
            groups=self.groups,
            seed=self.seed,
        )


def main(argv: Sequence[str]) -> int:
    """Check the plan in force once, and leave the files of the check.

    Returns: 0, whatever was decided; 1 if the pool does not answer.
    Raises: SettingError.
    """
    settings = parse_settings(argv, os.environ)
    folder = None if settings.out is None else result_folder(settings.out, "out")
    order = settings.order()
    try:
        checked = check_once(order, lambda: with_pool(settings, os.environ, _read_counts), _report)
        files = check_files(checked)
        if folder is not None:
            _write(folder, files)
        print("\n".join(_lines(checked)), flush=True)
        keep_result(settings, files, os.environ)
    except PoolUnavailable as error:
        _report(f"the pool does not answer: {error}")
        return 1
    return 0


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> FollowSettings:
    """Read the settings. Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        FollowSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca follow",
        description="Check a plan in force on the lengths of now, and decide whether another one should take over.",
    )


def _read_known(file: Path) -> FollowState | None:
    """Return the state of the check before; None if it cannot be read, such as one of another release."""
    try:
        return read_state(file)
    except SettingError as error:
        _report(f"{error}; following begins with this check")
        return None


async def _read_counts(pool: RequestPool) -> PoolCounts:
    """Return the counts of the model in force. A pool without one has counted nothing."""
    revision = (await pool.stats()).revision or ""
    return PoolCounts(lengths=await pool.lengths(revision), latencies=await pool.latencies(revision))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a check to a folder. A goal that is met again leaves no shortfall there."""
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    if SHORTFALL_FILE not in files:
        (folder / SHORTFALL_FILE).unlink(missing_ok=True)


def _lines(checked: CheckedPlan) -> list[str]:
    """Return the result of a check, for a person."""
    state = checked.state
    found = [f"another plan is to be in force: {checked.reason}" if checked.is_new else checked.reason]
    found.append(state.describe())
    if checked.check is not None and state.drift is not None:
        found.append(f"lengths since the plan was made: {state.drift.describe()}")
    if state.recommended is not None:
        found.append(f"recommended: {state.recommended.describe()}")
    return found


def _report(text: str) -> None:
    print(f"orca follow: {text}", file=sys.stderr, flush=True)
