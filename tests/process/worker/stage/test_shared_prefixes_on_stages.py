"""Stages whose requests begin with KV blocks of others: the tokens, and where bits are the same, too."""

from pathlib import Path

import pytest
import torch

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.kernels.device import use_kernels
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.plain import PlainKernels
from orca.worker.stage.kv_cache import BlockTables
from orca.worker.weights.linear import PanelLinear
from support.worker.shared_prefixes import ALL_KINDS, SLOTS, Logits, kinds_of, serve_shared, sharing_asks
from support.worker.stage_driver import Chain, serve

GPU = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=1, num_hidden_layers=2)


def test_recorded_steps_of_gpu_kernels_read_shared_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's tables are a copy, as on a GPU: they must equal the host's after each step (`Stage.check`)."""
    with use_kernels(GPU, PlainKernels()):
        alone = sharing_asks()
        for ask in alone:
            ask.arrival = 0
            serve(Chain(folder, packs=True), [ask])
    monkeypatch.setattr(BlockTables, "is_copied", staticmethod(lambda device: True))  # noqa: ARG005
    with use_kernels(GPU, TritonKernels()):
        chain, asks = Chain(folder, packs=True, slots=SLOTS, feeds_tokens=True), sharing_asks()
        [[stage]] = chain.stages
        assert stage.cache.tables.data_ptr() != stage.cache.own.host.ctypes.data
        steps = serve_shared(chain, asks)
    assert kinds_of(steps) == ALL_KINDS
    assert stage._recorded is not None
    assert {size.tokens for size, _ in stage._recorded._recordings} >= {1, 2}
    assert [ask.output for ask in asks] == [ask.output for ask in alone]


@pytest.mark.parametrize("max_batch_tokens", [None, 6])
@pytest.mark.parametrize(
    ("family", "dtype", "quantization", "options"),
    [
        ("llama", "float32", None, {"head_dim": 16}),
        ("gpt2", "float32", None, {"n_embd": 24}),
        ("mistral", "bfloat16", None, {"head_dim": 32, "intermediate_size": 48}),
        ("qwen3", "float32", "int8", {"head_dim": 8}),
    ],
    ids=["llama", "gpt2", "mistral-bfloat16", "qwen3-int8"],
)
def test_logits_of_cpu_kernels_have_the_same_bits_with_and_without_shared_blocks(
    family: str,
    dtype: str,
    quantization: str | None,
    options: dict[str, object],
    max_batch_tokens: int | None,
    tmp_path: Path,
) -> None:
    """Packed weights give a row the same bits in any step, and attention does if head_dim is a multiple of 8."""
    folder, found = tiny_checkpoint(family, tmp_path, seed=1, **options), []
    for shares in (False, True):
        chain = Chain(folder, packs=PanelLinear, slots=SLOTS, dtype=dtype, quantization=quantization)
        logits = Logits.noted(chain)
        steps = serve_shared(chain, sharing_asks(), shares=shares, max_batch_tokens=max_batch_tokens)
        found.append(logits)
    assert kinds_of(steps) >= ALL_KINDS - {"shares in the same step"}
    assert found[0].equal(found[1])
