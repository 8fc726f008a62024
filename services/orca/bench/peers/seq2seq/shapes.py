"""Encoder-decoder models of random weights: T5 type and BART type, in the tensors and configs of a Hugging Face folder.

No answer contains the end token, so that systems which ignore it and systems which cannot generate it agree. Its row of
the head is zero, and so is its logit. The largest of thousands of random logits is far above that.
"""

import math
from dataclasses import dataclass

import torch

from orca.bench.random_scales import BIAS_DEVIATION, EMBEDDING_DEVIATION, random_matrix, small_numbers

PAD, END, UNKNOWN, BEGIN = range(4)
"""Ids of the special tokens. As in T5, each target starts with the one for padding."""

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>", "<s>")
"""The special tokens, in the order of their ids."""

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",  # the families' own classes would rebuild the vocabulary
    "pad_token": SPECIAL_TOKENS[PAD],
    "eos_token": SPECIAL_TOKENS[END],
    "unk_token": SPECIAL_TOKENS[UNKNOWN],
    "bos_token": SPECIAL_TOKENS[BEGIN],
}

SPECIAL_IDS = {"decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": END}


# Each source decides its answer alone, and the next token depends on the last ones, only if no part of a layer drowns
# the others. With one gain for all matrices, a target hardly matters beside its source (T5), or all rows of a stack
# become equal (BART): a model then repeats one token.
_T5_EMBEDDING_DEVIATION = 1.0  # as T5 is initialised
_T5_CROSS_OUTPUT = 0.3
_BART_QUERY = 4.0
_BART_ATTENTION_OUTPUT = 0.25
_BART_MLP_OUTPUT = 0.5
_BART_POSITION_DEVIATION = 2 * EMBEDDING_DEVIATION


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Shape:
    """Sizes of a T5 1.1 type model. The defaults, T5 1.1 small with half of its vocabulary, have 60 M parameters."""

    layers: int = 8  # of each stack
    hidden: int = 512
    heads: int = 6
    head_dim: int = 64
    intermediate: int = 1024
    vocab: int = 16_000  # at least 260: the special tokens and those of single bytes
    buckets: int = 32
    max_distance: int = 128

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class BartShape:
    """Sizes of a BART type model. The defaults have 60 M parameters."""

    layers: int = 6  # of each stack
    hidden: int = 512
    heads: int = 8
    intermediate: int = 2048
    vocab: int = 30_000  # at least 260: the special tokens and those of single bytes
    positions: int = 1024


Seq2SeqShape = T5Shape | BartShape


def t5_weights(shape: T5Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return all tensors in float32, with the names of `T5ForConditionalGeneration`."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return random_matrix(rows, columns, columns, generator)

    def attention(name: str, output: float = 1.0) -> dict[str, torch.Tensor]:
        return {
            # T5 does not scale its scores, so its queries are small.
            f"{name}.q.weight": matrix(shape.inner, shape.hidden) / math.sqrt(shape.head_dim),
            f"{name}.k.weight": matrix(shape.inner, shape.hidden),
            f"{name}.v.weight": matrix(shape.inner, shape.hidden),
            f"{name}.o.weight": matrix(shape.hidden, shape.inner) * output,
        }

    head = matrix(shape.vocab, shape.hidden)
    head[END] = 0
    weights = {
        "shared.weight": small_numbers(
            shape.vocab, shape.hidden, generator=generator, deviation=_T5_EMBEDDING_DEVIATION
        ),
        "lm_head.weight": head,
    }
    for stack in ("encoder", "decoder"):
        for layer in range(shape.layers):
            here = f"{stack}.block.{layer}.layer"
            parts = [attention(f"{here}.0.SelfAttention")]
            if stack == "decoder":
                parts.append(attention(f"{here}.1.EncDecAttention", _T5_CROSS_OUTPUT))
            mlp = f"{here}.{len(parts)}.DenseReluDense"
            parts.append(
                {
                    f"{mlp}.wi_0.weight": matrix(shape.intermediate, shape.hidden),
                    f"{mlp}.wi_1.weight": matrix(shape.intermediate, shape.hidden),
                    f"{mlp}.wo.weight": matrix(shape.hidden, shape.intermediate),
                }
            )
            for index, part in enumerate(parts):
                weights |= part | {f"{here}.{index}.layer_norm.weight": torch.ones(shape.hidden)}
        bias = torch.randn(shape.buckets, shape.heads, generator=generator)
        weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = bias
        weights[f"{stack}.final_layer_norm.weight"] = torch.ones(shape.hidden)
    return weights


def t5_config(shape: T5Shape) -> dict[str, object]:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "num_layers": shape.layers,
        "num_decoder_layers": shape.layers,
        "d_model": shape.hidden,
        "d_kv": shape.head_dim,
        "d_ff": shape.intermediate,
        "num_heads": shape.heads,
        "vocab_size": shape.vocab,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": shape.buckets,
        "relative_attention_max_distance": shape.max_distance,
        "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": False,
    }


