"""A model folder for measuring: llama-type, random weights, the files that a Hugging Face folder has.

Random weights as a library initialises them make a model that repeats one token whatever the prompt, so comparing its
outputs would prove nothing. Here a matrix makes its input `GAIN` times as large and embeddings are small beside what
the layers add, so every output depends on its whole prompt. A much larger gain would let rounding errors grow from
layer to layer until two right answers differ.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

GAIN = 1.4
EMBEDDING_DEVIATION = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a llama-type model. The defaults have 63 M parameters."""

    layers: int = 12
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 8
    intermediate: int = 1408
    vocab: int = 24_000  # at least 256: the tokens of single bytes
    positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def make_model(folder: Path, shape: LlamaShape, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> int:
    """Write config.json, generation_config.json, tokenizer.json and model.safetensors into `folder`.

    Returns: the number of parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(shape, seed)
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / "model.safetensors")
    _write_json(folder / "config.json", _config(shape, dtype))
    _write_json(folder / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 0})
    _tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))
    return sum(weight.numel() for weight in weights.values())


def _weights(shape: LlamaShape, seed: int) -> dict[str, torch.Tensor]:
    """All tensors in float32, under the names that `LlamaForCausalLM` gives them, each `[out, in]`."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(GAIN / math.sqrt(columns))

    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, shape.hidden, generator=generator) * EMBEDDING_DEVIATION,
        "model.norm.weight": torch.ones(shape.hidden),
        "lm_head.weight": matrix(shape.vocab, shape.hidden),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(shape.hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(query, shape.hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(key, shape.hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(key, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(shape.hidden, query),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(shape.hidden),
            f"{prefix}.mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
    return weights


def _config(shape: LlamaShape, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _tokenizer(vocab: int) -> Tokenizer:
    """A byte-level tokenizer: the 256 bytes, then made-up words that only the model ever chooses."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([*alphabet, *(f"Ġw{n}" for n in range(vocab - len(alphabet)))])}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
