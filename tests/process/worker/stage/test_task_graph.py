"""Functions become tasks that wait for each other: each memory hazard is an edge, and none is missing."""

import operator
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orca.worker.stage.task_graph import Access, Edge, TaskGraph, hazards, trace
from support.effort import tries
from support.worker.stream_programs import (
    Program,
    TinyLayer,
    are_equal,
    blend_into,
    blend_into_all,
    clones,
    layer_inputs,
    program_inputs,
    programs,
    random_order,
    run_in_order,
    values_alone,
)

ORDERS = 20


def edges_of(function: Program, *inputs: object) -> tuple[Edge, ...]:
    return trace(function, *(inputs or (torch.ones(4, 4), torch.ones(4, 4)))).edges


def names_of(graph: TaskGraph) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.tasks]


def test_a_task_that_takes_a_value_waits_for_its_producer() -> None:
    assert edges_of(lambda x, y: (x * y).sum()) == ((0, 1),)


def test_a_reader_waits_for_the_last_writer() -> None:
    assert edges_of(lambda x, y: (x.add_(y), x * 2)[1]) == ((0, 1),)


def test_a_writer_waits_for_all_earlier_readers() -> None:
    assert edges_of(lambda x, y: (x * y, x + y, x.zero_())) == ((0, 2), (1, 2))


def test_a_writer_waits_for_the_writer_before_it() -> None:
    assert edges_of(lambda x, _: (x.zero_(), x.fill_(1))) == ((0, 1),)


def test_readers_do_not_wait_for_each_other_nor_for_those_of_other_memory() -> None:
    assert edges_of(lambda x, y: (x * y, x + y, x.sum(), torch.zeros(2))) == ()


def test_a_view_is_the_memory_that_it_shows() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        row = x.view(2, 8)[0]
        read = x * y
        row.add_(1)
        return read

    assert edges_of(function) == ((0, 1),)


def test_a_buffer_that_is_given_for_the_output_is_written() -> None:
    assert edges_of(lambda x, y: (y * 2, torch.mul(x, 3, out=y), y + 1)) == ((0, 1), (1, 2))


def test_an_argument_that_a_kernel_of_ours_changes_is_written() -> None:
    assert edges_of(lambda x, y: (y * 2, blend_into(x, y), y + 1)) == ((0, 1), (1, 2))


@pytest.mark.parametrize("write", [blend_into_all, lambda _, many: torch._foreach_add_(many, 1)])
def test_each_tensor_of_a_list_is_written(write: Callable[[Tensor, list[Tensor]], None]) -> None:
    one, x, y = torch.ones(2), torch.ones(2), torch.ones(2)
    assert edges_of(lambda one, x, y: (write(one, [x, y]), x * 2, y * 2), one, x, y) == ((0, 1), (0, 2))


def test_memory_reached_through_a_closure_is_tracked() -> None:
    """Each mention of a cache or a weight is a node of its own in the trace."""
    cache, weight = torch.zeros(4, 4), torch.ones(4, 4)
    assert edges_of(lambda x, _: (cache.copy_(x), weight * 2, cache[1] + weight)) == ((0, 2),)


def test_inputs_that_share_memory_are_one() -> None:
    whole = torch.ones(4, 4)
    assert edges_of(lambda x, y: (x.add_(1), y + 1), whole[0], whole[1:]) == ((0, 1),)


def test_random_numbers_are_drawn_in_order() -> None:
    assert edges_of(lambda x, _: (torch.rand_like(x), x + 1, torch.rand_like(x))) == ((0, 2),)


def test_views_and_memory_that_is_not_yet_written_are_no_tasks() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        left, right = x.t().reshape(2, 8).chunk(2, dim=1)
        return torch.empty(2, 4).copy_(left), torch.empty_like(y), x.new_empty(3), right.unsqueeze(0), x.contiguous()

    assert names_of(trace(function, *torch.ones(2, 4, 4))) == ["clone.default", "copy_.default"]


def test_filling_memory_before_it_is_written_is_a_task() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert edges_of(lambda x, _: torch.empty_like(x).copy_(x)) == ((0, 1),)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.unsqueeze_(0), "changes a tensor's shape in place"),
        (lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "0"), "communicates with other ranks"),
        (lambda x: torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "does not declare what it"),
    ],
)
def test_operations_with_unknown_effects_are_refused(function: Program, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        trace(function, torch.ones(3))


def test_tracing_computes_nothing() -> None:
    layer, inputs = TinyLayer(), layer_inputs()
    before = clones([*inputs, layer.cache])
    trace(layer, *inputs)
    assert are_equal(before, [*inputs, layer.cache])


accesses = st.builds(Access, *(st.frozensets(st.integers(1, 4), max_size=3) for _ in range(2)))


@given(tasks=st.lists(accesses, max_size=12))
def test_hazards_order_exactly_the_tasks_that_share_memory_if_one_of_them_writes(tasks: list[Access]) -> None:
    pairs = [
        (a, b)
        for a, b in combinations(range(len(tasks)), 2)
        if tasks[a].writes & (tasks[b].reads | tasks[b].writes) or tasks[a].reads & tasks[b].writes
    ]
    assert set(hazards(tasks)) <= set(pairs)
    assert before(len(tasks), hazards(tasks)) == before(len(tasks), pairs)


def before(tasks: int, edges: Sequence[Edge]) -> list[set[int]]:
    """Return for each task all tasks that it follows."""
    followed: list[set[int]] = [set() for _ in range(tasks)]
    for first, then in sorted(edges, key=operator.itemgetter(1)):
        followed[then] |= followed[first] | {first}
    return followed


@settings(max_examples=tries(60))
@given(program=programs(), seed=st.integers(0, 999))
def test_a_program_has_the_same_effects_in_any_order_that_respects_the_edges(program: Program, seed: int) -> None:
    graph = trace(program, *program_inputs())
    expected = program(*program_inputs())
    order = random_order(len(graph.tasks), graph.edges, seed)
    assert are_equal(run_in_order(graph, order, program_inputs()), expected)


def layer_in_orders(edges: Callable[[TaskGraph], Sequence[Edge]]) -> list[bool]:
    """Return whether a layer run in random orders leaves the same outputs and cache as the layer itself."""
    plain, expected = TinyLayer(), layer_inputs()
    plain(*expected)
    outcomes = []
    for seed in range(ORDERS):
        layer, inputs = TinyLayer(), layer_inputs()
        graph = trace(layer, *inputs)
        run_in_order(graph, random_order(len(graph.tasks), edges(graph), seed), inputs)
        outcomes.append(are_equal([inputs[0], layer.cache], [expected[0], plain.cache]))
    return outcomes


def test_a_layer_has_the_same_effects_in_any_order_that_respects_the_edges() -> None:
    assert all(layer_in_orders(lambda graph: graph.edges))


@pytest.mark.slow
def test_without_the_hazards_of_memory_orders_would_give_other_results() -> None:
    assert not all(layer_in_orders(values_alone))
