"""Products with a weight in panels, against PyTorch's in float64, for the tiles of this processor and of others."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import llvmlite.binding
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.cpu.product import amx
from orca.kernels.cpu.product.panel import HEAD_DIM, PANELS, THREADS, panel_of
from orca.kernels.cpu.product.product import PackedWeight
from orca.kernels.cpu.product.tile import Tile, tile_of
from orca.kernels.cpu.team import intrinsics
from orca.kernels.cpu.team.team import RowCount, bind_rows, record_calls
from orca.kernels.device import kernels_of
from orca.kernels.plain import PlainKernels
from support.kernels.torch_threads import computing_threads

pytestmark = pytest.mark.covered(1, others="prove")

TILES = {"avx2": Tile(lanes=8, rows=6, pairs=False), "avx512": Tile(lanes=16, rows=12, pairs=False), "own": None}
"""Vectors that are longer than this processor's are cut up by the compiler."""
if llvmlite.binding.get_host_cpu_features().get("avx512bf16", False):
    TILES["pairs"] = Tile(lanes=16, rows=12, pairs=True)  # where a processor's own are those of AMX
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Inputs and outputs: of one; off every grid; a whole number of panels; more inputs than are gone through at a time.
SHAPES = [(2, 1), (30, 37), (64, 96), (1100, 50)]


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tile_named(name: str, dtype: torch.dtype) -> Tile | None:
    return None if name == "pairs" and dtype != torch.bfloat16 else TILES[name]


def assert_rounded_once(y: Tensor, exact: Tensor, inputs: int) -> None:
    """Sums of float32 in any order, rounded to the dtype at the end: to its nearest number."""
    sums = 2 * torch.finfo(torch.float32).eps * inputs
    torch.testing.assert_close(y.double(), exact, atol=sums, rtol=torch.finfo(y.dtype).eps / 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_product_of_any_number_of_rows_equals_the_reference(
    inputs: int, outputs: int, tile: str, dtype: torch.dtype
) -> None:
    weight, bias = some(outputs, inputs, dtype=dtype), some(outputs, dtype=dtype, seed=1)
    used = tile_named(tile, dtype)
    with_bias, without = PackedWeight(weight, bias, tile=used), PackedWeight(weight, tile=used)
    for rows in (*range(14), 25, 96, 97, 257, 513):
        x = some(rows, inputs, dtype=dtype, seed=2)
        exact = x.double() @ weight.double().t()
        assert_rounded_once(without.product(x), exact, inputs)
        assert_rounded_once(with_bias.product(x), exact + bias, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_product_added_to_its_output_is_rounded_once(
    inputs: int, outputs: int, tile: str, dtype: torch.dtype
) -> None:
    weight, bias = some(outputs, inputs, dtype=dtype), some(outputs, dtype=dtype, seed=1)
    panels = PackedWeight(weight, bias, tile=tile_named(tile, dtype))
    x, there = some(19, inputs, dtype=dtype, seed=2), some(19, outputs, dtype=dtype, seed=3)
    exact = there.double() + x.double() @ weight.double().t() + bias
    panels.add_product(x, there)
    assert_rounded_once(there, exact, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 2), (30, 38), (64, 96), (1100, 50)])
def test_a_gated_product_equals_the_reference(
    inputs: int, outputs: int, activation: Activation, tile: str, dtype: torch.dtype
) -> None:
    weight, bias = some(outputs, inputs, dtype=dtype) / inputs**0.5, some(outputs, dtype=dtype, seed=1)
    panels = PackedWeight(weight, bias, is_gated=True, tile=tile_named(tile, dtype))
    x = some(19, inputs, dtype=dtype, seed=2)
    outputs_of_both = x.double() @ weight.double().t() + bias
    gate, up = outputs_of_both.chunk(2, dim=1)
    assert_rounded_once(panels.gated_product(x, activation), activation(gate) * up, 64)
    assert_rounded_once(panels.product(x), outputs_of_both, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("inputs", "outputs"), [(30, 37), (64, 96)])
