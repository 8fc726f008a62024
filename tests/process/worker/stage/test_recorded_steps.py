"""Steps recorded once and run again on other numbers: right, and without their layers being called."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.step import Step
from orca.kernels.contract.recording import RecordingSize
from orca.kernels.cpu.recording import CpuRecorder
from orca.worker.models.blocks import Layer, ModelPart, StepContext
from orca.worker.stage.recorded_steps import RecordedSteps
from orca.worker.stage.sampling import StepSample
from orca.worker.stage.step_runner import PreparedStep, StepOutput
from orca.worker.weights.linear import PanelLinear
from support.worker.stage_driver import GREEDY, Ask, Chain, random_asks, serve


class Operations(TorchDispatchMode):
    """Notes PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


class CountedLayer:
    """A layer that counts its calls."""

    def __init__(self, layer: Layer) -> None:
        self.only_kernels = layer.only_kernels
        self.calls = 0
        self._layer = layer

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        self.calls += 1
        return self._layer(x, step)

    def keep(self, x: Tensor, step: StepContext) -> None:
        self.calls += 1
        self._layer.keep(x, step)


def asks_of(vocab_size: int) -> list[Ask]:
    return random_asks(vocab_size, 30, seed=3, new_max=30)


def increments(steps: list[Step]) -> list[int]:
    """The number of requests in each step in which all of them run one token."""
    return [len(step.rows) for step in steps if step.rows and step.tokens == len(step.rows)]


@pytest.mark.covered(2)
@pytest.mark.parametrize("chunk", [None, 5, 1])
@pytest.mark.parametrize("feeds_tokens", [False, True])
@pytest.mark.parametrize(
    ("family", "vocab_size", "options", "quantization"),
    [
        ("gpt2", 211, {}, None),
        ("llama", 199, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}, None),
        ("mistral", 197, {"sliding_window": 9}, None),  # which hides something only when contexts have grown
        ("qwen3", 191, {}, "int8"),
    ],
)
def test_recorded_steps_give_the_same_tokens(
    family: str,
    vocab_size: int,
    options: dict[str, object],
    quantization: str | None,
    feeds_tokens: bool,
    chunk: int | None,
    tmp_path: Path,
) -> None:
    folder = tiny_checkpoint(family, tmp_path, seed=1, **options)
    outputs = []
    for is_recorded in (True, False):
        chain = Chain(folder, packs=PanelLinear, quantization=quantization, feeds_tokens=feeds_tokens)
        asks = asks_of(vocab_size)
        [[stage]] = chain.stages
        assert stage._recorded is not None
        if not is_recorded:
            stage._recorded = None
        steps = serve(chain, asks, max_batch_size=20, chunk=chunk)
        outputs.append([ask.output for ask in asks])
    assert max(increments(steps)) > 10
    assert outputs[0] == outputs[1]


def test_layers_are_called_once_for_steps_of_many_sizes(tmp_path: Path) -> None:
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear)
    [[stage]] = chain.stages
    counted = [CountedLayer(layer) for layer in stage._model.layers]
    stage._model.layers[:] = counted
    steps = serve(chain, asks_of(211), max_batch_size=12)
    assert len(set(increments(steps))) > 5
    assert len({step.tokens for step in steps if step.tokens > len(step.rows)}) > 10
    assert {layer.calls for layer in counted} == {2}


def test_steps_that_report_prompts_or_are_long_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuRecorder, "chunk_tokens_max", 32)
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear)
    [[stage]] = chain.stages
    assert stage._recorded is not None
    serve(chain, [Ask([5, 6, 7], 1, replace(GREEDY, prompt_logprobs=1))])
    serve(chain, [Ask([5] * 33, 1)])
    assert not stage._recorded._recordings
    serve(chain, [Ask([5] * 33, 1)], chunk=32)  # a step that draws nothing, then one of the prompt's last token
    assert {size for size, _ in stage._recorded._recordings} == {RecordingSize(32, None), RecordingSize(32, 32)}


def test_a_prompt_that_was_reported_does_not_prevent_recording(tmp_path: Path) -> None:
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear)
    [[stage]] = chain.stages
    assert stage._recorded is not None
    serve(chain, [Ask([5, 6, 7], 9, replace(GREEDY, prompt_logprobs=1)), Ask([8, 9], 1, arrival=4)])
    assert {size.wanted is None for size, _ in stage._recorded._recordings} == {True, False}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunk", [5, 1])
def test_stages_in_the_middle_record_chunks(chunk: int, tmp_path: Path) -> None:
    outputs = []
    for is_recorded in (True, False):
        chain = Chain(tiny_checkpoint("llama", tmp_path), packs=PanelLinear, stages=3, feeds_tokens=True)
        for ranks in chain.stages:
            assert ranks[0]._recorded is not None
            if not is_recorded:
                ranks[0]._recorded = None
        asks = asks_of(199)
        serve(chain, asks, max_batch_size=8, chunk=chunk)
        outputs.append([ask.output for ask in asks])
    assert outputs[0] == outputs[1]


