"""The options of a model's config.json, each read once.

A family reads the options that change its output (config.py). Of the others, those that change the output of other
families are refused unless their value changes nothing: their author meant a model that Orca does not compute. All
further options are ignored, as transformers ignores what its classes do not know, with one log line.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orca.core.domain.errors import ModelError
from orca.core.domain.log_once import log_once

# Options that say nothing about the numbers of a forward pass: bookkeeping, training, and those that
# generation_config.json, the tokenizer or core.domain.model answer for. They are ignored without a log line.
_BOOKKEEPING_TEXT = """
    architectures model_type transformers_version _name_or_path name_or_path torch_dtype dtype initializer_range
    init_std use_cache bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix
    task_specific_params id2label label2id num_labels problem_type finetuning_task return_dict output_hidden_states
    output_attentions torchscript use_bfloat16 chunk_size_feed_forward is_decoder
    cross_attention_hidden_size tie_encoder_decoder attention_dropout hidden_dropout resid_pdrop embd_pdrop
    attn_pdrop dropout activation_dropout layerdrop summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout n_ctx reorder_and_upcast_attn pretraining_tp gradient_checkpointing
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tokenizer_class
    tf_legacy_loss use_mrope attn_implementation _attn_implementation _attn_implementation_autoset unsloth_version
    unsloth_fixed max_window_layers use_sliding_window n_special predict_special_tokens transformers_weights
    is_llama_config learned_embeddings output_projection max_sequence_length model_max_length
"""
_BOOKKEEPING = frozenset(_BOOKKEEPING_TEXT.split())

_OFF: tuple[object, ...] = (False, 0)
_NONE: tuple[object, ...] = ()
_ONE: tuple[object, ...] = (1,)
# Options that change the output of some family of transformers or vLLM -> the values that change nothing, besides null
# and empty ones. A family that computes such an option has read it before.
_MEANINGFUL: Mapping[str, tuple[object, ...]] = {
    # Weights in another form, or other weights
    **dict.fromkeys(("quantization_config", "compression_config", "pruned_heads", "per_layer_config"), _NONE),
    **dict.fromkeys(("block_configs", "adapter_config", "lora_rank"), _NONE),
    # Scales of embeddings, layers, scores and logits (Granite, MiniCPM, Cohere, Falcon-H1, Gemma, OPT's ancestors)
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "residual_multiplier",
            "residual_scale",
            "logits_scaling",
            "logit_scale",
            "logits_scale",
            "lm_head_multiplier",
            "key_multiplier",
            "scale_emb",
            "embedding_scale",
            "mup_embeddings_multiplier",
            "mup_width_scale",
            "mup_output_alpha",
            "mup_attn_multiplier",
            "output_multiplier_scale",
            "attention_output_multiplier",
            "embedding_multiplier_scale",
        ),
        _ONE,
    ),
    **dict.fromkeys(
        (
            "attention_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "mlp_multipliers",
            "query_pre_attn_scalar",
            "softmax_scale",
            "scale_depth",
            "dim_model_base",
            "mup_base_width",
            "mup_base_hidden_size",
        ),
        _NONE,
    ),
    **dict.fromkeys(("scale_embeddings", "scale_embedding", "normalize_embedding", "mup_use_scaling", "use_mup"), _OFF),
    # Caps of scores, logits and projections (Gemma 2, Grok, OLMo, MPT)
    **dict.fromkeys(
        (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "router_logit_softcapping",
            "attn_logit_softcap",
            "final_logit_softcap",
            "logit_softcap",
            "logits_soft_cap",
            "logit_soft_cap",
            "clip_qkv",
        ),
        (0,),
    ),
    # Which positions a token sees, and how it knows their order
    **dict.fromkeys(("sliding_window", "layer_types", "window_size", "attention_window", "attention_chunk_size"), _OFF),
    **dict.fromkeys(("sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval"), _OFF),
    **dict.fromkeys(("local_attention", "no_rope_layers", "nope_layer_interval", "attn_temperature_tuning"), _OFF),
    **dict.fromkeys(("use_bidirectional_attention", "attention_sinks", "use_sinks", "prefix_lm"), _OFF),
    **dict.fromkeys(("alibi", "use_alibi", "rope_interleaved", "rope_interleave", "use_nope"), _OFF),
    **dict.fromkeys(("rope_ratio", "rotary_pct"), _ONE),
    "position_embedding_type": ("absolute", "learned_absolute", "rope", "rotary"),
    "is_causal": (True,),
    # Another layer (norms of queries and keys, parallel parts, experts, latent attention, an encoder)
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm", "query_key_norm"), _OFF),
    **dict.fromkeys(("attention_bias", "mlp_bias", "add_cross_attention", "is_encoder_decoder"), _OFF),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "parallel_residual", "layernorm_embedding"), _OFF),
    **dict.fromkeys(("apply_layernorm_1p", "rms_norm_unit_offset", "attn_output_gate", "use_output_gate"), _OFF),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (0, 1)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "num_kv_shared_layers"), _OFF),
}


class ConfigOptions:
    """The options that have not been read yet."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = dict(values)
        self._ignored: list[str] = []  # names for the log, of options inside others

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self._path}: {message}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return the value of a key, or the default if it is absent or null.

        Raises: ModelError for a value of another type.
        """
        value = self._values.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{key} is {value!r}, which has the wrong type")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if value < 1:
            raise self.error(f"{key} is {value}, not a whole number above 0")
        return int(value)

    def number(self, key: str, default: float) -> float:
        return float(self.take(key, (int, float), default))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.take(key, bool, default))

    def pass_over(self, *keys: str) -> None:
        """Take keys whose values change nothing in this family."""
        for key in keys:
            self._values.pop(key, None)

    def ignore(self, names: Iterable[str]) -> None:
        """Note options inside of others that this family does not read, for the log line of `finish`."""
        self._ignored += names

    def finish(self, family: str) -> None:
        """Refuse options that nobody has read if they change an output; log the names of the others."""
        for key, value in self._values.items():
            if key in _MEANINGFUL and not _changes_nothing(value, _MEANINGFUL[key]):
                raise self.error(f"option {key} = {value!r} is not supported for {family}: it changes the output")
        rest = [key for key in self._values if key not in _BOOKKEEPING and key not in _MEANINGFUL]
        if rest := sorted([*rest, *self._ignored]):
            line = f"{self._path}: ignored, because the layers of {family} read no such options: {', '.join(rest)}"
            log_once(__name__, logging.INFO, line)


def _changes_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value is null, empty, off or one of `neutral`."""
    if isinstance(value, bool):
        return any(value is each for each in neutral) or (not value and True not in neutral)
    return value is None or value in ("", [], {}) or value in neutral
