"""Tasks on their streams: what a device is told orders all that must be ordered, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from orca.worker.stage.stream_capture import CudaStreams, run_on_streams
from orca.worker.stage.task_graph import TaskGraph, trace
from orca.worker.streams.assignment import StreamAssignment, assign_streams, one_stream
from support.effort import tries
from support.worker.stream_programs import Program, TinyLayer, are_equal, layer_inputs, program_inputs, programs

BEGINNING = -1
"""Stands for what was given to the current stream before."""


@dataclass
class FakeStreams:
    """Notes what it is told. Of each stream and event it keeps all that has run when the stream comes to now, or the
    event passes."""

    run: list[set[int]] = field(default_factory=lambda: [{BEGINNING}])
    passed: list[set[int]] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)  # streams, in the order of tasks
    before: list[set[int]] = field(default_factory=list)  # of each task, what has run when it begins
    waits: list[tuple[int, int]] = field(default_factory=list)  # (number of tasks launched by then, event)

    def current(self) -> int:
        return 0

    def create(self) -> int:
        self.run.append(set())
        return len(self.run) - 1

    @contextmanager
    def using(self, stream: int) -> Iterator[None]:
        self.before.append(set(self.run[stream]))
        yield
        self.run[stream].add(len(self.launched))
        self.launched.append(stream)

    def record(self, stream: int) -> int:
        self.passed.append(set(self.run[stream]))
        return len(self.passed) - 1

    def wait(self, stream: int, event: int) -> None:
        self.run[stream] |= self.passed[event]
        self.waits.append((len(self.launched), event))


def assigned(graph: TaskGraph) -> StreamAssignment:
    return assign_streams(len(graph.tasks), graph.edges)


def needed(graph: TaskGraph) -> list[set[int]]:
    """Return for each task the tasks that must have run before it, and the beginning."""
    before: list[set[int]] = [{BEGINNING} for _ in graph.tasks]
    for first, then in sorted(graph.edges, key=lambda edge: edge[1]):
        before[then] |= before[first] | {first}
    return before


def branches(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Three branches of which two come together, and one that changes an input which another one reads."""
    left, right = (x * 2 + y).sin(), (x * 3).cos()
    z.add_(x)
    x.mul_(0.5)
    return left @ right, z


@settings(max_examples=tries(60))
@given(program=programs())
def test_streams_and_events_order_all_dependencies_and_nothing_else(program: Program) -> None:
    device, graph = FakeStreams(), trace(program, *program_inputs())
    run_on_streams(graph, assigned(graph), program_inputs(), device)
    assert device.before == needed(graph)
    assert device.run[0] == {BEGINNING, *range(len(graph.tasks))}


@settings(max_examples=tries(60))
@given(program=programs())
def test_tasks_wait_at_the_synchronisations_alone(program: Program) -> None:
    """The other waits fork streams from the current one, with one shared event, or join streams to it. A stream forks,
    or joins, there only if its first, or last, task is not ordered with another stream's.
    """
    device, graph = FakeStreams(), trace(program, *program_inputs())
    assignment = assigned(graph)
    run_on_streams(graph, assignment, program_inputs(), device)
    firsts = {assignment.streams[task]: task for task in reversed(range(len(graph.tasks)))}
    lasts = {stream: task for task, stream in enumerate(assignment.streams)}
    forks = sum(needed(graph)[task] == {BEGINNING} for stream, task in firsts.items() if stream)
    joins = sum(all(task not in edge[:1] for edge in graph.edges) for stream, task in lasts.items() if stream)
    assert len(device.waits) == len(assignment.syncs) + forks + joins
    assert len(device.passed) == len({first for first, _ in assignment.syncs}) + (forks > 0) + joins


@settings(max_examples=tries(30))
@given(program=programs())
def test_outputs_and_changed_inputs_are_those_of_the_function(program: Program) -> None:
    graph, expected = trace(program, *program_inputs()), program(*program_inputs())
    for assignment in (assigned(graph), one_stream(len(graph.tasks))):
        outputs = run_on_streams(graph, assignment, program_inputs(), FakeStreams())
        assert are_equal(outputs, expected)


