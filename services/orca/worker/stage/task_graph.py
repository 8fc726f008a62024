"""From a function of tensors to the graph that streams are assigned to: its tasks, and which wait for which.

A task is an operation that works on the device; what only looks at memory in another way (views) belongs to those who
use it. Our layers change tensors in place (the residual, the KV cache, given outputs), so tasks also wait for each
other where no value passes between them: whoever reads memory waits for its last writer, and whoever writes it for its
last writer and all who have read it since. Making a result is the first writing of its memory, which covers the values
that are passed on, too (the computation graph of Nimble; dissertation, section 3.3.2).

Memory is known by its storage: two parts of one tensor count as the same.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from orca.worker.streams.assignment import Edge

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)
"""What they give has not been written to."""

_RANDOM = 0
"""Stands for the device's generator, whose numbers are drawn one after the other; no storage has this address."""


@dataclass(frozen=True, slots=True)
class Access:
    """The memory of one task, by any numbers that tell storages apart."""

    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True, slots=True)
class TaskGraph:
    module: GraphModule
    """The traced function: what is computed, in the order in which it was called."""
    tasks: tuple[Node, ...]
    """Those of its nodes that work on the device, in this order."""
    edges: tuple[Edge, ...]
    """(from, to), by their places in `tasks`, ascending: `to` needs `from` to have run."""


def trace(function: Callable[..., object], *inputs: object) -> TaskGraph:
    """Run a function on tensors without memory, and note what it does; nothing is computed and nothing is changed.

    Args:
        function: of tensors, or of trees of them. What it reaches otherwise, such as weights and caches, becomes part
            of the graph.
        inputs: of the shapes that the graph will be run with. Those that share memory must share it then; those that
            do not must not.
    Raises: ValueError for what a graph does not tell the effects of; whatever PyTorch raises where values decide what
        is computed.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shapes = pytree.tree_map_only(Tensor, mode.from_tensor, inputs)
    with mode, torch.no_grad():
        module: GraphModule = make_fx(function, tracing_mode="fake")(*shapes)
    storages = _storages(module, mode)
    accesses = {node: _access(node, storages) for node in module.graph.nodes if node.op == "call_function"}
    tasks = {node: access for node, access in accesses.items() if access is not None}
    return TaskGraph(module, tuple(tasks), tuple(hazards(list(tasks.values()))))


def hazards(accesses: Sequence[Access]) -> list[Edge]:
    """Who must wait for whom, if these tasks have the effects of running one after the other.

    Returns: (from, to), ascending: enough of the pairs that touch the same memory, one of them writing, that the others
        follow.
    """
    edges: set[Edge] = set()
    writer: dict[int, int] = {}
    readers: defaultdict[int, list[int]] = defaultdict(list)  # since the last writer
    for task, access in enumerate(accesses):
        edges.update((writer[storage], task) for storage in access.reads | access.writes if storage in writer)
        for storage in access.writes:
            edges.update((reader, task) for reader in readers.pop(storage, ()))
            writer[storage] = task
        for storage in access.reads:
            readers[storage].append(task)
    return sorted(edges)


def _storages(module: GraphModule, mode: FakeTensorMode) -> dict[Node, frozenset[int]]:
    """The memory that each node's tensors lie in. It lives as long as the module: no address is used twice."""
    storages = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr" and isinstance(constant := getattr(module, node.target), Tensor):
            # What the tracer notes of such a node is a copy made for the note.
            value = node.meta["val"] = mode.from_tensor(constant)
        tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
        storages[node] = frozenset(each.untyped_storage()._cdata for each in tensors)
    return storages


def _access(node: Node, storages: dict[Node, frozenset[int]]) -> Access | None:
    """None: no task, for it does not work on the device."""
    if node.target is operator.getitem:
        return None
    if not isinstance(node.target, OpOverload):
        raise ValueError(f"{node.target} does not tell what it writes")
    if torch.Tag.inplace_view in node.target.tags:
        raise ValueError(f"{node.target} changes a tensor's shape in place, which views made before would not see")
    if "c10d" in node.target.namespace:
        raise ValueError(f"{node.target} talks to other ranks, which must all call it in the same order")
    touched = frozenset[int]().union(*(storages[each] for each in node.all_input_nodes))
    written = frozenset[int]().union(*(storages[each] for each in _written(node, node.target)))
    made = storages[node] - touched
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        written |= {_RANDOM}
    if storages[node] and not made and not written:
        return None  # a view: results that lie in memory which it neither makes nor writes
    # Deterministic algorithms fill memory that has not been written to.
    if node.target.overloadpacket in _ALLOCATIONS and not torch.are_deterministic_algorithms_enabled():
        return None
    return Access(touched, written | made)


def _written(node: Node, operation: OpOverload) -> Iterator[Node]:
    """The inputs that an operation changes, as its schema has it."""
    arguments = operation._schema.arguments
    given = dict(zip((each.name for each in arguments), node.args, strict=False)) | node.kwargs
    for each in arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            yield from (leaf for leaf in pytree.tree_leaves(given.get(each.name)) if isinstance(leaf, Node))
