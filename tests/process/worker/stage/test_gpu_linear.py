"""The layout of weights for GPUs gives what the plain one does, but for a rounding of what is added to its bias."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.device import use_kernels
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.plain import PlainKernels
from orca.worker.weights.gpu_linear import GpuLinear
from orca.worker.weights.linear import Linear, Norm

pytestmark = pytest.mark.covered(2)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, INPUTS, HEAD_DIM, HEADS, KV_HEADS = 3, 20, 16, 2, 1
OUTPUTS = (HEADS + 2 * KV_HEADS) * HEAD_DIM


@pytest.fixture(params=[TritonKernels, PlainKernels], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_kernels(DEVICE, request.param()):
        yield


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(params=[False, True], ids=["", "biased"])
def pair(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[GpuLinear, Linear]:
    weight = some(OUTPUTS, INPUTS, dtype=dtype, seed=1)
    bias = some(OUTPUTS, dtype=dtype, seed=2) if request.param else None
    return GpuLinear(weight, bias), Linear(weight, bias)


def some(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def norm_of(width: int, dtype: torch.dtype) -> Norm:
    return Norm(NormParameters(some(width, dtype=dtype, seed=3), 1e-5, some(width, dtype=dtype, seed=4)))


def largest_of(linear: Linear, norm: Norm, x: Tensor) -> float:
    """Return the largest output before rounding, with the bias or without."""
    outputs = [each.apply(norm, x).abs().max() for each in (linear, Linear(linear.weight))]
    return float(max(outputs))


def assert_alike(one: Tensor, other: Tensor, *, largest: float) -> None:
    """Allow four units of the last digit of the largest number that was rounded on the way. Norm, outputs, sum and
    result are rounded: half a unit each, and a whole one where Triton's interpreter cuts bfloat16 off.
    """
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert (one.float() - other.float()).abs().max() <= 4 * torch.finfo(one.dtype).eps * largest


def test_gpu_linear_of_normalised_rows_equals_the_reference(pair: tuple[GpuLinear, Linear], dtype: torch.dtype) -> None:
    x, norm = some(ROWS, INPUTS, dtype=dtype, seed=5), norm_of(INPUTS, dtype)
    ours, plain = pair
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.apply(norm, x), plain.apply(norm, x))
    assert torch.equal(ours.apply_float32(norm, x), plain.apply_float32(norm, x))
    assert ours.bytes == plain.bytes


@pytest.mark.parametrize("has_norm_behind", [False, True])
def test_gpu_linear_adds_its_outputs(has_norm_behind: bool, pair: tuple[GpuLinear, Linear], dtype: torch.dtype) -> None:
    x, norm = some(ROWS, INPUTS, dtype=dtype, seed=5), norm_of(OUTPUTS, dtype)
    one, other = (some(ROWS, OUTPUTS, dtype=dtype, seed=6) for _ in range(2))
    ours, plain = pair
    then = norm if has_norm_behind else None
    normed = ours.add_to(one, x, then)
    assert plain.add_to(other, x, then) is None
    assert (normed is not None) == (has_norm_behind and ours.bias is not None)
    assert_alike(one, other, largest=float(other.abs().max()) + float(plain(x).abs().max()))
    if normed is not None:
        assert torch.equal(normed, norm(one))


@pytest.mark.parametrize("has_norm_behind", [False, True])
def test_gpu_linear_takes_outputs_summed_over_ranks(has_norm_behind: bool, dtype: torch.dtype) -> None:
    outputs, norm = some(ROWS, OUTPUTS, dtype=dtype, seed=5), norm_of(OUTPUTS, dtype)
    one, other = (some(ROWS, OUTPUTS, dtype=dtype, seed=6) for _ in range(2))
    weight = some(OUTPUTS, INPUTS, dtype=dtype, seed=1)
    normed = GpuLinear(weight).add_outputs(one, outputs, norm if has_norm_behind else None)
    assert Linear(weight).add_outputs(other, outputs) is None
    assert_alike(one, other, largest=float(other.abs().max()))
    assert (normed is not None) == has_norm_behind
    assert normed is None or torch.equal(normed, norm(one))


@pytest.mark.parametrize("activation", Activation)
def test_gpu_linear_applies_an_activation(
    activation: Activation, pair: tuple[GpuLinear, Linear], dtype: torch.dtype
) -> None:
    """Activations whose slope is below 1.13."""
    x, norm = some(ROWS, INPUTS, dtype=dtype, seed=5), norm_of(INPUTS, dtype)
    ours, plain = (each.apply_activated(norm, x, activation) for each in pair)
    assert_alike(ours, plain, largest=1.13 * largest_of(pair[1], norm, x))


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
def test_gpu_linear_applies_a_gate(activation: Activation, pair: tuple[GpuLinear, Linear], dtype: torch.dtype) -> None:
    """An error of one factor is as many times as large as the other, up to 1.1 times each."""
    x, norm = some(ROWS, INPUTS, dtype=dtype, seed=5), norm_of(INPUTS, dtype)
    ours, plain = (each.apply_gated(norm, x, activation) for each in pair)
    assert_alike(ours, plain, largest=2.2 * largest_of(pair[1], norm, x) ** 2)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("is_normed", [False, True])
def test_gpu_linear_writes_its_outputs_to_the_cache(
    is_turned: bool, is_normed: bool, pair: tuple[GpuLinear, Linear], dtype: torch.dtype
) -> None:
    """Turned numbers are sums of two. Outputs are larger than the weights of their heads' norms, which makes no error
    larger."""
    x, norm = some(ROWS, INPUTS, dtype=dtype, seed=5), norm_of(INPUTS, dtype)
    angles = some(ROWS, 1, HEAD_DIM // 2, dtype=torch.float32, seed=7)
    turns = torch.polar(torch.ones_like(angles), angles) if is_turned else None
    head_norm = NormParameters(some(HEADS + KV_HEADS, HEAD_DIM, dtype=dtype, seed=8), 1e-5) if is_normed else None
    results = []
    for linear in pair:
        cache = torch.zeros(2, 2 * KV_HEADS, 4, HEAD_DIM, dtype=dtype, device=DEVICE)
        kept = KvWrite(cache, torch.tensor([5, 0, 7], device=DEVICE), turns, head_norm)
        results.append((linear.apply_to_cache(norm, x, kept), cache))
    for ours, plain in zip(*results, strict=True):
        assert_alike(ours, plain, largest=2 * largest_of(pair[1], norm, x))
