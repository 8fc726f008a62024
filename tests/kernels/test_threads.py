"""The threads of a team: each task once, nobody waits for a thread that does not come, and all sleep between calls."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from orca.kernels.cpu.team import team as team_module
from orca.kernels.cpu.team import threads
from orca.kernels.cpu.team.intrinsics import next_task, pointer, thread_number
from orca.kernels.cpu.team.team import Kernel, Team
from support.kernels.torch_threads import computing_threads

THREADS = 4


def _count_tasks(args: Any) -> None:
    """Each task and each thread is counted where its number is."""
    tasks, most = args[4], args[5]
    done = carray(pointer(args[2], np.int64), (tasks,))
    joined = carray(pointer(args[3], np.int64), (most,))
    joined[thread_number(args)] += 1
    task = next_task(args)
    while task < tasks:
        done[task] += 1
        task = next_task(args)


COUNT = Kernel("count", _count_tasks)


def counted(tasks: int) -> tuple[list[int], list[int]]:
    """Return how often each task was done, and how often each number was given to a thread."""
    done, joined = torch.zeros(tasks, dtype=torch.int64), torch.zeros(THREADS, dtype=torch.int64)
    COUNT(tasks, done.data_ptr(), joined.data_ptr(), tasks, THREADS)
    return done.tolist(), joined.tolist()


@pytest.fixture(autouse=True)
def team() -> Iterator[Team]:
    """A team of this test's own."""
    team_module._team.cache_clear()
    with computing_threads(THREADS):
        made = team_module._team()
        assert made is not None
        yield made
    made.end()
    team_module._team.cache_clear()


def state(team: Team) -> "ctypes.c_int64":
    return ctypes.c_int64.from_address(team._at + threads.STATE)


def assert_each_once(tasks: int) -> None:
    done, joined = counted(tasks)
    assert done == [1] * tasks
    assert set(joined) <= {0, 1}
    assert joined[0] == 1


def test_each_task_is_done_once_call_after_call() -> None:
    """Calls follow each other at once, or when helpers are about to sleep, or when they do."""
    chance = Random(0)
    for _ in range(3000):
        assert_each_once(chance.choice((1, 2, 3, 17, 400)))
        if chance.random() < 0.1:
            time.sleep(chance.random() / 2000)


def test_a_call_completes_without_a_helper_thread(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_run_helper", lambda _state: None)
    assert counted(1000) == ([1] * 1000, [1, 0, 0, 0])


def test_a_caller_that_finds_the_team_busy_runs_its_tasks_alone() -> None:
    with ThreadPoolExecutor(3) as callers:
        for done, joined in callers.map(lambda _: counted(500), range(300)):
            assert done == [1] * 500
            assert set(joined) <= {0, 1}


@pytest.mark.parametrize("number", [-1, 0x7FFFFFFF])
def test_call_numbers_wrap_around(team: Team, number: int) -> None:
    assert_each_once(100)
    state(team).value = number << 32
    for _ in range(100):
        assert_each_once(100)
    assert state(team).value & 0xFFFFFFFF == 0


def test_helpers_sleep_between_calls() -> None:
    assert_each_once(100)
    time.sleep(0.05)  # they look for the next call for less than a millisecond
    before_s = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before_s < 0.05
    assert_each_once(100)


def test_the_threads_of_a_team_end_with_it(team: Team) -> None:
    assert_each_once(100)
    helpers = list(team._helpers)
    assert [helper.is_alive() for helper in helpers] == [True] * (THREADS - 1)
    team.end()
    assert not any(helper.is_alive() for helper in helpers)


_PROGRAM = """
import os, sys, torch
from orca.kernels.cpu.rows import normalise
from orca.kernels.contract.reference import NormParameters

torch.set_num_threads(3)
x = torch.ones(300, 64)
norm = lambda: normalise(x, NormParameters(torch.ones(64), 0.0)).sum().item()
assert norm() == 300 * 64
if sys.argv[1:] == ["fork"]:
    child = os.fork()
    if child == 0:
        os._exit(0 if norm() == 300 * 64 else 1)
    assert os.waitpid(child, 0)[1] == 0
assert norm() == 300 * 64
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["end", "fork"])
def test_a_process_with_a_team_exits_and_forks_normally(what: str) -> None:
    ended = subprocess.run(
        # From 3.12 on Python warns of forks among threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PROGRAM, what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
