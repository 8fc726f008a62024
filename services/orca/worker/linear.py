"""y = x W^T + b with the weight laid out for the machine it runs on.

At a batch of some dozens of rows a plain matrix product spends much of its time rearranging the weight. oneDNN and MKL
can do that once, while loading; which of the three is fastest depends on processor and shape, so each distinct shape is
timed on the spot (`Packing`) and keeps the winner. A packed weight replaces the plain one.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

# Rows of the timing: a batch as the scheduler likes it, and one with a prompt in it.
_TIMED_ROWS = (16, 128)
# MKL packs for one row count only.
_ROWS = 16
# Candidates take turns, and each keeps its best: other processes on the machine only ever add to a time.
_ROUNDS = 7
# In a turn the first one finds the caches as another candidate left them.
_RUNS = 2
# Of one candidate at one row count, seconds: after so long none begins another run, for a start must not wait on that.
_TIMED_S = 0.1
# A head may have ten times as many: its layouts compare as do those of a part, which takes less time and memory.
_TIMED_OUTPUTS = 16384
# Smaller weights live in the processor's cache, where all layouts are alike; timing them would only delay the start.
_SMALL_BYTES = 128 << 10
# A packed layout must win by this much: below it is noise, and plain weights can be shared with an embedding.
_WORTH = 0.95
# MKL keeps a second copy, so it must also beat oneDNN by a margin that is worth the memory.
_WORTH_A_COPY = 0.8


class Linear:
    """A weight [out, in] and perhaps a bias [out]; rows in, rows out."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def bytes(self) -> int:
        return _bytes(self.weight) + (0 if self.bias is None else _bytes(self.bias))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnnLinear(Linear):
    """Weight in oneDNN's blocked layout; right for any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS), bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


class MklLinear(Linear):
    """Weight packed by MKL for 16 rows: fewer are filled up, more use the plain weight, which is kept beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _ROWS)

    @property
    def bytes(self) -> int:
        return super().bytes + _bytes(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > _ROWS:
            return super().__call__(x)
        filled = x if rows == _ROWS else F.pad(x, (0, 0, 0, _ROWS - rows))
        y: Tensor = torch.ops.mkl._mkl_linear(filled, self._packed, self.weight, self.bias, _ROWS)
        return y[:rows]


@dataclass(slots=True)
class Packing:
    """Chooses a layout for each shape, and remembers it for the other layers."""

    is_on: bool = True  # off for devices other than the CPU, and where a caller wants plain weights
    only: type[Linear] | None = None  # a layout to take without timing any
    _chosen: dict[tuple[int, int, torch.dtype], type[Linear]] = field(default_factory=dict)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A weight [out, in] in the fastest layout for its shape. Packing keeps no reference to `weight`."""
        if not self.is_on:
            return Linear(weight, bias)
        if self.only is not None:
            return self.only(weight, bias)
        if _bytes(weight) < _SMALL_BYTES:
            return Linear(weight, bias)
        key = (weight.shape[0], weight.shape[1], weight.dtype)
        if key not in self._chosen:
            self._chosen[key] = _fastest(weight, bias)
        return self._chosen[key](weight, bias)


def _fastest(weight: Tensor, bias: Tensor | None) -> type[Linear]:
    """The layout with the least time, as the product over `_TIMED_ROWS`: a tenth counts alike at each.

    The run that counts follows one of the same product. With memory written in between, so that the weight comes from
    there as in a real step, what else had left the caches weighed more than the layouts differ, and the wrong ones were
    taken.
    """
    part, part_bias = weight[:_TIMED_OUTPUTS], None if bias is None else bias[:_TIMED_OUTPUTS]
    candidates: list[Linear] = []
    for kind in (Linear, OneDnnLinear, MklLinear):
        try:
            candidate = kind(part, part_bias)
            candidate(weight.new_ones(1, weight.shape[1]))
        except (RuntimeError, NotImplementedError, AttributeError):
            continue  # not in this build of torch, or not for this dtype on this processor
        candidates.append(candidate)
    times = [least_s(candidates, weight.new_ones(rows, weight.shape[1])) for rows in _TIMED_ROWS]
    seconds = {type(candidate): taken for candidate, taken in zip(candidates, zip(*times, strict=True), strict=True)}
    taken = {kind: prod(each) ** (1 / len(each)) for kind, each in seconds.items()}
    best: type[Linear] = Linear
    if taken.get(OneDnnLinear, inf) < _WORTH * taken[Linear]:
        best = OneDnnLinear
    if taken.get(MklLinear, inf) < _WORTH_A_COPY * taken[best]:
        best = MklLinear
    said = "; ".join(
        f"{kind.__name__} {' '.join(f'{1e6 * time:.0f}' for time in each)}" for kind, each in seconds.items()
    )
    name = str(weight.dtype).removeprefix("torch.")
    log.info(
        "weight %d x %d %s: %s; microseconds for %s rows: %s", *weight.shape, name, best.__name__, _TIMED_ROWS, said
    )
    return best


def least_s(candidates: Sequence[Linear], x: Tensor, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The least seconds that each takes for the rows `x`, of up to `_ROUNDS` turns."""
    least, spent = [inf] * len(candidates), [0.0] * len(candidates)
    for _ in range(_ROUNDS):
        for place, candidate in enumerate(candidates):
            for _ in range(_RUNS):
                if spent[place] < _TIMED_S:
                    start = clock()
                    candidate(x)
                    took = clock() - start
                    least[place], spent[place] = min(least[place], took), spent[place] + took
    return least


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
