"""Bounds of a batch that change while the scheduler runs."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca.core.domain.errors import SettingError
from orca.scheduler.bounds_file import BoundsFile
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.policy import BatchBounds
from orca.scheduler.policy.request_level import RequestLevelPolicy
from orca.scheduler.settings import BatchingSettings, parse_settings
from support.scheduler.scheduler_simulation import (
    Simulation,
    a_request,
    a_shape,
    a_simulation,
    serving,
    tokens_at_least,
    virtually,
)

SLOW = LinearCost(step_us=10_000)


async def running_simulation(
    choices: SchedulingOptions, requests: int, first: int = 4, **of: Any
) -> tuple[Simulation, GroupScheduler]:
    """Run that many requests of 20 tokens in batches of `first`; the simulation takes `choices`."""
    simulation = a_simulation(choices=choices, **of)
    group = simulation.add_group(a_shape(slots=1024), cost=SLOW)
    simulation.start(group)
    await serving(simulation, group)
    assert group.scheduler is not None
    group.scheduler.set_batch_bounds(BatchBounds(max_batch_size=first))
    for number in range(requests):
        await simulation.submit(a_request(f"r{number}", new=20))
    return simulation, group.scheduler


def batch_sizes(simulation: Simulation) -> list[int]:
    return [len(record.rows) for record in simulation.groups["g0"].records]


@virtually
async def test_a_larger_batch_size_applies_from_the_next_step() -> None:
    simulation, scheduler = await running_simulation(SchedulingOptions(max_batch_size=4), 4, first=1)
    await tokens_at_least(simulation, "r0.0", 3)
    assert set(batch_sizes(simulation)) == {1}
    scheduler.set_batch_bounds(BatchBounds(max_batch_size=4))
    await tokens_at_least(simulation, "r3.0", 3)
    assert max(batch_sizes(simulation)) == 4
    await simulation.stop()


@virtually
async def test_a_smaller_batch_size_ends_no_request_and_the_oldest_continue() -> None:
    simulation, scheduler = await running_simulation(SchedulingOptions(max_batch_size=4), 4)
    await tokens_at_least(simulation, "r3.0", 3)
    scheduler.set_batch_bounds(BatchBounds(max_batch_size=1))
    before = len(simulation.groups["g0"].records)
    await tokens_at_least(simulation, "r0.0", 20)
    # One step of the old size may be on its way.
    assert set(batch_sizes(simulation)[before + 1 :]) == {1}
    for number in range(4):
        await tokens_at_least(simulation, f"r{number}.0", 20)
    await simulation.stop()


@virtually
async def test_the_new_bounds_outlive_the_epoch() -> None:
    simulation, scheduler = await running_simulation(SchedulingOptions(max_batch_size=4), 0)
    scheduler.set_batch_bounds(BatchBounds(max_batch_size=3, max_batch_tokens=8))
    await simulation.stop()
    assert scheduler._options.max_batch_size == 3


@virtually
async def test_bounds_that_the_policy_cannot_keep_are_refused_and_change_nothing() -> None:
    simulation, scheduler = await running_simulation(
        SchedulingOptions(max_batch_size=2), 0, first=2, policy=RequestLevelPolicy()
    )
    with pytest.raises(SettingError, match="max_batch_tokens"):
        scheduler.set_batch_bounds(BatchBounds(max_batch_size=4, max_batch_tokens=16))
    assert scheduler._options.max_batch_size == 2
    await simulation.stop()


ROUND_ROBIN = BatchingSettings(policy="rra", encode_batch=4, decode_steps=16, decode_batch=7, max_batch_size=8)


class Told:
    """Stands where the scheduler does."""

    def __init__(self) -> None:
        self.bounds: list[BatchBounds] = []

    def set_batch_bounds(self, bounds: BatchBounds) -> None:
        self.bounds.append(bounds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "bounds.json"
    path.write_text('{"max_batch_size": 4}')
    return path


def test_a_changed_file_is_applied_once(path: Path) -> None:
    told = Told()
    file = BoundsFile(path, BatchingSettings(), stages=1)
    assert file.bounds.max_batch_size == 4
    path.write_text(json.dumps({"max_batch_size": 8, "max_batch_tokens": 64}))
    for _ in range(3):
        file.poll(told)  # type: ignore[arg-type]
    assert told.bounds == [BatchBounds(max_batch_size=8, max_batch_tokens=64)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object of"),
        ('{"prefetch": 1}', "is not an object of"),
        ('{"max_batch_size": 0}', "max_batch_size 0 is not 1 or more"),
        ('{"max_batch_size": true}', "True, not a whole number"),
        ('{"max_batch_size": null}', "None, not a whole number"),
        ('{"max_batch_size": 8, "max_batch_tokens": 8}', "above max_batch_size"),
    ],
)
def test_a_file_that_cannot_be_used_leaves_the_bounds_as_they_are(
    path: Path, content: str, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    file = BoundsFile(path, BatchingSettings(), stages=1)
    path.write_text(content)
    file.poll(told)  # type: ignore[arg-type]
    assert told.bounds == []
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert complaint in record.getMessage()
    with pytest.raises(SettingError, match="bounds_file"):
        BoundsFile(path, BatchingSettings(), stages=1)


@pytest.mark.parametrize(
    ("content", "changes"),
    [
        ('{"max_batch_size": 8}', {}),
        ('{"max_batch_size": 8, "encode_batch": 6, "decode_steps": 3}', {"encode_batch": 6, "decode_steps": 3}),
        (
            '{"max_batch_size": 8, "decode_batch": 9, "encode_tokens": 300, "threshold_percent": 5}',
            {"decode_batch": 9, "encode_tokens": 300, "threshold_percent": 5},
        ),
        ('{"max_batch_size": 8, "decode_batch": null, "threshold_percent": null}', {"decode_batch": None}),
    ],
)
def test_a_changed_file_has_controls_of_the_cycle_too(path: Path, content: str, changes: dict[str, Any]) -> None:
    told = Told()
    file = BoundsFile(path, ROUND_ROBIN, stages=2)
    path.write_text(content)
    file.poll(told)  # type: ignore[arg-type]
    controls = replace(CycleControls(encode_batch=4, decode_steps=16, decode_batch=7), **changes)
    assert told.bounds == [BatchBounds(max_batch_size=8, cycle=controls)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"encode_batch": 0}', "encode_batch 0 is not 1 or more"),
        ('{"encode_batch": null}', "encode_batch is None, not a whole number"),
        ('{"decode_steps": "many"}', "decode_steps is 'many', not a whole number"),
        ('{"decode_steps": 1.5}', "decode_steps is 1.5, not a whole number"),
        ('{"threshold_percent": 101}', "threshold_percent 101 is not 100 or less"),
        ('{"threshold_percent": -1}', "threshold_percent -1 is not 0 or more"),
        ('{"max_batch_tokens": 64}', "max_batch_tokens 64 is not for the policy rra"),
        ('{"max_batch_size": 1}', "encode_batch 4 is not at most 2, the number of stages (2) times max_batch_size (1)"),
        ('{"decode_batch": 3}', "encode_batch 4 is not at most decode_batch (3)"),
    ],
)
def test_controls_that_cannot_be_used_leave_the_bounds_as_they_are(
    path: Path, content: str, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    file = BoundsFile(path, ROUND_ROBIN, stages=2)
    path.write_text(content)
    file.poll(told)  # type: ignore[arg-type]
    assert told.bounds == []
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert complaint in record.getMessage()


def test_the_file_alone_may_have_the_controls_of_the_cycle(path: Path) -> None:
    flags = ["--model", "m", "--stages", "h:1,h:2", "--policy", "rra", "--bounds-file", str(path)]
    settings = parse_settings(flags, {})
    path.write_text('{"max_batch_size": 4, "encode_batch": 8, "decode_steps": 3}')
    bounds = BoundsFile(path, settings, stages=2).bounds
    assert settings.make_options(bounds).cycle == CycleControls(encode_batch=8, decode_steps=3)
    path.write_text('{"max_batch_size": 4, "encode_batch": 8}')
    with pytest.raises(SettingError, match="decode_steps the policy rra needs it"):
        BoundsFile(path, settings, stages=2)


def test_controls_of_the_cycle_are_for_the_policy_rra_alone(path: Path) -> None:
    path.write_text('{"max_batch_size": 4, "encode_batch": 2}')
    with pytest.raises(SettingError, match="encode_batch 2 is not for this policy: only for rra"):
        BoundsFile(path, BatchingSettings(), stages=1)


def test_a_file_that_is_missing_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="No such file"):
        BoundsFile(tmp_path / "none", BatchingSettings(), stages=1)
