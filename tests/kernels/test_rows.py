"""Operations on single rows: the kernels of CPUs and GPUs against PyTorch's operations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.cpu.product.product import PackedWeight
from orca.kernels.device import Kernels
from orca.kernels.plain import PlainKernels
from support.kernels.gpu import GpuKernels
from support.kernels.rows import CPU, DTYPES, PLAIN, assert_alike, some

pytestmark = pytest.mark.covered(2)

KINDS: dict[str, Any] = {"cpu": CPU, "gpu": GpuKernels()}

SHAPES = [(1, 8), (3, 10), (50, 512), (9, 1000)]


@pytest.fixture(params=KINDS)
def kernels(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_norms_equal_the_reference(tokens: int, width: int, has_bias: bool, dtype: torch.dtype, kernels: Any) -> None:
    x, weight, bias = (some(*shape, dtype=dtype, seed=len(shape)) for shape in ((tokens, width), (width,), (width,)))
    norm = NormParameters(weight, 1e-5, bias if has_bias else None)
    assert_alike(kernels.normalise(x + 3, norm), PLAIN.normalise(x + 3, norm), roundings=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (40, 6, 10)])
def test_taken_rows_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype, kernels: Any) -> None:
    x = some(*shape, dtype=dtype)
    for rows in ([], [6], [3, 0, 3, 1, 6, 6, 2]):
        places = torch.tensor(rows, dtype=torch.int64)
        assert torch.equal(kernels.take_rows(x, places), PLAIN.take_rows(x, places))


def test_the_norm_of_nearly_equal_numbers_equals_the_reference(kernels: Any) -> None:
    """Far from zero, with little between them: the square of the mean is not taken from the mean of the squares."""
    x = 1000 + some(3, 512, dtype=torch.float32)
    norm = NormParameters(torch.ones(512), 1e-5, torch.zeros(512))
    exact = torch.nn.functional.layer_norm(x.double(), (512,), eps=1e-5)
    torch.testing.assert_close(kernels.normalise(x, norm).double(), exact, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.RELU])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_a_gate_equals_the_reference(
    tokens: int, width: int, activation: Activation, dtype: torch.dtype, kernels: Any
) -> None:
    gate_up = some(tokens, 2 * width, dtype=dtype) * 4
    assert_alike(kernels.gated(gate_up, activation), PLAIN.gated(gate_up, activation), roundings=8)


def test_a_silu_gate_of_large_numbers_equals_the_reference(kernels: Any) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    made, expected = (each.gated(gate_up, Activation.SILU) for each in (kernels, PLAIN))
    torch.testing.assert_close(made, expected, atol=1e-35, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 10), (8, 8, 64)])
def test_rows_are_written_to_the_cache(
    heads: int, kv_heads: int, head_dim: int, is_turned: bool, is_normed: bool, dtype: torch.dtype, kernels: Any
) -> None:
    tokens, blocks, block_tokens = 11, 6, 4
    qkv = some(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(blocks * block_tokens, generator=torch.Generator().manual_seed(5))[:tokens]
    turns = torch.polar(
        torch.ones(tokens, 1, head_dim // 2), some(tokens, 1, head_dim // 2, dtype=torch.float32, seed=6)
    )
    head_norm = NormParameters(some(heads + kv_heads, head_dim, dtype=dtype, seed=7), 1e-5) if is_normed else None
    queries, caches = [], []
    for each in (kernels, PLAIN):
        own = qkv.clone()
        cache = torch.full((blocks, 2 * kv_heads, block_tokens, head_dim), float("nan"), dtype=dtype)
        each.write_kv(own, KvWrite(cache, slots, turns if is_turned else None, head_norm))
        queries.append(own[:, :heads])
        caches.append(cache)
    assert_alike(*queries, roundings=8)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert_alike(caches[0].nan_to_num(), caches[1].nan_to_num(), roundings=8)


@pytest.mark.parametrize("bias", [None, torch.ones(30)], ids=["rms", "layer"])
def test_the_norm_of_a_token_has_the_same_bits_at_any_row(bias: Tensor | None) -> None:
    """The order is also that in memory: rows that may overlap need other code."""
    norm, memory = NormParameters(some(30, dtype=torch.float32), 1e-5, bias), torch.empty(4096)
    for seed in range(200):
        x = some(1, 30, dtype=torch.float32, seed=seed)
        elsewhere = memory[seed : seed + 30].copy_(x[0])[None]
        assert torch.equal(CPU.normalise(x, norm), CPU.normalise(elsewhere, norm))


@pytest.mark.parametrize("kernels", [CPU, PlainKernels()])
@pytest.mark.parametrize("scale", [1.0, 19**0.5])
@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        *((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_embeddings_are_the_sum_of_token_and_position_rows(
    stored: torch.dtype, dtype: torch.dtype, has_places: bool, scale: float, kernels: Kernels
) -> None:
    torch.manual_seed(4)
    table, places = torch.randn(31, 19).to(stored), torch.randn(23, 19).to(dtype)
    ids, positions = torch.randint(0, 31, (9,)), torch.randint(0, 23, (9,))
    embedded = kernels.embed(table, ids, places if has_places else None, positions, dtype, scale)
    expected = table[ids].to(dtype) * scale
    assert torch.equal(embedded, expected + places[positions] if has_places else expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embedding_lookup_returns_exact_numbers(dtype: torch.dtype) -> None:
    """Those too that processors may take for zero."""
    table = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(512, 128)
    ids, positions = torch.arange(512), torch.zeros(512, dtype=torch.int64)
    halves = table.view(dtype)
    assert torch.equal(CPU.embed(halves, ids, None, positions, dtype).view(torch.int16), table)
    found = PackedWeight(halves.nan_to_num(0.0, 0.0, 0.0)).embed(ids, None, positions)
    assert torch.equal(found.view(torch.int16), halves.nan_to_num(0.0, 0.0, 0.0).view(torch.int16))


@pytest.mark.parametrize("width", [1, 15, 16, 511, 512, 513, 1_025, 24_001])
def test_argmax_of_a_row_is_the_first_of_equal_numbers(width: int) -> None:
    torch.manual_seed(5)
    x = torch.randint(-6, 6, (7, width)).float()
    x[1] = float("-inf")
    x[2, -1] = 9.0
    x[3, width // 2] = 9.0
    x[4, :512], x[4, 512:] = float("-inf"), 9.0  # a part and its edge
    x[5, width // 3 :: 500] = 9.0
    assert CPU.argmax(x).tolist() == x.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("width", [1, 15, 16, 511, 512, 513, 1_025, 24_001])
@pytest.mark.parametrize("sign", [1, -1])
def test_argmax_of_a_row_with_nan_is_the_first_nan(width: int, sign: int) -> None:
    """A look at the chosen number then shows that the row has one."""
    x = torch.randn(6, width)
    nan = torch.copysign(torch.tensor(float("nan")), torch.tensor(float(sign)))
    x[0] = nan
    x[1, 0] = nan
    x[2, -1] = nan
    x[3, width // 2], x[3, width // 3 + 1 :: 7] = float("inf"), nan
    x[4, 0], x[4, -1] = float("inf"), nan
    x[5, -1] = float("inf")
    for kernels in (CPU, PLAIN):
        assert kernels.argmax(x).tolist() == x.numpy().argmax(axis=1).tolist()
