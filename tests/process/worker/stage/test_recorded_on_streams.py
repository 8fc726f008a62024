"""A whole recorded step as GPUs compute it, as a graph whose tasks may run in any order that keeps to its edges.

Without a GPU kernels run in Triton's interpreter.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.request import SamplingParams
from orca.kernels.contract.recording import Recorded
from orca.kernels.device import use_kernels
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.gpu.recording import GraphRecorder
from orca.worker.stage.task_graph import TaskGraph, trace
from orca.worker.streams.assignment import Edge, assign_streams
from orca.worker.weights.gpu_linear import GpuLinear
from orca.worker.weights.linear import PanelLinear
from support.worker.stage_driver import GREEDY, Ask, Chain, serve
from support.worker.stream_programs import random_order, run_in_order, values_alone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def edges_of(graph: TaskGraph) -> Sequence[Edge]:
    return graph.edges


class AnyOrder(GraphRecorder):
    """Runs what was recorded as a graph, each time in another order."""

    def __init__(self, device: torch.device, edges_of: Callable[[TaskGraph], Sequence[Edge]] = edges_of) -> None:
        super().__init__(device)
        self.graphs: list[TaskGraph] = []
        self._edges_of = edges_of

    def record(
        self, compute: Callable[[], Recorded], captured: Callable[[], Recorded] | None = None
    ) -> tuple[Recorded, Callable[[], None]]:
        assert captured is None
        made = compute()
        graph = trace(lambda: tuple(each for each in compute() if each is not None))
        self.graphs.append(graph)
        runs = 0

        def run() -> None:
            nonlocal runs
            runs += 1
            order = random_order(len(graph.tasks), self._edges_of(graph), seed=runs)
            results = cast("Sequence[Tensor]", run_in_order(graph, order, []))
            for to, of in zip((each for each in made if each is not None), results, strict=True):
                to.copy_(of)

        return made, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path, seed=1, num_hidden_layers=2)


def outputs(folder: Path, recorder: GraphRecorder | None) -> list[list[int]]:
    """Return the tokens of requests that join while others run, greedy and sampled ones with penalties."""
    params = (GREEDY, SamplingParams(seed=2, top_p=0.9, presence_penalty=0.7))
    prompts = ([5, 80, 17], [63], [31, 120, 7, 7], [9])
    asks = [Ask(prompt, 8, params[place % 2], arrival=place) for place, prompt in enumerate(prompts)]
    with use_kernels(DEVICE, TritonKernels()):
        chain = Chain(folder, packs=GpuLinear, feeds_tokens=True)
        [[stage]] = chain.stages
        assert stage._recorded is not None
        if recorder is not None:
            stage._recorded._recorder = recorder
        serve(chain, asks)
    return [ask.output for ask in asks]


@pytest.mark.prove
def test_tokens_are_the_same_in_any_order_that_respects_the_edges(folder: Path) -> None:
    recorder = AnyOrder(torch.device(DEVICE))
    assert outputs(folder, recorder) == outputs(folder, None)
    # What attention does is laid out beside the first products; the rest of a step is a chain.
    for graph in recorder.graphs:
        assignment = assign_streams(len(graph.tasks), graph.edges)
        assert 2 <= assignment.stream_count <= 4
        assert len(graph.tasks) > 20


@pytest.mark.prove
def test_missing_edges_change_the_tokens(folder: Path) -> None:
    recorder = AnyOrder(torch.device(DEVICE), values_alone)
    assert outputs(folder, recorder) != outputs(folder, None)


def test_kernels_that_run_on_a_cpu_are_recorded_without_streams(folder: Path) -> None:
    outputs = []
    for on_streams in (False, True):
        chain = Chain(folder, packs=PanelLinear, on_streams=on_streams)
        [[stage]] = chain.stages
        assert stage._recorded is not None
        asks = [Ask([5, 6], 6)]
        serve(chain, asks)
        outputs.append(asks[0].output)
    assert outputs[0] == outputs[1]
