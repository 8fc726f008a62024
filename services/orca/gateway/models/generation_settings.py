"""Finds the settings of a model's folder that `generate` of transformers applies and Orca does not.

In Orca a call brings its own settings, whose defaults are OpenAI's. So the gateway names in its log what a user of
transformers would expect to count.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "temperature", "top_p"), (1,)),
    **dict.fromkeys(("typical_p", "repetition_penalty", "encoder_repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "top_k", "min_p"), (0,)),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "top_h", "penalty_alpha"), (0,)),
    "max_length": (20,),
    "guidance_scale": (1,),
    **dict.fromkeys(("min_new_tokens", "max_new_tokens", "max_time", "stop_strings", "early_stopping"), ()),
    **dict.fromkeys(("do_sample", "bad_words_ids", "force_words_ids", "constraints", "sequence_bias"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "token_healing"), ()),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config", "dola_layers"), ()),
}
"""Settings that change an output -> the values that change nothing, besides null, false and empty ones. The names are
those of GenerationConfig in transformers 4 and 5; config.json of older models has them, too."""
_APPLIED = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "suppress_tokens"})
_FORCED = frozenset({"forced_bos_token_id", "forced_eos_token_id"})  # applied with an encoder-decoder model
_BOOKKEEPING_TEXT = """
    _from_model_config transformers_version use_cache cache_implementation cache_config return_legacy_cache low_memory
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate prefill_chunk_size
    compile_config disable_compile is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens
    max_matching_ngram_size trust_remote_code
"""
_BOOKKEEPING = frozenset(_BOOKKEEPING_TEXT.split())
_BAD_WORDS = "bad_words_ids"
_PIPELINE_KEY = "task_specific_params"
_SHOWN_CHARS = 60


def unapplied_settings(folder: Path, *, is_encoder_decoder: bool) -> dict[str, str]:
    """Return the settings that have no effect here, as JSON by name, each long one cut.

    As in `generate`, those of config.json count only without a generation_config.json. Pipelines of transformers take
    some more from `task_specific_params` of config.json.

    Args: folder: a model's that `load_model_info` has accepted.
    """
    path, config = folder / "generation_config.json", _read(folder / "config.json")
    if path.is_file():
        found = {key: value for key, value in _read(path).items() if key not in _BOOKKEEPING}
    else:
        found = {key: value for key, value in config.items() if key in NEUTRAL_VALUES}
    found[_PIPELINE_KEY] = config.get(_PIPELINE_KEY)
    if _BAD_WORDS in found:  # single tokens are applied (core.domain.model)
        found[_BAD_WORDS] = [word for word in found[_BAD_WORDS] or () if len(word) > 1]
    applied = _APPLIED | _FORCED if is_encoder_decoder else _APPLIED
    changing = {key: value for key, value in found.items() if key not in applied and not _is_neutral(key, value)}
    return {key: _shown(value) for key, value in sorted(changing.items())}


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _is_neutral(key: str, value: object) -> bool:
    if isinstance(value, bool) or value is None:
        return not value
    return value in ("", [], {}) or value in NEUTRAL_VALUES.get(key, ())


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
