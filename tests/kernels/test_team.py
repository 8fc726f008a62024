"""A team of threads runs CPU kernels: each task once, with or without other threads and a folder to write to."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from orca.kernels.cpu.team import code, team
from orca.kernels.cpu.team.intrinsics import float_argument, next_task, pointer, thread_number
from orca.kernels.cpu.team.team import Kernel
from support.kernels.torch_threads import computing_threads


def _sign_tasks(args: Any) -> None:
    """Each task is signed by the thread that took it; none is taken before `most` threads have joined, or some time."""
    tasks, most = args[4], args[5]
    signed = carray(pointer(args[2], np.int64), (tasks,))
    joined = carray(pointer(args[3], np.int64), (most,))
    number = thread_number(args)
    joined[number] += 1
    for _ in range(10_000_000_000):
        if joined.sum() == most:
            break
    task = next_task(args)
    while task < tasks:
        signed[task] += 1 + number
        task = next_task(args)


def _halve(args: Any) -> None:
    if next_task(args) == 0:
        carray(pointer(args[2], np.float64), (1,))[0] = float_argument(args[3]) / 2


@pytest.fixture
def two_threads() -> Iterator[None]:
    with computing_threads(2):
        yield


@pytest.mark.usefixtures("two_threads")
def test_as_many_threads_as_pytorch_has_take_part_and_each_task_is_done_once() -> None:
    signed, joined = torch.zeros(1000, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    Kernel("sign", _sign_tasks)(1000, signed.data_ptr(), joined.data_ptr(), 1000, 2)
    assert joined.tolist() == [1, 1]
    assert set(signed.tolist()) <= {1, 2}


@pytest.mark.usefixtures("two_threads")
def test_one_thread_does_all_tasks_if_threads_cannot_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_team", lambda: None)
    signed, joined = torch.zeros(10, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    Kernel("sign", _sign_tasks)(10, signed.data_ptr(), joined.data_ptr(), 10, 1)
    assert signed.tolist() == [1] * 10


def test_a_float_argument_is_passed_exactly() -> None:
    half = torch.zeros(1, dtype=torch.float64)
    Kernel("halve", _halve)(1, half.data_ptr(), -1e-300)
    assert half.item() == -5e-301


def test_kernels_are_compiled_without_a_writable_cache(kept_kernels: Path) -> None:
    (kept_kernels / "orca").touch()
    assert code.cache_folder() is None
    half = torch.zeros(1, dtype=torch.float64)
    Kernel("halve", _halve)(1, half.data_ptr(), 3.0)
    assert half.item() == 1.5


def test_compiled_kernels_are_cached_by_their_sources(kept_kernels: Path) -> None:
    Kernel("halve", _halve).compile()
    (folder,) = (kept_kernels / "orca" / "kernels").iterdir()
    assert code.cache_folder() == folder
    assert any(folder.rglob("*.nbc"))


@pytest.mark.usefixtures("two_threads")
def test_a_single_task_wakes_no_thread() -> None:
    signed, joined = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    Kernel("sign", _sign_tasks)(1, signed.data_ptr(), joined.data_ptr(), 1, 1)
    assert (signed.tolist(), joined.tolist()) == ([1], [1])


def test_threads_that_need_a_kernel_at_once_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_body = []
    made = team.compile_body

    def made_late(name: str, body: Any) -> Any:
        """Long after the other threads came."""
        compile_body.append(name)
        sleep(0.05)
        return made(name, body)

    team.compile_launches()
    monkeypatch.setattr(team, "compile_body", made_late)
    kernel, halves = Kernel("halve", _halve), torch.zeros(4, dtype=torch.float64)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda place: kernel(1, halves[place].data_ptr(), 1.0), range(4)))
    assert halves.tolist() == [0.5] * 4
    assert len(compile_body) == 1


def test_a_truncated_cache_file_costs_only_a_compilation(kept_kernels: Path, caplog: pytest.LogCaptureFixture) -> None:
    Kernel("halve", _halve).compile()
    for kept in (path for path in kept_kernels.rglob("*") if path.is_file()):
        kept.write_bytes(b"")
    half = torch.zeros(1, dtype=torch.float64)
    Kernel("halve", _halve)(1, half.data_ptr(), 5.0)
    assert half.item() == 2.5
    assert "is compiled and not kept" in caplog.text


@pytest.mark.usefixtures("kept_kernels")
def test_variants_of_a_kernel_are_cached_separately() -> None:
    """Numba would keep them under one index, which two processes at a time leave pointing to each other's code."""
    for name in ("one", "other"):
        Kernel(name, _halve).compile()
    kept_in = code.cache_folder()
    assert kept_in is not None
    assert {path.name for path in kept_in.iterdir()} == {"one", "other"}


_COMPILE = """
from torch import float32
from orca.kernels.cpu.team import code
from orca.kernels.cpu.product.tile import Tile
from orca.kernels.cpu.product.vector_product import kernel
code.LOCK_SECONDS_MAX = 200.0  # however slow this machine is
kernel(float32, float32, Tile(lanes=4, rows=1, pairs=False)).compile()
print(code.has_compiled())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("kept_kernels")
def test_one_of_several_processes_compiles_a_kernel() -> None:
    """Those that want it at the same time, and the next one: Numba tells functions apart by what they close over, and
    something new in each process would be compiled in each."""
    command = [sys.executable, "-c", _COMPILE]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=300)[0].strip() for each in both]
    assert sorted(said) == ["False", "True"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.usefixtures("kept_kernels")
def test_a_process_that_hangs_while_compiling_is_waited_for_only_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_in = code.cache_folder()
    assert kept_in is not None
    place = kept_in / "halve"
    place.mkdir()
    monkeypatch.setattr(code, "LOCK_SECONDS_MAX", 0.2)
    hung = os.open(place, os.O_RDONLY)
    fcntl.flock(hung, fcntl.LOCK_EX)
    begun = monotonic()
    Kernel("halve", _halve).compile()
    os.close(hung)
    assert monotonic() - begun > 0.2
    assert any(place.rglob("*.nbc"))


@pytest.mark.usefixtures("kept_kernels")
def test_a_file_system_without_locks_caches_kernels_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Kernel("halve", _halve).compile()
    kept_in = code.cache_folder()
    assert kept_in is not None
    assert any((kept_in / "halve").rglob("*.nbc"))
    assert not caplog.records
