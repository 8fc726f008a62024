"""The assignment of tasks to the streams of a GPU, and the points where streams wait for each other. This is Algorithm
1 of Nimble (dissertation, section 3.3.2; its proofs are in appendix A.1). The code is pure and knows no device.

Tasks without a path between them get different streams (maximum logical concurrency). Among all assignments that do so,
this one has the fewest synchronisations (Theorem 4). Unlike Nimble's, it then reuses streams that have come to their
end (`fewer_streams`): otherwise a model that branches in each layer would have some new streams in each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StreamAssignment:
    streams: tuple[int, ...]
    """The stream of each task: 0, 1, 2 and so on, in the order of their first tasks."""
    syncs: tuple[Edge, ...]
    """Pairs (from, to), ascending: `to` waits on its stream until `from` has run on another one. A task need not wait
    for earlier tasks of its own stream.
    """

    @property
    def stream_count(self) -> int:
        return max(self.streams, default=-1) + 1


def assign_streams(tasks: int, edges: Iterable[Edge]) -> StreamAssignment:
    """Run Algorithm 1, and reuse streams that have ended.

    Args:
        tasks: their number; they are numbered in an order in which they may run.
        edges: (from, to): `to` runs after `from`.
    Returns: an assignment with |E'| - |M| synchronisations (Theorem 3): the edges of the minimum equivalent graph
        without those of a maximum matching.
    Raises: ValueError for an edge that does not lead from an earlier task to a later one.
    """
    children = minimum_equivalent_graph(tasks, edges)
    streams = fewer_streams(children, streams_of(maximum_matching(children)))
    return StreamAssignment(streams, syncs_between(children, streams))


def one_stream(tasks: int) -> StreamAssignment:
    """Assign all tasks to one stream, for comparison."""
    return StreamAssignment((0,) * tasks, ())


def minimum_equivalent_graph(tasks: int, edges: Iterable[Edge]) -> list[list[int]]:
    """Step 1: find the fewest edges that keep all paths between tasks, in a DAG the transitive reduction.

    Returns: for each task the tasks that its edges lead to, ascending.
    """
    given: list[set[int]] = [set() for _ in range(tasks)]
    for before, after in edges:
        if not 0 <= before < after < tasks:
            raise ValueError(f"edge {before} -> {after} does not lead to a later one of {tasks} tasks")
        given[before].add(after)
    reached = [0] * tasks  # sets of tasks, one bit each
    kept: list[list[int]] = [[] for _ in range(tasks)]
    for task in reversed(range(tasks)):
        # A longer path to a child leads through an earlier child.
        for child in sorted(given[task]):
            if not reached[task] >> child & 1:
                kept[task].append(child)
                reached[task] |= reached[child] | 1 << child
    return kept


def maximum_matching(children: Sequence[Sequence[int]]) -> list[int | None]:
    """Steps 2 and 3: find a largest set of edges with no two that leave the same task or lead to the same task.

    The algorithm is Hopcroft and Karp's, O(edges x sqrt(tasks)). While there are paths by which the set can grow by
    one, it takes the shortest ones, as many at once as do not meet.

    Returns: for each task the task that its edge of the set leads to; None if no edge of the set leaves it.
    """
    child: list[int | None] = [None] * len(children)
    parent: list[int | None] = [None] * len(children)
    while (layers := _layers(children, child, parent)) is not None:
        for task in range(len(children)):
            if child[task] is None:
                _augment(task, children, layers, child, parent)
    return child


def streams_of(matched: Sequence[int | None]) -> tuple[int, ...]:
    """Steps 4 and 5, the map of Theorem 2: the streams are the paths formed by the edges of a matching.

    Args:
        matched: as `maximum_matching` returns it; any matching works.
    Returns: the stream of each task; streams are numbered in the order of their first tasks.
    """
    streams: list[int | None] = [None] * len(matched)
    numbered: list[int] = []
    new = count()
    for task, follower in enumerate(matched):
        stream = streams[task]
        if stream is None:
            stream = next(new)
        if follower is not None:
            streams[follower] = stream
        numbered.append(stream)
    return tuple(numbered)


def fewer_streams(children: Sequence[Sequence[int]], streams: Sequence[int]) -> tuple[int, ...]:
    """Join each stream to one whose first task comes after its last task anyway; again by a maximum matching.

    Tasks without a path between them stay on different streams, and no synchronisation is added. None is saved either
    if the streams came from a maximum matching. An edge from a stream's last task to another stream's first could have
    been added to that matching. Any other edge between the two has a longer path beside it, so it is not in a minimum
    equivalent graph.

    Theorem 2 overlooks this case: it says that each assignment of maximum logical concurrency belongs to a matching.
    The assignment of a -> b -> c to streams {a, c} and {b} does not (the proof's m_f is empty, and its streams are
    three). Theorem 4 stands, because Lemmas 3 and 4 count all edges inside streams, whether or not these are paths.
    """
    reached = [0] * len(children)  # sets of tasks, one bit each
    for task in reversed(range(len(children))):
        for child in children[task]:
            reached[task] |= reached[child] | 1 << child
    last = {stream: task for task, stream in enumerate(streams)}
    first = {streams[task]: task for task in reversed(range(len(streams)))}
    following = [
        [after for after in range(len(last)) if reached[last[each]] >> first[after] & 1] for each in range(len(last))
    ]
    joined = streams_of(maximum_matching(following))
    return tuple(joined[stream] for stream in streams)


def syncs_between(children: Sequence[Sequence[int]], streams: Sequence[int]) -> tuple[Edge, ...]:
    """Return the edges of a minimum equivalent graph that go from one stream to another, ascending.

    With maximum logical concurrency, no fewer synchronisations are possible (Lemma 4).
    """
    edges = ((task, child) for task, others in enumerate(children) for child in others)
    return tuple((task, child) for task, child in edges if streams[task] != streams[child])


def _layers(
    children: Sequence[Sequence[int]], child: Sequence[int | None], parent: Sequence[int | None]
) -> list[int | None] | None:
    """Return each task's layer: the number of matching edges on the shortest path to it from an unmatched task.

    A path goes from a task to any of its children, and from there back along the matching. It ends at a child that no
    matching edge leads to. Returns: None for tasks beyond the nearest end; None instead of all layers if there is no
    end.
    """
    layers: list[int | None] = [0 if each is None else None for each in child]
    frontier = [task for task, each in enumerate(child) if each is None]
    layer = 0
    while frontier:
        layer += 1
        following = []
        has_end = False
        for task in frontier:
            for to in children[task]:
                back = parent[to]
                if back is None:
                    has_end = True
                elif layers[back] is None:
                    layers[back] = layer
                    following.append(back)
        if has_end:
            # The tasks just found lie beyond the end: no shortest path leads through them.
            for task in following:
                layers[task] = None
            return layers
        frontier = following
    return None


def _augment(
    root: int,
    children: Sequence[Sequence[int]],
    layers: list[int | None],
    child: list[int | None],
    parent: list[int | None],
) -> None:
    """Follow the layers from `root` to an end, and flip the path: its edges change in and out of the matching.

    Tasks from which no end is found lose their layer. There is no recursion, because a path can be as long as the
    graph.
    """
    path = [(root, iter(children[root]))]
    while path:
        task, untried = path[-1]
        here = layers[task]
        for to in untried:
            back = parent[to]
            if back is None:
                _flip([task for task, _ in path], to, child, parent)
                return
            if here is not None and layers[back] == here + 1:
                path.append((back, iter(children[back])))
                break
        else:
            layers[task] = None
            path.pop()


def _flip(path: Sequence[int], end: int, child: list[int | None], parent: list[int | None]) -> None:
    to: int | None = end
    for task in reversed(path):
        assert to is not None, "only the first task of a path is without an edge"
        parent[to] = task
        child[task], to = to, child[task]
