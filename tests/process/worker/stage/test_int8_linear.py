"""Weights of 8 bits: near the full ones, alike in both layouts, a quarter of the memory."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.errors import ModelError
from orca.worker.models import build
from orca.worker.models.build import load_stage
from orca.worker.weights import int8_linear, layout_choice
from orca.worker.weights.int8_linear import INT8_LAYOUTS, Int8PanelLinear, OneDnnInt8Linear
from orca.worker.weights.linear import Linear
from support.worker.stage_driver import Chain, random_asks, serve

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest output: what the dtype itself rounds, a few times over.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


needs_bytes = pytest.mark.skipif(
    not int8_linear.can_multiply_bytes(), reason="this processor has no 8-bit dot products"
)
KINDS = [Int8PanelLinear, pytest.param(OneDnnInt8Linear, marks=needs_bytes)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_output_has_its_own_scale_and_rounds_to_the_nearest_of_255_values(kind: type[Linear]) -> None:
    weight = torch.tensor([[127.0, 1.4, -126.6, 0.0], [0.00127, 0.0, -0.00127, 0.0000149], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[127.0, 1.0, -127.0, 0.0], [0.00127, 0.0, -0.00127, 0.00001], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(kind(weight)(torch.eye(4)).t(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_stay_near_those_of_the_full_weight(kind: type[Linear], has_bias: bool, dtype: torch.dtype) -> None:
    """A weight of a normal distribution, rounded to 127 steps of its largest in 300, is 0.7 % off in sum."""
    weight, bias = torch.randn(530, 300, dtype=dtype), torch.randn(530, dtype=dtype) if has_bias else None
    x = torch.randn(40, 300, dtype=dtype)
    y, full = kind(weight, bias)(x), Linear(weight, bias)(x)
    assert y.dtype == dtype
    assert (y - full).norm() / full.norm() < 0.012


@needs_bytes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_of_bytes_equals_one_of_floats_for_any_number_of_rows(has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(53, 31, dtype=dtype), torch.randn(53, dtype=dtype) if has_bias else None
    packed, plain = OneDnnInt8Linear(weight, bias), Int8PanelLinear(weight, bias)
    for rows in (1, 2, 17, 127, 128, 129, 300):
        x = torch.randn(rows, 31, dtype=dtype) * torch.logspace(-3, 2, rows, dtype=dtype)[:, None]
        y, expected = packed(x), plain(x)
        assert ((y - expected).abs() <= NEAR[dtype] * expected.abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_gives_the_bias_and_a_row_of_nan_stays_nan(kind: type[Linear]) -> None:
    bias = torch.randn(20)
    y = kind(torch.randn(20, 64), bias)(torch.tensor([[0.0], [torch.nan], [torch.inf], [1.0]]).repeat(1, 64))
    assert torch.equal(y[0], bias)
    assert y[1:3].isnan().all()
    assert y[3].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_8_bit_weight_replaces_the_plain_one(kind: type[Linear]) -> None:
    weight = torch.randn(64, 512)
    assert kind(weight).bytes == 64 * 512 + 64 * 4
    assert kind(weight, torch.randn(64)).bytes == 64 * 512 + 2 * 64 * 4


def test_weights_of_half_precision_are_timed_with_the_rows_that_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()

    def best_times_s(candidates: Sequence[Linear], x: Tensor) -> list[float]:
        seen.add(x.dtype)
        return [1.0] * len(candidates)

    monkeypatch.setattr(layout_choice, "best_times_s", best_times_s)
    layout_choice.fastest_layout(torch.randn(400, 300).bfloat16(), None, dtype=torch.float32, layouts=INT8_LAYOUTS)
    assert seen == {torch.float32}


@pytest.mark.parametrize(("bytes_us", "best"), [(950, Int8PanelLinear), (850, OneDnnInt8Linear)])
def test_int8_products_are_used_if_they_are_a_tenth_faster(
    bytes_us: int, best: type[Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_linear, "can_multiply_bytes", lambda: True)
    times_us = {Int8PanelLinear: 1000, OneDnnInt8Linear: bytes_us}
    monkeypatch.setattr(
        layout_choice, "best_times_s", lambda candidates, _x: [1e-6 * times_us[type(each)] for each in candidates]
    )
    assert layout_choice.fastest_layout(torch.randn(400, 300), None, layouts=INT8_LAYOUTS) is best
    assert (
        layout_choice.fastest_layout(torch.randn(400, 300), None, layouts=INT8_LAYOUTS, is_together=True)
        is Int8PanelLinear
    )


def middling_checkpoint(folder: Path) -> Path:
    """Write a checkpoint with weights large enough that their layouts are timed, of whole panels on any processor."""
    return tiny_checkpoint("llama", folder, hidden_size=384, intermediate_size=640, vocab_size=192)


def test_a_model_takes_a_quarter_of_the_memory(tmp_path: Path) -> None:
    folder = middling_checkpoint(tmp_path)
    small, full = load_stage(folder, quantization="int8"), load_stage(folder, packs=False)
    embedding = 192 * 384 * 4
    assert (small.weight_bytes - embedding) / (full.weight_bytes - embedding) == pytest.approx(0.25, abs=0.01)
    assert all(isinstance(each, Int8PanelLinear | OneDnnInt8Linear) for each in small.linears)


@needs_bytes
def test_the_log_names_the_layouts_of_a_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = middling_checkpoint(tmp_path)
    with caplog.at_level(logging.INFO, logger="orca.worker"):
        model = load_stage(folder, quantization="int8")
    large = [each for each in model.linears if each.outputs * each.inputs * 4 >= layout_choice._SMALL_BYTES]
    assert large
    for each in large:
        said = f"weight {each.outputs} x {each.inputs} float32: {type(each).__name__}"
        assert any(message.startswith(said) for message in caplog.messages)


def test_if_int8_sums_overflow_only_panels_are_used_and_nothing_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "can_multiply_bytes", lambda: False)
    monkeypatch.setattr(layout_choice, "best_times_s", None)
    folder = middling_checkpoint(tmp_path)
    with caplog.at_level(logging.INFO, logger="orca.worker"):
        model = load_stage(folder, quantization="int8")
    assert {type(each) for each in model.linears} == {Int8PanelLinear}
    assert "weights of 8 bits: Int8PanelLinear, because this processor does not multiply bytes" in caplog.messages


def test_a_tied_table_stays_as_it_is_and_the_head_is_a_rounded_copy(tmp_path: Path) -> None:
    model = load_stage(tiny_checkpoint("qwen2", tmp_path), quantization="int8")
    embed: Any = model.embed
    assert embed.table._table.weight.dtype == torch.float32
    assert isinstance(model.linears[-1], Int8PanelLinear | OneDnnInt8Linear)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_model_with_weights_of_8_bits_stays_near_the_full_one(tmp_path: Path, tensor: int, dtype: str) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    asks, rounded = (random_asks(199, 24, seed=12, new_max=1) for _ in range(2))
    serve(Chain(folder), asks)
    serve(Chain(folder, dtype=dtype, quantization="int8", tensor=tensor), rounded)
    alike = [one.output == other.output for one, other in zip(asks, rounded, strict=True)]
    assert sum(alike) >= 0.8 * len(alike)


def test_other_devices_than_the_cpu_refuse_weights_of_8_bits(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="int8 is for the device cpu, not meta"):
        load_stage(tiny_checkpoint("llama", tmp_path), quantization="int8", device="meta")
