"""Algorithm 1 of Nimble against its theorems (dissertation, section 3.3.2 and appendix A.1), by trying everything."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from orca.worker.streams.assignment import (
    Edge,
    assign_streams,
    maximum_matching,
    minimum_equivalent_graph,
    one_stream,
    streams_of,
    syncs_between,
)
from support.effort import tries

TASKS_MAX = 6
"""203 partitions into streams, up to 15 edges, and as many plans of synchronisations for each as there are subsets."""
EXAMPLES = tries(100)


@st.composite
def dags(draw: st.DrawFn, *, tasks_max: int = TASKS_MAX) -> tuple[int, list[Edge]]:
    tasks = draw(st.integers(1, tasks_max))
    return tasks, [edge for edge in combinations(range(tasks), 2) if draw(st.booleans())]


def reachable(tasks: int, edges: Iterable[Edge]) -> set[Edge]:
    pairs = set(edges)
    for middle in range(tasks):
        pairs |= {(a, b) for a in range(tasks) for b in range(tasks) if {(a, middle), (middle, b)} <= pairs}
    return pairs


def reduced(tasks: int, edges: Iterable[Edge]) -> list[Edge]:
    return [(task, child) for task, some in enumerate(minimum_equivalent_graph(tasks, edges)) for child in some]


def partitions(tasks: int) -> Iterator[tuple[int, ...]]:
    """Every assignment of streams, once: they are numbered in the order of their first tasks."""
    if tasks == 0:
        yield ()
        return
    for others in partitions(tasks - 1):
        yield from ((*others, stream) for stream in range(max(others, default=-1) + 2))


def concurrent(tasks: int, edges: Iterable[Edge]) -> list[tuple[int, ...]]:
    """The assignments of maximum logical concurrency: tasks without a path between them have different streams."""
    apart = set(combinations(range(tasks), 2)) - reachable(tasks, edges)
    return [streams for streams in partitions(tasks) if all(streams[a] != streams[b] for a, b in apart)]


def fewest_syncs(tasks: int, edges: Sequence[Edge], streams: Sequence[int]) -> int:
    """minsync of appendix A.1: the smallest safe plan (definition 2), of all that there are."""
    reached = reachable(tasks, edges) | {(task, task) for task in range(tasks)}
    ways = [
        {(a, b) for a, b in edges if (before, a) in reached and (b, after) in reached}
        for before, after in edges
        if streams[before] != streams[after]
    ]
    return next(
        size
        for size in range(len(edges) + 1)
        if any(all(way.intersection(plan) for way in ways) for plan in combinations(edges, size))
    )


def matchings(tasks: int, edges: Sequence[Edge]) -> Iterator[list[int | None]]:
    """Yield all matchings: for each task the one that its edge leads to."""
    for size in range(len(edges) + 1):
        for chosen in combinations(edges, size):
            matched = dict(chosen)
            if len(matched) == size == len(set(matched.values())):
                yield [matched.get(task) for task in range(tasks)]


def is_path(tasks: int, edges: Sequence[Edge], streams: Sequence[int]) -> bool:
    """Return whether each stream's tasks follow each other along edges."""
    inside = sum(streams[a] == streams[b] for a, b in edges)
    return inside == tasks - len(set(streams))


@settings(max_examples=EXAMPLES)
@given(dag=dags(tasks_max=9))
def test_the_minimum_equivalent_graph_keeps_reachability_and_needs_every_edge(dag: tuple[int, list[Edge]]) -> None:
    tasks, edges = dag
    kept = reduced(tasks, edges)
    assert set(kept) <= set(edges)
    assert reachable(tasks, kept) == reachable(tasks, edges)
    for edge in kept:
        assert reachable(tasks, set(kept) - {edge}) != reachable(tasks, edges)


@settings(max_examples=EXAMPLES)
@given(dag=dags())
def test_theorem_1_the_minimum_equivalent_graph_has_the_same_assignments_and_synchronisations(
    dag: tuple[int, list[Edge]],
) -> None:
    tasks, edges = dag
    kept = reduced(tasks, edges)
    assert concurrent(tasks, edges) == concurrent(tasks, kept)
    for streams in concurrent(tasks, edges):
        assert fewest_syncs(tasks, edges, streams) == fewest_syncs(tasks, kept, streams)


@settings(max_examples=EXAMPLES)
@given(dag=dags())
def test_theorem_2_matchings_are_the_assignments_of_maximum_concurrency_whose_streams_are_paths(
    dag: tuple[int, list[Edge]],
) -> None:
    tasks, edges = dag
    kept = reduced(tasks, edges)
    mapped = [streams_of(matched) for matched in matchings(tasks, kept)]
    assert len(mapped) == len(set(mapped))
    assert set(mapped) == {streams for streams in concurrent(tasks, edges) if is_path(tasks, kept, streams)}


def test_theorem_2_does_not_cover_streams_that_skip_a_task_of_a_path() -> None:
    """0 -> 1 -> 2 with 0 and 2 on one stream: no two tasks are without a path, and no matching has these streams."""
    chain = [(0, 1), (1, 2)]
    assert (0, 1, 0) in concurrent(3, chain)
    assert (0, 1, 0) not in {streams_of(matched) for matched in matchings(3, chain)}


