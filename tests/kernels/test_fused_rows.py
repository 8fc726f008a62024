"""Fused operations on rows: a bias before the operation, the sum after a product, or the next norm.

The kernels of CPUs and GPUs, and PyTorch's operations, against the same in steps or in float64.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from support.kernels.gpu import GpuKernels, rounded
from support.kernels.rows import CPU, DTYPES, PLAIN, assert_alike, some

pytestmark = pytest.mark.covered(2)

GPU = GpuKernels()
KINDS: dict[str, Any] = {"cpu": CPU, "gpu": GPU, "plain": PLAIN}
# One number; off the grid of blocks; a run of 1024 and a bit; a whole number of them.
SHAPES = [(1, 1), (3, 10), (5, 1030), (2, 2048)]


@pytest.fixture(params=KINDS)
def kernels(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def sum_of(kernels: Any, *terms: Tensor) -> Tensor:
    """Taken in float32 from left to right and rounded once, to the dtype of the terms."""
    sum_ = terms[0].float()
    for term in terms[1:]:
        sum_ = sum_ + term.float()
    return rounded(sum_, terms[0].dtype) if kernels is GPU else sum_.to(terms[0].dtype)


def exact(activation: Activation, x: Tensor) -> Tensor:
    """Return the reference in float64, where no digits cancel."""
    x = x.double()
    if activation is Activation.GELU:
        return x * torch.erfc(-x / 2**0.5) / 2
    if activation is Activation.GELU_TANH:
        return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return activation(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_a_fused_sum_and_norm_has_the_bits_of_a_sum_and_then_a_norm(
    tokens: int, width: int, has_bias: bool, is_layer_norm: bool, dtype: torch.dtype, kernels: Any
) -> None:
    x, added = (some(tokens, width, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, norm_bias, bias = (some(width, dtype=dtype, seed=seed) for seed in (3, 4, 5))
    norm = NormParameters(weight, 1e-5, norm_bias if is_layer_norm else None)
    sum_ = sum_of(kernels, x, added, *([bias] if has_bias else []))
    normed = kernels.add_normalise(x, added, norm, bias if has_bias else None)
    assert torch.equal(x, sum_)
    assert torch.equal(normed, kernels.normalise(sum_, norm))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("width", [5120, 12288, 16384])  # Llama 13B, GPT-3 175B, Llama 3.1 405B
def test_norms_of_the_widest_rows_equal_the_reference(width: int, is_layer_norm: bool, dtype: torch.dtype) -> None:
    x, weight, bias = (some(*shape, dtype=dtype) for shape in ((2, width), (width,), (width,)))
    norm = NormParameters(weight, 1e-5, bias if is_layer_norm else None)
    assert_alike(GPU.normalise(x + 3, norm), PLAIN.normalise(x + 3, norm), roundings=16)
    one, other = x.clone(), x.clone()
    normed = [each.add_normalise(sum_, x, norm) for each, sum_ in ((GPU, one), (PLAIN, other))]
    assert torch.equal(one, other)
    assert_alike(*normed, roundings=16)


def test_a_row_wider_than_the_registers_is_refused() -> None:
    with pytest.raises(AssertionError, match="a row of 16385 numbers"):
        GPU.normalise(torch.zeros(1, 16385), NormParameters(torch.ones(16385), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_activations_equal_the_reference(
    tokens: int, width: int, has_bias: bool, activation: Activation, dtype: torch.dtype, kernels: Any
) -> None:
    x, bias = some(tokens, width, dtype=dtype) * 2, some(width, dtype=dtype, seed=1) if has_bias else None
    expected = exact(activation, x if bias is None else x.double() + bias.double()).to(dtype)
    out = torch.full_like(x, float("nan"))
    assert kernels.activate(x, activation, bias, out) is out
    assert_alike(out, expected, roundings=8)
    assert torch.equal(kernels.activate(x, activation, bias), out)
    assert kernels.activate(x, activation, bias, out=x) is x
    assert torch.equal(x, out)


@pytest.mark.parametrize("activation", Activation)
def test_activations_of_large_numbers_equal_the_reference(activation: Activation) -> None:
    """None is NaN or infinite, and what little is left of negative ones has digits: 1e-5 of itself, for the power of e
    is taken of numbers up to 80, each 5e-6 wide."""
    x = torch.tensor([[-1e30, -200.0, -12.0, -9.0, -5.0, -0.0, 0.0, 5.0, 88.0, 200.0, 1e30]])
    with np.errstate(over="ignore"):  # powers of 1e30: infinite in the interpreter as on a GPU
        activated = GPU.activate(x, activation)
    torch.testing.assert_close(activated.double(), exact(activation, x), rtol=1e-5, atol=1e-37)


def test_relu_keeps_nan(kernels: Any) -> None:
    x = torch.tensor([[float("nan"), -1.0]])
    assert kernels.activate(x, Activation.RELU).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_a_gate_with_biases_equals_the_reference(
    tokens: int, width: int, activation: Activation, dtype: torch.dtype, kernels: Any
) -> None:
    gate_up, bias = some(tokens, 2 * width, dtype=dtype) * 2, some(2 * width, dtype=dtype, seed=1)
    gate, up = (gate_up.double() + bias.double()).chunk(2, dim=1)
    expected = exact(activation, gate) * up
    # Sums rounded before are off by a rounding of themselves, of up to 16 here; their product by as much of the other.
    slack = torch.finfo(dtype).eps * (8 + 2 * (gate.abs() * up.abs()))
    assert ((kernels.gated(gate_up, activation, bias).double() - expected).abs() <= slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_a_bias_is_added_before_norm_rotation_and_cache_write(
    head_dim: int, is_turned: bool, is_normed: bool, dtype: torch.dtype, kernels: Any
) -> None:
    tokens, heads, kv_heads, blocks, block_tokens = 3, 6, 2, 3, 4
    qkv, bias = (some(*shape, dtype=dtype) for shape in ((tokens, 10, head_dim), (10 * head_dim,)))
    turns = torch.polar(torch.ones(tokens, 1, head_dim // 2), some(tokens, 1, head_dim // 2, dtype=torch.float32))
    head_norm = NormParameters(some(heads + kv_heads, head_dim, dtype=dtype), 1e-5) if is_normed else None

    def kept() -> KvWrite:
        cache = torch.full((blocks, 2 * kv_heads, block_tokens, head_dim), float("nan"), dtype=dtype)
        return KvWrite(cache, torch.tensor([7, 0, 11]), turns if is_turned else None, head_norm)

    one, plain, places = qkv.clone(), qkv.clone(), [kept() for _ in range(3)]
    other = sum_of(kernels, qkv, bias.view(10, head_dim))
    kernels.write_kv(one, places[0], bias)
    kernels.write_kv(other, places[1])
    PLAIN.write_kv(plain, places[2], bias)
    assert torch.equal(one, other)
    assert torch.equal(places[0].cache.nan_to_num(7.0), places[1].cache.nan_to_num(7.0))
    assert_alike(one, plain, roundings=8)
    assert torch.equal(places[0].cache.isnan(), places[2].cache.isnan())
    assert_alike(places[0].cache.nan_to_num(), places[2].cache.nan_to_num(), roundings=8)


def test_no_tokens_do_nothing(kernels: Any) -> None:
    x, norm = torch.empty(0, 6), NormParameters(torch.ones(6), 1e-5)
    assert kernels.add_normalise(x, x.clone(), norm).shape == (0, 6)
    assert kernels.activate(x, Activation.GELU).shape == (0, 6)
    assert kernels.gated(x, Activation.SILU, torch.ones(6)).shape == (0, 3)


def test_cpu_kernels_fuse_biases_when_they_run_together() -> None:
    """The result of one call is not there yet when the next one is made."""

    def layer(x: Tensor) -> Tensor:
        normed = CPU.add_normalise(x, added, NormParameters(bias, 1e-5), bias)
        return CPU.gated(CPU.activate(normed, Activation.GELU, bias, out=normed), Activation.SILU, bias)

    bias, added = (some(*shape, dtype=torch.float32, seed=1) for shape in ((64,), (9, 64)))
    one, other = (some(9, 64, dtype=torch.float32) for _ in range(2))
    with CPU.deferred():
        together = layer(one)
    assert torch.equal(together, layer(other))
    assert torch.equal(one, other)
