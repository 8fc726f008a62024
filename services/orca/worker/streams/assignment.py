"""Which stream of a GPU each task of a graph runs on, and where streams wait for each other: Algorithm 1 of Nimble
(dissertation, section 3.3.2; its proofs are in appendix A.1). Pure: it knows of no device.

Tasks between which there is no path get different streams (maximum logical concurrency), and among all assignments
that do so this one has the fewest synchronisations (Theorem 4). Unlike Nimble's it then goes on using streams that have
come to their end (`fewer_streams`): a model that branches in each layer would have some new ones in each.
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
    """(from, to), ascending: `to` waits on its stream until `from` has run on another one. The task before it on its
    own stream is waited for by the stream's order."""

    @property
    def stream_count(self) -> int:
        return max(self.streams, default=-1) + 1


def assign_streams(tasks: int, edges: Iterable[Edge]) -> StreamAssignment:
    """Algorithm 1, and streams that have ended used again.

    Args:
        tasks: how many; they are numbered in an order in which they may run.
        edges: (from, to): `to` needs `from` to have run.
    Returns: |E'| - |M| synchronisations (Theorem 3): edges of the minimum equivalent graph but those of a maximum
        matching.
    Raises: ValueError for an edge that does not lead from an earlier task to a later one.
    """
    children = minimum_equivalent_graph(tasks, edges)
    streams = fewer_streams(children, streams_of(maximum_matching(children)))
    return StreamAssignment(streams, syncs_between(children, streams))


def one_stream(tasks: int) -> StreamAssignment:
    """All tasks in their order, for comparison."""
    return StreamAssignment((0,) * tasks, ())


def minimum_equivalent_graph(tasks: int, edges: Iterable[Edge]) -> list[list[int]]:
    """Step 1: the fewest edges that keep who reaches whom, which in a DAG is unique: the transitive reduction.

    Returns: of each task those that it leads to, ascending.
    """
    given: list[set[int]] = [set() for _ in range(tasks)]
    for before, after in edges:
        if not 0 <= before < after < tasks:
            raise ValueError(f"edge {before} -> {after} does not lead to a later one of {tasks} tasks")
        given[before].add(after)
    reached = [0] * tasks  # sets of tasks, one bit each
    kept: list[list[int]] = [[] for _ in range(tasks)]
    for task in reversed(range(tasks)):
        # A longer way to a child leads through an earlier child.
        for child in sorted(given[task]):
            if not reached[task] >> child & 1:
                kept[task].append(child)
                reached[task] |= reached[child] | 1 << child
    return kept


def maximum_matching(children: Sequence[Sequence[int]]) -> list[int | None]:
    """Steps 2 and 3: a largest set of edges of which no two leave the same task, and no two lead to the same.

    Hopcroft and Karp's algorithm, O(edges x sqrt(tasks)): as long as there are paths by which the set can grow by one,
    it takes the shortest, as many at once as do not meet.

    Returns: of each task the one that its edge of the set leads to; None: no edge of the set leaves it.
    """
    child: list[int | None] = [None] * len(children)
    parent: list[int | None] = [None] * len(children)
    while (layers := _layers(children, child, parent)) is not None:
        for task in range(len(children)):
            if child[task] is None:
                _augment(task, children, layers, child, parent)
    return child


def streams_of(matched: Sequence[int | None]) -> tuple[int, ...]:
    """Steps 4 and 5, the map of Theorem 2: streams are the paths that the edges of a matching make.

    Args:
        matched: as `maximum_matching` gives it, but any matching will do.
    Returns: the stream of each task, numbered in the order of their first tasks.
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
    """Join streams, each to one whose first task comes after its last one anyway; again a maximum matching.

    Tasks without a path between them stay apart, and no synchronisation is added. None is spared either, if the streams
    were those of a maximum matching: to that an edge from a stream's last task to another one's first could have been
    added, and any other edge between the two has a longer way beside it, so it is not in a minimum equivalent graph.

    This is what Theorem 2 overlooks, by which each assignment of maximum logical concurrency would belong to a
    matching: that of a -> b -> c with streams {a, c} and {b} does not (the proof's m_f is empty, and its streams are
    three). Theorem 4 stands, for Lemmas 3 and 4 count all edges inside streams, whether or not these are paths.
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
    """The edges of a minimum equivalent graph that go from one stream to another, ascending.

    No fewer will do where streams have maximum logical concurrency (Lemma 4).
    """
    edges = ((task, child) for task, others in enumerate(children) for child in others)
    return tuple((task, child) for task, child in edges if streams[task] != streams[child])


def _layers(
    children: Sequence[Sequence[int]], child: Sequence[int | None], parent: Sequence[int | None]
) -> list[int | None] | None:
    """Of each task the number of edges of the matching on the shortest way to it that begins at a task without one.

    A way goes from a task to any of its children, and from there back along the matching. Returns: None for tasks that
    are farther away than the nearest end, a child that no edge leads to; None in all when there is no end.
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
            # Those just found lie behind the end: no shortest way leads through them.
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
    """Follow the layers from `root` to an end, and there turn the way: its edges change in and out of the matching.

    Tasks from which no end is found lose their layer. No recursion: a way can be as long as the graph.
    """
    way = [(root, iter(children[root]))]
    while way:
        task, untried = way[-1]
        here = layers[task]
        for to in untried:
            back = parent[to]
            if back is None:
                _turn([task for task, _ in way], to, child, parent)
                return
            if here is not None and layers[back] == here + 1:
                way.append((back, iter(children[back])))
                break
        else:
            layers[task] = None
            way.pop()


def _turn(way: Sequence[int], end: int, child: list[int | None], parent: list[int | None]) -> None:
    to: int | None = end
    for task in reversed(way):
        assert to is not None, "only the first task of a way is without an edge"
        parent[to] = task
        child[task], to = to, child[task]
