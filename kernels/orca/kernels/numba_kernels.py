"""The kernels of CPUs (device.py): one launch each, run by a team of threads (numba_team.py)."""

from collections.abc import Sequence

from orca.kernels import numba_attention, numba_gates, numba_rows
from orca.kernels.numba_attention import CpuAttention
from orca.kernels.numba_team import recorded, together
from orca.kernels.reference import ContextRow, ModelSizes, Sight


class CpuKernels:
    """For tensors of float32, bfloat16 and float16."""

    def prepare(self, sizes: ModelSizes) -> None:
        """Takes some seconds where these kernels were never compiled, and a tenth of a second where they were."""
        gated = numba_gates.gated_silu_kernel(sizes.dtype)
        for kernel in (numba_attention.kernel(sizes.dtype, sizes.head_dim), *numba_rows.kernels(sizes.dtype), gated):
            kernel.compile()

    def attention(self, rows: Sequence[ContextRow], seen: Sight) -> CpuAttention:
        return CpuAttention(rows, seen)

    together = staticmethod(together)
    recorded = staticmethod(recorded)
    count = staticmethod(numba_rows.count)
    take_rows = staticmethod(numba_rows.take_rows)
    keep = staticmethod(numba_rows.keep)
    normalise = staticmethod(numba_rows.normalise)
    add_normalise = staticmethod(numba_rows.add_normalise)
    activated = staticmethod(numba_gates.activated)
    gated_silu = staticmethod(numba_gates.gated_silu)