@settings(max_examples=EXAMPLES)
@given(dag=dags())
def test_theorem_3_any_matching_needs_the_edges_less_its_own_as_synchronisations(dag: tuple[int, list[Edge]]) -> None:
    tasks, edges = dag
    kept, children = reduced(tasks, edges), minimum_equivalent_graph(tasks, edges)
    for matched in matchings(tasks, kept):
        streams, size = streams_of(matched), tasks - matched.count(None)
        syncs = syncs_between(children, streams)
        assert fewest_syncs(tasks, edges, streams) == len(syncs) == len(kept) - size
        assert set(syncs) == {(a, b) for a, b in kept if matched[a] != b}


@settings(max_examples=EXAMPLES)
@given(dag=dags())
def test_theorem_4_no_assignment_of_maximum_concurrency_needs_fewer_synchronisations(
    dag: tuple[int, list[Edge]],
) -> None:
    tasks, edges = dag
    assignment, all_others = assign_streams(tasks, edges), concurrent(tasks, edges)
    assert assignment.streams in all_others
    assert len(assignment.syncs) == min(fewest_syncs(tasks, edges, streams) for streams in all_others)


@settings(max_examples=EXAMPLES)
@given(dag=dags(tasks_max=30))
def test_ended_streams_are_reused_without_synchronisation(dag: tuple[int, list[Edge]]) -> None:
    tasks, edges = dag
    children = minimum_equivalent_graph(tasks, edges)
    paths, assignment = streams_of(maximum_matching(children)), assign_streams(tasks, edges)
    reached = reachable(tasks, edges)
    together = [(a, b) for a, b in combinations(range(tasks), 2) if assignment.streams[a] == assignment.streams[b]]
    assert set(together) <= reached
    assert assignment.syncs == syncs_between(children, paths)
    firsts_and_lasts = [
        [[task for task in range(tasks) if assignment.streams[task] == stream][place] for place in (0, -1)]
        for stream in range(assignment.stream_count)
    ]
    assert not any((last, first) in reached for _, last in firsts_and_lasts for first, _ in firsts_and_lasts)


def test_branches_in_each_layer_share_their_streams() -> None:
    """Four layers of a task, three branches and a task: three streams, where paths alone are 1 + 4 x 2."""
    layers = 4
    edges = [
        (4 * layer + a, 4 * layer + b)
        for layer in range(layers)
        for a, b in [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]
    ]
    children = minimum_equivalent_graph(4 * layers + 1, edges)
    assert max(streams_of(maximum_matching(children))) + 1 == 9
    assert assign_streams(4 * layers + 1, edges).stream_count == 3


@settings(max_examples=EXAMPLES)
@given(dag=dags(tasks_max=30))
def test_the_matching_is_maximum(dag: tuple[int, list[Edge]]) -> None:
    tasks, edges = dag
    children: list[list[int]] = [[] for _ in range(tasks)]
    is_edge = np.zeros((tasks, tasks), dtype=np.int8)
    for before, after in edges:
        children[before].append(after)
        is_edge[before, after] = 1
    found = [(task, child) for task, child in enumerate(maximum_matching(children)) if child is not None]
    assert set(found) <= set(edges)
    assert len({child for _, child in found}) == len(found)
    assert len(found) == np.count_nonzero(maximum_bipartite_matching(csr_array(is_edge)) >= 0)


def test_two_independent_tasks_and_one_that_needs_both_get_two_streams() -> None:
    """The example of section 3.3.2: A and B run beside each other, and C follows one of them on its stream."""
    assignment = assign_streams(3, [(0, 2), (1, 2)])
    assert assignment.streams == (0, 1, 0)
    assert assignment.syncs == ((1, 2),)


def test_an_attention_block_gets_the_hand_computed_streams() -> None:
    """norm 0, query 1, key 2, value 3, cache 4, attention 5, residual 6, which also needs what came before the norm.

    0 -> 4 and 0 -> 6 say nothing new. A matching has four of the other 8 edges: one of those that leave 0, one of the
    two that lead to 4, one of the two that lead to 5, and 5 -> 6. So there are 7 - 4 streams, and 8 - 4
    synchronisations.
    """
    edges = [(0, 1), (0, 2), (0, 3), (0, 4), (0, 6), (2, 4), (3, 4), (1, 5), (4, 5), (5, 6)]
    assignment = assign_streams(7, edges)
    assert reduced(7, edges) == [edge for edge in sorted(edges) if edge not in {(0, 4), (0, 6)}]
    assert assignment.stream_count == 3
    assert len(assignment.syncs) == 4


def test_an_augmenting_path_as_long_as_the_graph_is_found() -> None:
    """Each left task but the last takes the first of its two children, which the last one needs: all must move on."""
    left = 1500
    children = [[left + each, left + each + 1] for each in range(left - 1)] + [[left]]
    children += [[] for _ in range(left)]
    assert maximum_matching(children)[:left] == [*range(left + 1, 2 * left), left]


def test_one_stream_needs_no_synchronisation() -> None:
    assert one_stream(4).streams == (0, 0, 0, 0)
    assert one_stream(4).syncs == ()


def test_no_task_needs_no_stream() -> None:
    assert assign_streams(0, []).stream_count == one_stream(0).stream_count == 0


@pytest.mark.parametrize("edge", [(1, 1), (2, 1), (-1, 2), (1, 3)])
def test_an_edge_that_leads_to_no_later_task_is_refused(edge: Edge) -> None:
    with pytest.raises(ValueError, match="does not lead to a later one of 3 tasks"):
        assign_streams(3, [(0, 1), edge])
