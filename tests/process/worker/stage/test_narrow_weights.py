"""Matrices that are half precision in the files stay so where a CPU computes in float32: half the memory, and nothing
else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.model import load_model_info
from orca.kernels.contract.reference import ModelSizes
from orca.kernels.cpu.kernels import CpuKernels
from orca.worker.models.build import load_stage, prepare_kernels
from orca.worker.parallel.shard import Shard
from orca.worker.weights.linear import PanelLinear

HALVES = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
SIZES = {"hidden_size": 384, "head_dim": 64, "intermediate_size": 640, "vocab_size": 192}
"""Whole panels on any processor, and too large to be left plain."""


def every_number(dtype: torch.dtype) -> Tensor:
    """[1024, 64]: all numbers of a dtype, as float32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).float().nan_to_num(0.0, 0.0, 0.0).view(1024, 64)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_number_is_kept_exactly(dtype: torch.dtype) -> None:
    weight, x = every_number(dtype), torch.eye(64)
    kept = PanelLinear(weight.to(dtype), dtype=torch.float32)
    assert kept.weight.dtype == dtype
    usual = weight.abs() >= torch.finfo(torch.float32).tiny  # processors may take others for zero
    assert torch.equal(torch.where(usual, kept(x).t(), 0.0), torch.where(usual, weight, 0.0))


@pytest.mark.parametrize("stored", HALVES)
def test_a_model_takes_half_the_memory_and_times_nothing(
    stored: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = load_stage(tiny_checkpoint("llama", tmp_path / "full", **SIZES), packs=PanelLinear)
    with caplog.at_level("INFO", logger="orca.worker"):
        half = load_stage(tiny_checkpoint("llama", tmp_path / "half", stored=stored, **SIZES))
    assert "microseconds" not in caplog.text
    assert "earlier start" not in caplog.text
    assert half.weight_bytes / full.weight_bytes == pytest.approx(0.5, abs=0.01)


def one_in_float32(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()


def all_in_float32(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: each.float() for name, each in tensors.items()})


@pytest.mark.parametrize("widen", [one_in_float32, all_in_float32])
def test_files_with_some_float32_tensors_stay_in_float32(
    widen: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    """The kernels of a rank are compiled before it reads any number, so they cannot depend on the numbers."""
    file = tiny_checkpoint("llama", tmp_path, stored=torch.bfloat16) / "model.safetensors"
    tensors = load_file(file)
    widen(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    model = load_stage(tmp_path, packs=PanelLinear)
    assert {each.weight.dtype for each in model.linears} == {model.sizes[0].weight_dtype} == {torch.float32}


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # one of which has its embedding for its head
@pytest.mark.parametrize(
    ("stored", "dtype", "quantization", "kept_in"),
    [
        (torch.bfloat16, "float32", None, torch.bfloat16),
        (torch.float16, "float32", None, torch.float16),
        (torch.float32, "float32", None, torch.float32),
        (torch.float32, "bfloat16", None, torch.bfloat16),
        (torch.float16, "bfloat16", None, torch.bfloat16),
        (torch.bfloat16, "float32", "int8", torch.int8),
    ],
)
def test_the_kernels_compiled_ahead_are_those_of_the_weights(
    family: str,
    stored: torch.dtype,
    dtype: str,
    quantization: str | None,
    kept_in: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled while loading, they would run otherwise in this process than in later ones (Kernels.prepare)."""
    folder = tiny_checkpoint(family, tmp_path, stored=stored, intermediate_size=52)
    prepared: list[ModelSizes] = []
    monkeypatch.setattr(CpuKernels, "prepare", lambda _kernels, sizes: bool(prepared.append(sizes)))
    info = load_model_info(folder, dtype=dtype, quantization=quantization)
    prepare_kernels(info, Shard(), CPU)
    model = load_stage(info)
    assert [each.weight_dtype for each in prepared] == [kept_in] * 2
    table: Any = model.embed
    assert {each.table_dtype for each in prepared} == {table.table._table.weight.dtype}
    if quantization is None:
        packed = load_stage(info, packs=PanelLinear)
        assert {each.weight.dtype for each in packed.linears} == {kept_in}
