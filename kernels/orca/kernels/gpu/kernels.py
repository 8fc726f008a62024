"""The kernels of GPUs (device.py): Triton, which compiles each for what it meets first and keeps it on the disk.

attention.py     ragged paged attention
keep.py          bias, head norm, rotation, and keys and values into the cache
norms.py         norms, and an addition with the norm behind it
activations.py   activations and gates, and the bias before them
recording.py     recorded steps, with inputs.py: what they read is made on the device
sampling.py      tokens out of logits
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from orca.kernels.contract.recording import RecordingSize, RequestLines
from orca.kernels.contract.reference import AttentionView, ContextRow, KvWrite, ModelSizes, NormParameters
from orca.kernels.contract.sampling_lines import SamplingLines
from orca.kernels.gpu import activations, norms, sampling, write_kv
from orca.kernels.gpu.attention import Sizes, TritonAttention
from orca.kernels.gpu.recording import GraphRecorder
from orca.kernels.plain import PlainKernels


class TritonKernels(PlainKernels):
    """For tensors of float32, bfloat16 and float16. What PyTorch does in one kernel of its own stays with it."""

    def prepare(self, sizes: ModelSizes) -> bool:
        """Launches what the layers of such a model launch, each with one token: seconds where these kernels were never
        compiled. In a step that would be time in which a rank is silent.

        Triton compiles for what 16 divides, sizes and addresses. What begins elsewhere, as some views do, it compiles
        for when it meets it: no layer makes any.
        """
        _Model(sizes).launch(self)
        return False

    def attention(self, rows: Sequence[ContextRow], seen: AttentionView) -> TritonAttention:  # type: ignore[override]
        return TritonAttention(rows, seen)

    def recorder(self, device: torch.device) -> GraphRecorder:  # type: ignore[override]
        return GraphRecorder(device)

    def sampler(self, vocab: int, device: torch.device) -> "TritonSampler":  # type: ignore[override]
        return TritonSampler(vocab, device)

    write_kv = staticmethod(write_kv.write_kv)  # type: ignore[assignment]
    normalise = staticmethod(norms.normalise)  # type: ignore[assignment]
    add_normalise = staticmethod(norms.add_normalise)  # type: ignore[assignment]
    activate = staticmethod(activations.activate)  # type: ignore[assignment]
    gated_silu = staticmethod(activations.gated_silu)  # type: ignore[assignment]


class TritonSampler:
    """As device.Sampler."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.lines = SamplingLines(1, vocab, device)

    def sample(self, logits: Tensor, lines: Tensor, indices: Tensor) -> Tensor:
        tokens = torch.zeros_like(indices)
        sampling.sample(logits, lines, indices, self.lines, tokens, logits.new_empty(len(logits)))
        return tokens


class _Model:
    """A model of these sizes, of zeros: what of its layers is no matrix product (worker/weights/gpu_linear.py)."""

    def __init__(self, sizes: ModelSizes) -> None:
        self._sizes = sizes

    def launch(self, kernels: TritonKernels) -> None:
        self._norms(kernels)
        self._keep(kernels)
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
        # With a bias behind its own product, without one behind a sum over the ranks.
        kernels.add_normalise(x, self._zeros(1, sizes.hidden), norm)
        if sizes.has_out_bias:
            kernels.add_normalise(x, self._zeros(1, sizes.hidden), norm, row)

    def _keep(self, kernels: TritonKernels) -> None:
        sizes = self._sizes
        heads, head_dim = sizes.heads + 2 * sizes.kv_heads, sizes.head_dim
        turns = self._zeros(1, 1, head_dim // 2, dtype=torch.complex64) if sizes.is_turned else None
        weight = self._zeros(sizes.heads + sizes.kv_heads, head_dim)
        kept = KvWrite(
            self._zeros(1, 2 * sizes.kv_heads, sizes.block_tokens, head_dim),
            self._zeros(1, dtype=torch.int64),
            turns,
            NormParameters(weight, 1e-5) if sizes.has_head_norm else None,
        )
        bias = self._zeros(heads * head_dim) if sizes.has_qkv_bias and kept.changes_queries else None
        kernels.write_kv(self._zeros(1, heads, head_dim), kept, bias)

    def _attend(self, kernels: TritonKernels) -> None:
        """Of prompts and of single tokens, and the inputs of recorded steps."""
        sizes = self._sizes
        heads, head_dim = sizes.heads + 2 * sizes.kv_heads, sizes.head_dim
        tables = self._zeros(1, 64, dtype=torch.int32)
        cache = self._zeros(1, 2 * sizes.kv_heads, sizes.block_tokens, head_dim)
        numbers = self._zeros(1, dtype=torch.int64)
        for window in dict.fromkeys((*sizes.windows, None)):
            seen = AttentionView(
                kv_of_query=sizes.kv_of_query,
                kv_heads=sizes.kv_heads,
                head_dim=head_dim,
                tables=tables,
                block_tokens=sizes.block_tokens,
                window=window,
                dtype=sizes.dtype,
                device=sizes.device,
            )
            inputs = kernels.recorder(sizes.device).inputs(
                RecordingSize(1, None),
                RequestLines(tables, numbers, numbers),
                slots=sizes.block_tokens,
                block_tokens=sizes.block_tokens,
            )
            recorded = inputs.attention(seen)
            inputs.build()
            recorded(self._zeros(1, heads, head_dim), cache, 1.0)
            # A single token, and as many as make a wide item.
            for count in (1, 1 + Sizes.of(seen).shape.narrow):
                attention = kernels.attention([ContextRow(0, count, 0, 0)], seen)
                attention(self._zeros(count, heads, head_dim), cache, 1.0)

    def _sample(self, kernels: TritonKernels) -> None:
        nobody = torch.full((1,), -1, dtype=torch.int32, device=self._sizes.device)
        logits = self._zeros(1, self._sizes.vocab, dtype=torch.float32)
        kernels.sampler(self._sizes.vocab, self._sizes.device).sample(logits, nobody, nobody.long())

    def _mlp(self, kernels: TritonKernels) -> None:
        sizes = self._sizes
        assert sizes.activation is not None
        width = sizes.intermediate * (2 if sizes.is_gated else 1)
        x, bias = self._zeros(1, width), self._zeros(width) if sizes.has_mlp_bias else None
        if sizes.is_gated:
            kernels.gated_silu(x, bias)
        else:
            kernels.activate(x, sizes.activation, bias, out=x)