def test_branches_run_on_streams_of_their_own() -> None:
    device, graph = FakeStreams(), trace(branches, *program_inputs())
    assert [str(task.target).split(".")[1] for task in graph.tasks] == [
        "mul",
        "add",
        "sin",
        "mul",
        "cos",
        "add_",
        "mul_",
        "mm",
    ]
    run_on_streams(graph, assigned(graph), program_inputs(), device)
    assert len({device.launched[task] for task in (0, 3, 5)}) == 3


def test_one_stream_is_the_current_one_and_has_no_events() -> None:
    device, graph = FakeStreams(), trace(branches, *program_inputs())
    run_on_streams(graph, one_stream(len(graph.tasks)), program_inputs(), device)
    assert device.launched == [0] * len(graph.tasks)
    assert device.passed == device.waits == []


@pytest.mark.parametrize("left_out", range(3))
def test_without_one_of_its_synchronisations_a_dependency_would_not_be_ordered(left_out: int) -> None:
    device, graph = FakeStreams(), trace(branches, *program_inputs())
    syncs = assigned(graph).syncs
    mutant = replace(assigned(graph), syncs=syncs[:left_out] + syncs[left_out + 1 :])
    assert len(syncs) == 3
    run_on_streams(graph, mutant, program_inputs(), device)
    assert device.before != needed(graph)


made: list[StorageWeakRef] = []


@torch.library.custom_op("orca_streams::remembered", mutates_args=())
def remembered(x: Tensor) -> Tensor:
    result = x + 1
    made.append(StorageWeakRef(result.untyped_storage()))
    return result


@remembered.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Watching(FakeStreams):
    """Notes of all that `remembered` has made whether it is still there, when a task begins and when streams join."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[list[bool]] = []

    def look(self) -> None:
        self.alive.append([not each.expired() for each in made])

    @contextmanager
    def using(self, stream: int) -> Iterator[None]:
        self.look()
        with super().using(stream):
            yield

    def wait(self, stream: int, event: int) -> None:
        super().wait(stream, event)
        self.look()


def beside_a_sum(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return remembered(remembered(x)) * 2, y + z


def test_outputs_of_tasks_are_kept_until_all_streams_have_joined() -> None:
    made.clear()
    device, graph = Watching(), trace(beside_a_sum, *program_inputs())
    run_on_streams(graph, assigned(graph), program_inputs(), device)
    assert device.waits[-1][0] == len(graph.tasks)
    assert device.alive[-1] == [True, True]
    assert all(each.expired() for each in made)


def test_with_one_stream_outputs_are_freed_before_the_last_task() -> None:
    made.clear()
    device, graph = Watching(), trace(beside_a_sum, *program_inputs())
    run_on_streams(graph, one_stream(len(graph.tasks)), program_inputs(), device)
    assert device.alive[-1] == [False, False]


def test_the_streams_of_a_gpu_are_for_captures() -> None:
    graph = trace(branches, *program_inputs())
    with pytest.raises(RuntimeError, match="only inside the capture"):
        run_on_streams(graph, assigned(graph), program_inputs(), CudaStreams())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_layer_computes_what_the_layer_does() -> None:
    layer, inputs = TinyLayer("cuda"), layer_inputs("cuda")
    expected = TinyLayer("cuda")(*layer_inputs("cuda"))
    graph, recorded = trace(layer, *inputs), torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        output = run_on_streams(graph, assigned(graph), inputs, CudaStreams())
    for _ in range(2):
        inputs[0].copy_(layer_inputs("cuda")[0])
        recorded.replay()
        # cuBLAS may choose another order of its sums where several streams run; sums here have at most 16 numbers.
        torch.testing.assert_close(output, expected, rtol=16 * torch.finfo(torch.float32).eps, atol=1e-5)
