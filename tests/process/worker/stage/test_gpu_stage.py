"""Stages as GPUs compute them, with plain weights and kernels in Triton; without a GPU, in Triton's interpreter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.step import Claim, NewRequest, Row, Step
from orca.kernels.device import Kernels, use_kernels
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.plain import PlainKernels
from orca.worker.models.build import load_stage
from orca.worker.parallel.shard import Shard
from orca.worker.stage.stage import Stage
from orca.worker.weights.gpu_linear import GpuLinear
from orca.worker.weights.linear import Linear
from support.worker.stage_driver import EPOCH, GREEDY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = {1: (5, 80, 17, 44, 102, 9), 2: (63, 31, 120)}
# Every bias, norm, activation, rotation and window that a family may have.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu", "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True}),
    "gpt2": ("gpt2", {"n_embd": 30}),
    "gpt2-relu": ("gpt2", {"activation_function": "relu"}),
    "gpt2-quick-gelu": ("gpt2", {"activation_function": "quick_gelu"}),
    "opt": ("opt", {}),
    "opt-gelu-norms-behind": ("opt", {"activation_function": "gelu", "do_layer_norm_before": False}),
    "opt-no-bias": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
}

SHARED = ("llama-biased", "qwen3-biased", "gpt2", "opt-gelu-norms-behind")
"""Those that `make test` divides among ranks, too: all biases, norms of heads, norms behind, and each family's own."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class OneOfTwo:
    """A TensorGroup whose other rank adds nothing."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_last(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        return F.pad(tensor, (0, sum(sizes[1:])))


class Launches(TorchDispatchMode):
    """Remembers of each of our kernels' launches what it is compiled for: all but numbers of tokens and of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "orca":
            self.seen.add((func.name(), *(self._compiled_for(each) for each in args)))
        return func(*args, **(kwargs or {}))

    def _compiled_for(self, argument: Any) -> object:
        if not isinstance(argument, Tensor):
            return float if isinstance(argument, float) else argument
        shape = (argument.shape[1], argument.shape[3]) if argument.dim() == 4 else argument.shape[1:]
        return argument.dtype, tuple(shape), argument.data_ptr() % 16


def steps() -> list[Step]:
    """A prompt; one more, beside a token; a prompt's second part beside tokens; tokens alone."""
    return [
        step(1, [1], Row(handle=1, start=0, count=6, sample=True, token=None)),
        step(2, [2], decode(1, 6), Row(handle=2, start=0, count=2, sample=False, token=None)),
        step(3, [], Row(handle=2, start=2, count=1, sample=True, token=None), decode(1, 7)),
        step(4, [], decode(2, 3), decode(1, 8)),
    ]


def decode(handle: int, start: int) -> Row:
    return Row(handle=handle, start=start, count=1, sample=True, token=7 * start)


def step(number: int, new: list[int], *rows: Row) -> Step:
    requests = tuple(
        NewRequest(
            handle=handle,
            request_id=str(handle),
            claim=Claim(1, "test/1"),
            tokens=PROMPTS[handle],
            prompt_length=len(PROMPTS[handle]),
            max_total_tokens=12,
            sampling=GREEDY,
        )
        for handle in new
    )
    return Step(epoch=EPOCH, number=number, new=requests, rows=rows)


@dataclass(frozen=True)
class Run:
    """A stage's answers to all steps, and the launches before the first and in them."""

    logits: list[Tensor]
    before: set[tuple[object, ...]]
    meanwhile: set[tuple[object, ...]]


def run(folder: Path, kernels: Kernels, layout: type[Linear], *, tensor: int) -> Run:
    with use_kernels(DEVICE, kernels):
        with Launches() as before:
            model = load_stage(folder, Shard(tensor=tensor), device=DEVICE, group=OneOfTwo(), packs=layout)
        stage = Stage(model, slots=64, block_tokens=16, eos_token_ids=(), feeds_tokens=False)
        with Launches() as meanwhile:
            logits = [stage.forward(stage.begin(each)).tensor.cpu().clone() for each in steps()]
    return Run(logits, before.seen, meanwhile.seen)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, ranks), id=f"{name}-{ranks}", marks=() if ranks == 1 or name in SHARED else pytest.mark.prove
        )
        for name in MODELS
        for ranks in (1, 2)
    ],
)
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Name of a model, and ranks of its stage."""
    chosen: tuple[str, int] = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(case: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint of a model with two layers."""
    family, options = MODELS[case[0]]
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 2}
    return tiny_checkpoint(family, tmp_path_factory.mktemp(case[0]), **layers, **options)


@pytest.fixture(scope="module")
def tensor(case: tuple[str, int]) -> int:
    return case[1]


@pytest.fixture(scope="module")
def ours(folder: Path, tensor: int) -> Run:
    return run(folder, TritonKernels(), GpuLinear, tensor=tensor)


@pytest.mark.sampled(4, others="prove")
def test_logits_are_those_of_plain_kernels(ours: Run, folder: Path, tensor: int) -> None:
    """Logits of float32 are sums whose terms are as large as the largest of them; each of two layers rounds some."""
    plain = run(folder, PlainKernels(), Linear, tensor=tensor)
    for one, other in zip(ours.logits, plain.logits, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 32 * torch.finfo(torch.float32).eps * other.abs().max()


@pytest.mark.sampled(4, others="prove")
def test_kernels_of_steps_are_compiled_ahead(ours: Run) -> None:
    assert ours.meanwhile
    assert ours.meanwhile <= ours.before


def test_devices_other_than_the_cpu_get_the_layout_of_gpus(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    assert {type(linear) for linear in load_stage(folder, device="meta").linears} == {GpuLinear}
    assert {type(linear) for linear in load_stage(folder, device="meta", packs=False).linears} == {Linear}
    assert GpuLinear not in {type(linear) for linear in load_stage(folder).linears}
