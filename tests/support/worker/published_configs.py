"""config.json of well-known models, written by hand from what is publicly known of them.

`SERVED` maps a name to the file's content, `REFUSED` to the content and the reason. Bookkeeping keys are as odd as they
are in public copies: the point of these files is that nobody has tidied them.
"""

from typing import Any

Json = dict[str, Any]

_SAMPLING = {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}


def _gpt2(**values: Any) -> Json:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "vocab_size": 50257,
        **values,
    }


def _opt(**values: Any) -> Json:
    return {
        "_name_or_path": "facebook/opt",
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "eos_token_id": 2,
        "ffn_dim": 3072,
        "hidden_size": 768,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "model_type": "opt",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "prefix": "</s>",
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
        **values,
    }


def _llama(**values: Any) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
        **values,
    }


def _llama3(**values: Any) -> Json:
    return _llama(
        **{
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
            **values,
        }
    )


def _mistral(**values: Any) -> Json:
    return {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
        **values,
    }


def _qwen2(**values: Any) -> Json:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
        **values,
    }


def _qwen3(**values: Any) -> Json:
    return _qwen2(
        **{
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            **values,
        }
    )


_YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}

SERVED: dict[str, Json] = {
    "gpt2": _gpt2(**_SAMPLING),
    "gpt2-medium": _gpt2(n_embd=1024, n_head=16, n_layer=24, n_special=0, predict_special_tokens=True, **_SAMPLING),
    "gpt2-large": _gpt2(n_embd=1280, n_head=20, n_layer=36, n_special=0, predict_special_tokens=True, **_SAMPLING),
    "gpt2-xl": _gpt2(n_embd=1600, n_head=25, n_layer=48, output_past=True, **_SAMPLING),
    "distilgpt2": _gpt2(n_layer=6, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, **_SAMPLING),
    "DialoGPT-medium": _gpt2(
        n_embd=1024,
        n_head=16,
        n_layer=24,
        task_specific_params={"conversational": {"max_length": 1000}},
    ),
    "stanford-mistral-gpt2": _gpt2(
        scale_attn_by_inverse_layer_idx=True, scale_attn_weights=True, reorder_and_upcast_attn=True, use_cache=False
    ),
    "opt-125m": _opt(),
    "opt-350m": _opt(
        hidden_size=1024,
        ffn_dim=4096,
        num_attention_heads=16,
        num_hidden_layers=24,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    ),
    "opt-1.3b": _opt(
        hidden_size=2048, ffn_dim=8192, num_attention_heads=32, num_hidden_layers=24, word_embed_proj_dim=2048
    ),
    "galactica-1.3b": _opt(
        activation_function="gelu",
        attention_dropout=0.1,
        bos_token_id=0,
        enable_bias=False,
        ffn_dim=8192,
        hidden_size=2048,
        layer_norm_elementwise_affine=False,
        learned_embeddings=True,
        num_attention_heads=32,
        num_hidden_layers=24,
        scale_embeddings=False,
        vocab_size=50000,
        word_embed_proj_dim=2048,
    ),
    "llama-7b": _llama(max_position_embeddings=2048, max_sequence_length=2048, pad_token_id=0, rms_norm_eps=1e-06),
    "llama-7b, first conversion": {
        key: value
        for key, value in _llama(
            architectures=["LLaMAForCausalLM"],
            max_sequence_length=2048,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=-1,
            rms_norm_eps=1e-06,
        ).items()
        if key != "max_position_embeddings"
    },
    "Llama-2-7b-hf": _llama(_name_or_path="meta-llama/Llama-2-7b-hf", pretraining_tp=1, rope_scaling=None),
    "Llama-2-70b-hf": _llama(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8),
    "LLaMA-2-7B-32K": _llama(
        auto_map={"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"},
        max_position_embeddings=32768,
        rope_scaling={"factor": 8.0, "type": "linear"},
    ),
    "vicuna-7b-v1.5-16k": _llama(
        max_sequence_length=16384, rope_scaling={"factor": 4.0, "type": "linear"}, pad_token_id=0
    ),
    "Yarn-Llama-2-7b-64k": _llama(
        max_position_embeddings=4096,
        rope_scaling={
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
            "finetuned": True,
        },
    ),
    "CodeLlama-7b-hf": _llama(
        max_position_embeddings=16384, rope_theta=1000000, vocab_size=32016, num_key_value_heads=32
    ),
    "deepseek-coder-6.7b": _llama(
        bos_token_id=32013,
        eos_token_id=32014,
        max_position_embeddings=16384,
        rms_norm_eps=1e-06,
        rope_scaling={"factor": 4.0, "type": "linear"},
        rope_theta=100000,
        vocab_size=32256,
    ),
    "Yi-6B": _llama(
        intermediate_size=11008,
        num_key_value_heads=4,
        pad_token_id=0,
        rope_theta=5000000.0,
        vocab_size=64000,
    ),
    "TinyLlama-1.1B": _llama(
        hidden_size=2048,
        intermediate_size=5632,
        max_position_embeddings=2048,
        num_hidden_layers=22,
        num_key_value_heads=4,
    ),
    "SmolLM-135M": _llama(
        bos_token_id=0,
        eos_token_id=0,
        hidden_size=576,
        intermediate_size=1536,
        max_position_embeddings=2048,
        num_attention_heads=9,
        num_hidden_layers=30,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        vocab_size=49152,
    ),
    "SmolLM2-135M": _llama(
        bos_token_id=0,
        eos_token_id=0,
        hidden_size=576,
        intermediate_size=1536,
        is_llama_config=True,
        max_position_embeddings=8192,
        num_attention_heads=9,
        num_hidden_layers=30,
        num_key_value_heads=3,
        rope_interleaved=False,
        rope_theta=100000,
        tie_word_embeddings=True,
        vocab_size=49152,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "Meta-Llama-3-8B": _llama3(eos_token_id=128001, max_position_embeddings=8192, rope_scaling=None),
    "Llama-3.1-8B-Instruct": _llama3(),
    "Llama-3.2-1B": _llama3(
        head_dim=64,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        rope_scaling={
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        tie_word_embeddings=True,
    ),
    "DeepSeek-R1-Distill-Llama-8B": _llama3(eos_token_id=128001),
    "Mistral-7B-v0.1": _mistral(),
    "Mistral-7B-Instruct-v0.3": _mistral(rope_theta=1000000.0, sliding_window=None, vocab_size=32768),
    "Mistral-Nemo": _mistral(
        head_dim=128,
        hidden_size=5120,
        max_position_embeddings=1024000,
        num_hidden_layers=40,
        rope_theta=1000000.0,
        sliding_window=None,
        vocab_size=131072,
    ),
    "zephyr-7b-beta": _mistral(_name_or_path="HuggingFaceH4/mistral-7b-sft-beta", pad_token_id=2),
    "Qwen1.5-0.5B": _qwen2(
        hidden_size=1024,
        intermediate_size=2816,
        max_window_layers=21,
        num_attention_heads=16,
        num_hidden_layers=24,
        num_key_value_heads=16,
        sliding_window=32768,
        tie_word_embeddings=True,
        vocab_size=151936,
    ),
    "Qwen2-7B": _qwen2(max_position_embeddings=131072),
    "Qwen2.5-7B-Instruct": _qwen2(),
    "Qwen2.5-7B-Instruct, long": _qwen2(**_YARN),
    "Qwen2.5-0.5B": _qwen2(
        hidden_size=896,
        intermediate_size=4864,
        max_window_layers=24,
        num_attention_heads=14,
        num_hidden_layers=24,
        num_key_value_heads=2,
        sliding_window=32768,
        tie_word_embeddings=True,
        use_mrope=False,
        vocab_size=151936,
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(
        eos_token_id=151643,
        hidden_size=1536,
        intermediate_size=8960,
        max_position_embeddings=131072,
        max_window_layers=21,
        num_attention_heads=12,
        num_key_value_heads=2,
        rope_theta=10000,
        sliding_window=4096,
        use_mrope=False,
    ),
    "Qwen3-0.6B": _qwen3(),
    "Qwen3-8B, long": _qwen3(
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        tie_word_embeddings=False,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "Qwen3-0.6B, saved by transformers 5": {
        **{key: value for key, value in _qwen3().items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")},
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "transformers_version": "5.2.0",
    },
}

REFUSED: dict[str, tuple[Json, str]] = {
    "Phi-3-mini": ({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, "model_type 'phi3' is not one of"),
    "phi-2": ({"model_type": "phi", "architectures": ["PhiForCausalLM"]}, "model_type 'phi' is not one of"),
    "gemma-2b": ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "model_type 'gemma' is not one of"),
    "gemma-2-2b": ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "model_type 'gemma2' is not one of"),
    "Mixtral-8x7B": ({"model_type": "mixtral", "num_local_experts": 8}, "model_type 'mixtral' is not one of"),
    "DeepSeek-V3": ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "model_type 'deepseek_v3' is not one of"),
    "Yi-6B, first release": ({"model_type": "Yi", "architectures": ["YiForCausalLM"]}, "model_type 'Yi' is not one of"),
    "Qwen2.5-VL": ({"model_type": "qwen2_5_vl", "vision_config": {}}, "model_type 'qwen2_5_vl' is not one of"),
    "Llama-2-7B-AWQ": (
        _llama(quantization_config={"bits": 4, "group_size": 128, "quant_method": "awq", "zero_point": True}),
        "quantization_config = ",
    ),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": (
        _qwen2(quantization_config={"bits": 4, "quant_method": "gptq", "desc_act": False}),
        "quantization_config = ",
    ),
    "an Eagle draft of Llama": (_llama(architectures=["LlamaForCausalLMEagle3"]), "architectures"),
    "a reward model": (_llama(architectures=["LlamaForSequenceClassification"]), "architectures"),
    "MiniCPM as a Llama": (_llama(scale_emb=12, scale_depth=1.4, dim_model_base=256), "option scale_emb = 12"),
    "Granite as a Llama": (_llama(embedding_multiplier=12.0, logits_scaling=8.0), "option embedding_multiplier = 12.0"),
    "SmolLM3 as a Llama": (_llama(no_rope_layers=[1, 1, 1, 0]), "option no_rope_layers"),
}
