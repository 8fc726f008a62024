"""Weights of float32 whose numbers all are of half precision take half the memory, and nothing else changes."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint

from orca.core.model import load_model_info
from orca.kernels.numba_kernels import CpuKernels
from orca.kernels.reference import ModelSizes
from orca.worker.linear import PanelLinear, narrowed
from orca.worker.models.build import load_stage, prepare_kernels
from orca.worker.shard import Shard

HALVES = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """[1024, 64]: all numbers of a dtype but those that are none, as float32."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return every.nan_to_num(0.0, torch.inf, -torch.inf).view(1024, 64)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_half_precision_is_kept_as_it_is(dtype: torch.dtype) -> None:
    weight = numbers(dtype)
    narrow = narrowed(weight)
    assert narrow.dtype == dtype
    assert torch.equal(narrow.float(), weight)


@pytest.mark.parametrize("other", [0.1, torch.nan])
@pytest.mark.parametrize("dtype", HALVES)
def test_one_other_number_anywhere_keeps_a_weight_in_float32(dtype: torch.dtype, other: float) -> None:
    weight = numbers(dtype)
    weight[1023, 63] = other
    assert narrowed(weight) is weight


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_computed_in_half_precision_is_not_touched(dtype: torch.dtype) -> None:
    weight = torch.ones(3, 4, dtype=dtype)
    assert narrowed(weight) is weight


@pytest.mark.parametrize("stored", HALVES)
def test_a_model_takes_half_the_memory_beside_its_embeddings(stored: torch.dtype, tmp_path: Path) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 640, "vocab_size": 192}  # whole panels on any processor
    half, full = (
        load_stage(tiny_checkpoint("llama", tmp_path / str(each), stored=each, **sizes), packs=PanelLinear)
        for each in (stored, torch.float32)
    )
    embedding = 192 * 384 * 4
    assert (half.weight_bytes - embedding) / (full.weight_bytes - embedding) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("stored", "dtype", "kept_in"),
    [
        (torch.bfloat16, "float32", torch.bfloat16),
        (torch.float16, "float32", torch.float16),
        (torch.float32, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float16, "bfloat16", torch.bfloat16),
    ],
)
def test_the_kernels_that_are_made_ahead_are_those_of_the_weights(
    stored: torch.dtype, dtype: str, kept_in: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled while loading, they would run otherwise in this process than in later ones (Kernels.prepare)."""
    folder = tiny_checkpoint("llama", tmp_path, stored=stored, intermediate_size=52)
    prepared: list[ModelSizes] = []
    monkeypatch.setattr(CpuKernels, "prepare", lambda _kernels, sizes: bool(prepared.append(sizes)))
    prepare_kernels(load_model_info(folder, dtype=dtype), Shard(), CPU)
    model = load_stage(folder, dtype=dtype, packs=PanelLinear)
    assert [each.weight_dtype for each in prepared] == [kept_in] * 2
    assert {each.weight.dtype for each in model.linears} == {kept_in}
