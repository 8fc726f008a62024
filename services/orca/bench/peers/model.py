"""Makes a model folder for measuring: llama, GPT-2, T5 or BART type, random weights (random_scales.py), in the files of
a Hugging Face folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from orca.bench.peers.seq2seq.shapes import (
    SPECIAL_IDS,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    BartShape,
    T5Shape,
    bart_config,
    bart_weights,
    t5_config,
    t5_weights,
)
from orca.bench.random_scales import BIAS_DEVIATION, EMBEDDING_DEVIATION, random_matrix, small_numbers


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
    is_tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Shape:
    """Sizes of a GPT-2 type model. The defaults have 24 M parameters."""

    layers: int = 8
    hidden: int = 384
    heads: int = 6
    vocab: int = 24_000  # at least 256: the tokens of single bytes
    positions: int = 1024


Shape = LlamaShape | GPT2Shape | T5Shape | BartShape

IN_BFLOAT16 = "-bf16"
"""Suffix of the names of models with files in bfloat16; all others are in float32."""

_SHAPES: Mapping[str, Shape] = {
    "llama-63m": LlamaShape(),
    # The same with grouped queries, like models since Llama 2: four query heads per head of keys and values.
    "llama-58m-gqa": LlamaShape(kv_heads=2),
    "gpt2-8x384": GPT2Shape(),
    "llama-500m": LlamaShape(
        layers=24, hidden=1024, heads=16, kv_heads=8, intermediate=5120, vocab=32_000, positions=2048
    ),
    # A vocabulary like that of today's small models; the sizes of Qwen2.5-0.5B.
    "llama-494m-tied": LlamaShape(
        layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864, vocab=151_936, positions=2048, is_tied=True
    ),
    "t5-60m": T5Shape(),
    "bart-60m": BartShape(),
}
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {f"{name}{stored}": shape for stored in ("", IN_BFLOAT16) for name, shape in _SHAPES.items()}
)
"""Name of a model -> its shape."""


def make_model(folder: Path, shape: Shape, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> int:
    """Write config.json, generation_config.json, tokenizer.json and model.safetensors into `folder`.

    An encoder-decoder model also has a tokenizer_config.json with its special tokens.
    Returns: the number of parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = _weights_and_config(shape, torch.Generator().manual_seed(seed))
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / "model.safetensors")
    is_seq2seq = isinstance(shape, T5Shape | BartShape)
    special = SPECIAL_IDS if is_seq2seq else {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    _write_json(folder / "config.json", {**config, **special, "torch_dtype": str(dtype).split(".")[-1]})
    _write_json(folder / "generation_config.json", {key: special[key] for key in special if key != "bos_token_id"})
    if is_seq2seq:
        _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    made_up_tokenizer(shape.vocab, SPECIAL_TOKENS if is_seq2seq else ()).save(str(folder / "tokenizer.json"))
    return sum(weight.numel() for weight in weights.values())


def _weights_and_config(
    shape: Shape, generator: torch.Generator
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
    match shape:
        case LlamaShape():
            return _llama_weights(shape, generator), _llama_config(shape)
        case GPT2Shape():
            return _gpt2_weights(shape, generator), _gpt2_config(shape)
        case T5Shape():
            return t5_weights(shape, generator), t5_config(shape)
        case BartShape():
            return bart_weights(shape, generator), bart_config(shape)


def _llama_weights(shape: LlamaShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return all tensors in float32, with the names of `LlamaForCausalLM`, each `[out, in]`."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return random_matrix(rows, columns, columns, generator)

    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": small_numbers(shape.vocab, shape.hidden, generator=generator),
        "model.norm.weight": torch.ones(shape.hidden),
    }
    if not shape.is_tied:
        weights["lm_head.weight"] = matrix(shape.vocab, shape.hidden)
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


def _llama_config(shape: LlamaShape) -> dict[str, object]:
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
        "tie_word_embeddings": shape.is_tied,
    }


def _gpt2_weights(shape: GPT2Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return all tensors in float32, with the names of `GPT2LMHeadModel`; a layer's matrices are `[in, out]`."""
    hidden = shape.hidden

    def small(*size: int, deviation: float = EMBEDDING_DEVIATION) -> torch.Tensor:
        return small_numbers(*size, generator=generator, deviation=deviation)

    def linear(name: str, inputs: int, outputs: int) -> dict[str, torch.Tensor]:
        weight = random_matrix(inputs, outputs, inputs, generator)
        return {f"{name}.weight": weight, f"{name}.bias": small(outputs, deviation=BIAS_DEVIATION)}

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(hidden), f"{name}.bias": small(hidden, deviation=BIAS_DEVIATION)}

    # The embedding is also the head.
    weights = {
        "transformer.wte.weight": small(shape.vocab, hidden),
        "transformer.wpe.weight": small(shape.positions, hidden),
        **norm("transformer.ln_f"),
    }
    for layer in range(shape.layers):
        prefix = f"transformer.h.{layer}"
        weights |= norm(f"{prefix}.ln_1") | linear(f"{prefix}.attn.c_attn", hidden, 3 * hidden)
        weights |= linear(f"{prefix}.attn.c_proj", hidden, hidden) | norm(f"{prefix}.ln_2")
        weights |= linear(f"{prefix}.mlp.c_fc", hidden, 4 * hidden) | linear(f"{prefix}.mlp.c_proj", 4 * hidden, hidden)
    return weights


def _gpt2_config(shape: GPT2Shape) -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": 4 * shape.hidden,
        "vocab_size": shape.vocab,
        "n_positions": shape.positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }


def made_up_tokenizer(vocab: int, special: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level tokenizer: special tokens, the 256 bytes, then made-up words that only outputs contain."""
    first = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {token: index for index, token in enumerate([*first, *(f"Ġw{n}" for n in range(vocab - len(first)))])}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
