"""Mistakes in BART and models in its form that give wrong output and no error: the comparison finds each."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.errors import ModelError
from orca.worker.models import config as config_module
from orca.worker.models.build import load_stage
from orca.worker.models.encoder_decoder import bart
from orca.worker.models.encoder_decoder.bart_config import BartConfig, Positions
from support.worker.first_logits import is_close, reference_logits, stage_logits

FAMILIES = ("bart", "mbart", "m2m_100", "marian")


def changed(**values: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a mistake: the config is read with other values."""

    def mistake(patch: pytest.MonkeyPatch) -> None:
        read = config_module.read_bart
        patch.setattr(config_module, "read_bart", lambda *args: replace(read(*args), **values))

    return mistake


def interleaved_sinusoids(patch: pytest.MonkeyPatch) -> None:
    """Sines and cosines take turns, as in the paper."""
    make = bart.sinusoids

    def interleaved(config: BartConfig) -> torch.Tensor:
        halves = make(config).chunk(2, dim=1)
        return torch.stack(halves, dim=2).flatten(1)

    patch.setattr(bart, "sinusoids", interleaved)


def learned_positions_from_zero(patch: pytest.MonkeyPatch) -> None:
    """The rows of padding belong to the first two tokens."""

    def positions(weights: Any, config: BartConfig, name: str) -> torch.Tensor:
        whole: torch.Tensor = weights.tensor(name, (config.max_positions + 2, config.hidden_size))
        return whole[: config.max_positions]

    patch.setattr(bart, "_positions", positions)


def one_stack_for_both(patch: pytest.MonkeyPatch) -> None:
    """Targets get the positions of sources."""
    patch.setattr(bart.BartTargetEmbedding, "stack", "encoder")


MISTAKES = {
    "bart": {
        "positions from 0": learned_positions_from_zero,
        "no embedding norm": changed(has_embedding_norm=False),
        "no bias of logits": changed(has_logits_bias=False),
        "scaled embedding": changed(embedding_scale=24**0.5),
        "other activation": changed(activation="gelu_new"),
        "one stack for both": one_stack_for_both,
    },
    "mbart": {
        "no scale": changed(embedding_scale=1.0),
        "norms after": changed(norms_first=False),
        "no embedding norm": changed(has_embedding_norm=False),
        "positions from 0": learned_positions_from_zero,
    },
    "m2m_100": {
        "positions from 0": changed(first_position=0),
        "frequencies of Marian": changed(positions=Positions.SINUSOIDS_FROM_ZERO),
        "interleaved": interleaved_sinusoids,
        "no scale": changed(embedding_scale=1.0),
    },
    "marian": {
        "positions from 2": changed(first_position=2),
        "frequencies of fairseq": changed(positions=Positions.SINUSOIDS_FROM_PADDING),
        "interleaved": interleaved_sinusoids,
        "no scale": changed(embedding_scale=1.0),
        "no bias of logits": changed(has_logits_bias=False),
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny_checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_mistake_the_logits_are_those_of_the_reference(folders: dict[str, Path], family: str) -> None:
    assert is_close(stage_logits(folders[family]), reference_logits(folders[family]))


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, mistakes in MISTAKES.items() for name in mistakes]
)
def test_a_mistake_changes_the_logits(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, name: str
) -> None:
    MISTAKES[family][name](monkeypatch)
    assert not is_close(stage_logits(folders[family]), reference_logits(folders[family]))


def copy(folder: Path, target: Path, **change: Any) -> Path:
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | change))
    return target


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("bart", {"normalize_before": True}, "normalize_before is True, and it is False in every bart model"),
        ("mbart", {"normalize_before": False}, "normalize_before is False, and it is True in every mbart model"),
        ("marian", {"static_position_embeddings": False}, "static_position_embeddings is False"),
        ("bart", {"normalize_embedding": False}, "normalize_embedding is False"),
        ("bart", {"encoder_attention_heads": 5}, "d_model 24 is not a multiple of encoder_attention_heads 5"),
        ("bart", {"activation_function": "tanh"}, "activation 'tanh'"),
        ("bart", {"decoder_layers": 3}, r"no tensor model\.decoder\.layers\.2"),
        ("bart", {"encoder_layers": 2, "decoder_layers": 3}, r"no tensor model\.decoder\.layers\.2"),
        ("bart", {"max_position_embeddings": 65}, "shape"),
        ("bart", {"quantization_config": {"bits": 4}}, "option quantization_config"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_stage(copy(folders[family], tmp_path, **change))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_an_embedding_of_a_stack_is_refused_unless_it_is_the_shared_one(
    folders: dict[str, Path], tmp_path: Path, stack: str
) -> None:
    folder = copy(folders["bart"], tmp_path)
    tensors, name = load_file(folder / "model.safetensors"), f"model.{stack}.embed_tokens.weight"
    tensors[name] = tensors["model.shared.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert is_close(stage_logits(folder), reference_logits(folder))
    tensors[name][7, 3] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"tensor {name} in .* differs from model\.shared\.weight"):
        load_stage(folder)
