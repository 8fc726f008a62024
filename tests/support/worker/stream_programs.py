"""Functions that change tensors in place, to be traced, and what runs them in any order."""

import random
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Interpreter, Node

from orca.worker.stage.task_graph import _ALLOCATIONS, Edge, TaskGraph

SIZE = 4
Program = Callable[..., object]


@torch.library.custom_op("orca_streams::blend_into", mutates_args={"target"})
def blend_into(source: Tensor, target: Tensor) -> None:
    """Compute target = target / 2 + source, as a Triton kernel in a graph does. The order of calls matters."""
    target.mul_(0.5).add_(source)


@torch.library.custom_op("orca_streams::blend_into_all", mutates_args={"targets"})
def blend_into_all(source: Tensor, targets: list[Tensor]) -> None:
    """Blend the source into each target, as one kernel."""
    for target in targets:
        target.mul_(0.5).add_(source)


class TinyLayer:
    """A transformer layer as ours are: residual changed in place, keys and values kept, a buffer given to one product.

    Query and key are turned in place where they lie, and gate and up are two products.
    """

    def __init__(self, device: str = "cpu", *, hidden: int = 8, slots: int = 6) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = {"qkv": 3 * hidden, "out": hidden, "gate": 2 * hidden, "up": 2 * hidden, "down": hidden}
        self._weights = {
            name: torch.randn(2 * hidden if name == "down" else hidden, width, generator=generator).to(device)
            for name, width in shapes.items()
        }
        self.cache = torch.zeros(slots, 2 * hidden, device=device)
        self._gate = torch.full((slots, 2 * hidden), torch.nan, device=device)

    def __call__(self, x: Tensor, slots: Tensor, turns: Tensor) -> Tensor:
        query, kv = (_normed(x) @ self._weights["qkv"]).split([x.shape[1], 2 * x.shape[1]], dim=1)
        query.mul_(turns)
        kv[:, : x.shape[1]].mul_(turns)
        self.cache.index_copy_(0, slots, kv)
        keys, values = self.cache.chunk(2, dim=1)
        x.addmm_(torch.softmax(query @ keys.t(), dim=-1) @ values, self._weights["out"])
        normed = _normed(x)
        gate = torch.mm(normed, self._weights["gate"], out=self._gate[: len(x)])
        blend_into(F.silu(gate).mul_(normed @ self._weights["up"]) @ self._weights["down"], x)
        return x


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def layer_inputs(device: str = "cpu", *, hidden: int = 8) -> list[Tensor]:
    """Return seeded inputs of a TinyLayer."""
    generator = torch.Generator().manual_seed(6)
    x, turns = torch.randn(3, hidden, generator=generator), torch.rand(3, hidden, generator=generator)
    return [each.to(device) for each in (x, torch.tensor([4, 0, 2]), turns)]


_STATEMENTS: dict[str, Callable[[list[Tensor], Tensor, Tensor], object]] = {
    "make": lambda known, a, b: known.append(a * 0.5 + b),
    "change": lambda _, a, b: a.copy_(a * 0.5 + b),
    "blend": lambda _, a, b: blend_into(b.clone(), a),
    "blend all": lambda _, a, b: blend_into_all(b * 2.0, [a]),
    "view": lambda known, a, _: known.append(a.t()),
    "row": lambda _, a, b: a[0].copy_(a[1] * 0.5 + b[2]),
    "rows": lambda _, a, b: [half.add_(b.mean()) for half in a.chunk(2)],
    "allocate": lambda known, a, b: known.append(torch.empty_like(a).copy_(b)),
    "write out": lambda _, a, b: torch.add(a * 0.5, b + 1, out=a),
}


@st.composite
def programs(draw: st.DrawFn, *, statements_max: int = 12) -> Program:
    """Functions of three tensors [SIZE, SIZE], of which they change some and return all that they know."""
    names = draw(st.lists(st.sampled_from(sorted(_STATEMENTS)), min_size=1, max_size=statements_max))
    chosen = [(name, draw(st.integers(0, 99)), draw(st.integers(0, 99))) for name in names]

    def program(*inputs: Tensor) -> list[Tensor]:
        known = list(inputs)
        for name, a, b in chosen:
            _STATEMENTS[name](known, known[a % len(known)], known[b % len(known)])
        return known

    return program


def program_inputs() -> list[Tensor]:
    """Return seeded inputs of a program."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SIZE, SIZE, generator=generator) for _ in range(3)]


def are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Bit by bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def clones(values: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the values."""
    return [value.clone() for value in values]


def random_order(tasks: int, edges: Iterable[Edge], seed: int) -> list[int]:
    """One that keeps to the edges."""
    chance, left = random.Random(seed), set(edges)
    remaining, order = list(range(tasks)), []
    while remaining:
        blocked = {after for _, after in left}
        task = chance.choice([each for each in remaining if each not in blocked])
        remaining.remove(task)
        order.append(task)
        left = {edge for edge in left if edge[0] != task}
    return order


def run_in_order(graph: TaskGraph, order: Sequence[int], inputs: Sequence[object]) -> object:
    """Views are made when a task first asks for them; memory that is not yet written is NaN."""
    interpreter = Interpreter(graph.module, garbage_collect_values=False)
    *_, output = graph.module.graph.nodes
    interpreter.args_iter = iter(graph.module.graph.process_inputs(*inputs))

    def make(node: Node) -> None:
        if node in interpreter.env:
            return
        if getattr(node.target, "overloadpacket", None) in _ALLOCATIONS:
            # It wants no more of its inputs than their shape, so a task that makes one may come later.
            shape = node.meta["val"]
            made = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
            interpreter.env[node] = made.fill_(torch.nan)
            return
        for each in node.all_input_nodes:
            make(each)
        interpreter.env[node] = interpreter.run_node(node)

    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            make(node)
    for task in order:
        make(graph.tasks[task])
    make(output)
    return graph.module.graph.process_outputs(interpreter.env[output])


def values_alone(graph: TaskGraph) -> list[Edge]:
    """The mutant of a graph: who is given what another one made, and nothing of memory that is changed."""
    task_of = {node: task for task, node in enumerate(graph.tasks)}

    def makers(node: Node) -> set[int]:
        if node in task_of:
            return {task_of[node]}
        return set().union(*(makers(each) for each in node.all_input_nodes))

    given = {(maker, task) for node, task in task_of.items() for each in node.all_input_nodes for maker in makers(each)}
    return sorted(given)
