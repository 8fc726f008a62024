"""The kernels of CPUs (device.py): one launch each, run by a team of threads (team.py)."""

from collections.abc import Sequence

import torch

from orca.kernels.contract.reference import AttentionView, ContextRow, ModelSizes
from orca.kernels.cpu import gates, lookups, recording, rows
from orca.kernels.cpu.attention import attention
from orca.kernels.cpu.attention.attention import CpuAttention
from orca.kernels.cpu.product import product
from orca.kernels.cpu.recording import CpuRecorder
from orca.kernels.cpu.team.code import has_compiled
from orca.kernels.cpu.team.team import compile_launches, deferred


class CpuKernels:
    """For tensors of float32, bfloat16 and float16."""

    def prepare(self, sizes: ModelSizes) -> bool:
        """Takes some seconds where these kernels were never compiled, and a tenth of a second where they were."""
        for kernel in (
            attention.kernel(sizes.dtype, sizes.head_dim),
            product.kernel(sizes.dtype, sizes.weight_dtype),
            *lookups.kernels(sizes.dtype, sizes.table_dtype),
            *rows.kernels(sizes.dtype),
            *recording.kernels(),
            gates.gated_silu_kernel(sizes.dtype),
        ):
            kernel.compile()
        compile_launches()
        return has_compiled()

    def attention(self, rows: Sequence[ContextRow], seen: AttentionView) -> CpuAttention:
        return CpuAttention(rows, seen)

    def recorder(self, device: torch.device) -> CpuRecorder:
        del device
        return CpuRecorder()

    def sampler(self, vocab: int, device: torch.device) -> None:
        """Some rows of logits are drawn from by the host as well."""

    deferred = staticmethod(deferred)
    increment = staticmethod(lookups.increment)
    take_rows = staticmethod(lookups.take_rows)
    embed = staticmethod(lookups.embed)
    argmax = staticmethod(lookups.argmax)
    write_kv = staticmethod(rows.write_kv)
    normalise = staticmethod(rows.normalise)
    add_normalise = staticmethod(rows.add_normalise)
    activate = staticmethod(gates.activate)
    gated_silu = staticmethod(gates.gated_silu)
