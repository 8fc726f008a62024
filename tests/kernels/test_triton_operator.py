"""Launches as PyTorch's operators: a traced step has a node for each, and runs again from its graph."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Node

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.gpu.kernels import TritonKernels
from support.kernels.gpu import DEVICE

KERNELS = TritonKernels()
WIDTH = 32


def part_of_a_layer(x: Tensor, added: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """All kernels beside attention, as far as they are launches of ours, and a product among them."""
    normed = KERNELS.add_normalise(x, added, NormParameters(weight, 1e-5), weight)
    qkv = (normed @ weight.expand(WIDTH, WIDTH)).view(-1, 4, 8)
    KERNELS.write_kv(qkv, KvWrite(cache, slots, None), weight)
    KERNELS.write_kv(qkv, KvWrite(cache, slots, None))
    activated = KERNELS.activate(qkv.view(-1, WIDTH), Activation.GELU)
    KERNELS.activate(activated, Activation.SILU, weight, out=activated)
    return KERNELS.gated(KERNELS.normalise(activated, NormParameters(weight, 1e-5, weight)), Activation.SILU, weight)


def arguments(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, added, weight, cache = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((3, WIDTH), (3, WIDTH), (WIDTH,), (2, 2, 4, 8))
    )
    return x, added, weight, cache, torch.tensor([5, 0, 7], device=DEVICE)


def launches(nodes: list[Node]) -> list[str]:
    return [str(node.target).split(".")[1] for node in nodes if str(node.target).startswith("orca.")]


def test_a_traced_step_has_a_node_for_each_launch_and_runs_again() -> None:
    with torch.inference_mode():
        graph = make_fx(part_of_a_layer)(*arguments(1))
        assert launches(list(graph.graph.nodes)) == [
            "add_normalise",
            "rotate_and_write_kv",
            "write_kv",
            "activate_into",
            "activate_in_place",
            "normalise",
            "gate",
        ]
        own, other = arguments(2), arguments(2)
        assert torch.equal(graph(*own), part_of_a_layer(*other))
    for one, same in zip(own, other, strict=True):
        assert torch.equal(one, same)


def test_operators_declare_the_arguments_they_change() -> None:
    changed = {}
    for name in (
        "add_normalise",
        "normalise",
        "rotate_and_write_kv",
        "write_kv",
        "activate_into",
        "activate_in_place",
        "gate",
    ):
        schema = getattr(torch.ops.orca, name).default._schema
        changed[name] = {each.name for each in schema.arguments if each.alias_info is not None}
    assert changed == {
        "add_normalise": {"x", "normed"},
        "normalise": {"normed"},
        "rotate_and_write_kv": {"qkv", "cache"},
        "write_kv": {"cache"},
        "activate_into": {"out"},
        "activate_in_place": {"x"},
        "gate": {"made"},
    }


def test_meta_tensors_pass_through_operators() -> None:
    with FakeTensorMode() as fake:
        result = part_of_a_layer(*(fake.from_tensor(each) for each in arguments(1)))
    assert result.shape == (3, WIDTH // 2)
