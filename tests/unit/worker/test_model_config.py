"""worker.models.config: both namings of Hugging Face, their defaults, and refusal of what is not built."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca.core.domain.errors import ModelError
from orca.worker.models.config import GPT2Config, LlamaConfig, OPTConfig, load_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 60,
    "max_position_embeddings": 128,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
OPT = {k: v for k, v in LLAMA.items() if k != "intermediate_size"} | {"model_type": "opt", "ffn_dim": 60}


def llama(folder: Path, **values: Any) -> LlamaConfig:
    config = read(folder, LLAMA | values)
    assert isinstance(config, LlamaConfig)
    return config


def read(folder: Path, values: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return load_config(folder)


def test_absent_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = llama(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-6)
    assert (config.is_tied, config.has_qkv_bias, config.rope.kind, config.rope.theta) == (False, False, "default", 1e4)
    gpt2 = read(tmp_path, GPT2)
    assert isinstance(gpt2, GPT2Config)
    assert (gpt2.intermediate_size, gpt2.activation, gpt2.is_tied) == (128, "gelu_new", True)
    opt = read(tmp_path, OPT)
    assert isinstance(opt, OPTConfig)
    assert (opt.embedding_dim, opt.norms_first, opt.has_final_norm, opt.activation) == (32, True, True, "relu")


def test_old_and_new_names_of_rope_options_are_equivalent(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 64}
    new = llama(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    old = llama(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    assert new == old
    assert (new.rope.theta, new.rope.original_max_positions) == (5e5, 64)


def test_each_family_slides_its_windows_where_its_config_says(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "num_key_value_heads": 2}
    assert llama(tmp_path, **mistral).windows == (4096,) * 3
    assert llama(tmp_path, **mistral, sliding_window=None).windows == (None,) * 3
    qwen = {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 9, "max_window_layers": 2}
    assert llama(tmp_path, **qwen).windows == (None,) * 3
    assert llama(tmp_path, **qwen, use_sliding_window=True).windows == (None, None, 9)
    assert llama(tmp_path, **qwen | {"max_window_layers": 0}, use_sliding_window=True).windows == (9,) * 3
    assert llama(tmp_path, **qwen | {"sliding_window": None}, use_sliding_window=True).windows == (None,) * 3
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert llama(tmp_path, **qwen, use_sliding_window=True, layer_types=kinds).windows == (9, None, None)


def test_qwen3_has_its_own_head_size_and_norms_its_heads(tmp_path: Path) -> None:
    config = llama(tmp_path, model_type="qwen3", num_key_value_heads=4)
    assert (config.head_dim, config.has_qk_norm, config.has_qkv_bias) == (128, True, False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantized": (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    "scaled logits": (LLAMA | {"logit_scale": 0.5}, "option logit_scale = 0.5 is not supported for llama"),
    "scaled embeddings": (OPT | {"scale_embeddings": True}, "option scale_embeddings = True"),
    "capped logits": (LLAMA | {"final_logit_softcapping": 30.0}, "option final_logit_softcapping = 30.0"),
    "muP": (LLAMA | {"embedding_multiplier": 12}, "option embedding_multiplier = 12"),
    "norms of heads": (LLAMA | {"use_qk_norm": True}, "option use_qk_norm = True"),
    "both directions": (LLAMA | {"is_causal": False}, "option is_causal = False"),
    "layers that differ": (LLAMA | {"per_layer_config": {"1": {"head_dim": 8}}}, "option per_layer_config"),
    "some layers slide": (LLAMA | {"layer_types": ["sliding_attention"] * 3}, "no sliding window"),
    "bias of another kind": (LLAMA | {"attention_bias": "qkv"}, "attention_bias is 'qkv'"),
    "biases of a mistral": (LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "mlp_bias": True}, "mlp_bias"),
    "a window of 0": (
        LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 0},
        "sliding_window is 0",
    ),
    "RoPE with a text for a number": (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": "4.0"}},
        "RoPE option factor is '4.0'",
    ),
    "longrope for other heads": (
        LLAMA | {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
        "short_factor has 1 numbers; head_dim 8 needs 4",
    ),
    "window of a llama": (LLAMA | {"sliding_window": 7}, "sliding_window = 7"),
    "cross attention": (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
    "unknown activation": (LLAMA | {"hidden_act": "mish"}, "activation 'mish'"),
    "unknown RoPE": (LLAMA | {"rope_scaling": {"type": "mrope"}}, "RoPE type 'mrope'"),
    "RoPE without its factor": (LLAMA | {"rope_scaling": {"type": "linear"}}, "RoPE type linear needs factor"),
    "RoPE by layer": (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "RoPE options"),
    "partial RoPE": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "size of null": (LLAMA | {"hidden_size": None}, "hidden_size is missing"),
    "size of the wrong type": (LLAMA | {"hidden_size": "32"}, "hidden_size is '32'"),
    "flag of the wrong type": (LLAMA | {"mlp_bias": 1}, "mlp_bias is 1"),
    "negative size": (LLAMA | {"intermediate_size": -1}, "intermediate_size is -1"),
    "uneven groups": (LLAMA | {"num_key_value_heads": 3}, "4 heads do not share 3"),
    "odd head": (LLAMA | {"head_dim": 7}, "head_dim 7 is odd"),
    "heads that do not divide": (GPT2 | {"n_head": 5}, "n_embd 32 is not a multiple of n_head 5"),
    "layer types of another length": (
        LLAMA | {"model_type": "qwen3", "layer_types": ["full_attention"]},
        "layer_types",
    ),
    "sliding without a window": (
        LLAMA | {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3},
        "no sliding window",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_are_refused_by_name(name: str, tmp_path: Path) -> None:
    values, reason = REFUSED[name]
    with pytest.raises(ModelError) as refused:
        read(tmp_path, values)
    assert reason in str(refused.value)
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize("value", [None, False, "", [], {}, True, "text", 7, [1], {"a": 1}])
def test_keys_that_no_layer_reads_are_ignored(tmp_path: Path, value: Any) -> None:
    assert llama(tmp_path, something_new=value) == llama(tmp_path)


def test_ignored_keys_are_logged_once_on_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scaling = {"type": "linear", "factor": 2.0, "new_in_2027": 1}
    for _ in range(2):
        llama(tmp_path, zeta=1, auto_map={"AutoModel": "x.Y"}, rope_scaling=scaling, torch_dtype="bfloat16")
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("read no such options: RoPE's new_in_2027, auto_map, zeta")
    assert "config.json" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", 1.0),
        ("embedding_multiplier", 1),
        ("final_logit_softcapping", None),
        ("attn_logit_softcapping", 0.0),
        ("use_qk_norm", False),
        ("is_causal", True),
        ("sliding_window", None),
        ("num_experts", 0),
        ("partial_rotary_factor", 1),
        ("quantization_config", None),
    ],
)
def test_options_of_other_families_pass_with_the_value_that_changes_nothing(
    tmp_path: Path, key: str, value: Any
) -> None:
    assert llama(tmp_path, **{key: value}) == llama(tmp_path)


def test_sizes_that_are_absent_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    gpt2 = read(tmp_path, {"model_type": "gpt2"})
    assert (gpt2.hidden_size, gpt2.num_heads, gpt2.num_layers, gpt2.vocab_size) == (768, 12, 12, 50257)
    assert llama(tmp_path, model_type="mistral", num_attention_heads=8, sliding_window=None).num_kv_heads == 8
    assert llama(tmp_path, model_type="mistral", num_key_value_heads=None).num_kv_heads == 4


def test_gpt2_knows_its_sizes_under_the_names_of_other_families_too(tmp_path: Path) -> None:
    names = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 64}
    assert read(tmp_path, {"model_type": "gpt2", "vocab_size": 50, **names}) == read(tmp_path, GPT2)


def test_a_qwen2_has_its_biases_whatever_the_key_of_other_families_says(tmp_path: Path) -> None:
    qwen2 = {"model_type": "qwen2", "num_key_value_heads": 4}
    for value in (True, False):
        config = llama(tmp_path, **qwen2, attention_bias=value)
        assert (config.has_qkv_bias, config.has_output_bias) == (True, False)
