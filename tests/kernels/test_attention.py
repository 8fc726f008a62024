"""Ragged paged attention: the reference by hand, then every faster version against the reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from orca.kernels.contract.reference import ContextRow, attend_reference
from orca.kernels.device import kernels_of
from orca.kernels.plain import PlainKernels
from support.kernels.attention_steps import HEADS, STEPS, random_step, view_of
from support.kernels.gpu import GpuKernels
from support.pairs import covered

pytestmark = pytest.mark.covered(2)

CPU = torch.device("cpu")


def one_head(*pairs: tuple[float, float]) -> Tensor:
    """A cache of one KV head, one dimension and blocks of one slot, from (key, value) of each slot."""
    return torch.tensor(pairs)[:, :, None, None]


KINDS = {"cpu": kernels_of(CPU), "plain": PlainKernels(), "gpu": GpuKernels()}


def ragged(
    kind: str,
    rows: list[ContextRow],
    tables: Tensor,
    kv_of_query: list[int],
    cache: Tensor,
    window: int | None = None,
) -> Any:
    _, lines, block_tokens, head_dim = cache.shape
    seen = view_of(tables, kv_of_query, head_dim, cache.dtype, block_tokens, kv_heads=lines // 2, window=window)
    return KINDS[kind].attention(rows, seen)


def attend_one(query: Tensor, cache: Tensor, slots: list[int], kv_of_query: list[int], **options: Any) -> Tensor:
    """The reference for one request whose tokens have these slots, in blocks of one, the last ones its own."""
    rows = [ContextRow(0, len(query), len(slots) - len(query), 0)]
    return attend_reference(query, cache, rows, torch.tensor([slots]).int(), kv_of_query, **options)


def test_reference_weighs_values_by_the_softmax_of_scaled_scores() -> None:
    cache = one_head((0.0, 4.0), (math.log(3.0), 8.0))
    output = attend_one(torch.tensor([[[2.0]]]), cache, [0, 1], [0], scale=0.5)
    # Scores 0 and ln 3: weights 1/4 and 3/4.
    assert output.item() == pytest.approx(4.0 / 4 + 8.0 * 3 / 4)


def test_reference_hides_later_tokens_of_the_same_row() -> None:
    cache = one_head((0.0, 1.0), (0.0, 3.0), (0.0, 8.0))
    output = attend_one(torch.ones(3, 1, 1), cache, [0, 1, 2], [0], scale=1.0)
    assert output.flatten().tolist() == pytest.approx([1.0, 2.0, 4.0])


def test_reference_sees_no_further_back_than_its_window() -> None:
    cache = one_head((0.0, 1.0), (0.0, 3.0), (0.0, 8.0))
    output = attend_one(torch.ones(3, 1, 1), cache, [0, 1, 2], [0], scale=1.0, window=2)
    assert output.flatten().tolist() == pytest.approx([1.0, 2.0, 5.5])


def test_reference_reads_the_slots_in_the_order_of_positions() -> None:
    cache = one_head((9.0, 9.0), (0.0, 1.0), (0.0, 3.0))
    output = attend_one(torch.ones(2, 1, 1), cache, [2, 1], [0], scale=1.0)
    assert output.flatten().tolist() == pytest.approx([3.0, 2.0])


def test_reference_gives_each_query_head_its_kv_head() -> None:
    cache = torch.tensor([[[[0.0]], [[0.0]], [[5.0]], [[7.0]]]])  # one slot: two keys, two values
    output = attend_one(torch.ones(1, 3, 1), cache, [0], [0, 1, 1], scale=1.0)
    assert output.flatten().tolist() == [5.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("step", "heads", "window", "kind"),
    covered({"step": list(STEPS), "heads": list(HEADS), "window": [None, 1, 6, 257], "kind": list(KINDS)}, 3),
)
def test_ragged_attention_equals_the_reference(step: str, heads: str, window: int | None, kind: str) -> None:
    kv_of_query = HEADS[heads]
    kv_heads = max(kv_of_query) + 1
    qkv, cache, rows, tables = random_step(STEPS[step], len(kv_of_query), kv_heads, 10, torch.float32)
    output = ragged(kind, rows, tables, kv_of_query, cache, window)(qkv, cache, 0.3)
    query = qkv[:, : len(kv_of_query)]
    expected = attend_reference(query, cache, rows, tables, kv_of_query, scale=0.3, window=window)
    # Sums of at most 300 products of order 1 in another order: some units of 2^-24.
    torch.testing.assert_close(output, expected.flatten(1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [None, 255])
@pytest.mark.parametrize("block_tokens", [3, 16, 300])
@pytest.mark.parametrize(("heads", "head_dim"), [([0], 1), ([0, 1, 1], 80), ([0] * 40, 128)], ids=str)
def test_attention_of_any_shape_equals_the_reference(
    heads: list[int], head_dim: int, block_tokens: int, window: int | None
) -> None:
    shapes = STEPS["tiles"] + STEPS["mixed"]
    qkv, cache, rows, tables = random_step(shapes, len(heads), max(heads) + 1, head_dim, torch.float32, block_tokens)
    output = ragged("cpu", rows, tables, heads, cache, window)(qkv, cache, 0.1)
    expected = attend_reference(qkv[:, : len(heads)], cache, rows, tables, heads, scale=0.1, window=window)
    torch.testing.assert_close(output, expected.flatten(1), atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 270])
@pytest.mark.parametrize("heads", ["each-its-own", "border-of-ranks"])
def test_a_token_gets_the_same_output_alone_and_among_others(
    heads: str, window: int | None, dtype: torch.dtype
) -> None:
    """Prompts may be cut into chunks, and requests begin again with their whole log."""
    kv_of_query = HEADS[heads]
    qkv, cache, rows, tables = random_step([(600, 70), (9, 9)], len(kv_of_query), 3, 64, dtype, block_tokens=16)
    together = ragged("cpu", rows, tables, kv_of_query, cache, window)(qkv, cache, 0.125)
    for each in rows:
        for token in range(each.count):
            here = slice(each.first + token, each.first + token + 1)
            own = [ContextRow(0, 1, each.position + token, each.line)]
            alone = ragged("cpu", own, tables, kv_of_query, cache, window)(qkv[here], cache, 0.125)
            assert torch.equal(alone, together[here])


@pytest.mark.parametrize(
    ("step", "head_dim", "dtype", "kind"),
    covered(
        {
            "step": list(STEPS),
            "head_dim": [12, 64, 80],
            "dtype": [torch.bfloat16, torch.float16],
            "kind": list(KINDS),
        },
        3,
    ),
)
def test_half_precision_equals_the_reference_within_its_rounding(
    step: str, head_dim: int, dtype: torch.dtype, kind: str
) -> None:
    qkv, cache, rows, tables = random_step(STEPS[step], 4, 2, head_dim, dtype)
    attention, scale = ragged(kind, rows, tables, [0, 0, 1, 1], cache), head_dim**-0.5
    expected = attend_reference(qkv[:, :4], cache, rows, tables, [0, 0, 1, 1], scale=scale)
    # Results of order 1 are rounded to 8 (bfloat16) or 11 bits, and a prefill rounds its softmax weights too.
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    torch.testing.assert_close(attention(qkv, cache, scale), expected.flatten(1), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_very_different_size_in_one_step_do_not_disturb_each_other(kind: str) -> None:
    qkv, cache, rows, tables = random_step(STEPS["decode"], 1, 1, 4, torch.float32)
    qkv[0, 0] *= 1e4  # its scores reach thousands; the others stay near 0
    output = ragged(kind, rows, tables, [0], cache)(qkv, cache, 0.5)
    expected = attend_reference(qkv[:, :1], cache, rows, tables, [0], scale=0.5)
    torch.testing.assert_close(output, expected.flatten(1), atol=2e-6, rtol=2e-6)
