"""The kernels for GPUs (device.py), in Triton, which compiles each variant at its first use and caches it on disk.

attention.py     ragged paged attention
write_kv.py      bias, head norm, rotation, and the write of keys and values into the cache
norms.py         norms, and an addition followed by a norm
activations.py   activations and gates, with the bias before them
recording.py     recorded steps; inputs.py builds their inputs on the device
sampling.py      draws tokens from logits
token_masks.py   leaves out the tokens that a grammar does not allow
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from orca.kernels.contract.recording import RecordingSize, RequestLines
from orca.kernels.contract.reference import (
    AttentionView,
    ContextRow,
    DistanceBias,
    KvWrite,
    ModelSizes,
    NormParameters,
)
from orca.kernels.contract.sampling_lines import SamplingLines
from orca.kernels.gpu import activations, norms, sampling, token_masks, write_kv
from orca.kernels.gpu.attention import AttentionSizes, TritonAttention
from orca.kernels.gpu.recording import GraphRecorder
from orca.kernels.plain import PlainKernels


class TritonKernels(PlainKernels):
    """Kernels for tensors of float32, bfloat16 and float16.

    Operations that are a single kernel in PyTorch are left to PyTorch.
    """

    def prepare(self, sizes: ModelSizes) -> bool:
        """Launch all kernels of such a model once, with one token: seconds if they were never compiled.

        Otherwise a rank would be silent for that time in a step. Triton compiles a variant for sizes and addresses that
        16 divides. It would compile another variant for tensors at other addresses, as some views have, but no layer
        makes such views.
        """
        _Model(sizes).launch(self)
        return False

    def attention(self, rows: Sequence[ContextRow], view: AttentionView) -> TritonAttention:  # type: ignore[override]
        return TritonAttention(rows, view)

    def recorder(self, device: torch.device) -> GraphRecorder:  # type: ignore[override]
        return GraphRecorder(device)

    def sampler(self, vocab: int, device: torch.device) -> "TritonSampler":  # type: ignore[override]
        return TritonSampler(vocab, device)

    mask_tokens = staticmethod(token_masks.mask_tokens)  # type: ignore[assignment]
    write_kv = staticmethod(write_kv.write_kv)  # type: ignore[assignment]
    normalise = staticmethod(norms.normalise)  # type: ignore[assignment]
    add_normalise = staticmethod(norms.add_normalise)  # type: ignore[assignment]
    activate = staticmethod(activations.activate)  # type: ignore[assignment]
    gated = staticmethod(activations.gated)  # type: ignore[assignment]


class TritonSampler:
    """See device.Sampler."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.lines = SamplingLines(1, vocab, device)

    def sample(self, logits: Tensor, lines: Tensor, indices: Tensor) -> Tensor:
        tokens = torch.zeros_like(indices)
        sampling.sample(logits, lines, indices, self.lines, tokens, logits.new_empty(len(logits)))
        return tokens


