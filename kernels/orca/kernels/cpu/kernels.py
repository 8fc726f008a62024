"""The kernels for CPUs (device.py). Each is one launch on a team of threads (team/team.py)."""

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
    """Kernels for tensors of float32, bfloat16 and float16."""

    def prepare(self, sizes: ModelSizes) -> bool:
        """Compile all kernels: some seconds if they were never compiled on this machine, otherwise 0.1 s."""
        for kernel in (
            attention.kernel(
                sizes.dtype,
                sizes.head_dim,
                turns=not sizes.is_causal and attention.turns_keys(sizes.dtype, sizes.block_tokens),
            ),
            product.kernel(sizes.dtype, sizes.weight_dtype),
            *lookups.kernels(sizes.dtype, sizes.table_dtype),
            *rows.kernels(sizes.dtype),
            *recording.kernels(),
        ):
            kernel.compile()
        if sizes.is_gated and sizes.activation is not None:
            gates.gated_kernel(sizes.dtype, sizes.activation).compile()
        compile_launches()
        return has_compiled()

    def attention(self, rows: Sequence[ContextRow], view: AttentionView) -> CpuAttention:
        return CpuAttention(rows, view)

    def recorder(self, device: torch.device) -> CpuRecorder:
        del device
        return CpuRecorder()

    def sampler(self, vocab: int, device: torch.device) -> None:
        """Return None: the host draws tokens from a few rows of logits just as well."""

    deferred = staticmethod(deferred)
    increment = staticmethod(lookups.increment)
    take_rows = staticmethod(lookups.take_rows)
    embed = staticmethod(lookups.embed)
    argmax = staticmethod(lookups.argmax)
    mask_tokens = staticmethod(lookups.mask_tokens)
    write_kv = staticmethod(rows.write_kv)
    normalise = staticmethod(rows.normalise)
    add_normalise = staticmethod(rows.add_normalise)
    activate = staticmethod(gates.activate)
    gated = staticmethod(gates.gated)
