"""y = x W^T + b on a GPU, beside kernels that do what is left to do (kernels/device.py).

The product is cuBLAS's, of the plain weight. What follows it is a launch that waits for memory: one that reads and
writes the outputs anyway adds the bias on its way. The product's own epilogue would be as good where PyTorch has one,
which depends on shapes and alignment; else it fills the outputs with the bias in a launch before. Outputs are rounded
once more, before the bias is added: by so much a result differs from that of a plain `Linear`. Where nothing of ours
follows, the bias is the product's.

    after, wide    norm; product with bias
    add_to         product into the sum, which is read and written by it alone; with a bias, product, then sum and norm
    activated      norm; product; bias and activation
    gated          norm; product; bias and gate
    kept           norm; product; bias, head norm, rotation and cache. Without norm and rotation queries stay as they
                   are, and the bias is the product's
"""

import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite
from orca.kernels.device import kernels_of
from orca.worker.weights.linear import Linear
from orca.worker.weights.norms import Norm


class GpuLinear(Linear):
    """The plain weight; right on any device and with any kernels."""

    def add_to(self, to: Tensor, x: Tensor, then: Norm | None = None) -> Tensor | None:
        if self.bias is None:
            # The product reads and writes the sum once. One that left it to the norm would write its outputs besides.
            to.addmm_(x, self.weight.t())
            return None
        if then is None:
            return self.add_outputs(to, self(x))
        return kernels_of(x.device).add_normalise(to, self._product(x), then.rows, self.bias)

    def add_outputs(self, to: Tensor, outputs: Tensor, then: Norm | None = None) -> Tensor | None:
        if then is None:
            to.add_(outputs)
            return None
        return kernels_of(to.device).add_normalise(to, outputs, then.rows)

    def activated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        outputs = self._product(x if norm is None else norm(x))
        return kernels_of(x.device).activate(outputs, activation, self.bias, out=outputs)

    def gated(self, norm: Norm | None, x: Tensor) -> Tensor:
        return kernels_of(x.device).gated_silu(self._product(x if norm is None else norm(x)), self.bias)

    def kept(self, norm: Norm | None, x: Tensor, kept: KvWrite) -> Tensor:
        if not kept.changes_queries:
            return super().kept(norm, x, kept)
        qkv = self._product(x if norm is None else norm(x)).view(x.shape[0], -1, kept.cache.shape[3])
        kernels_of(x.device).write_kv(qkv, kept, self.bias)
        return qkv

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
