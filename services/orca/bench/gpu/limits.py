"""The lower bound of a decode step's time on this device: the sum of the bounds of its operations.

An operation has to move its bytes, which takes at least their time at the speed of a copy. It also has to compute its
products, which takes at least their time at the rate of PyTorch's own product of the same shape. The longer time
counts. Both rates are measured in the same run.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from orca.bench.kernels.clock import Clock, matmul_rate
from orca.worker.models.config import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOperation:
    """A part of a step."""

    name: str
    times: int = 1  # in a step
    bytes: int  # read and written each time
    product: tuple[int, int, int] | None = None  # rows, inputs, outputs

    @property
    def flops(self) -> int:
        return 0 if self.product is None else 2 * self.product[0] * self.product[1] * self.product[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The lower bound of a step's time."""

    seconds: float
    by: str  # memory or products, whichever bounds the larger part of the time
    operations: list[dict[str, Any]]  # name, bytes, products and total seconds of each


def decode_operations(config: LlamaConfig, batch: int, context: int, dtype: torch.dtype) -> Iterator[DecodeOperation]:
    """Yield the operations of a step in which `batch` tokens run. Args: context: positions that each token sees."""
    size, layers, vocab = dtype.itemsize, config.num_layers, config.vocab_size
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def product(name: str, inputs: int, outputs: int, *, adds: bool = False) -> DecodeOperation:
        """Return a layer's linear. Args: adds: its outputs are added to numbers in memory, which are read."""
        moved = inputs * outputs + batch * (inputs + outputs * (2 if adds else 1))
        return DecodeOperation(name=name, times=layers, bytes=size * moved, product=(batch, inputs, outputs))

    rows = 2 * batch * hidden * size
    yield DecodeOperation(name="embedding", bytes=rows)
    yield DecodeOperation(name="norms", times=2 * layers + 1, bytes=rows)
    yield product("query, key, value", hidden, queries + 2 * keys)
    turned = 2 * batch * (queries + 2 * keys) * size
    yield DecodeOperation(name="rotation and cache", times=layers, bytes=turned)
    seen = (2 * batch * context * keys + 2 * batch * queries) * size
    yield DecodeOperation(name="attention", times=layers, bytes=seen)
    yield product("attention output", queries, hidden, adds=True)
    yield product("gate and up", hidden, 2 * inner)
    yield DecodeOperation(name="silu(gate) * up", times=layers, bytes=3 * batch * inner * size)
    yield product("down", inner, hidden, adds=True)
    # Logits are float32.
    head = size * (hidden * vocab + batch * hidden) + 4 * batch * vocab
    yield DecodeOperation(name="head", bytes=head, product=(batch, hidden, vocab))
    yield DecodeOperation(name="choice of tokens", bytes=4 * batch * vocab)


def limit_of(
    operations: Iterator[DecodeOperation], copy_bytes_s: float, flops_s: Callable[[int, int, int], float]
) -> Limit:
    """
    Args:
        copy_bytes_s: bytes that a copy reads and writes per second.
        flops_s: returns the rate of a product of [rows, inputs] and [inputs, outputs].
    """
    told = []
    bound = {"memory": 0.0, "products": 0.0}
    for each in operations:
        by_memory = each.bytes / copy_bytes_s
        by_products = each.flops / flops_s(*each.product) if each.product is not None else 0.0
        seconds = each.times * max(by_memory, by_products)
        bound["memory" if by_memory >= by_products else "products"] += seconds
        told.append({**asdict(each), "seconds": seconds})
    return Limit(seconds=sum(bound.values()), by=max(bound, key=lambda kind: bound[kind]), operations=told)


def product_rates(clock: Clock, dtype: torch.dtype) -> Callable[[int, int, int], float]:
    """Return a function that gives the rate of PyTorch's product of a shape, which it measures once. The weight is laid
    out as [out, in], like in models, and as [in, out]. The faster of the two is the limit.
    """

    @cache
    def flops_s(rows: int, inputs: int, outputs: int) -> float:
        return max(_linear_rate(clock, dtype, rows, inputs, outputs), matmul_rate(clock, dtype, rows, inputs, outputs))

    return flops_s


def _linear_rate(clock: Clock, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    x, weight = (torch.empty(many, inputs, dtype=dtype, device=clock.device).normal_() for many in (rows, outputs))
    return 2 * rows * inputs * outputs / clock.seconds(lambda: F.linear(x, weight))
