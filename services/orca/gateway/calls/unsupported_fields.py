"""Fields that would change an answer and are not supported: refused by name, never dropped.

Each field has its neutral values, which are allowed; null is always neutral. A field that is missing here and in
`bodies.py` is harmless and ignored. The names are from OpenAI's API and from additions of other servers that clients
use. If a constraint or a sampler were dropped silently, the client would take the answer for one that obeys it.
"""

from collections.abc import Mapping
from typing import Any

from orca.gateway.errors import ApiError
from orca.gateway.models.generation_settings import NEUTRAL_VALUES

_EMPTY: tuple[Any, ...] = (False, [], "", {})

_GENERATION: dict[str, tuple[Any, ...]] = {
    # Transformers: what `generate` takes. The calls' own fields among them never come here.
    **{name: (*values, *_EMPTY) for name, values in NEUTRAL_VALUES.items()},
    "generation_config": ({},),
    "decoder_input_ids": ([],),
    "decoder_start_token_id": (),
    "src_lang": ("",),
    "tgt_lang": ("",),
    # OpenAI
    "verbosity": ("medium",),
    # vLLM
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "logprob_token_ids": ([],),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (0,),
    "trace_decode_token_ids": ([],),
    "detokenize": (True,),
    "flat_logprobs": (False,),
    # SGLang
    "regex": ("",),
    "ebnf": ("",),
    "json_schema": ("",),
    "stop_regex": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "session_params": ({},),
    "lora_path": (),
    "input_embeds": (),
    # CTranslate2, LMDeploy and others
    "beam_size": (1,),
    "beam_search": (False,),
    "n_beams": (1,),
    # TGI, pipelines of Transformers, and llama.cpp
    "grammar": ("",),
    "adapter_id": (),
    "lora": ([],),
    "watermark": (False,),
    "do_sample": (True,),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "max_length": (),
    "n_predict": (),
    "repeat_penalty": (1, 1.0),
    "dynatemp_range": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "samplers": ([],),
    "image_data": ([],),
    # TensorRT-LLM, Dynamo and Gemini's proxies
    "beam_width": (1,),
    "beamWidth": (1,),
    "beam_search_diversity_rate": (0,),
    "nvext": ({},),
    "response_schema": (),
}

COMPLETION: dict[str, tuple[Any, ...]] = _GENERATION | {
    "suffix": ("",),
    # Fields of chats
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "max_completion_tokens": (),  # accepted if it equals max_tokens (`accept.py`)
    "top_logprobs": (0,),
}

CHAT: dict[str, tuple[Any, ...]] = _GENERATION | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "thinking": ({"type": "disabled"},),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}

_ENCODER_DECODER = "For an encoder-decoder model, begin the answer with decoder_prefix."
_INSTEAD: dict[str, str] = {
    "tools": "Use /v1/chat/completions.",
    "tool_choice": "Use /v1/chat/completions.",
    "functions": "Use tools of /v1/chat/completions.",
    "function_call": "Use tool_choice of /v1/chat/completions.",
    "continue_final_message": "A completion continues its prompt.",
    "max_completion_tokens": "Use max_tokens.",
    "top_logprobs": "Use logprobs.",
    **dict.fromkeys(("tgt_lang", "decoder_input_ids", "forced_bos_token_id"), _ENCODER_DECODER),
    "src_lang": "For an encoder-decoder model, write the tokens of the language around the prompt, with "
    "add_special_tokens false.",
}
"""Fields for whose purpose a call has another field -> what to do."""

STRUCTURED: dict[str, tuple[Any, ...]] = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_fallback": (False,),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "_backend": (),
    "_backend_was_auto": (False,),
}
"""The same, of `structured_outputs`."""

MESSAGE: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "audio": (),
}


def refuse_unsupported(given: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raises: ApiError naming the first field of the table that is set to more than a neutral value.

    The order of the table decides: SDKs add a `tool_choice` to their caller's tools, and some write it before them.

    Args:
        given: the fields of a body beyond those that are supported.
        where: prefix of the field's name in the error, such as `messages[2].`.
    """
    for name, neutral in table.items():
        value = given.get(name)
        if value is not None and not _is_one_of(value, neutral):
            raise _unsupported(f"{where}{name}")


def _unsupported(name: str) -> ApiError:
    message = " ".join((f"Unsupported parameter: '{name}' is not supported with this model.", _INSTEAD.get(name, "")))
    return ApiError(400, message.rstrip(), param=name, code="unsupported_parameter")


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        # SDKs write the options that their caller left out as null.
        value = {name: inner for name, inner in value.items() if inner is not None}
    # True == 1 in Python, but not in JSON.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)
