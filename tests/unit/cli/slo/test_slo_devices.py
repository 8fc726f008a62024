"""The devices that `orca up --slo-latency-ms` measures and plans for."""

from dataclasses import replace

import pytest

from orca.cli.up.planned import given_options
from orca.cli.up.settings import parse_settings
from orca.cli.up.slo.devices import Machine, PlannedDevices, choose_devices, fixed_shape, profiled_devices
from orca.core.domain.errors import SettingError
from orca.planner.search.device_layouts import Shape
from support.planner.profiles import key

MACHINE = Machine(parameters=63_000_000, heads=8, processors=2, gpus=0)


def chosen(flags: str, machine: Machine = MACHINE) -> PlannedDevices:
    words = ["--slo-latency-ms", "9", *flags.split()]
    settings = parse_settings(words)
    return choose_devices(settings, fixed_shape(settings, given_options(words), num_layers=6), machine)


@pytest.mark.parametrize(
    ("flags", "processors", "total", "per_group", "threads", "ranks"),
    [
        ("", 1, 1, 1, 1, (1,)),
        ("", 2, 2, 2, 1, (1, 2)),
        ("", 4, 3, 3, 1, (1, 2)),
        ("", 16, 4, 4, 3, (1, 2, 4)),
        ("--slo-devices 8", 16, 8, 8, 1, (1, 2, 4, 8)),
        ("--slo-devices 16", 16, 16, 16, 1, (1, 2, 4, 8)),
        ("--threads 2", 2, 1, 1, 2, (1,)),
        ("--threads 5", 16, 3, 3, 5, (1, 2)),
        ("--tensor 2", 2, 2, 2, 1, (2,)),
        ("--tensor 2 --stages 1", 16, 2, 2, 7, (2,)),
        ("--stages 2", 16, 4, 4, 3, (1, 2)),
        ("--stages 6", 2, 6, 6, 1, (1,)),
        ("--replicas 2", 2, 2, 1, 1, (1,)),
        ("--replicas 2 --slo-devices 5", 8, 4, 2, 1, (1, 2)),
        ("--replicas 2 --stages 2 --tensor 1", 2, 4, 2, 1, (1,)),
    ],
)
def test_devices_of_a_machine(
    flags: str, processors: int, total: int, per_group: int, threads: int, ranks: tuple[int, ...]
) -> None:
    found = chosen(flags, replace(MACHINE, processors=processors))
    assert found == PlannedDevices(total=total, per_group=per_group, threads=threads, ranks=ranks)


def test_a_small_model_gets_one_thread_for_each_rank() -> None:
    assert chosen("", replace(MACHINE, parameters=2_800_000, processors=16)).threads == 1


def test_on_gpus_the_visible_ones_are_planned_for() -> None:
    found = chosen("--device cuda", replace(MACHINE, gpus=4))
    assert (found.total, found.per_group, found.ranks) == (4, 4, (1, 2, 4))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--slo-devices 3", "--slo-devices: 3 is more than the 2 processors"),
        ("--device cuda --slo-devices 3", "--slo-devices: 3 is more than the 1 visible GPUs"),
        ("--device cuda --stages 2", "--stages 2 need 2 devices, and there are 1"),
        ("--slo-devices 1 --replicas 2", "--replicas 2 need 2 devices, and there are 1"),
        ("--slo-devices 2 --stages 2 --tensor 2", "--stages 2 --tensor 2 need 4 devices, and there are 2"),
    ],
)
def test_too_few_devices_are_refused(flags: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        chosen(flags, replace(MACHINE, gpus=1))


def test_options_that_are_given_fix_the_layout() -> None:
    words = ["--slo-latency-ms=9", "--stages=2", "--layers", "4,2"]
    assert fixed_shape(parse_settings(words), given_options(words), num_layers=6) == Shape(stages=2, layers=(4, 2))
    assert fixed_shape(parse_settings(words[:1]), given_options(words[:1]), num_layers=6) == Shape()


def test_a_named_profile_decides_devices_threads_and_ranks() -> None:
    settings = parse_settings(["--slo-latency-ms", "9"])
    found = profiled_devices(settings, Shape(), key())
    assert found == PlannedDevices(total=2, per_group=2, threads=1, ranks=(1, 2))
    fewer = parse_settings(["--slo-latency-ms", "9", "--slo-devices", "1"])
    assert profiled_devices(fewer, Shape(), key()).per_group == 1
    with pytest.raises(SettingError, match="--slo-devices: 3 is more than the 2 of the profile"):
        profiled_devices(parse_settings(["--slo-latency-ms", "9", "--slo-devices", "3"]), Shape(), key())
    with pytest.raises(SettingError, match="--tensor: the profile has no times for 2 ranks, only for 1"):
        profiled_devices(settings, Shape(ranks=2), key(ranks=(1,)))
