"""The task graph of a function of tensors, to which streams are assigned: its tasks, and the tasks they wait for.

A task is an operation that works on the device. A view is no task: it belongs to the operations that use it. Our layers
change tensors in place (the residual, the KV cache, given outputs), so a task may have to wait for another one although
no value passes between them. A task that reads memory waits for its last writer; a task that writes memory waits for
its last writer and for all later readers. Making a result counts as the first write of its memory, which covers the
values that are passed on as well (the computation graph of Nimble; dissertation, section 3.3.2).

Memory is identified by its storage: two parts of one tensor count as the same memory.
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
"""Operations whose result is memory that has not been written to."""

_RANDOM = 0
"""Stands for the device's random generator, whose uses must keep their order; no storage has this address."""


@dataclass(frozen=True, slots=True)
class Access:
    """The memory that one task reads and writes, as numbers that identify storages."""

    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True, slots=True)
class TaskGraph:
    module: GraphModule
    """The traced function: its operations in the order of the calls."""
    tasks: tuple[Node, ...]
    """The nodes of `module` that work on the device, in its order."""
    edges: tuple[Edge, ...]
    """Pairs (from, to) of places in `tasks`, ascending: `to` runs after `from`."""


def trace(function: Callable[..., object], *inputs: object) -> TaskGraph:
    """Trace a function by running it on tensors without memory; nothing is computed and nothing is changed.

    Args:
        function: of tensors, or of trees of tensors. Other tensors that it uses, such as weights and caches, become
            part of the graph.
        inputs: of the shapes that the graph will run with. Inputs must share memory now exactly if they will then.
    Raises: ValueError for an operation whose effects the graph does not show; whatever PyTorch raises if values decide
        what is computed.
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
    """Return which task must wait for which, so that the tasks have the effects of running in their order.

    Returns: (from, to), ascending: of all pairs that use the same memory, one of them writing, enough pairs that the
        rest follow.
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
    """Return the memory of each node's tensors. It lives as long as the module, so no address is used twice."""
    storages = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr" and isinstance(constant := getattr(module, node.target), Tensor):
            # The tracer records a copy of such a tensor, not the tensor itself.
            value = node.meta["val"] = mode.from_tensor(constant)
        tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
        storages[node] = frozenset(each.untyped_storage()._cdata for each in tensors)
    return storages


def _access(node: Node, storages: dict[Node, frozenset[int]]) -> Access | None:
    """Return the memory of a task; None if the node is no task, because it does not work on the device.

    Raises: ValueError for an operation whose effects the graph does not show.
    """
    if node.target is operator.getitem:
        return None
    if not isinstance(node.target, OpOverload):
        raise ValueError(f"{node.target} does not declare what it writes")
    if torch.Tag.inplace_view in node.target.tags:
        raise ValueError(f"{node.target} changes a tensor's shape in place, which earlier views would not see")
    if "c10d" in node.target.namespace:
        raise ValueError(f"{node.target} communicates with other ranks, which must all call it in the same order")
    touched = frozenset[int]().union(*(storages[each] for each in node.all_input_nodes))
    written = frozenset[int]().union(*(storages[each] for each in _written(node, node.target)))
    made = storages[node] - touched
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        written |= {_RANDOM}
    if storages[node] and not made and not written:
        return None  # a view: its results lie in memory that it neither makes nor writes
    # With deterministic algorithms, PyTorch fills new memory.
    if node.target.overloadpacket in _ALLOCATIONS and not torch.are_deterministic_algorithms_enabled():
        return None
    return Access(touched, written | made)


def _written(node: Node, operation: OpOverload) -> Iterator[Node]:
    """Yield the inputs that an operation changes according to its schema."""
    arguments = operation._schema.arguments
    given = dict(zip((each.name for each in arguments), node.args, strict=False)) | node.kwargs
    for each in arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            yield from (leaf for leaf in pytree.tree_leaves(given.get(each.name)) if isinstance(leaf, Node))
