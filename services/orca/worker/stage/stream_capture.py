"""Runs a traced function with its tasks on their assigned streams, inside the capture of a CUDA graph (the pre-run of
Nimble's ahead-of-time scheduling; dissertation, section 3.3.1, and 3.3.2 for synchronisations).

    with torch.cuda.graph(cuda_graph):
        outputs = run_on_streams(graph, assign_streams(len(graph.tasks), graph.edges), inputs, CudaStreams())

Stream 0 is the one that captures. Another stream forks from it if the stream's first task waits for no task, and joins
it if no task waits for the stream's last one.

All results of tasks are kept until the streams have joined, because a stream must not reuse memory that another one
still reads. This is the simplest right way, and its price is memory. The results lie side by side until the join, and
only work that is captured after the join reuses their memory. Telling the allocator about each reading stream
(record_stream) would save nothing: in a capture it cannot ask whether a stream is done, and keeps such memory until the
end. On a single stream nothing is kept.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.fx import Interpreter, Node

from orca.worker.stage.task_graph import TaskGraph
from orca.worker.streams.assignment import StreamAssignment

Stream = TypeVar("Stream")
Event = TypeVar("Event")


class DeviceStreams(Protocol[Stream, Event]):
    """The streams of a device."""

    def current(self) -> Stream: ...

    def create(self) -> Stream: ...

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a block whose work goes to this stream."""
        ...

    def record(self, stream: Stream) -> Event:
        """Return an event that has passed when all work given to the stream so far has run."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Make all further work given to the stream wait for an event."""
        ...


class CudaStreams:
    """The streams of the current device while it captures a graph.

    PyTorch has 32 streams and then starts again with the first: with more, tasks wait for others without need.
    """

    def current(self) -> torch.cuda.Stream:
        """Return the stream that captures.

        Raises: RuntimeError outside a capture: there, others could take memory that goes back to a stream.
        """
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError("tasks run on several streams only inside the capture of a graph")
        return torch.cuda.current_stream()

    def create(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)


def run_on_streams(
    graph: TaskGraph, assignment: StreamAssignment, inputs: Sequence[object], device: DeviceStreams[Stream, Event]
) -> object:
    """Compute the traced function.

    Tasks are launched in the order of the trace, and each stream waits exactly at the assignment's synchronisations. A
    task that several others wait for has one event.

    Args:
        inputs: as those of `trace`.
    Returns: the function's result, for work that is given to the current stream afterwards.
    """
    launches = _Launches(graph, assignment, device)
    outputs = launches.run(*inputs)
    # Until here `launches` keeps the results of the tasks.
    launches.join()
    return outputs


class _Launches(Interpreter, Generic[Stream, Event]):
    def __init__(self, graph: TaskGraph, assignment: StreamAssignment, device: DeviceStreams[Stream, Event]) -> None:
        # With one stream, memory may be freed as usual.
        super().__init__(graph.module, garbage_collect_values=assignment.stream_count < 2)
        self._device = device
        self._task_of = {node: task for task, node in enumerate(graph.tasks)}
        self._stream_of = assignment.streams
        self._streams = [device.current(), *(device.create() for _ in range(1, assignment.stream_count))]
        self._waits: defaultdict[int, list[int]] = defaultdict(list)
        for before, after in assignment.syncs:
            self._waits[after].append(before)
        self._is_awaited = {before for before, _ in assignment.syncs}
        self._events: dict[int, Event] = {}
        self._forks, self._joins = self._ends()
        self._beginning = device.record(self._streams[0]) if self._forks else None

    def run_node(self, node: Node) -> Any:
        task = self._task_of.get(node)
        if task is None:
            return super().run_node(node)
        stream = self._streams[self._stream_of[task]]
        if task in self._forks:
            assert self._beginning is not None
            self._device.wait(stream, self._beginning)
        for before in self._waits.get(task, ()):
            self._device.wait(stream, self._events[before])
        with self._device.using(stream):
            result = super().run_node(node)
        if task in self._is_awaited:
            self._events[task] = self._device.record(stream)
        return result

    def join(self) -> None:
        for task in sorted(self._joins):
            event = self._device.record(self._streams[self._stream_of[task]])
            self._device.wait(self._streams[0], event)

    def _ends(self) -> tuple[set[int], set[int]]:
        """Return the tasks that fork and join, on all streams but the current one.

        They are first tasks that wait for no task, and last tasks that no task waits for. All other first and last
        tasks follow or precede some task, so they run after the beginning and before the end anyway.
        """
        elsewhere = [task for task, stream in enumerate(self._stream_of) if stream]
        last = {self._stream_of[task]: task for task in elsewhere}
        first = {self._stream_of[task]: task for task in reversed(elsewhere)}
        forks = {task for task in first.values() if task not in self._waits}
        return forks, {task for task in last.values() if task not in self._is_awaited}
