"""Layouts are timed at the first start on a machine and remembered at the next."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.kernels.cpu.team import code
from orca.worker.models import build
from orca.worker.models.build import load_stage
from orca.worker.weights.int8_linear import INT8_LAYOUTS, Int8PanelLinear
from orca.worker.weights.layout_cache import remembered_layout
from orca.worker.weights.linear import Linear, MklLinear, OneDnnLinear
from support.kernels.torch_threads import computing_threads

WEIGHT = torch.zeros(30, 20)


pytestmark = pytest.mark.usefixtures("kept_kernels")


def timed(*winners: type[Linear]) -> Callable[[Tensor, Tensor | None], type[Linear]]:
    """A timing that has these winners, one after the other, and no more."""
    left = iter(winners)
    return lambda weight, bias: next(left)  # noqa: ARG005 - the shape of a choice


def test_a_layout_is_timed_at_the_first_start_and_reused_at_the_next(caplog: pytest.LogCaptureFixture) -> None:
    assert remembered_layout(WEIGHT, None, timed(OneDnnLinear, OneDnnLinear)) is OneDnnLinear
    with caplog.at_level(logging.INFO, logger="orca.worker.weights.layout_cache"):
        assert remembered_layout(WEIGHT, None, timed()) is OneDnnLinear
    assert "weight 30 x 20 float32: OneDnnLinear, found by an earlier start" in caplog.text


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_that_is_loaded_again_times_nothing(
    quantization: str | None,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Timed or not, its only candidate is right on any processor.
    monkeypatch.setattr(build, "can_multiply_bytes", lambda: True)
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), intermediate_size=1000)
    load_stage(folder, quantization=quantization)
    with caplog.at_level(logging.INFO, logger="orca.worker"):
        load_stage(folder, quantization=quantization)
    assert "found by an earlier start" in caplog.text
    assert "microseconds" not in caplog.text


def test_the_measured_layout_is_stored() -> None:
    kind = remembered_layout(WEIGHT, None)
    assert remembered_layout(WEIGHT, None, timed()) is kind


@pytest.mark.parametrize("disturbed", [(Linear, MklLinear, MklLinear), (MklLinear, Linear, MklLinear)])
def test_a_layout_that_won_once_by_chance_is_not_kept(disturbed: tuple[type[Linear], ...]) -> None:
    assert remembered_layout(WEIGHT, None, timed(*disturbed)) is MklLinear
    assert remembered_layout(WEIGHT, None, timed()) is MklLinear


@pytest.mark.parametrize("other", [torch.zeros(20, 30), torch.zeros(30, 20, dtype=torch.bfloat16)])
def test_another_shape_or_dtype_is_timed_for_itself(other: Tensor) -> None:
    remembered_layout(WEIGHT, None, timed(OneDnnLinear, OneDnnLinear))
    assert remembered_layout(other, None, timed(Linear, Linear)) is Linear


def test_a_weight_that_is_rounded_is_timed_for_itself() -> None:
    remembered_layout(WEIGHT, None, timed(OneDnnLinear, OneDnnLinear))
    rounded = timed(Int8PanelLinear, Int8PanelLinear)
    assert remembered_layout(WEIGHT, None, rounded, layouts=INT8_LAYOUTS) is Int8PanelLinear
    assert remembered_layout(WEIGHT, None, timed(), layouts=INT8_LAYOUTS) is Int8PanelLinear
    # It is the rows' dtype that counts, not that of the files.
    assert (
        remembered_layout(WEIGHT.bfloat16(), None, timed(), dtype=WEIGHT.dtype, layouts=INT8_LAYOUTS) is Int8PanelLinear
    )
    assert remembered_layout(WEIGHT, None, timed()) is OneDnnLinear


def test_a_weight_whose_layer_runs_together_is_timed_for_itself() -> None:
    remembered_layout(WEIGHT, None, timed(OneDnnLinear, OneDnnLinear))
    assert remembered_layout(WEIGHT, None, timed(Linear, Linear), is_together=True) is Linear
    assert remembered_layout(WEIGHT, None, timed()) is OneDnnLinear


def test_another_number_of_threads_is_timed_for_itself() -> None:
    remembered_layout(WEIGHT, None, timed(OneDnnLinear, OneDnnLinear))
    with computing_threads(torch.get_num_threads() + 1):
        assert remembered_layout(WEIGHT, None, timed(Linear, Linear)) is Linear


@pytest.mark.parametrize("content", [b"", b"\xff", b"NoLayout"])
def test_a_file_without_a_valid_layout_is_replaced(kept_kernels: Path, content: bytes) -> None:
    remembered_layout(WEIGHT, None, timed(OneDnnLinear, OneDnnLinear))
    [file] = (path for path in kept_kernels.rglob("layouts/*"))
    file.write_bytes(content)
    assert remembered_layout(WEIGHT, None, timed(Linear, Linear)) is Linear
    assert file.read_text() == "Linear"


def test_without_a_writable_folder_each_start_times_once(kept_kernels: Path) -> None:
    (kept_kernels / "orca").touch()
    for _ in range(2):
        assert remembered_layout(WEIGHT, None, timed(OneDnnLinear)) is OneDnnLinear


def test_a_layout_that_cannot_be_stored_is_used_for_this_start(caplog: pytest.LogCaptureFixture) -> None:
    kept_in = code.cache_folder()
    assert kept_in is not None
    (kept_in / "layouts").touch()
    assert remembered_layout(WEIGHT, None, timed(OneDnnLinear, OneDnnLinear)) is OneDnnLinear
    assert "the next start times it again" in caplog.text
