"""A T5 by its formulas, in PyTorch's own operations: the reference by which tokens are checked (see plain_llama.py)."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.bench.gpu.random_weights import RandomTensors
from orca.worker.models.encoder_decoder.t5_config import T5Config

START = 0
"""The first token of each target: T5 begins with its padding."""


class PlainT5:
    """A T5 1.1: a gated MLP with the tanh approximation of GELU, and a head of its own.

    Args:
        dtype: of the computation; the weights are those of `tensors`, rounded to the dtype of `tensors` first.
    """

    def __init__(self, config: T5Config, tensors: RandomTensors, dtype: torch.dtype) -> None:
        assert config.is_gated
        assert not config.is_tied
        self._config = config
        self._tensors = tensors
        self._dtype = dtype

    @torch.inference_mode()
    def answer_logits(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[Tensor]:
        """Return the logits before each token of the answers, float32 [tokens, vocab]. Args: prompts: the sources."""
        config = self._config
        memories = self._stack("encoder", prompts, None)
        outputs = self._stack("decoder", [[START, *answer[:-1]] for answer in answers], memories)
        head = self._weight("lm_head", config.vocab_size, config.hidden_size)
        return [F.linear(output, head).float() for output in outputs]

    def _stack(self, name: str, sequences: Sequence[list[int]], memories: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Run one stack over whole sequences. Args: memories: outputs of the encoder for the decoder."""
        config, is_causal = self._config, memories is not None
        lengths = [len(sequence) for sequence in sequences]
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=self._tensors.device)
        x = self._weight("shared", config.vocab_size, config.hidden_size)[ids]
        biases = [self._bias(f"{name}.block.0.layer.0", length, is_causal=is_causal) for length in lengths]
        for layer in range((config.decoder if is_causal else config.encoder).layers):
            here = f"{name}.block.{layer}.layer"
            normed = self._norm(f"{here}.0.layer_norm", x)
            x = x + self._attention(f"{here}.0.SelfAttention", normed, torch.split(normed, lengths), biases)
            if memories is not None:
                normed = self._norm(f"{here}.1.layer_norm", x)
                x = x + self._attention(f"{here}.1.EncDecAttention", normed, memories, [None] * len(lengths), lengths)
            x = x + self._mlp(f"{here}.{2 if is_causal else 1}", x)
        return torch.split(self._norm(f"{name}.final_layer_norm", x), lengths)

    def _attention(
        self,
        name: str,
        x: Tensor,
        keys_of: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the attention of x [tokens, hidden], whose queries are those of consecutive sequences.

        Args:
            keys_of: for each sequence, the numbers [keys, hidden] that it attends to.
            biases: for each sequence, [heads, queries, keys]; -inf for keys that a query does not see.
            lengths: queries of each sequence; None: as many as keys.
        """
        config = self._config
        hidden, dim = config.hidden_size, config.head_dim
        inner = config.num_heads * dim
        query, key, value = (self._weight(f"{name}.{part}", inner, hidden) for part in "qkv")
        queries = torch.split(F.linear(x, query), list(lengths or map(len, keys_of)))
        attended = []
        for one, seen, bias in zip(queries, keys_of, biases, strict=True):
            heads = [
                each.view(-1, config.num_heads, dim).transpose(0, 1)
                for each in (one, F.linear(seen, key), F.linear(seen, value))
            ]
            scores = heads[0] @ heads[1].transpose(1, 2)  # not scaled
            if bias is not None:
                scores = scores + bias
            weights = scores.float().softmax(dim=-1).to(x.dtype)
            attended.append((weights @ heads[2]).transpose(0, 1).flatten(1))
        return F.linear(torch.cat(attended), self._weight(f"{name}.o", hidden, inner))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        hidden, inner = self._config.hidden_size, self._config.decoder.intermediate_size
        normed, here = self._norm(f"{name}.layer_norm", x), f"{name}.DenseReluDense"
        gate, up = (F.linear(normed, self._weight(f"{here}.wi_{part}", inner, hidden)) for part in (0, 1))
        return F.linear(F.gelu(gate, approximate="tanh") * up, self._weight(f"{here}.wo", hidden, inner))

    def _bias(self, name: str, length: int, *, is_causal: bool) -> Tensor:
        """Return the bias of scores, [heads, queries, keys], with -inf for keys behind the query if it is causal.

        Half of the buckets, or of those of a direction, have one distance each. The others share distances by their
        logarithm (Raffel et al., section 2.1).
        """
        config, device = self._config, self._tensors.device
        table = self._tensors.read(
            f"{name}.SelfAttention.relative_attention_bias.weight", (config.buckets, config.num_heads)
        )
        places = torch.arange(length, device=device)
        ahead = places[None, :] - places[:, None]  # of the key, from the query on
        buckets = config.buckets if is_causal else config.buckets // 2
        exact, far = buckets // 2, config.max_distance
        apart = ahead.abs()
        logarithm = torch.log(apart.clamp(min=1).float() / exact) / math.log(far / exact)
        bucket = torch.where(
            apart < exact, apart, (exact + (logarithm * (buckets - exact)).long()).clamp(max=buckets - 1)
        )
        if not is_causal:
            bucket = bucket + torch.where(ahead > 0, buckets, 0)
        bias = table.to(self._dtype)[bucket].permute(2, 0, 1)
        return bias.masked_fill(ahead > 0, -math.inf) if is_causal else bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], self._weight(name, x.shape[1]), self._config.norm_eps)

    def _weight(self, name: str, *shape: int) -> Tensor:
        return self._tensors.read(f"{name}.weight", shape).to(self._dtype)