def test_an_activated_product_equals_the_reference(
    inputs: int, outputs: int, activation: Activation, tile: str, dtype: torch.dtype
) -> None:
    weight, bias = some(outputs, inputs, dtype=dtype) / inputs**0.5, some(outputs, dtype=dtype, seed=1)
    panels, x = PackedWeight(weight, bias, tile=tile_named(tile, dtype)), some(19, inputs, dtype=dtype, seed=2)
    exact = activation(x.double() @ weight.double().t() + bias)
    assert_rounded_once(panels.product(x, None, activation), exact, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_wide_product_is_not_rounded(inputs: int, outputs: int, tile: str, dtype: torch.dtype) -> None:
    weight, bias = some(outputs, inputs, dtype=dtype), some(outputs, dtype=dtype, seed=1)
    x, panels = some(19, inputs, dtype=dtype, seed=2), PackedWeight(weight, bias, tile=tile_named(tile, dtype))
    wide = panels.float32_product(x)
    assert wide.dtype == torch.float32
    assert_rounded_once(wide, x.double() @ weight.double().t() + bias, inputs)
    assert torch.equal(wide.to(dtype), panels.product(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("inputs", [30, 1100])
def test_recorded_products_run_on_the_given_number_of_rows(inputs: int, tile: str, dtype: torch.dtype) -> None:
    used = tile_named(tile, dtype)
    norm = NormParameters(some(inputs, dtype=dtype, seed=4), 1e-5, some(inputs, dtype=dtype, seed=5))
    panels = PackedWeight(some(96, inputs, dtype=dtype) / inputs**0.5, some(96, dtype=dtype, seed=1), tile=used)
    gated = PackedWeight(some(96, inputs, dtype=dtype) / inputs**0.5, is_gated=True, tile=used)
    rows, x, added = RowCount(600), some(600, inputs, dtype=dtype, seed=2), torch.zeros(600, 96, dtype=dtype)
    slots, cache = torch.arange(600).flip(0), torch.zeros(40, 2, 16, 16, dtype=dtype)

    def products(x: Tensor, added: Tensor, slots: Tensor, cache: Tensor) -> list[Tensor]:
        kept = panels.write_kv_product(x, norm, KvWrite(cache, slots, None))
        panels.add_product(x, added)
        active = panels.product(x, norm, Activation.GELU)
        return [kept, active, gated.gated_product(x, Activation.GELU_TANH), panels.float32_product(x, norm)]

    with record_calls() as recording:
        bind_rows(rows, x, added, slots)
        made = products(x, added, slots, cache)
    for rows.current in (600, 1, 257, 14, 0):
        for each in (*made, added, cache):
            each.zero_()
        recording.run()
        alone = [torch.zeros_like(each) for each in (added, cache)]
        expected = products(x[: rows.current], alone[0][: rows.current], slots[: rows.current], alone[1])
        for each, other in zip(made, expected, strict=True):
            assert torch.equal(each[: rows.current], other)
            assert not each[rows.current :].any()
        assert all(torch.equal(each, other) for each, other in zip((added, cache), alone, strict=True))


@pytest.mark.parametrize("activation", Activation)
def test_an_activation_of_any_number_equals_the_reference(activation: Activation) -> None:
    """And of infinities and none: as PyTorch has them, or 0 where it has no number."""
    far = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("nan"), float("inf")])
    numbers = torch.cat((torch.linspace(-30, 30, 6001), far))[:, None]
    activated = PackedWeight(torch.ones(1, 1)).product(numbers, None, activation)
    torch.testing.assert_close(activated.double(), activation(numbers.double()), atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("activation", Activation)
def test_a_gate_of_large_numbers_equals_the_reference(activation: Activation) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("nan")])
    panels = PackedWeight(torch.cat((gate, torch.ones(9)))[:, None], is_gated=True)
    made, tiny = (
        panels.gated_product(torch.ones(1, 1), activation).double(),
        1e-35 if activation is Activation.SILU else 1e-6,
    )
    torch.testing.assert_close(made, activation(gate.double())[None], atol=tiny, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_outputs_alone_and_among_others(dtype: torch.dtype) -> None:
    panels, x = PackedWeight(some(100, 600, dtype=dtype)), some(130, 600, dtype=dtype, seed=1)
    together = panels.product(x)
    for first, last in ((0, 1), (3, 20), (90, 130)):
        assert torch.equal(panels.product(x[first:last]), together[first:last])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [1, 40])
