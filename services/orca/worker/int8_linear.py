"""y = x W^T + b with a weight of 8 bits, a scale for each output (`--quantization int8`).

    W[o, i] is about scale[o] q[o, i],  q in -127..127,  scale[o] = max over i of |W[o, i]| / 127

Nothing else is rounded so. A rank scales its own part of a weight, so where inputs are divided among ranks, an output
has a scale on each.

Processors multiply bytes by bytes, so a row of activations goes through a product as two rows, the low and the high
bytes of whole numbers:

    x[r, i] is about step[r] (256 (high[r, i] - 128) + low[r, i] - 128),  step[r] = max over i of |x[r, i]| / 32512

Over a whole row the error is smaller than that of rounding to bfloat16. Beside one element that is a thousand times as
large as the others, these are rounded as coarsely as bfloat16 does, beside a larger one more coarsely: a row has one
step. Two rows of bytes cost as much as one of bfloat16, and the weight, which is what a small batch waits for, takes
half the memory.
"""

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.worker.linear import Linear

log = logging.getLogger(__name__)

_WEIGHT_MAX = 127
# The largest is 127 x 256, so that low bytes of either sign fit beside it.
_ROW_MAX = 32512
# What makes both bytes unsigned, and a half that turns cutting off into rounding.
_OFFSET = torch.tensor(256 * 128 + 128 + 0.5)
# Bits that a number is moved by, so that its low byte is the one wanted.
_LOW_HIGH = torch.tensor([0, 8], dtype=torch.int32)[:, None, None]
# A prompt goes through in parts: what is written in between stays in the cache.
_ROWS = 128
# Of a weight, outputs that are rounded at a time: the floats in between take little memory.
_OUTPUTS = 4096
# Stands in for the largest of a row of zeros.
_TINY = 1e-30


class Int8Linear(Linear):
    """Weight as it is, made floats anew for each product: right on any processor, and slow."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weight, self._scale = _rounded(weight)

    @property
    def bytes(self) -> int:
        return super().bytes + self._scale.numel() * self._scale.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight * self._scale[:, None]).to(x.dtype), self.bias)


class OneDnnInt8Linear(Int8Linear):
    """Weight in oneDNN's blocked layout, multiplied as bytes."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.onednn.qlinear_prepack(self.weight, None)
        self._scale /= _ROW_MAX
        self._zero = torch.zeros(1, dtype=torch.int64)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= _ROWS:
            return self._product(x)
        return torch.cat([self._product(rows) for rows in torch.split(x, _ROWS)])

    def _product(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=1, keepdim=True).float().clamp_min_(_TINY)
        largest += largest - largest  # a row with an infinity has no numbers, as one with NaN
        numbers = torch.addcmul(_OFFSET, x.float(), largest.reciprocal(), value=_ROW_MAX).int()
        low_high = (numbers >> _LOW_HIGH).byte()
        products = self._multiply(
            low_high.flatten(0, 1),
            1.0,  # scale of x: each row has its own, below
            128,  # zero of x
            self.weight,
            self._scale,
            self._zero,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        low, high = products.view(2, x.shape[0], self._scale.numel())
        y: Tensor = low.add_(high, alpha=256).mul_(largest)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


@cache
def int8_layout() -> type[Int8Linear]:
    """The faster of the two that is right on this processor: without 8-bit dot products sums of bytes overflow."""
    weight, x = torch.ones(16, 256), torch.ones(2, 256)
    try:
        is_right = torch.allclose(OneDnnInt8Linear(weight)(x), Int8Linear(weight)(x), rtol=1e-3)
    except (RuntimeError, NotImplementedError, AttributeError):
        is_right = False  # not in this build of torch
    kind = OneDnnInt8Linear if is_right else Int8Linear
    log.info("weights of 8 bits: %s", kind.__name__)
    return kind


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of the weight's shape, and the float32 scale of each output."""
    scale = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).float().div_(_WEIGHT_MAX).clamp_min_(_TINY)
    rounded = torch.empty_like(weight, dtype=torch.int8)
    parts = (torch.split(each, _OUTPUTS) for each in (rounded, weight, scale))
    for into, floats, scales in zip(*parts, strict=True):
        into.copy_((floats / scales[:, None]).round_())
    return rounded, scale
