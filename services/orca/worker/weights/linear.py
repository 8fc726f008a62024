"""y = x W^T + b with the weight laid out for the machine it runs on.

At a batch of some dozens of rows a plain matrix product spends much of its time rearranging the weight. Our own kernel
(product.py), oneDNN and MKL can do that once, while loading; which of the four is fastest depends on processor
and shape, so each distinct shape is timed on the spot (`Packing`) and keeps the winner. A packed weight replaces the
plain one. Weights that are half precision in the files and float32 in the model stay half in our own kernel, untimed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.cpu import huge_pages
from orca.kernels.device import kernels_of
from orca.worker.weights.norms import Norm
from orca.worker.weights.table import PlainTable, Table

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


class Linear:
    """A weight [out, in] and perhaps a bias [out]; rows in, rows out.

    What models do right before and behind it is asked of it, too: some layouts do it in the same go.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight = weight
        self.bias = bias

    @property
    def bytes(self) -> int:
        return _bytes(self.weight) + (0 if self.bias is None else _bytes(self.bias))

    @property
    def table(self) -> Table | None:
        """Rows of the weight as they were, for an embedding that is the same matrix; None where the layout has lost
        them, or does not show where they are."""
        return PlainTable(self.weight, self.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, to: Tensor, x: Tensor, then: Norm | None = None) -> Tensor | None:
        """to [rows, out] += the outputs for x, in place.

        Args:
            then: the norm that comes behind it, if there is one.
        Returns: `then` of the sum, where the layout has it in the same go; None elsewhere: it is still to be done.
        """
        return self.add_outputs(to, self(x), then)

    def add_outputs(self, to: Tensor, outputs: Tensor, then: Norm | None = None) -> Tensor | None:  # noqa: ARG002
        """`add_to`, of outputs at hand: summed over ranks."""
        to.add_(outputs)
        return None

    def after(self, norm: Norm | None, x: Tensor) -> Tensor:
        """The outputs for normalised rows."""
        return self(x if norm is None else norm(x))

    def wide(self, norm: Norm | None, x: Tensor) -> Tensor:
        """`after`, in float32: not rounded to x's dtype before, where the layout can do without."""
        return self.after(norm, x).float()

    def activated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        """`after`, through an activation."""
        return activation(self.after(norm, x))

    def gated(self, norm: Norm | None, x: Tensor) -> Tensor:
        """`after`, silu(gate) * up, [rows, out / 2], where the outputs are gate and up."""
        return kernels_of(x.device).gated_silu(self.after(norm, x))

    def kept(self, norm: Norm | None, x: Tensor, kept: KvWrite) -> Tensor:
        """`after`, [rows, query heads + 2 x kv heads, head_dim], turned and put into the KV cache."""
        qkv = self.after(norm, x).view(x.shape[0], -1, kept.cache.shape[3])
        kernels_of(x.device).write_kv(qkv, kept)
        return qkv


class PanelLinear(Linear):
    """Weight in panels of our own kernel, which does all that is asked in one go.

    Args:
        dtype: of rows and results: the weight's (None), or float32 beside a weight of half precision, which stays so.
        is_gated: `gated` is called, too.
        memory: for the weight; None takes it anywhere.
    Raises: ValueError where the kernel cannot multiply so many inputs.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        is_gated: bool = False,
        memory: huge_pages.WeightMemory | None = None,
    ) -> None:
        # Numba takes a quarter of a second to import, which other devices need not wait for.
        from orca.kernels.cpu.product.product import PackedWeight

        super().__init__(weight)
        stored, scale = self._stored(weight)
        self._panels = PackedWeight(
            stored, bias, scale=scale, dtype=dtype or weight.dtype, is_gated=is_gated, memory=memory
        )
        self.weight = self._panels.weight

    def _stored(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """What lies in the panels, and the scale of each output if it has one."""
        return weight, None

    @property
    def bytes(self) -> int:
        return self._panels.bytes

    @property
    def table(self) -> Table | None:
        return self._panels if self._panels.keeps_rows else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._panels.product(x)

    def add_to(self, to: Tensor, x: Tensor, then: Norm | None = None) -> None:  # noqa: ARG002
        self._panels.add_product(x, to)

    def after(self, norm: Norm | None, x: Tensor) -> Tensor:
        return self._panels.product(x, _rows(norm))

    def wide(self, norm: Norm | None, x: Tensor) -> Tensor:
        return self._panels.float32_product(x, _rows(norm))

    def activated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        return self._panels.product(x, _rows(norm), activation)

    def gated(self, norm: Norm | None, x: Tensor) -> Tensor:
        return self._panels.gated_product(x, _rows(norm))

    def kept(self, norm: Norm | None, x: Tensor, kept: KvWrite) -> Tensor:
        return self._panels.write_kv_product(x, _rows(norm), kept)


def _rows(norm: Norm | None) -> NormParameters | None:
    return None if norm is None else norm.rows


class OneDnnLinear(Linear):
    """Weight in oneDNN's blocked layout; right for any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)

    @property
    def table(self) -> None:
        return None

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


