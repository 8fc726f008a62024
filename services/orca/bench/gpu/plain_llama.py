"""A Llama by its formulas, in PyTorch's own operations: the reference by which tokens are checked.

It has no cache, no batch and no layout of weights. It runs whole sequences, one layer at a time, and makes each layer's
weights when the layer runs. So it shares nothing with a stage but the tensors, and a model of 8 billion parameters
takes little memory.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.bench.gpu.random_weights import RandomTensors
from orca.worker.models.config import LlamaConfig


class PlainLlama:
    """
    Args:
        dtype: of the computation; the weights are those of `tensors`, rounded to the dtype of `tensors` first.
    """

    def __init__(self, config: LlamaConfig, tensors: RandomTensors, dtype: torch.dtype) -> None:
        self._config = config
        self._tensors = tensors
        self._dtype = dtype

    def answer_logits(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[Tensor]:
        """Return the logits before each token of the answers, float32 [tokens, vocab]."""
        read = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
        return self.logits(read, [len(answer) for answer in answers])

    @torch.inference_mode()
    def logits(self, sequences: Sequence[list[int]], last: Sequence[int]) -> list[Tensor]:
        """Compute logits.

        Args: last: the number of tokens at the end of each sequence whose logits are wanted.
        Returns: for each sequence the logits after these tokens, float32 [last, vocab].
        """
        config, device = self._config, self._tensors.device
        lengths = [len(sequence) for sequence in sequences]
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        turns = self._turns(positions)
        x = self._weight("model.embed_tokens", config.vocab_size, config.hidden_size)[ids]
        for layer in range(config.num_layers):
            x = self._layer(f"model.layers.{layer}", x, lengths, turns)
        wanted = [rows[-count:] for rows, count in zip(torch.split(x, lengths), last, strict=True)]
        x = self._norm("model.norm", torch.cat(wanted))
        logits = F.linear(x, self._weight("lm_head", config.vocab_size, config.hidden_size)).float()
        return list(torch.split(logits, list(last)))

    def _layer(self, name: str, x: Tensor, lengths: list[int], turns: tuple[Tensor, Tensor]) -> Tensor:
        """Return x [tokens, hidden] + attention(norm(x)), then + down(silu(gate(norm(x))) * up(norm(x)))."""
        config, dim = self._config, self._config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(part: str, of: Tensor, outputs: int) -> Tensor:
            return F.linear(of, self._weight(f"{name}.{part}", outputs, of.shape[1]))

        def heads(part: str, of: Tensor, count: int) -> Tensor:
            return linear(part, of, count * dim).view(-1, count, dim)

        normed = self._norm(f"{name}.input_layernorm", x)
        query = _turned(heads("self_attn.q_proj", normed, config.num_heads), turns)
        key = _turned(heads("self_attn.k_proj", normed, config.num_kv_heads), turns)
        value = heads("self_attn.v_proj", normed, config.num_kv_heads)
        parts = zip(*(torch.split(each, lengths) for each in (query, key, value)), strict=True)
        attended = torch.cat([_attend(*part).flatten(1) for part in parts])
        x = x + linear("self_attn.o_proj", attended, hidden)
        normed = self._norm(f"{name}.post_attention_layernorm", x)
        gated = F.silu(linear("mlp.gate_proj", normed, inner)) * linear("mlp.up_proj", normed, inner)
        return x + linear("mlp.down_proj", gated, hidden)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], self._weight(name, x.shape[1]), self._config.norm_eps)

    def _weight(self, name: str, *shape: int) -> Tensor:
        return self._tensors.read(f"{name}.weight", shape).to(self._dtype)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [tokens, 1, head_dim / 2], of position / theta ^ (2 j / head_dim)."""
        dim = self._config.head_dim
        exponents = torch.arange(0, dim, 2, device=positions.device).float() / dim
        angles = positions[:, None].float() / self._config.rope.theta**exponents
        return angles.cos()[:, None], angles.sin()[:, None]


def _turned(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads [tokens, heads, head_dim]: dimensions j and j + head_dim / 2 are a pair."""
    cosines, sines = turns
    one, other = heads.float().chunk(2, dim=-1)
    return torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1).to(heads.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend within one sequence, each [tokens, heads, head_dim]; query heads are divided equally among key heads."""
    group = query.shape[1] // key.shape[1]
    heads = (query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
    one, two, three = (each.transpose(0, 1)[None] for each in heads)
    return F.scaled_dot_product_attention(one, two, three, is_causal=True)[0].transpose(0, 1)
