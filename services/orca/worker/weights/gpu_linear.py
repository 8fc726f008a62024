"""y = x W^T + b on a GPU, beside kernels for the operations around the product (kernels/device.py).

The product is cuBLAS's, with the plain weight. The operation after it is a launch that waits for memory. If that launch
reads and writes the outputs anyway, it adds the bias on its way. The product's own epilogue would be as good, but
PyTorch uses one only for some shapes and alignments. Otherwise PyTorch fills the outputs with the bias in another
launch before the product. So outputs are rounded once more, before the bias is added: a result may differ from that of
a plain `Linear` by that much. If no kernel of ours follows, the product adds the bias.

    apply, apply_float32   norm; product with bias
    add_to                 product into the sum, which only the product reads and writes; with a bias: product, then
                           sum and norm
    apply_activated        norm; product; bias and activation
    apply_gated            norm; product; bias and gate
    apply_to_cache         norm; product; bias, head norm, rotation and cache. Without head norm and rotation, queries
                           stay as they are, and the product adds the bias
"""

import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite
from orca.kernels.device import kernels_of
from orca.worker.weights.linear import Linear, Norm


class GpuLinear(Linear):
    """The plain weight with fused operations around it; right on any device and with any kernels."""

    def add_to(self, to: Tensor, x: Tensor, then: Norm | None = None) -> Tensor | None:
        if self.bias is None:
            # The product reads and writes the sum once. If it left the sum to the norm, it would also write its
            # outputs.
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

    def apply_activated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        outputs = self._product(x if norm is None else norm(x))
        return kernels_of(x.device).activate(outputs, activation, self.bias, out=outputs)

    def apply_gated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        return kernels_of(x.device).gated(self._product(x if norm is None else norm(x)), activation, self.bias)

    def apply_to_cache(self, norm: Norm | None, x: Tensor, kept: KvWrite) -> Tensor:
        if not kept.changes_queries:
            return super().apply_to_cache(norm, x, kept)
        qkv = self._product(x if norm is None else norm(x)).view(x.shape[0], -1, kept.cache.shape[3])
        kernels_of(x.device).write_kv(qkv, kept, self.bias)
        return qkv

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
