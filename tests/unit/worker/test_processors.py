"""worker.processors: how many processors a process may keep busy."""

import os
from pathlib import Path

import pytest

from orca.worker.machine import available_processors
from orca.worker.settings import WorkerSettings

V2 = "0::/system.slice/orca.service"
V1 = "4:memory:/elsewhere\n7:cpu,cpuacct:/docker/d1"


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("own", "files", "processors"),
    [
        (V2, {}, 8),
        (V2, {"system.slice/orca.service/cpu.max": "200000 100000"}, 2),
        (V2, {"system.slice/cpu.max": "300000 100000", "system.slice/orca.service/cpu.max": "max 100000"}, 3),
        (V2, {"cpu.max": "1600000 100000"}, 8),
        (V2, {"cpu.max": "250000 100000"}, 2),
        (V2, {"cpu.max": "50000 100000"}, 1),
        (V1, {"cpu/docker/d1/cpu.cfs_quota_us": "400000", "cpu/docker/d1/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
    ids=[
        "no limit told",
        "v2",
        "v2 around the own group",
        "v2 with more than there are",
        "v2 with a part of one",
        "v2 with less than one",
        "v1",
        "v1 whose own group is not mounted",
        "v1 without a limit",
    ],
)
def test_processors_are_limited_by_affinity_and_the_tightest_cgroup(
    tmp_path: Path, own: str, files: dict[str, str], processors: int
) -> None:
    written = {"proc/self/cgroup": own} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert available_processors(tmp_path) == processors


def test_the_ranks_of_a_stage_divide_the_processors() -> None:
    assert WorkerSettings(model="/m", tensor=4).threads_per_rank == available_processors() // 4
