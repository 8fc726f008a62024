"""The choice of a layout for each shape of weight: the fastest of those that this processor has.

The fastest layout depends on processor and shape. So each distinct shape is timed once on the spot, and its layout
serves all weights of that shape (`LayoutChooser`). The module layout_cache.py remembers the choice for later starts.
Weights that are half precision in the files and float32 in the model stay half precision in panels, untimed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch
from torch import Tensor

from orca.kernels.cpu import huge_pages
from orca.worker.weights.linear import Linear, MklLinear, OneDnnLinear, PanelLinear

log = logging.getLogger(__name__)

# Row counts of the timing: a batch as the scheduler likes it, and one with a prompt in it.
_TIMED_ROWS = (16, 128)
# Candidates take turns, and each keeps its best time: other processes on the machine only ever add to a time.
_ROUNDS = 7
# Runs in a turn; the first one finds the caches as another candidate left them.
_RUNS = 2
# Seconds for one candidate at one row count. After that it begins no further run, so that timing does not delay a
# start for long.
_TIMED_S = 0.1
# A head may have ten times as many outputs. The layouts of a part compare as those of the whole do, and timing a part
# takes less time and memory.
_TIMED_OUTPUTS = 16384
# Smaller weights live in the processor's cache, where all layouts are alike; timing them would only delay the start.
_SMALL_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts to choose the fastest from.

    Args:
        first: taken unless another one wins.
        others: each layout with the share of the best earlier layout's time that its own time must stay below.
    """

    first: type[Linear]
    others: tuple[tuple[type[Linear], float], ...]

    @property
    def kinds(self) -> list[type[Linear]]:
        return [self.first, *(kind for kind, _ in self.others)]


# Panels win over the plain weight if the gain is more than noise. oneDNN and MKL must beat panels by more, for three
# reasons. Only panels prefetch weights that are not in the cache, which the timing does not show. An embedding cannot
# share oneDNN's weight. MKL keeps a copy.
LAYOUTS = Layouts(Linear, ((PanelLinear, 0.95), (OneDnnLinear, 0.9), (MklLinear, 0.8)))
# Additional seconds that layouts other than panels cost in layers that would run together (device.Kernels.deferred):
# the next operation is another launch, and all launches are separate then. It is some 50 us in a small layer and 300 us
# for a head that is not recorded with its layers (24,000 x 384 in bfloat16: 8 to 13 % of a step). With 50 us here, one
# start in three took oneDNN for that head.
_APART_S = 1.5e-4

ChooseLayout = Callable[[Tensor, Tensor | None], type[Linear]]
"""A function that maps a weight and its bias to the layout for all weights of its shape."""


def always_panels(weight: Tensor, bias: Tensor | None) -> type[Linear]:  # noqa: ARG001 (a ChooseLayout)
    """Return panels, for weights of half precision beside float32 rows.

    A product of few rows waits for memory, which timing does not show, and in panels of half precision it waits half as
    long.
    """
    return PanelLinear


def fastest_layout(
    weight: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    layouts: Layouts = LAYOUTS,
    is_together: bool = False,
) -> type[Linear]:
    """Time the layouts and return the one with the least product of its times over `_TIMED_ROWS`.

    The run that counts follows a run of the same product. An alternative writes memory in between, so that the weight
    comes from memory as in a real step. It was worse: other data that had left the caches cost more time than the
    layouts differ by, and the wrong layouts were taken.

    Args:
        dtype: of rows; None: the weight's.
        layouts: the first of which takes any weight.
        is_together: its layer runs together with others as long as all weights are in panels (`_APART_S`).
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
    times_s = [best_times_s(candidates, part.new_ones(rows, part.shape[1])) for rows in _TIMED_ROWS]
    by_kind = {type(candidate): times for candidate, times in zip(candidates, zip(*times_s, strict=True), strict=True)}
    apart_s = {kind: _APART_S if is_together and not issubclass(kind, PanelLinear) else 0.0 for kind in by_kind}
    mean_s = {kind: prod(time + apart_s[kind] for time in each) ** (1 / len(each)) for kind, each in by_kind.items()}
    best = layouts.first
    for kind, share in layouts.others:
        if mean_s.get(kind, inf) < share * mean_s[best]:
            best = kind
    measured = "; ".join(
        f"{kind.__name__} {' '.join(f'{1e6 * time:.0f}' for time in each)}" for kind, each in by_kind.items()
    )
    name = shape_name(weight, part.dtype)
    log.info("weight %s: %s; microseconds for %s rows: %s", name, best.__name__, _TIMED_ROWS, measured)
    return best


def shape_name(weight: Tensor, dtype: torch.dtype) -> str:
    """Return the key by which a layout is chosen, such as `512 x 1536 float32`. Args: dtype: of rows."""
    return f"{weight.shape[0]} x {weight.shape[1]} {str(dtype).removeprefix('torch.')}"


def best_times_s(
    candidates: Sequence[Linear], x: Tensor, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the best time of each candidate for the rows `x`, in up to `_ROUNDS` turns."""
    best, spent = [inf] * len(candidates), [0.0] * len(candidates)
    for _ in range(_ROUNDS):
        for place, candidate in enumerate(candidates):
            for _ in range(_RUNS):
                if spent[place] < _TIMED_S:
                    start = clock()
                    candidate(x)
                    took = clock() - start
                    best[place], spent[place] = min(best[place], took), spent[place] + took
    return best


@dataclass(slots=True)
class LayoutChooser:
    """Lays weights out. It chooses a layout once for each shape."""

    is_on: bool = True  # False: leave all weights plain
    only: type[Linear] | None = None  # take this layout without timing, as on devices other than the CPU
    small: type[Linear] = Linear  # the layout of weights that are too small to time
    choose: ChooseLayout = fastest_layout  # called once for each shape
    dtype: torch.dtype | None = None  # of rows and results, if weights may come in another one
    _chosen: dict[tuple[int, int, torch.dtype], type[Linear]] = field(default_factory=dict)
    _memory: huge_pages.WeightMemory = field(default_factory=huge_pages.WeightMemory)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> Linear:
        """Lay a weight [out, in] out in the layout for its shape, and keep no reference to `weight`.

        Args:
            is_gated: the outputs are gate and up, of equal sizes, and wanted as activation(gate) * up.
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