class _Model:
    """A model of zeros in these sizes, without its matrix products (worker/weights/gpu_linear.py)."""

    def __init__(self, sizes: ModelSizes) -> None:
        self._sizes = sizes

    def launch(self, kernels: TritonKernels) -> None:
        self._norms(kernels)
        self._write_kv(kernels)
        self._attend(kernels)
        if self._sizes.vocab:
            self._sample(kernels)
        if self._sizes.activation is not None:
            self._mlp(kernels)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self._sizes.dtype, device=self._sizes.device)

    def _norms(self, kernels: TritonKernels) -> None:
        sizes = self._sizes
        row = self._zeros(sizes.hidden)
        x, norm = self._zeros(1, sizes.hidden), NormParameters(row, 1e-5, row if sizes.is_layer_norm else None)
        kernels.normalise(x, norm)
        # With a bias after the rank's own product; without one after a sum over the ranks.
        kernels.add_normalise(x, self._zeros(1, sizes.hidden), norm)
        if sizes.has_out_bias:
            kernels.add_normalise(x, self._zeros(1, sizes.hidden), norm, row)

    def _write_kv(self, kernels: TritonKernels) -> None:
        sizes = self._sizes
        heads, head_dim = sizes.heads + 2 * sizes.kv_heads, sizes.head_dim
        rotations = self._zeros(1, 1, head_dim // 2, dtype=torch.complex64) if sizes.has_rotary else None
        weight = self._zeros(sizes.heads + sizes.kv_heads, head_dim)
        kv = KvWrite(
            self._zeros(1, 2 * sizes.kv_heads, sizes.block_tokens, head_dim),
            self._zeros(1, dtype=torch.int64),
            rotations,
            NormParameters(weight, 1e-5) if sizes.has_head_norm else None,
        )
        bias = self._zeros(heads * head_dim) if sizes.has_qkv_bias and kv.changes_queries else None
        kernels.write_kv(self._zeros(1, heads, head_dim), kv, bias)
        if sizes.has_cross_attention:
            kernels.write_kv(self._zeros(1, 2 * sizes.kv_heads, head_dim), KvWrite(kv.cache, kv.slots, None))

    def _attend(self, kernels: TritonKernels) -> None:
        """Launch attention of prompts and of single tokens, and the kernels for inputs of recorded steps."""
        sizes = self._sizes
        heads, head_dim = sizes.heads + 2 * sizes.kv_heads, sizes.head_dim
        tables = self._zeros(1, 64, dtype=torch.int32)
        cache = self._zeros(1, 2 * sizes.kv_heads, sizes.block_tokens, head_dim)
        numbers = self._zeros(1, dtype=torch.int64)
        view = AttentionView(
            kv_of_query=sizes.kv_of_query,
            kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            tables=tables,
            block_tokens=sizes.block_tokens,
            window=None,
            dtype=sizes.dtype,
            device=sizes.device,
            is_causal=sizes.is_causal,
        )
        bias = DistanceBias(self._zeros(sizes.heads, 32, dtype=torch.float32), 0) if sizes.has_distance_bias else None
        kinds = [(replace(view, window=window), heads, bias) for window in dict.fromkeys((*sizes.windows, None))]
        if sizes.has_cross_attention:
            kinds.append((replace(view, is_causal=False), sizes.heads, None))
        for view, row_heads, added in kinds:
            inputs = kernels.recorder(sizes.device).inputs(
                RecordingSize(1, None),
                RequestLines(tables, numbers, numbers, tables, numbers),
                slots=sizes.block_tokens,
                block_tokens=sizes.block_tokens,
            )
            recorded = inputs.attention(view)
            inputs.build()
            recorded(self._zeros(1, row_heads, head_dim), cache, 1.0, added)
            # A single token, and as many as make a wide item.
            for count in (1, 1 + AttentionSizes.of(view).shape.narrow):
                attention = kernels.attention([ContextRow(0, count, 0, 0, keys=1)], view)
                attention(self._zeros(count, row_heads, head_dim), cache, 1.0, added)

    def _sample(self, kernels: TritonKernels) -> None:
        nobody = torch.full((1,), -1, dtype=torch.int32, device=self._sizes.device)
        logits = self._zeros(1, self._sizes.vocab, dtype=torch.float32)
        kernels.sampler(self._sizes.vocab, self._sizes.device).sample(logits, nobody, nobody.long())
        words = self._zeros(1, -(-self._sizes.vocab // 32), dtype=torch.int32)
        kernels.mask_tokens(logits, self._zeros(1, dtype=torch.int64), words)

    def _mlp(self, kernels: TritonKernels) -> None:
        sizes = self._sizes
        assert sizes.activation is not None
        width = sizes.intermediate * (2 if sizes.is_gated else 1)
        x, bias = self._zeros(1, width), self._zeros(width) if sizes.has_mlp_bias else None
        if sizes.is_gated:
            kernels.gated(x, sizes.activation, bias)
        else:
            kernels.activate(x, sizes.activation, bias, out=x)
