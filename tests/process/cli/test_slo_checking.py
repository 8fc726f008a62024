"""Checks of plans in another process: its answer, its priority, and how it fails."""

import asyncio
import sys
from collections.abc import Sequence

import psutil
import pytest

from orca.cli.up.slo.checking import CheckFailed, CheckOrder, check_apart
from orca.planner.follow.check import PlanLimits, check_plan
from orca.planner.search.device_layouts import DeviceMemory, Shape
from orca.planner.search.goal import PlanGoal
from orca.planner.workload.lengths import Range
from orca.planner.workload.workload import Workload
from support.planner.profiles import profile
from support.waiting import until

ORDER = CheckOrder(
    profile=profile(ranks=(1,)),
    workload=Workload.of_lengths(Range(4, 12), Range(2, 10)),
    goal=PlanGoal(latency_ms=60_000),
    limits=PlanLimits(devices=1, shape=Shape(stages=1, ranks=1), memory=DeviceMemory(slots=64), strategies=("rra",)),
    plan=None,
    is_searching=True,
)


def python(code: str) -> Sequence[str]:
    return sys.executable, "-c", code


def test_another_process_finds_the_same() -> None:
    found = asyncio.run(check_apart(ORDER))
    assert found == check_plan(ORDER.profile, ORDER.workload, ORDER.goal, ORDER.limits, None)
    assert found.best is not None


async def test_lengths_that_the_model_does_not_allow_are_a_failure_that_says_so() -> None:
    order = CheckOrder(
        profile=ORDER.profile,
        workload=Workload.of_lengths(Range(4, 400), Range(2, 10)),
        goal=ORDER.goal,
        limits=ORDER.limits,
        plan=None,
        is_searching=True,
    )
    with pytest.raises(CheckFailed, match=r"the plan could not be checked: .*256"):
        await check_apart(order)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no memory')", "no memory"),
        ("import sys; sys.exit(9)", "exit code 9"),
        ("print('{}')", "version is missing"),
    ],
)
async def test_a_process_that_fails_is_reported_with_its_last_words(code: str, said: str) -> None:
    with pytest.raises(CheckFailed, match=said):
        await check_apart(ORDER, command=python(code))


async def test_the_process_has_the_lowest_priority_and_ends_with_its_call() -> None:
    code = "from orca.cli.up.slo import checking; checking.check_plan = lambda *_, **__: __import__('time').sleep(600);"
    call = asyncio.create_task(check_apart(ORDER, command=python(f"{code} checking.main()")))

    def polite() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if each.nice() == 19]

    await until(polite, limit_s=90.0)
    [process] = polite()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
