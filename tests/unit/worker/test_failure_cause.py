"""The cause of a rank's failure: from its exit status and the kernel's counters, and as a stage reports it."""

import signal
from pathlib import Path

import pytest

from orca.worker.controller.failure_cause import FailureCause, cause_of_death, out_of_memory_kills, outweighs


@pytest.mark.parametrize("status", [0, 1, 7, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE])
def test_a_rank_that_exits_by_itself_has_an_internal_cause(status: int) -> None:
    assert cause_of_death(status, was_out_of_memory=False) is FailureCause.INSIDE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_has_an_external_cause_unless_memory_ran_out(number: int) -> None:
    assert cause_of_death(-number, was_out_of_memory=False) is FailureCause.OUTSIDE
    assert cause_of_death(-number, was_out_of_memory=True) is FailureCause.INSIDE


def test_a_lost_link_explains_nothing_and_an_external_death_explains_all_later_failures() -> None:
    assert outweighs(FailureCause.INSIDE, FailureCause.LINK)
    assert outweighs(FailureCause.OUTSIDE, FailureCause.INSIDE)
    assert not outweighs(FailureCause.LINK, FailureCause.INSIDE)
    assert not outweighs(FailureCause.INSIDE, FailureCause.OUTSIDE)


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/pods/p1", "sys/fs/cgroup/pods/p1/memory.events", "low 0\noom 4\noom_kill 3\n"),
        ("0::/", "sys/fs/cgroup/memory.events", "oom_kill 3\n"),
        ("4:memory:/p1", "sys/fs/cgroup/memory/p1/memory.oom_control", "under_oom 0\noom_kill 3\n"),
        ("4:memory:/outside/the/container", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 3\n"),
        ("0::/../outside", "sys/fs/cgroup/memory.events", "oom_kill 3\n"),
    ],
    ids=["v2", "v2 in a namespace", "v1", "v1 whose own group is not mounted", "v2 from outside its namespace"],
)
def test_the_kernels_count_of_out_of_memory_kills_is_read(tmp_path: Path, own: str, file: str, text: str) -> None:
    for name, content in (("proc/self/cgroup", f"{own}\n"), (file, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert out_of_memory_kills(tmp_path) == 3


def test_without_a_counter_there_were_no_out_of_memory_kills(tmp_path: Path) -> None:
    assert out_of_memory_kills(tmp_path) == 0
