"""Tiny random Hugging Face checkpoints of every family, with odd sizes, for tests and measurements.

Random models of the usual scale repeat a token or two for every prompt. With embeddings x 3 and all other matrices x 8,
the greedy output changes when any one prompt token changes. If head and embedding are always tied (GPT-2, OPT) or a
window is narrow (Mistral), the layers need a larger scale to have an effect.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

FAMILIES = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3")
ENCODER_DECODERS = ("t5", "t5_gated", "mt5", "umt5", "bart", "mbart", "m2m_100", "marian")
"""Encoder-decoder models. `t5` has a tied head, and `t5_gated` is T5 1.1: a head of its own and a gated activation."""

# Odd sizes: an odd vocabulary, heads that do not fill the hidden size, a grouped KV head.
_ODD: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 211, "n_embd": 24, "n_head": 3, "n_layer": 3, "n_positions": 96, "n_inner": 52},
    "opt": {
        "vocab_size": 203,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "ffn_dim": 54,
        "max_position_embeddings": 96,
        "word_embed_proj_dim": 24,
    },
    "llama": {
        "vocab_size": 199,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "intermediate_size": 51,
        "max_position_embeddings": 96,
    },
    "mistral": {
        "vocab_size": 197,
        "hidden_size": 30,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "intermediate_size": 47,
        "max_position_embeddings": 96,
        "sliding_window": 9,
    },
    "qwen2": {
        "vocab_size": 193,
        "hidden_size": 28,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "num_hidden_layers": 3,
        "intermediate_size": 45,
        "max_position_embeddings": 96,
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "vocab_size": 191,
        "hidden_size": 26,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 14,
        "num_hidden_layers": 3,
        "intermediate_size": 43,
        "max_position_embeddings": 96,
    },
}
_ODD_T5: dict[str, Any] = {
    "vocab_size": 189,
    "d_model": 26,
    "d_kv": 6,
    "d_ff": 45,
    "num_heads": 5,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 17,
    "decoder_start_token_id": 2,
    "pad_token_id": 2,
}
_BART_FORM = ("bart", "mbart", "m2m_100", "marian")
_ODD_BART: dict[str, Any] = {
    "vocab_size": 195,
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 51,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": 3,
}
_ODD |= {
    "bart": _ODD_BART,
    "mbart": _ODD_BART | {"scale_embedding": True, "activation_function": "relu"},
    "m2m_100": _ODD_BART | {"encoder_layers": 1, "decoder_layers": 3},
    "marian": _ODD_BART | {"scale_embedding": True, "activation_function": "swish"},
    "t5": _ODD_T5 | {"feed_forward_proj": "relu"},
    "t5_gated": _ODD_T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": _ODD_T5 | {"feed_forward_proj": "gated-silu"},
    "umt5": _ODD_T5 | {"feed_forward_proj": "gated-gelu", "num_layers": 3, "num_decoder_layers": 2},
}
_MATRIX_SCALE = {
    "gpt2": 24,
    "opt": 24,
    "mistral": 12,
    **dict.fromkeys(_BART_FORM, 20),
    # T5 does not scale its scores: with more, rounding decides the output.
    **dict.fromkeys(("t5", "t5_gated", "mt5", "umt5"), 3),
}
_CLASSES = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "opt": (transformers.OPTConfig, transformers.OPTForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    "mbart": (transformers.MBartConfig, transformers.MBartForConditionalGeneration),
    "m2m_100": (transformers.M2M100Config, transformers.M2M100ForConditionalGeneration),
    "marian": (transformers.MarianConfig, transformers.MarianMTModel),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
    "t5_gated": (transformers.T5Config, transformers.T5ForConditionalGeneration),
    "mt5": (transformers.MT5Config, transformers.MT5ForConditionalGeneration),
    "umt5": (transformers.UMT5Config, transformers.UMT5ForConditionalGeneration),
}


def tiny_checkpoint(
    family: str, folder: Path, seed: int = 0, *, stored: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Save a tiny random model of `family` in `folder` (made if absent): config, safetensors, tokenizer.

    Args:
        stored: dtype of the files.
        overrides: config values that replace the odd sizes; `vocab_size` must leave room for some bytes.
    Returns: `folder`.
    """
    config_class, model_class = _CLASSES[family]
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = config_class(**{**special, **_ODD[family], **overrides})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    give_effect(model, family)
    if family == "t5_gated":
        untie(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(stored).save_pretrained(folder)
    if family in ENCODER_DECODERS:  # their own classes rebuild the vocabulary
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "tokenizer.json").write_text(json.dumps(_byte_tokenizer(config.vocab_size)))
    return folder


def give_effect(model: PreTrainedModel, family: str, *, gain: float = 1) -> None:
    """Scale a random model's weights so that its outputs depend on all of its prompt (see above).

    Args:
        gain: additional factor of all matrices but embeddings. A model that is not tiny needs less than 1 if its
            initial weights do not get smaller with its width. Otherwise its scores are so large that rounding decides.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms that matter
            else:
                parameter.mul_(_scale_of(name, family) * (1 if _is_embedding(name) else gain))
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn_like(buffer) * 0.3)


def untie(model: PreTrainedModel) -> None:
    """Give a T5 model a head of its own, which transformers keeps although it always ties T5's head by the config."""
    shared = model.get_parameter("shared.weight")
    model.lm_head.weight = torch.nn.Parameter(shared + 0.5 * torch.randn_like(shared))
    model.config.tie_word_embeddings = False


def reference_model(folder: Path) -> PreTrainedModel:
    """Return the checkpoint as Hugging Face runs it, in float32."""
    is_encoder_decoder = json.loads((folder / "config.json").read_text()).get("is_encoder_decoder", False)
    kind = transformers.AutoModelForSeq2SeqLM if is_encoder_decoder else transformers.AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def _scale_of(name: str, family: str) -> float:
    if _is_embedding(name):
        return 15 if family in _BART_FORM else 3
    return _MATRIX_SCALE.get(family, 8)


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "embed_tokens", "embed_positions", "model.shared"))


def _byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return a byte-level tokenizer with one token per byte, as many as the vocabulary holds, printable bytes first."""
    alphabet = _byte_alphabet()
    order = [*range(32, 127), 10, 9, *(byte for byte in range(256) if byte not in {*range(32, 127), 9, 10})]
    vocab = {"<s>": 0, "</s>": 1}
    for byte in order[: vocab_size - 2]:
        vocab[alphabet[byte]] = len(vocab)
    for extra in range(len(vocab), vocab_size):
        vocab[f"<extra_{extra}>"] = extra
    special = [
        {
            "id": number,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, content in enumerate(("<s>", "</s>"))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _byte_alphabet() -> dict[int, str]:
    """Return the printable character that represents each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table
