"""The kernels of CPUs (device.py): one launch each, run by a team of threads (numba_team.py)."""

from collections.abc import Sequence

import torch

from orca.kernels import numba_attention, numba_gates, numba_lookups, numba_product, numba_recording, numba_rows
from orca.kernels.numba_attention import CpuAttention
from orca.kernels.numba_code import has_compiled
from orca.kernels.numba_recording import CpuRecorder
from orca.kernels.numba_team import compile_launches, together
from orca.kernels.reference import ContextRow, ModelSizes, Sight


class CpuKernels:
    """For tensors of float32, bfloat16 and float16."""

    def prepare(self, sizes: ModelSizes) -> bool:
        """Takes some seconds where these kernels were never compiled, and a tenth of a second where they were."""
        for kernel in (
            numba_attention.kernel(sizes.dtype, sizes.head_dim),
            numba_product.kernel(sizes.dtype, sizes.weight_dtype),
            *numba_lookups.kernels(sizes.dtype, sizes.table_dtype),
            *numba_rows.kernels(sizes.dtype),
            *numba_recording.kernels(),
            numba_gates.gated_silu_kernel(sizes.dtype),
        ):
            kernel.compile()
        compile_launches()
        return has_compiled()

    def attention(self, rows: Sequence[ContextRow], seen: Sight) -> CpuAttention:
        return CpuAttention(rows, seen)

    def recorder(self, device: torch.device) -> CpuRecorder:
        del device
        return CpuRecorder()

    def sampler(self, vocab: int, device: torch.device) -> None:
        """Some rows of logits are drawn from by the host as well."""

    together = staticmethod(together)
    count = staticmethod(numba_lookups.count)
    take_rows = staticmethod(numba_lookups.take_rows)
    embed = staticmethod(numba_lookups.embed)
    largest = staticmethod(numba_lookups.largest)
    keep = staticmethod(numba_rows.keep)
    normalise = staticmethod(numba_rows.normalise)
    add_normalise = staticmethod(numba_rows.add_normalise)
    activated = staticmethod(numba_gates.activated)
    gated_silu = staticmethod(numba_gates.gated_silu)