def bart_weights(shape: BartShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return all tensors in float32, with the names of `BartForConditionalGeneration`; the embedding is the head."""
    hidden = shape.hidden

    def small(*size: int, deviation: float) -> torch.Tensor:
        return small_numbers(*size, generator=generator, deviation=deviation)

    def linear(name: str, outputs: int, inputs: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
        weight = random_matrix(outputs, inputs, inputs, generator) * scale
        return {f"{name}.weight": weight, f"{name}.bias": small(outputs, deviation=BIAS_DEVIATION)}

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(hidden), f"{name}.bias": small(hidden, deviation=BIAS_DEVIATION)}

    def attention(name: str) -> dict[str, torch.Tensor]:
        scales = {"q_proj": _BART_QUERY, "k_proj": 1.0, "v_proj": 1.0, "out_proj": _BART_ATTENTION_OUTPUT}
        parts = (linear(f"{name}.{part}", hidden, hidden, scale) for part, scale in scales.items())
        return {key: tensor for part in parts for key, tensor in part.items()} | norm(f"{name}_layer_norm")

    shared = small_numbers(shape.vocab, hidden, generator=generator)
    shared[END] = 0
    weights = {"model.shared.weight": shared, "final_logits_bias": torch.zeros(1, shape.vocab)}
    for stack in ("encoder", "decoder"):
        # The first two rows belonged to padding in training, and no position uses them.
        positions = small(shape.positions + 2, hidden, deviation=_BART_POSITION_DEVIATION)
        weights[f"model.{stack}.embed_positions.weight"] = positions
        weights |= norm(f"model.{stack}.layernorm_embedding")
        for layer in range(shape.layers):
            here = f"model.{stack}.layers.{layer}"
            weights |= attention(f"{here}.self_attn")
            if stack == "decoder":
                weights |= attention(f"{here}.encoder_attn")
            weights |= linear(f"{here}.fc1", shape.intermediate, hidden)
            weights |= linear(f"{here}.fc2", hidden, shape.intermediate, _BART_MLP_OUTPUT)
            weights |= norm(f"{here}.final_layer_norm")
    return weights


def bart_config(shape: BartShape) -> dict[str, object]:
    stacks = {
        f"{stack}_{key}": value
        for stack in ("encoder", "decoder")
        for key, value in (("layers", shape.layers), ("attention_heads", shape.heads), ("ffn_dim", shape.intermediate))
    }
    return {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "is_encoder_decoder": True,
        **stacks,
        "d_model": shape.hidden,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "activation_function": "gelu",
        "scale_embedding": False,
        "normalize_before": False,  # this option and the next one are for CTranslate2: transformers has no other kind
        "normalize_embedding": True,
        "tie_word_embeddings": True,
        "forced_eos_token_id": None,
    }
