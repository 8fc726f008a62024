"""Mistakes in T5 that give wrong output and no error: each is made here on purpose, and the comparison finds it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.errors import ModelError
from orca.core.domain.model import load_model_info
from orca.kernels.contract.reference import DistanceBias
from orca.worker.models import build
from orca.worker.models import config as config_module
from orca.worker.models.build import load_stage
from orca.worker.models.encoder_decoder import t5
from orca.worker.models.encoder_decoder.t5_config import T5Config
from support.worker.first_logits import SOURCES, START, is_close, reference_logits, stage_logits
from support.worker.stage_driver import Ask, Chain, generate, serve


def read_as(monkeypatch: pytest.MonkeyPatch, change: Callable[[T5Config], T5Config]) -> None:
    read = config_module.read_t5
    monkeypatch.setattr(config_module, "read_t5", lambda *args: change(read(*args)))


def no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are scaled as in other models."""
    monkeypatch.setattr(t5, "_SCALE", 6**-0.5)


def no_bias_after_layer_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias is used only in the layer in which the files have it."""
    make = t5._self_attention

    def self_attention(weights: Any, config: T5Config, stack: str, number: int, index: int) -> Any:
        attention = make(weights, config, stack, number, index)
        if number > 0:
            attention._bias = None
        return attention

    monkeypatch.setattr(t5, "_self_attention", self_attention)


def causal_buckets_in_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    make = t5.distance_bias
    monkeypatch.setattr(t5, "distance_bias", lambda table, config, **_: make(table, config, is_causal=True))


def bidirectional_buckets_in_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    make = t5.distance_bias
    monkeypatch.setattr(t5, "distance_bias", lambda table, config, **_: make(table, config, is_causal=False))


def distances_the_wrong_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    make = t5.distance_bias

    def turned(table: torch.Tensor, config: T5Config, *, is_causal: bool) -> DistanceBias:
        bias = make(table, config, is_causal=is_causal)
        return bias if is_causal else DistanceBias(bias.table.flip(1).contiguous(), bias.zero)

    monkeypatch.setattr(t5, "distance_bias", turned)


def bias_in_cross_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    call = t5.CrossAttention.__call__

    def biased(self: Any, x: torch.Tensor, step: Any, *more: Any) -> Any:
        bias = DistanceBias(torch.linspace(-3, 3, 105).view(5, 21), zero=10)
        attention = step.cross.attention
        step.cross.attention = lambda qkv, cache, scale: attention(qkv, cache, scale, bias)
        try:
            return call(self, x, step, *more)
        finally:
            step.cross.attention = attention

    monkeypatch.setattr(t5.CrossAttention, "__call__", biased)


def logits_of_an_untied_head_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy output shows no factor of the logits: the test below compares the logits themselves."""
    read_as(monkeypatch, lambda config: replace(config, logit_scale=26**-0.5))


def exact_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    read_as(monkeypatch, lambda config: replace(config, activation="gelu"))


def head_of_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    read_as(monkeypatch, lambda config: replace(config, is_tied=True))
    monkeypatch.setattr("orca.worker.models.build._tied_as_the_files_are", lambda _checkpoint, config, *_: config)


def encoder_without_its_last_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert t5.FAMILY.encoder is not None
    without = replace(t5.FAMILY, encoder=replace(t5.FAMILY.encoder, norm=lambda *_: None))
    monkeypatch.setitem(build._FAMILIES, T5Config, without)


MISTAKES = (
    no_scale,
    no_bias_after_layer_0,
    causal_buckets_in_the_encoder,
    bidirectional_buckets_in_the_decoder,
    distances_the_wrong_way_round,
    bias_in_cross_attention,
    logits_of_an_untied_head_scaled,
    exact_gelu,
    head_of_the_embedding,
    encoder_without_its_last_norm,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("t5_gated", tmp_path_factory.mktemp("t5"))


def test_without_a_mistake_the_logits_are_those_of_the_reference(folder: Path) -> None:
    assert is_close(stage_logits(folder), reference_logits(folder))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_changes_the_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    wanted = reference_logits(folder)
    mistake(monkeypatch)
    assert not is_close(stage_logits(folder), wanted)


@pytest.mark.parametrize("key", ["scale_decoder_outputs", None])
def test_the_scale_of_logits_follows_its_key_or_else_the_tied_head(tmp_path: Path, key: str | None) -> None:
    folder = tiny_checkpoint("t5", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("scale_decoder_outputs", None)
    if key is not None:
        config[key] = False
    (folder / "config.json").write_text(json.dumps(config))
    assert is_close(stage_logits(folder), reference_logits(folder))


@pytest.mark.parametrize("forced_eos", [60, [70, 60, 80]])
def test_forced_tokens_are_those_of_generate(tmp_path: Path, forced_eos: int | list[int]) -> None:
    folder = tiny_checkpoint("umt5", tmp_path)
    path = folder / "generation_config.json"
    forced = {"forced_bos_token_id": 50, "forced_eos_token_id": forced_eos}
    path.write_text(json.dumps(json.loads(path.read_text()) | forced))
    info = load_model_info(folder)
    assert info.encoder_decoder is not None
    beginning = info.encoder_decoder.beginning()
    assert beginning == (START, 50)
    asks = [Ask(source, 6, decoder_prefix=beginning) for source in SOURCES]
    chain = Chain(folder)
    serve(chain, asks)
    chain.close()
    model = reference_model(folder)
    for ask in asks:
        wanted = generate(model, ask.prompt, 7, (START,)).tokens
        assert wanted[0] == 50
        assert ask.output == wanted[1:]
        assert ask.output[-1] == 60


def test_float16_is_refused_because_its_mlp_overflows(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: t5 overflows in float16"):
        load_model_info(folder, dtype="float16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "swiglu-relu"}, "feed_forward_proj 'swiglu-relu'"),
        ({"feed_forward_proj": "gated-tanh", "dense_act_fn": "tanh"}, "activation 'tanh'"),
        ({"dense_act_fn": "relu"}, "dense_act_fn contradicts feed_forward_proj"),
        ({"is_gated_act": False}, "is_gated_act contradicts feed_forward_proj"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets 2"),
        ({"relative_attention_max_distance": 4}, "relative_attention_max_distance 4"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"d_kv": "64"}, "d_kv is '64'"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "decoder_start_token_id"),
        ({"quantization_config": {"bits": 4}}, "option quantization_config"),
        ({"model_type": "mt5"}, "architectures"),
        ({"num_decoder_layers": 4}, r"no tensor decoder\.block\.3"),
        ({"num_decoder_layers": 0}, "num_decoder_layers is 0"),
        ({"d_ff": 44}, "shape"),
        ({"vocab_size": 188}, "shape"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / name).read_text())
        changed = {key: value for key, value in change.items() if name == "config.json" or key in config}
        (tmp_path / name).write_text(json.dumps(config | changed))
    with pytest.raises(ModelError, match=message):
        load_stage(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "shared.weight",
        "encoder.final_layer_norm.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder.block.1.layer.1.EncDecAttention.k.weight",
    ],
)
def test_a_missing_tensor_is_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"{tmp_path} has no tensor {name}"):
        load_stage(tmp_path)
