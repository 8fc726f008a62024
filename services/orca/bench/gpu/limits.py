"""How fast a decode step could be on this device: the sum over its operations of what bounds each of them.

An operation takes at least the bytes that it has to move at the speed of a copy, and at least its products at the rate
of PyTorch's own product of that very shape; whichever is longer counts. Both are measured in the same run.
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
    """Part of a step."""

    name: str
    times: int = 1  # in a step
    bytes: int  # each time: read and written
    product: tuple[int, int, int] | None = None  # rows, inputs, outputs

    @property
    def flops(self) -> int:
        return 0 if self.product is None else 2 * self.product[0] * self.product[1] * self.product[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Of a step."""

    seconds: float
    by: str  # memory or products: what bounds more of it
    operations: list[dict[str, Any]]  # of each: its name, what it moves and multiplies, and seconds of all its times


def decode_operations(config: LlamaConfig, batch: int, context: int, dtype: torch.dtype) -> Iterator[DecodeOperation]:
    """Of a step in which `batch` requests run one token each, which sees `context` positions, itself included."""
    size, layers, vocab = dtype.itemsize, config.num_layers, config.vocab_size
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def product(name: str, inputs: int, outputs: int, *, adds: bool = False) -> DecodeOperation:
        """A layer's linear. Args: adds: its outputs are added to what is there, which is read."""
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
        copy_bytes_s: read and written, of a copy.
        flops_s: of a product of [rows, inputs] and [inputs, outputs].
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
    """PyTorch's products of any shape, each measured once: with the weight [out, in], as models have it, and [in, out],
    of which the faster one is the limit."""

    @cache
    def flops_s(rows: int, inputs: int, outputs: int) -> float:
        return max(_linear_rate(clock, dtype, rows, inputs, outputs), matmul_rate(clock, dtype, rows, inputs, outputs))

    return flops_s


def _linear_rate(clock: Clock, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    x, weight = (torch.empty(many, inputs, dtype=dtype, device=clock.device).normal_() for many in (rows, outputs))
    return 2 * rows * inputs * outputs / clock.seconds(lambda: F.linear(x, weight))
