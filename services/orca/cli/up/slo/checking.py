"""Checks a plan in a process of its own with the lowest priority, so that ranks and gateways notice nothing of it.

The order goes to the process as a pickle and the answer comes back as JSON. Both are this program, from one start.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orca.core.domain.errors import OrcaError, SettingError
from orca.core.process.parent_death import die_with_parent
from orca.planner.follow.check import PlanCheck, PlanLimits, check_from_json, check_plan, check_to_json
from orca.planner.profile.profile import Profile
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan
from orca.planner.workload.workload import Workload

_COMMAND = (sys.executable, "-m", "orca.cli.up.slo.checking")
_NICE = 19
_AUTOGROUP = Path("/proc/self/autogroup")


class CheckFailed(OrcaError):
    """A plan could not be checked; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """The arguments of a check (planner/follow/check.py)."""

    profile: Profile
    workload: Workload
    goal: PlanGoal
    limits: PlanLimits
    plan: Plan | None
    is_searching: bool


async def check_apart(order: CheckOrder, *, command: Sequence[str] = _COMMAND) -> PlanCheck:
    """Check a plan in another process, which ends if this call is cancelled.

    Args: command: the command to run.
    Raises: CheckFailed with the last words of the process.
    """
    process = await asyncio.create_subprocess_exec(
        *die_with_parent(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C reaches `orca up` alone, which then ends this process.
        start_new_session=True,
    )
    try:
        found, errors = await process.communicate(pickle.dumps(order))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise CheckFailed(f"the plan could not be checked: {last}")
    try:
        return check_from_json(found, "of this process")
    except SettingError as error:
        raise CheckFailed(f"the plan could not be checked: {error}") from error


def main() -> int:
    """Carry out the order on stdin. Returns: 0, or 1 if the workload or the limits allow no check."""
    os.nice(_NICE)
    # A session has a scheduling group of its own, whose share its nice value does not change.
    with suppress(OSError):
        _AUTOGROUP.write_text(str(_NICE))
    order: CheckOrder = pickle.load(sys.stdin.buffer)
    try:
        check = check_plan(
            order.profile, order.workload, order.goal, order.limits, order.plan, is_searching=order.is_searching
        )
    except SettingError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(check_to_json(check))
    return 0


if __name__ == "__main__":
    sys.exit(main())
