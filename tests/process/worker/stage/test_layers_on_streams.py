"""The engine's own layers, in PyTorch's operations, as graphs whose tasks run in any order that keeps to the edges."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.kernels.device import use_kernels
from orca.kernels.plain import PlainKernels
from orca.worker.models.blocks import Layer, StepContext
from orca.worker.stage.task_graph import TaskGraph, trace
from orca.worker.streams.assignment import Edge
from support.worker.stage_driver import Chain, random_asks, serve
from support.worker.stream_programs import are_equal, clones, random_order, run_in_order, values_alone


@pytest.fixture(autouse=True)
def _plain_kernels() -> Iterator[None]:
    """Use kernels that can be traced: of those that run on a CPU, only PyTorch's own calls."""
    with use_kernels("cpu", PlainKernels()):
        yield


class InAnyOrder:
    """Layers that also run as a graph, in a random order, before they run: a layer for a stage."""

    only_kernels = False

    def __init__(self, layers: Sequence[Layer], edges: Callable[[TaskGraph], Sequence[Edge]]) -> None:
        self._layers = layers
        self._edges = edges
        self.outcomes: list[bool] = []
        """One entry for each step: whether both gave the same output and cache."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        before = clones([x, *step.caches])
        graph = trace(lambda hidden: self._through(hidden, step), x)
        order = random_order(len(graph.tasks), self._edges(graph), seed=len(self.outcomes))
        results = clones([run_in_order(graph, order, [x]), *step.caches])
        for tensor, kept in zip([x, *step.caches], before, strict=True):
            tensor.copy_(kept)
        output = self._through(x, step)
        self.outcomes.append(are_equal(results, [output, *step.caches]))
        return output

    def keep(self, x: Tensor, step: StepContext) -> None:
        for layer in self._layers[:-1]:
            x = layer(x, step)
        self._layers[-1].keep(x, step)

    def _through(self, x: Tensor, step: StepContext) -> Tensor:
        for layer in self._layers:
            x = layer(x, step)
        return x


def outcomes_of(folder: Path, vocab_size: int, edges: Callable[[TaskGraph], Sequence[Edge]]) -> list[bool]:
    chain = Chain(folder)
    [[stage]] = chain.stages
    layers = InAnyOrder(list(stage._model.layers), edges)
    stage._model.layers[:] = [layers]
    serve(chain, random_asks(vocab_size, 5, seed=3, prompt_max=6, new_max=5), chunk=4)
    return layers.outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("family", "vocab_size"), [("gpt2", 211), ("mistral", 197), ("qwen3", 191)])
def test_steps_have_the_same_effects_in_any_order_that_respects_the_edges(
    family: str, vocab_size: int, tmp_path: Path
) -> None:
    outcomes = outcomes_of(tiny_checkpoint(family, tmp_path), vocab_size, lambda graph: graph.edges)
    assert len(outcomes) > 5
    assert all(outcomes)


@pytest.mark.slow
def test_without_the_hazards_of_memory_steps_would_have_other_effects(tmp_path: Path) -> None:
    assert not all(outcomes_of(tiny_checkpoint("qwen3", tmp_path), 191, values_alone))
