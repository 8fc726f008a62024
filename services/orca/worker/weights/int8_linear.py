"""y = x W^T + b with a weight of 8 bits and a scale for each output (`--quantization int8`).

    W[o, i] is about scale[o] q[o, i],  q in -127..127,  scale[o] = max over i of |W[o, i]| / 127

Nothing else is rounded to 8 bits. A rank scales its own part of a weight, so if inputs are divided among ranks, an
output has a scale on each.

In panels, bytes are widened to float32 between memory and registers, and sums are scaled at the end. The sums overflow
if x is some 1e36 / inputs, far from what models have. Processors that multiply bytes by bytes may be faster with many
rows. A row of activations goes through such a product as two rows, the low and the high bytes of whole numbers:

    x[r, i] is about step[r] (256 (high[r, i] - 128) + low[r, i] - 128),  step[r] = max over i of |x[r, i]| / 32512

Over a whole row the error is smaller than that of rounding to bfloat16. A row has one step. If one element is a
thousand times as large as the others, the others are rounded as coarsely as in bfloat16. If it is larger still, they
are rounded more coarsely.
"""

from functools import cache

import torch
from torch import Tensor

from orca.worker.weights.layout_choice import Layouts
from orca.worker.weights.linear import Linear, PanelLinear

_WEIGHT_MAX = 127
# The largest number is 127 x 256, so that low bytes of either sign fit beside it.
_ROW_MAX = 32512
# This offset makes both bytes unsigned; its half turns truncation into rounding.
_OFFSET = torch.tensor(256 * 128 + 128 + 0.5)
# Bits by which a number is shifted so that its low byte is the one wanted.
_LOW_HIGH = torch.tensor([0, 8], dtype=torch.int32)[:, None, None]
# Rows that go through at a time: intermediate results of a prompt's part stay in the cache.
_ROWS = 128
# Outputs of a weight that are rounded at a time: the floats in between take little memory.
_OUTPUTS = 4096
# Replaces the largest number of a row of zeros.
_TINY = 1e-30
_ZERO = torch.zeros(1, dtype=torch.int64)


class Int8PanelLinear(PanelLinear):
    """Weight in panels of our own kernel, which widens it."""

    def _stored(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return _rounded(weight)


class OneDnnInt8Linear(Linear):
    """Weight in oneDNN's blocked layout, multiplied as bytes.

    Raises: NotImplementedError on a processor without 8-bit dot products: there, sums of bytes overflow.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if not can_multiply_bytes():
            raise NotImplementedError("this processor does not multiply bytes")
        super().__init__(weight, bias)
        rounded, self._scale = _rounded(weight)
        self.weight = _prepacked(rounded)
        self._scale /= _ROW_MAX

    @property
    def table(self) -> None:
        return None

    @property
    def bytes(self) -> int:
        return super().bytes + self._scale.numel() * self._scale.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= _ROWS:
            return self._product(x)
        return torch.cat([self._product(rows) for rows in torch.split(x, _ROWS)])

    def _product(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=1, keepdim=True).float().clamp_min_(_TINY)
        largest += largest - largest  # a row with an infinity becomes NaN, as a row with NaN does
        numbers = torch.addcmul(_OFFSET, x.float(), largest.reciprocal(), value=_ROW_MAX).int()
        low_high = (numbers >> _LOW_HIGH).byte()
        products = _products(low_high.flatten(0, 1), self.weight, self._scale)
        low, high = products.view(2, x.shape[0], self._scale.numel())
        y: Tensor = low.add_(high, alpha=256).mul_(largest)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


def _prepacked(rounded: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
    return packed


def _products(rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Return (rows - 128) W^T times the scale of each output, in float32.

    Args: rows: of uint8; packed: of int8, by `_prepacked`.
    """
    products: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        rows, 1.0, 128, packed, scale, _ZERO, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return products


# The same margin as among layouts of floats: only panels prefetch weights that are not in the cache, which the timing
# does not show.
INT8_LAYOUTS = Layouts(Int8PanelLinear, ((OneDnnInt8Linear, 0.9),))


@cache
def can_multiply_bytes() -> bool:
    """Return whether oneDNN multiplies bytes on this processor with the right sums, also for the largest bytes."""
    rows, rounded = torch.full((2, 256), 255, dtype=torch.uint8), torch.full((16, 256), 127, dtype=torch.int8)
    try:
        products = _products(rows, _prepacked(rounded), torch.ones(16))
    except (RuntimeError, NotImplementedError, AttributeError):
        return False  # not in this build of torch
    return bool((products == (255 - 128) * 127 * 256).all())


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 of the weight's shape, and the float32 scale of each output."""
    scale = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).float().div_(_WEIGHT_MAX).clamp_min_(_TINY)
    rounded = torch.empty_like(weight, dtype=torch.int8)
    parts = (torch.split(each, _OUTPUTS) for each in (rounded, weight, scale))
    for into, floats, scales in zip(*parts, strict=True):
        into.copy_((floats / scales[:, None]).round_())
    return rounded, scale