def test_a_step_of_a_recorded_size_runs_no_pytorch_operation(tmp_path: Path) -> None:
    chain = Chain(tiny_checkpoint("llama", tmp_path), packs=PanelLinear)
    [[stage]] = chain.stages
    steps = list[list[str]]()
    forward, sample = stage.forward, stage.sample

    def noted_forward(prepared: PreparedStep, hidden: Tensor | None = None) -> StepOutput:
        with Operations() as noted:
            output = forward(prepared, hidden)
        steps.append(noted.names)
        return output

    def noted_sample(prepared: PreparedStep, output: StepOutput) -> StepSample:
        with Operations() as noted:
            sampled = sample(prepared, output)
        steps[-1].extend(noted.names)
        return sampled

    stage.forward, stage.sample = noted_forward, noted_sample  # type: ignore[method-assign]
    serve(chain, [Ask([5, 6, 7], 6), Ask([8, 9], 6)])
    prompts, first, *others = steps
    assert prompts
    assert first
    assert others == [[]] * 4


def test_few_recordings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRecorder, "recordings_max", 1)
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear)
    [[stage]] = chain.stages
    assert stage._recorded is not None
    serve(chain, asks_of(211), max_batch_size=20)
    assert {size for size, _ in stage._recorded._recordings} == {RecordingSize(CpuRecorder.chunk_tokens_max, None)}


def test_activations_for_the_next_stage_outlive_the_next_step(tmp_path: Path) -> None:
    chain = Chain(tiny_checkpoint("llama", tmp_path), packs=PanelLinear, stages=2)
    [[first], [last]] = chain.stages
    asks = asks_of(199)
    passed, copies = list[Tensor](), list[Tensor]()
    forward = first.forward

    def watched(prepared: PreparedStep, hidden: Tensor | None = None) -> StepOutput:
        output = forward(prepared, hidden)
        passed.append(output.tensor)
        copies.append(output.tensor.clone())
        return output

    first.forward = watched  # type: ignore[method-assign]
    serve(chain, asks, max_batch_size=8)
    assert all(torch.equal(one, other) for one, other in zip(passed, copies, strict=True))
    assert first._recorded is not None
    assert last._recorded is not None
    whole = Chain(tiny_checkpoint("llama", tmp_path), packs=PanelLinear)
    alone = asks_of(199)
    serve(whole, alone, max_batch_size=8)
    assert [ask.output for ask in asks] == [ask.output for ask in alone]


def test_a_recording_that_reads_released_memory_is_recorded_again(tmp_path: Path) -> None:
    """Tables grow with the requests and the longest of them."""
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear, block_tokens=1)
    [[stage]] = chain.stages
    tables = stage.cache.tables
    asks = [Ask([5, 6], 4), Ask([7, 8, 9], 80, arrival=2), *(Ask([place], 20, arrival=30) for place in range(2, 22))]
    serve(chain, asks, max_batch_size=30)
    assert all(now > before for now, before in zip(stage.cache.tables.shape, tables.shape, strict=True))
    alone = [Ask(ask.prompt, ask.max_new_tokens) for ask in asks]
    for ask in alone:
        serve(Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear), [ask])
    assert [ask.output for ask in asks] == [ask.output for ask in alone]


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_head_that_is_no_kernel_runs_after_the_recording(chunk: int | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    outputs = []
    for has_kernel in (True, False):
        chain, asks = Chain(folder, packs=PanelLinear), asks_of(199)
        [[stage]] = chain.stages
        if not has_kernel:
            stage._model.head = PlainHead(stage._model.head)
            stage._recorded = RecordedSteps.create(stage._model, stage.cache, stage._requests)
        assert stage._recorded is not None
        serve(chain, asks, max_batch_size=8, chunk=chunk)
        serve(chain, alone := [Ask([*range(2, 33)], 3)], chunk=chunk)  # in chunks there are steps that draw nothing
        outputs.append([ask.output for ask in (*asks, *alone)])
    assert outputs[0] == outputs[1]


class PlainHead:
    """A head that says that it is no kernel."""

    only_kernels = False

    def __init__(self, head: ModelPart | None) -> None:
        assert head is not None
        self._head = head

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor:
        return self._head(x.clone(), step)


def test_a_dropped_stage_frees_its_cache(tmp_path: Path) -> None:
    """The cache is freed without the garbage collector: the next epoch's cache needs the memory at once."""
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear)
    serve(chain, asks_of(211), max_batch_size=4)
    cache = weakref.ref(chain.stages[0][0].cache)
    gc.disable()
    try:
        chain.stages.clear()
        assert cache() is None
    finally:
        gc.enable()
