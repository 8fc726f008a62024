"""Putting another plan in force: its changes to a running system, the bounds that are polled, and a restart."""

from dataclasses import replace
from pathlib import Path

import pytest

from orca.cli.up.plan import bounds_file
from orca.cli.up.planned import plan_options
from orca.cli.up.settings import UpSettings, parse_settings
from orca.cli.up.slo.applying import PlanChange, change_to, command_with_plan, write_bounds
from orca.core.process.settings import with_texts
from orca.planner.search.plan import Plan, PlannedBounds
from orca.scheduler.bounds_file import BoundsFile
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.policy import BatchBounds
from orca.scheduler.settings import BatchingSettings
from support.planner.plans import plan

ROUNDS = PlannedBounds(max_batch_size=9, encode_batch=3, decode_steps=7, decode_batch=8, encode_tokens=99)


def settings_of(chosen: Plan) -> UpSettings:
    found = with_texts(parse_settings(["--slo-latency-ms", "8000"]), plan_options(chosen))
    return replace(found, max_batch_tokens=found.max_batch_tokens or None)


def of_rra(chosen: Plan) -> Plan:
    return replace(chosen, schedule=replace(chosen.schedule, policy="rra", bounds=ROUNDS))


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (settings_of(plan(12)), PlanChange.BOUNDS),
        (settings_of(of_rra(plan(8))), PlanChange.SCHEDULERS),
        (replace(settings_of(plan(8)), prefetch=0), PlanChange.SCHEDULERS),
        (settings_of(plan(8, stages=2)), PlanChange.LAYOUT),
        (replace(settings_of(plan(8)), tensor=2), PlanChange.LAYOUT),
        (replace(settings_of(plan(8)), threads=7), PlanChange.LAYOUT),
        (replace(settings_of(plan(8)), slots=640), PlanChange.LAYOUT),
        (replace(settings_of(plan(8)), layers=None), PlanChange.BOUNDS),
    ],
)
def test_a_plan_changes_the_least_that_it_needs(planned: UpSettings, expected: PlanChange) -> None:
    assert change_to(settings_of(plan(8)), planned, num_layers=4) is expected


def test_other_layers_of_the_same_stages_are_another_layout() -> None:
    two = settings_of(plan(8, stages=2))
    assert change_to(two, replace(two, layers="5,3"), num_layers=8) is PlanChange.LAYOUT
    assert change_to(two, replace(two, layers=None), num_layers=8) is PlanChange.BOUNDS


def test_schedulers_read_the_bounds_of_a_plan(tmp_path: Path) -> None:
    chunked = plan(12)
    bounds = PlannedBounds(max_batch_size=12, max_batch_tokens=44)
    chunked = replace(chunked, schedule=replace(chunked.schedule, bounds=bounds))
    started = BatchingSettings(max_batch_size=3, max_batch_tokens=99)
    for chosen, expected in (
        (chunked, BatchBounds(max_batch_size=12, max_batch_tokens=44)),
        (plan(7), BatchBounds(max_batch_size=7)),
    ):
        file = write_bounds(tmp_path, settings_of(chosen))
        assert file == bounds_file(tmp_path, "iteration")
        assert BoundsFile(file, started, stages=1).bounds == expected


def test_schedulers_of_rra_read_all_controls(tmp_path: Path) -> None:
    file = write_bounds(tmp_path, settings_of(of_rra(plan())))
    started = BatchingSettings(policy="rra", max_batch_size=1, encode_batch=1, decode_steps=1)
    controls = CycleControls(encode_batch=3, decode_steps=7, decode_batch=8, encode_tokens=99)
    assert BoundsFile(file, started, stages=1).bounds == BatchBounds(max_batch_size=9, cycle=controls)


def test_the_command_of_a_restart_names_the_plan_and_keeps_other_options() -> None:
    argv = [*("--model", "/m", "--slo-latency-ms", "8000", "--replan=recommend", "--port", "9000", "--policy", "rra")]
    order = ("--order", "deadline", "--drop", "never")
    assert command_with_plan([*argv, "--open-to-network", "--slots", "64", *order], plan(), Path("/d/p.json")) == [
        *("orca", "up", "--model", "/m", "--port", "9000", "--open-to-network", "--slots", "64", *order),
        *("--plan", "/d/p.json"),
    ]
