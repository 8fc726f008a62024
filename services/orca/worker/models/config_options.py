"""The options of a model's config.json, each read once; an option that nobody reads is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca.core.domain.errors import ModelError

# Options that say nothing about the numbers of a forward pass: bookkeeping, training, and those that
# generation_config.json, the tokenizer or core.domain.model answer for.
_INERT_TEXT = """
    architectures model_type transformers_version _name_or_path name_or_path torch_dtype dtype initializer_range
    init_std use_cache bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix
    task_specific_params id2label label2id num_labels problem_type finetuning_task return_dict output_hidden_states
    output_attentions torchscript use_bfloat16 chunk_size_feed_forward is_encoder_decoder is_decoder
    cross_attention_hidden_size tie_encoder_decoder pruned_heads attention_dropout hidden_dropout resid_pdrop embd_pdrop
    attn_pdrop dropout activation_dropout layerdrop summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout n_ctx reorder_and_upcast_attn pretraining_tp gradient_checkpointing
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tokenizer_class
    tf_legacy_loss use_mrope attn_implementation _attn_implementation _attn_implementation_autoset unsloth_version
    unsloth_fixed max_window_layers
"""
_INERT = frozenset(_INERT_TEXT.split())


class ConfigOptions:
    """The options that have not been read yet."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = dict(values)

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

    def refuse_unless(self, key: str, *neutral: object) -> None:
        """Refuse a known option unless it is absent, null or one of the values that Orca supports."""
        value = self._values.pop(key, neutral[0])
        if value is not None and value not in neutral:
            raise self.error(f"{key} = {value!r} is not supported")

    def refuse_rest(self, family: str) -> None:
        """Refuse options that nobody has read, unless they are known to be inert or have an empty value."""
        for key, value in self._values.items():
            if key not in _INERT and value not in (None, False, "", [], {}):
                raise self.error(f"option {key} = {value!r} is not known for {family} and might change the output")
