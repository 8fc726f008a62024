"""Kernel calls that run together when their block ends: in order, on any number of threads, with memory given again."""

from collections.abc import Iterator
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import NormParameters
from orca.kernels.cpu.product.product import PackedWeight
from orca.kernels.cpu.team import team as team_module
from orca.kernels.cpu.team import threads as thread_kernels
from orca.kernels.cpu.team.intrinsics import next_task, pointer
from orca.kernels.cpu.team.team import Kernel, RowCount, bind_rows, deferred, new_empty, record_calls
from orca.kernels.device import kernels_of
from support.kernels.torch_threads import computing_threads


def _append(args: Any) -> None:
    """numbers[0], of elements, times ten and a digit, in each element."""
    size, digit = args[3], args[4]
    numbers = carray(pointer(args[2], np.int64), (size,))
    place = next_task(args)
    while place < size:
        numbers[place] = 10 * numbers[place] + digit
        place = next_task(args)


APPEND = Kernel("append", _append)


def _wait(args: Any) -> None:
    """Wait until another writer has written at an address."""
    for _ in range(10_000_000_000):
        if thread_kernels._get(args[2]) != 0:
            break


WAIT = Kernel("wait", _wait)


def append(numbers: torch.Tensor, digit: int) -> None:
    APPEND(len(numbers), numbers.data_ptr(), len(numbers), digit)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with computing_threads(request.param):
        yield request.param


@pytest.mark.usefixtures("threads")
def test_calls_run_in_their_order_when_the_block_ends() -> None:
    many, one = torch.zeros(1000, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with deferred():
        for digit in (1, 2, 3, 4, 5):
            append(many, digit)
            append(one, digit)
        assert not many.any()
    assert set(many.tolist()) == {12345}
    assert one.tolist() == [12345]
    append(one, 6)
    assert one.tolist() == [123456]


@pytest.mark.usefixtures("threads")
def test_calls_run_without_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "_team", lambda: None)
    numbers = torch.zeros(100, dtype=torch.int64)
    with deferred():
        append(numbers, 1)
        append(numbers, 2)
    assert set(numbers.tolist()) == {12}


def test_a_block_that_an_error_leaves_runs_nothing() -> None:
    numbers = torch.zeros(1, dtype=torch.int64)

    def break_off() -> None:
        with deferred():
            append(numbers, 1)
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert numbers.tolist() == [0]
    append(numbers, 2)
    assert numbers.tolist() == [2]


def test_unreferenced_memory_is_reused_only_within_a_block() -> None:
    with deferred():
        held = new_empty(torch.float32, 3, 4)
        first = new_empty(torch.float32, 3, 4).data_ptr()
        other = new_empty(torch.float32, 4, 3)
        again = new_empty(torch.float32, 3, 4)
    assert held.data_ptr() != first
    assert other.data_ptr() != first
    assert again.data_ptr() == first
    held[:], again[:] = 1, 2
    assert new_empty(torch.float32, 3, 4).data_ptr() not in {held.data_ptr(), again.data_ptr()}
    assert held.sum() == 12


@pytest.mark.usefixtures("threads")
def test_an_unreferenced_result_is_read_by_the_next_kernel() -> None:
    kernels, x, norm = kernels_of(torch.device("cpu")), torch.randn(50, 64), NormParameters(torch.randn(64), 1e-5)
    panels = PackedWeight(torch.randn(128, 64), is_gated=True)
    expected = kernels.gated(panels.product(kernels.normalise(x, norm)), Activation.SILU)
    with deferred():
        for _ in range(5):
            y = kernels.gated(panels.product(kernels.normalise(x, norm)), Activation.SILU)
    assert torch.equal(y, expected)


@pytest.mark.usefixtures("threads")
def test_a_recording_replays_with_the_present_contents_of_memory() -> None:
    kernels, x, norm = kernels_of(torch.device("cpu")), torch.zeros(50, 64), NormParameters(torch.randn(64), 1e-5)
    panels = PackedWeight(torch.randn(128, 64), is_gated=True)
    with record_calls() as recording:
        y = kernels.gated(panels.product(kernels.normalise(x, norm)), Activation.SILU)
    for seed in range(3):
        x.copy_(torch.randn(50, 64, generator=torch.Generator().manual_seed(seed)))
        recording.run()
        other = new_empty(torch.float32, *y.shape)  # memory of the recording is given to nobody else
        other[:] = torch.nan
        assert torch.equal(y, kernels.gated(panels.product(kernels.normalise(x, norm)), Activation.SILU))