def test_rounding_gives_the_nearest_number_and_keeps_nan(outputs: int, dtype: torch.dtype) -> None:
    """Round one element at a time at the end of a row, and a vector of them before that. The inputs are all numbers of
    the dtype but those that processors may take for zero, plus a fraction of their last place.
    """
    numbers = torch.arange(0, 2**16, 7, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = torch.where(_is_usual(numbers), numbers, 0.0)
    there = numbers[: len(numbers) // outputs * outputs].view(-1, outputs).clone()
    panels = PackedWeight(torch.eye(outputs, outputs + outputs % 2).to(dtype))
    share = (there.float() * 1.5 * 2.0 ** -(9 if dtype == torch.bfloat16 else 12)).to(dtype)
    share = torch.where(_is_usual(share) & share.isfinite(), share, 0.0)
    expected = (there.float() + share.float()).to(dtype)
    panels.add_product(F.pad(share, (0, outputs % 2)), there)
    torch.testing.assert_close(there, expected, atol=0, rtol=0, equal_nan=True)


def _is_usual(numbers: Tensor) -> Tensor:
    return numbers.isnan() | (numbers.abs() >= torch.finfo(numbers.dtype).tiny)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    panels, x = PackedWeight(some(300, 64, dtype=torch.float32)), some(50, 64, dtype=torch.float32, seed=1)
    results = []
    for threads in (1, 2, 5):
        with computing_threads(threads):
            results.append(panels.product(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_each_panel_is_one_task_and_concurrent_panels_are_far_apart() -> None:
    for panels in range(1, 40):
        for threads in range(1, 6):
            args = np.zeros(HEAD_DIM, np.int64)
            args[PANELS], args[THREADS] = panels, threads
            order = [panel_of(place, args) for place in range(panels)]
            assert sorted(order) == list(range(panels))
            for first in range(0, panels - threads + 1, threads):
                together = order[first : first + threads]
                apart = [low + panels // threads <= high for low, high in pairwise(together)]
                assert all(apart), (panels, threads, together)


def test_inputs_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="an odd number of inputs, 5, has no pairs"):
        PackedWeight(torch.ones(4, 5, dtype=torch.bfloat16), tile=Tile(lanes=16, rows=12, pairs=True))


def test_a_packed_weight_takes_no_more_memory_than_the_plain_one() -> None:
    weight = torch.randn(96, 64)
    assert PackedWeight(weight).bytes == weight.numel() * 4 + 96 * 4


@pytest.mark.parametrize(
    ("stored", "dtype"), [*((dtype, dtype) for dtype in DTYPES), *((half, torch.float32) for half in DTYPES[1:])]
)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_of_the_weight_are_read_from_its_panels(
    inputs: int, outputs: int, tile: str, stored: torch.dtype, dtype: torch.dtype
) -> None:
    weight, places = some(outputs, inputs, dtype=stored), some(3, inputs, dtype=dtype, seed=1)
    panels = PackedWeight(weight, some(outputs, dtype=torch.float32), dtype=dtype, tile=tile_named(tile, dtype))
    ids = torch.tensor([*range(outputs), 0, outputs - 1])
    positions = torch.arange(len(ids)) % 3
    rows = weight[ids].to(dtype)
    assert torch.equal(panels.embed(ids, None, positions), rows)
    assert torch.equal(panels.embed(ids, places, positions), rows + places[positions])
    assert torch.equal(panels.embed(ids, places, positions, 1.5), rows * 1.5 + places[positions])


@pytest.mark.skipif(not amx.is_available(), reason="this processor has no AMX")
def test_bfloat16_goes_through_amx() -> None:
    assert tile_of(torch.bfloat16).is_amx
    assert not tile_of(torch.float32).is_amx


_ON_HASWELL = """
import torch
from orca.kernels.device import kernels_of
from orca.kernels.cpu.product.product import PackedWeight
from orca.kernels.plain import PlainKernels
from orca.kernels.contract.reference import NormParameters

x, weight = torch.randn(20, 30).bfloat16(), torch.randn(50, 30).bfloat16()
norm = NormParameters(torch.ones(30).bfloat16(), 1e-5)
normed = kernels_of(x.device).normalise(x, norm)
torch.testing.assert_close(normed, PlainKernels().normalise(x, norm), atol=0.01, rtol=0.01)
product = PackedWeight(weight).product(x)
torch.testing.assert_close(product.double(), x.double() @ weight.double().t(), atol=1e-4, rtol=2.0**-8)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for another architecture")
def test_a_processor_without_half_precision_rounds_in_software() -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2"}
    subprocess.run([sys.executable, "-c", _ON_HASWELL], env=environment, check=True, timeout=300)


_DIGEST = """
import hashlib
import torch
from orca.kernels.contract.reference import NormParameters
from orca.kernels.cpu.product.product import PackedWeight
from orca.kernels.cpu.team import code
made = torch.Generator().manual_seed(0)
x, weight = torch.randn(300, 90, generator=made), torch.randn(96, 90, generator=made)
product = PackedWeight(weight).product(x, NormParameters(torch.ones(90), 1e-5))
print(code.has_compiled(), hashlib.sha256(product.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("kept_kernels")
def test_a_kernel_computes_the_same_bits_when_it_is_loaded_from_the_cache() -> None:
    """LLVM contracts a product and a sum in one of the two if it has the choice."""
    runs = [subprocess.run([sys.executable, "-c", _DIGEST], capture_output=True, text=True, check=True) for _ in "12"]
    (compiled, digest), (loaded, digest_loaded) = (run.stdout.split() for run in runs)
    assert (compiled, loaded) == ("True", "False")
    assert digest == digest_loaded


@pytest.mark.parametrize(("processor", "locality"), [("znver5", 0), ("znver4", 2), ("haswell", 2)])
def test_non_temporal_prefetch_is_used_only_if_measured_faster(
    processor: str, locality: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intrinsics.config, "CPU_NAME", processor)
    assert intrinsics._locality.__wrapped__() == locality


def test_only_bfloat16_is_paired() -> None:
    assert not tile_of(torch.float32).pairs
    assert not tile_of(torch.float16).pairs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_product_of_normalised_rows_equals_the_reference(
    inputs: int, outputs: int, tile: str, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, scale, bias = (some(*shape, inputs, dtype=dtype, seed=len(shape)) for shape in ((outputs,), (), ()))
    norm = NormParameters(scale, 1e-5, bias if has_bias else None)
    panels = PackedWeight(weight, tile=tile_named(tile, dtype))
    for rows in (1, 19, 200):
        x = some(rows, inputs, dtype=dtype, seed=2)
        normed = kernels_of(x.device).normalise(x, norm)
        assert torch.equal(panels.product(x, norm), panels.product(normed))
    if outputs % 2 == 0:
        gated = PackedWeight(weight, is_gated=True, tile=tile_named(tile, dtype))
        assert torch.equal(gated.gated_product(x, Activation.SILU, norm), gated.gated_product(normed, Activation.SILU))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 16), (5, 2, 48), (4, 4, 64), (2, 2, 20)])
def test_a_product_written_to_the_cache_equals_the_reference(
    heads: int, kv_heads: int, head_dim: int, is_turned: bool, is_normed: bool, dtype: torch.dtype
) -> None:
    """Heads into which whole vectors fit, and others."""
    tokens, blocks, block_tokens, inputs = 101, 30, 4, 40
    x, norm = some(tokens, inputs, dtype=dtype), NormParameters(some(inputs, dtype=dtype, seed=1), 1e-5)
    panels = PackedWeight(some((heads + 2 * kv_heads) * head_dim, inputs, dtype=dtype, seed=2) / inputs**0.5)
    slots = torch.randperm(blocks * block_tokens, generator=torch.Generator().manual_seed(5))[:tokens]
    angles = some(tokens, 1, head_dim // 2, dtype=torch.float32, seed=6)
    turns = torch.polar(torch.ones_like(angles), angles) if is_turned else None
    head_norm = NormParameters(some(heads + kv_heads, head_dim, dtype=dtype, seed=7), 1e-5) if is_normed else None
    caches = [torch.full((blocks, 2 * kv_heads, block_tokens, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    kept = panels.write_kv_product(x, norm, KvWrite(caches[0], slots, turns, head_norm))
    qkv = panels.product(x, norm).view(tokens, -1, head_dim)
    PlainKernels().write_kv(qkv, KvWrite(caches[1], slots, turns, head_norm))
    # Turned before they are rounded, and rounded before they are turned.
    unit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(kept, qkv, atol=3 * unit, rtol=unit)
    torch.testing.assert_close(*caches, atol=3 * unit, rtol=unit, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", ["avx2", "avx512", "own"])
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (31, 50)])
def test_a_product_of_an_8_bit_weight_equals_the_reference(
    inputs: int, outputs: int, tile: str, dtype: torch.dtype
) -> None:
    rounded = torch.randint(-127, 128, (outputs, inputs), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale, bias = some(outputs, dtype=torch.float32).abs() / 256, some(outputs, dtype=dtype, seed=1)
    weight = rounded.double() * scale.double()[:, None]
    with_bias, without = (
        PackedWeight(rounded, each, scale=scale, dtype=dtype, tile=TILES[tile]) for each in (bias, None)
    )
    for rows in (0, 1, 5, 13, 97, 300):
        x = some(rows, inputs, dtype=dtype, seed=2)
        exact = x.double() @ weight.t()
        assert_rounded_once(without.product(x), exact, inputs)
        assert_rounded_once(with_bias.product(x), exact + bias.double(), inputs)


def in_all_ways(plain: PackedWeight, gated: PackedWeight, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the results of some rows, with any operation before and after a product. Both have 90 inputs."""
    norm = NormParameters(some(90, dtype=dtype, seed=1), 1e-5)
    x, added = some(rows, 90, dtype=dtype, seed=2), some(rows, plain.outputs, dtype=dtype, seed=3)
    plain.add_product(x, added)
    cache = torch.zeros(rows, 2, 1, 4, dtype=dtype)
    return [
        plain.product(x, norm),
        plain.product(x, None, Activation.GELU),
        plain.float32_product(x),
        gated.gated_product(x, Activation.SILU, norm),
        plain.write_kv_product(x, norm, KvWrite(cache, torch.arange(rows), None)),
        added,
        cache,
    ]


def assert_same_bits(one: Sequence[PackedWeight], other: Sequence[PackedWeight], rows: int, dtype: torch.dtype) -> None:
    """Args: one, other: each plain and gated."""
    for here, there in zip(in_all_ways(*one, rows, dtype), in_all_ways(*other, rows, dtype), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [96, 44])
def test_an_8_bit_weight_and_the_same_numbers_in_float32_give_the_same_bits(outputs: int, dtype: torch.dtype) -> None:
    """A scale of a power of two changes no bit of a sum."""
    tile = Tile(lanes=8, rows=6, pairs=False)
    rounded = torch.randint(-127, 128, (outputs, 90), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale, kinds = torch.full((outputs,), 1 / 128), (False, True)
    small = [PackedWeight(rounded, scale=scale, dtype=dtype, is_gated=each, tile=tile) for each in kinds]
    full = [PackedWeight(rounded.to(dtype) / 128, is_gated=each, tile=tile) for each in kinds]
    for rows in (1, 20):
        assert_same_bits(small, full, rows, dtype)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", ["avx2", "avx512", "own"])
@pytest.mark.parametrize("outputs", [96, 44])
def test_a_weight_of_half_precision_and_the_same_numbers_in_float32_give_the_same_bits(
    outputs: int, tile: str, weight_dtype: torch.dtype
) -> None:
    narrow, bias = some(outputs, 90, dtype=weight_dtype), some(outputs, dtype=torch.float32, seed=4)
    half, full = (
        [PackedWeight(weight, bias, dtype=torch.float32, is_gated=each, tile=TILES[tile]) for each in (False, True)]
        for weight in (narrow, narrow.float())
    )
    assert 2 * half[0].weight.numel() * half[0].weight.element_size() == full[0].weight.numel() * 4
    for rows in (0, 1, 5, 20, 97, 300):
        assert_same_bits(half, full, rows, torch.float32)
