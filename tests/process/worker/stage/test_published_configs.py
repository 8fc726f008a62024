"""Well-known models by their config.json: each loads and computes what transformers computes, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from orca.bench.parts.tiny_families import give_effect, reference_model
from orca.core.domain.errors import ModelError
from orca.core.domain.model import load_model_info
from orca.worker.models.config import load_config
from support.worker.published_configs import REFUSED, SERVED
from support.worker.stage_driver import Chain, differences, generate, random_asks, serve

NEW_MAX = 12
# Lengths are divided by this number, so that a short prompt crosses them.
SHORTER = 512
LENGTHS = ("n_positions", "n_ctx", "max_position_embeddings", "max_sequence_length", "sliding_window")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with small sizes; every other key stays as it is published."""
    small = dict(config)
    heads = {"n_head": 4, "num_attention_heads": 4}
    sizes = {"n_embd": 24, "hidden_size": 24, "intermediate_size": 36, "ffn_dim": 36, "n_layer": 3, "vocab_size": 97}
    for key, value in {**heads, **sizes, "num_hidden_layers": 3, "head_dim": 8, "max_window_layers": 2}.items():
        if key in small:
            small[key] = value
    if "num_key_value_heads" in small:
        small["num_key_value_heads"] = 4 if config["num_key_value_heads"] == config["num_attention_heads"] else 2
    if "word_embed_proj_dim" in small:
        small["word_embed_proj_dim"] = 24 if config["word_embed_proj_dim"] == config["hidden_size"] else 12
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][:3]
    for key in LENGTHS:
        if small.get(key) is not None:
            small[key] = max(24, small[key] // SHORTER)
    for key in ("rope_scaling", "rope_parameters"):
        if small.get(key) is not None:
            small[key] = dict(small[key])
            if "original_max_position_embeddings" in small[key]:
                small[key]["original_max_position_embeddings"] //= SHORTER
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if key in small:
            small[key] = None
    return small


def made(config: dict[str, Any], folder: Path) -> Path:
    """Save a random model for a config.json, which stays as it is."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    read = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(read).float().eval()
    give_effect(model, config["model_type"])
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("name", SERVED)
def test_a_published_config_loads_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SERVED[name]))
    config = load_config(tmp_path)
    expected = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.num_layers, config.num_heads) == (expected.num_hidden_layers, expected.num_attention_heads)
    assert config.is_tied == expected.tie_word_embeddings


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        load_config(tmp_path)
    assert reason in str(refused.value)


CONTEXTS = {
    "gpt2": 1024,
    "llama-7b, first conversion": 2048,
    "LLaMA-2-7B-32K": 262144,
    "vicuna-7b-v1.5-16k": 16384,
    "Yarn-Llama-2-7b-64k": 65536,
    "Llama-3.1-8B-Instruct": 131072,
    "Qwen2.5-7B-Instruct": 32768,
    "Qwen2.5-7B-Instruct, long": 131072,
    "Qwen3-0.6B": 40960,
    "Qwen3-8B, long": 131072,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_the_one_of_the_models_card(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SERVED[name]))
    empty = json.dumps({}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
    assert load_model_info(tmp_path).max_model_len == CONTEXTS[name]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SERVED)
def test_a_published_model_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    folder = made(shrunk(SERVED[name]), tmp_path / "model")
    info = load_model_info(folder)
    asks = random_asks(info.vocab_size, 6, seed=5, prompt_max=min(60, info.max_model_len - NEW_MAX), new_max=NEW_MAX)
    chain = Chain(folder)
    serve(chain, asks, chunk=11)
    chain.close()
    reference = reference_model(folder)
    expected = [generate(reference, ask.prompt, ask.max_new_tokens) for ask in asks]
    assert differences(asks, expected) == 0
    assert len({token for ask in asks for token in ask.output}) >= 3, "the outputs say nothing"