@dataclass(frozen=True, slots=True)
class Layouts:
    """Those of which the fastest is taken.

    Args:
        first: what is taken unless another one wins.
        others: each with the share of the time of the best of those before it that it must stay below.
    """

    first: type[Linear]
    others: tuple[tuple[type[Linear], float], ...]

    @property
    def kinds(self) -> list[type[Linear]]:
        return [self.first, *(kind for kind, _ in self.others)]


# Packed weights against plain ones: above it is noise. Others against panels: those ask for weights that are not in the
# cache, which the timing does not show, and oneDNN's cannot be shared with an embedding. MKL keeps a copy.
LAYOUTS = Layouts(Linear, ((PanelLinear, 0.95), (OneDnnLinear, 0.9), (MklLinear, 0.8)))
# Seconds that others than panels cost besides in layers that would run together (device.Kernels.deferred): what follows
# the product is another launch, and all launches are apart then. It is some 50 us in a small layer and 300 for a head
# that is not recorded with its layers (24,000 x 384 in bfloat16: 8 to 13 % of a step). With 50 one start in three took
# oneDNN for that head.
_APART_S = 1.5e-4

Choose = Callable[[Tensor, Tensor | None], type[Linear]]
"""From a weight and its bias to the layout for all weights of its shape."""


def in_panels(weight: Tensor, bias: Tensor | None) -> type[Linear]:  # noqa: ARG001 - it times nothing
    """For weights of half precision and rows of float32: few rows wait for memory, which timing does not show, and in
    panels they wait half as long."""
    return PanelLinear


def fastest(
    weight: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    layouts: Layouts = LAYOUTS,
    is_together: bool = False,
) -> type[Linear]:
    """The layout with the least time, as the product over `_TIMED_ROWS`: a tenth counts alike at each.

    Args:
        dtype: of rows; None if it is the weight's.
        layouts: the first of which takes any weight.
        is_together: its layer runs together with others, as long as all weights are in panels (`_APART_S`).

    The run that counts follows one of the same product. With memory written in between, so that the weight comes from
    there as in a real step, what else had left the caches weighed more than the layouts differ, and the wrong ones were
    taken.
    """
    part = weight[:_TIMED_OUTPUTS].to(dtype or weight.dtype)
    part_bias = None if bias is None else bias[:_TIMED_OUTPUTS]
    candidates: list[Linear] = []
    for kind in layouts.kinds:
        try:
            candidate = kind(part, part_bias)
            candidate(part.new_ones(1, part.shape[1]))
        except (RuntimeError, NotImplementedError, AttributeError, ValueError):
            continue  # not in this build of torch, or not for this dtype or shape on this processor
        candidates.append(candidate)
    times = [least_s(candidates, part.new_ones(rows, part.shape[1])) for rows in _TIMED_ROWS]
    seconds = {type(candidate): taken for candidate, taken in zip(candidates, zip(*times, strict=True), strict=True)}
    apart_s = {kind: _APART_S if is_together and not issubclass(kind, PanelLinear) else 0.0 for kind in seconds}
    taken = {kind: prod(time + apart_s[kind] for time in each) ** (1 / len(each)) for kind, each in seconds.items()}
    best = layouts.first
    for kind, worth in layouts.others:
        if taken.get(kind, inf) < worth * taken[best]:
            best = kind
    said = "; ".join(
        f"{kind.__name__} {' '.join(f'{1e6 * time:.0f}' for time in each)}" for kind, each in seconds.items()
    )
    name = shape_name(weight, part.dtype)
    log.info("weight %s: %s; microseconds for %s rows: %s", name, best.__name__, _TIMED_ROWS, said)
    return best


def shape_name(weight: Tensor, dtype: torch.dtype) -> str:
    """What layouts are chosen by: `512 x 1536 float32`. Args: dtype: of rows."""
    return f"{weight.shape[0]} x {weight.shape[1]} {str(dtype).removeprefix('torch.')}"


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


@dataclass(slots=True)
class Packing:
    """Chooses a layout for each shape, and remembers it for the other layers."""

    is_on: bool = True  # off where a caller wants plain weights
    only: type[Linear] | None = None  # a layout to take without timing any, as on devices other than the CPU
    small: type[Linear] = Linear  # of weights that are not timed
    choose: Choose = fastest  # asked once for each shape
    dtype: torch.dtype | None = None  # of rows and results, if weights may come in another one
    _chosen: dict[tuple[int, int, torch.dtype], type[Linear]] = field(default_factory=dict)
    _memory: huge_pages.WeightMemory = field(default_factory=huge_pages.WeightMemory)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> Linear:
        """A weight [out, in] in the fastest layout for its shape. Packing keeps no reference to `weight`.

        Args:
            is_gated: the outputs are gate and up, of equal sizes, and wanted as silu(gate) * up.
        """
        dtype = self.dtype or weight.dtype
        kind = self._kind(weight, bias, dtype)
        if issubclass(kind, PanelLinear):
            return kind(weight, bias, dtype=dtype, is_gated=is_gated, memory=self._memory)
        return kind(weight.to(dtype), bias)

    def _kind(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> type[Linear]:
        if not self.is_on:
            return Linear
        if self.only is not None:
            return self.only
        if weight.numel() * dtype.itemsize < _SMALL_BYTES:
            return self.small
        key = (weight.shape[0], weight.shape[1], weight.dtype)
        if key not in self._chosen:
            self._chosen[key] = self.choose(weight, bias)
        return self._chosen[key]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
