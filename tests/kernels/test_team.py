"""How kernels of CPUs run: on PyTorch's threads, each task once, with or without OpenMP and a folder to write to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from orca.kernels import numba_team
from orca.kernels.numba_intrinsics import elements, join, real, take
from orca.kernels.numba_team import Kernel


def _sign_tasks(args: Any) -> None:
    """Each task is signed by the thread that took it, and waits until `most` threads have joined."""
    tasks, most = args[4], args[5]
    signed = carray(elements(args[2], np.int64), (tasks,))
    joined = carray(elements(args[3], np.int64), (most,))
    number = join(args)
    joined[number] += 1
    task = take(args)
    while task < tasks:
        for _ in range(1_000_000_000):
            if joined.sum() == most:
                break
        signed[task] += 1 + number
        task = take(args)


def _halve(args: Any) -> None:
    if take(args) == 0:
        carray(elements(args[2], np.float64), (1,))[0] = real(args[3]) / 2


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kept_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder for what programs keep of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    numba_team.folder.cache_clear()
    yield tmp_path
    numba_team.folder.cache_clear()


@pytest.mark.usefixtures("two_threads")
def test_all_of_pytorchs_threads_take_part_and_each_task_is_done_once() -> None:
    signed, joined = torch.zeros(1000, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    Kernel("sign", _sign_tasks)(1000, signed, joined, 1000, 2)
    assert joined.tolist() == [1, 1]
    assert set(signed.tolist()) <= {1, 2}


@pytest.mark.usefixtures("two_threads")
def test_one_thread_does_it_all_where_pytorch_has_no_openmp_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_team, "_PARALLEL", None)
    signed, joined = torch.zeros(10, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    Kernel("sign", _sign_tasks)(10, signed, joined, 10, 1)
    assert signed.tolist() == [1] * 10


def test_a_float_is_given_as_it_is() -> None:
    half = torch.zeros(1, dtype=torch.float64)
    Kernel("halve", _halve)(1, half, -1e-300)
    assert half.item() == -5e-301


def test_kernels_are_compiled_where_nothing_can_be_kept(kept_kernels: Path) -> None:
    (kept_kernels / "orca").touch()
    assert numba_team.folder() is None
    half = torch.zeros(1, dtype=torch.float64)
    Kernel("halve", _halve)(1, half, 3.0)
    assert half.item() == 1.5


def test_compiled_kernels_are_kept_by_their_sources(kept_kernels: Path) -> None:
    Kernel("halve", _halve).compile()
    (folder,) = (kept_kernels / "orca" / "kernels").iterdir()
    assert numba_team.folder() == folder
    assert any(folder.rglob("*.nbc"))


@pytest.mark.usefixtures("two_threads")
def test_no_more_threads_are_woken_than_there_are_tasks() -> None:
    signed, joined = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    Kernel("sign", _sign_tasks)(1, signed, joined, 1, 1)
    assert (signed.tolist(), joined.tolist()) == ([1], [1])


def test_a_cut_file_of_an_earlier_process_costs_a_compilation_and_no_more(
    kept_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Kernel("halve", _halve).compile()
    for kept in (path for path in kept_kernels.rglob("*") if path.is_file()):
        kept.write_bytes(b"")
    half = torch.zeros(1, dtype=torch.float64)
    Kernel("halve", _halve)(1, half, 5.0)
    assert half.item() == 2.5
    assert "is compiled and not kept" in caplog.text


@pytest.mark.usefixtures("kept_kernels")
def test_variants_of_a_kernel_are_kept_apart() -> None:
    """Numba would keep them under one index, which two processes at a time leave pointing to each other's code."""
    for name in ("one", "other"):
        Kernel(name, _halve).compile()
    kept_in = numba_team.folder()
    assert kept_in is not None
    assert {path.name for path in kept_in.iterdir()} == {"one", "other"}