@pytest.mark.usefixtures("threads")
def test_a_recording_runs_on_the_given_number_of_rows() -> None:
    kernels, norm = kernels_of(torch.device("cpu")), NormParameters(torch.randn(64), 1e-5)
    x, taken, rows, some = torch.randn(600, 64), torch.arange(600).flip(0), RowCount(600), RowCount(600)
    panels, head = PackedWeight(torch.randn(128, 64), is_gated=True), PackedWeight(torch.randn(30, 64))
    with record_calls() as recording:
        bind_rows(rows, x)
        bind_rows(some, taken)
        y = kernels.gated(panels.product(kernels.normalise(x, norm)), Activation.SILU)
        logits = head.float32_product(kernels.take_rows(y, taken))
        largest = kernels.argmax(logits)
    for rows.current, some.current in ((600, 600), (1, 1), (257, 13), (14, 300)):
        for each in (y, logits):
            each[:] = torch.nan
        largest[:] = -1
        taken[: some.current] = torch.randint(rows.current, (some.current,))
        recording.run()
        expected = kernels.gated(panels.product(kernels.normalise(x[: rows.current], norm)), Activation.SILU)
        assert torch.equal(y[: rows.current], expected)
        of_these = head.float32_product(expected[taken[: some.current]])
        assert torch.equal(logits[: some.current], of_these)
        assert torch.equal(largest[: some.current], of_these.argmax(dim=1))
        assert y[rows.current :].isnan().all()
        assert logits[some.current :].isnan().all()
        assert (largest[some.current :] == -1).all()


def test_a_view_in_a_recording_whose_rows_vary_is_refused() -> None:
    """It would be gone through to the end of the memory, and garbage written to the KV cache."""
    kernels, x = kernels_of(torch.device("cpu")), torch.zeros(30, 64)
    norm = NormParameters(torch.ones(64), 1e-5)

    def recorded_on(tensor: torch.Tensor) -> None:
        with record_calls():
            bind_rows(RowCount(30), x)
            kernels.normalise(tensor, norm)

    recorded_on(x)
    with pytest.raises(AssertionError, match="a view"):
        recorded_on(x[:20])


def test_more_rows_than_the_memory_holds_are_refused() -> None:
    kernels, x, rows = kernels_of(torch.device("cpu")), torch.zeros(30, 64), RowCount(30)
    with record_calls() as recording:
        bind_rows(rows, x)
        kernels.normalise(x, NormParameters(torch.ones(64), 1e-5))
    rows.current = 31
    with pytest.raises(AssertionError):
        recording.run()


def test_recording_a_block_does_not_run_it() -> None:
    numbers = torch.zeros(1, dtype=torch.int64)
    with record_calls() as recording:
        append(numbers, 1)
    assert numbers.tolist() == [0]
    recording.run()
    recording.run()
    assert numbers.tolist() == [11]


def _join(args: Any) -> None:
    """One more, also while others do the same."""
    thread_kernels._add(args[2], 1)


JOIN = Kernel("join", _join)


def test_a_recording_may_run_on_two_threads_at_a_time() -> None:
    begun, told, ended = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    numbers = torch.zeros(100, dtype=torch.int64)
    with computing_threads(2):
        with record_calls() as recording:
            JOIN(1, begun.data_ptr())
            WAIT(1, told.data_ptr())
            for _ in range(5):
                JOIN(1, ended.data_ptr())
        with record_calls() as other:
            append(numbers, 1)
        callers = [Thread(target=recording.run) for _ in range(2)]
        for caller in callers:
            caller.start()
        until_s = monotonic() + 30
        while begun.item() < 2 and monotonic() < until_s:
            sleep(0.001)
        other.run()
        told[0] = 1
        for caller in callers:
            caller.join()
    assert (begun.item(), ended.item()) == (2, 10)
    assert set(numbers.tolist()) == {1}


def test_a_recording_of_nothing_does_nothing() -> None:
    with record_calls() as recording:
        pass
    recording.run()


def test_a_kernel_without_tasks_changes_nothing() -> None:
    panels, some, ones, none = (
        PackedWeight(torch.randn(128, 64)),
        torch.randn(50, 64),
        torch.ones(50, 64),
        torch.ones(0, 64),
    )
    with computing_threads(2), deferred():
        first = panels.product(some)
        nothing = panels.product(none)
        last = panels.product(ones)
    assert nothing.shape == (0, 128)
    assert torch.equal(first, panels.product(some))
    assert torch.equal(last, panels.product(ones))


@pytest.mark.usefixtures("threads")
def test_a_progress_count_rises_while_the_block_runs() -> None:
    kernels, count, told = kernels_of(torch.device("cpu")), torch.zeros(1, dtype=torch.int64), []
    told_at = torch.zeros(1, dtype=torch.int64)

    def tell() -> None:
        until_s = monotonic() + 30
        while not count.item() and monotonic() < until_s:
            sleep(0.001)
        told.append(count.item())
        told_at[0] = 1

    teller = Thread(target=tell)
    with deferred():
        kernels.increment(count.data_ptr())
        WAIT(1, told_at.data_ptr())
        kernels.increment(count.data_ptr())
        teller.start()
    teller.join()
    assert told == [1]
    assert count.tolist() == [2]
    kernels.increment(count.data_ptr())
    assert count.tolist() == [3]
