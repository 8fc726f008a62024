"""config.json and generation_config.json of well-known encoder-decoder models, from what is publicly known of them.

They follow the files that their authors publish on the Hugging Face hub (google/flan-t5-small, facebook/bart-base,
facebook/bart-large-cnn, Helsinki-NLP/opus-mt-en-de, facebook/nllb-200-distilled-600M), written by hand from memory.
Bookkeeping keys are as odd as they are there. bart-base names `BartModel`, and has no generation_config.json.
"""

from typing import Any

Json = dict[str, Any]

_SUMMARIES = {"early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "num_beams": 4}
_BART_LABELS = {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}


def _translates(language: str) -> Json:
    prefix = f"translate English to {language}: "
    return {"early_stopping": True, "max_length": 300, "num_beams": 4, "prefix": prefix}


def _bart(**values: Any) -> Json:
    return {
        "activation_dropout": 0.1,
        "activation_function": "gelu",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "classif_dropout": 0.1,
        "classifier_dropout": 0.0,
        "decoder_layerdrop": 0.0,
        "decoder_start_token_id": 2,
        "dropout": 0.1,
        "early_stopping": True,
        "encoder_layerdrop": 0.0,
        "eos_token_id": 2,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "gradient_checkpointing": False,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_position_embeddings": 1024,
        "model_type": "bart",
        "no_repeat_ngram_size": 3,
        "normalize_before": False,
        "num_beams": 4,
        "pad_token_id": 1,
        "scale_embedding": False,
        "torch_dtype": "float32",
        "use_cache": True,
        **_BART_LABELS,
        **values,
    }


def _stacks(*, layers: int, heads: int, ffn_dim: int) -> Json:
    return {
        f"{stack}_{key}": value
        for stack in ("encoder", "decoder")
        for key, value in {"layers": layers, "attention_heads": heads, "ffn_dim": ffn_dim}.items()
    }


CONFIGS: dict[str, Json] = {
    "flan-t5-small": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_ff": 1024,
        "d_kv": 64,
        "d_model": 512,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "n_positions": 512,
        "num_decoder_layers": 8,
        "num_heads": 6,
        "num_layers": 8,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "task_specific_params": {
            "summarization": {**_SUMMARIES, "max_length": 200, "min_length": 30, "prefix": "summarize: "},
            "translation_en_to_de": _translates("German"),
            "translation_en_to_fr": _translates("French"),
            "translation_en_to_ro": _translates("Romanian"),
        },
        "tie_word_embeddings": False,
        "transformers_version": "4.23.1",
        "use_cache": True,
        "vocab_size": 32128,
    },
    "bart-base": _bart(
        _name_or_path="bart-base",
        architectures=["BartModel"],
        d_model=768,
        normalize_embedding=True,
        num_hidden_layers=6,
        task_specific_params={
            "summarization": {"length_penalty": 1.0, "max_length": 128, "min_length": 12, "num_beams": 4},
            "summarization_cnn": {"length_penalty": 2.0, "max_length": 142, "min_length": 56, "num_beams": 4},
            "summarization_xsum": {"length_penalty": 1.0, "max_length": 62, "min_length": 11, "num_beams": 6},
        },
        transformers_version="4.12.0.dev0",
        vocab_size=50265,
        **_stacks(layers=6, heads=12, ffn_dim=3072),
    ),
    "bart-large-cnn": _bart(
        _num_labels=3,
        activation_dropout=0.0,
        architectures=["BartForConditionalGeneration"],
        d_model=1024,
        force_bos_token_to_be_generated=True,
        length_penalty=2.0,
        max_length=142,
        min_length=56,
        num_hidden_layers=12,
        output_past=True,
        prefix=" ",
        task_specific_params={"summarization": {**_SUMMARIES, "max_length": 142, "min_length": 56}},
        transformers_version="4.7.0.dev0",
        vocab_size=50264,
        **_stacks(layers=12, heads=16, ffn_dim=4096),
    ),
    "opus-mt-en-de": {
        "activation_dropout": 0.0,
        "activation_function": "swish",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "architectures": ["MarianMTModel"],
        "attention_dropout": 0.0,
        "bad_words_ids": [[58100]],
        "bos_token_id": 0,
        "classif_dropout": 0.0,
        "classifier_dropout": 0.0,
        "d_model": 512,
        "decoder_layerdrop": 0.0,
        "decoder_start_token_id": 58100,
        "decoder_vocab_size": 58101,
        "dropout": 0.1,
        "encoder_layerdrop": 0.0,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_length": 512,
        "max_position_embeddings": 512,
        "model_type": "marian",
        "normalize_before": False,
        "normalize_embedding": False,
        "num_beams": 6,
        "num_hidden_layers": 6,
        "pad_token_id": 58100,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "static_position_embeddings": True,
        "transformers_version": "4.22.0.dev0",
        "use_cache": True,
        "vocab_size": 58101,
        **_BART_LABELS,
        **_stacks(layers=6, heads=8, ffn_dim=2048),
    },
    "nllb-200-distilled-600M": {
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["M2M100ForConditionalGeneration"],
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "d_model": 1024,
        "decoder_layerdrop": 0,
        "decoder_start_token_id": 2,
        "dropout": 0.1,
        "encoder_layerdrop": 0,
        "eos_token_id": 2,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_length": 200,
        "max_position_embeddings": 1024,
        "model_type": "m2m_100",
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "scale_embedding": True,
        "tokenizer_class": "NllbTokenizer",
        "torch_dtype": "float32",
        "transformers_version": "4.21.0.dev0",
        "use_cache": True,
        "vocab_size": 256206,
        **_stacks(layers=12, heads=16, ffn_dim=4096),
    },
}

GENERATIONS: dict[str, Json] = {
    "flan-t5-small": {"_from_model_config": True, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    "bart-large-cnn": {
        "_from_model_config": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "max_length": 142,
        "min_length": 56,
        "pad_token_id": 1,
        "transformers_version": "4.27.0.dev0",
        **_SUMMARIES,
    },
    "opus-mt-en-de": {
        "bad_words_ids": [[58100]],
        "bos_token_id": 0,
        "decoder_start_token_id": 58100,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "max_length": 512,
        "num_beams": 6,
        "pad_token_id": 58100,
        "renormalize_logits": True,
        "transformers_version": "4.32.0.dev0",
    },
    "nllb-200-distilled-600M": {
        "_from_model_config": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "max_length": 200,
        "pad_token_id": 1,
        "transformers_version": "4.27.0.dev0",
    },
}
