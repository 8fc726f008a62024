"""The description of an encoder-decoder model: its special tokens, its layers and its lengths."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.errors import ModelError
from orca.core.domain.model import ModelInfo, load_model_info

T5 = {"model_type": "t5", "vocab_size": 100, "num_layers": 3, "eos_token_id": 1, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("forced", "prefix", "beginning"),
    [
        (None, (), (7,)),
        (None, (7,), (7,)),
        (None, (3, 4), (7, 3, 4)),
        (None, (7, 3, 4), (7, 3, 4)),
        (5, (), (7, 5)),
        (5, (7,), (7, 5)),
        (5, (3,), (7, 3)),
        (5, (7, 3), (7, 3)),
    ],
)
def test_the_beginning_of_a_target_is_that_of_generate(
    forced: int | None, prefix: tuple[int, ...], beginning: tuple[int, ...]
) -> None:
    model = EncoderDecoder(encoder_layers=1, start_token_id=7, forced_bos_token_id=forced)
    assert model.beginning(prefix) == beginning


def info_of(
    folder: Path, generation: dict[str, Any] | None = None, base: dict[str, Any] = T5, **config: Any
) -> ModelInfo:
    (folder / "config.json").write_text(json.dumps(base | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return load_model_info(folder)


def test_layers_are_those_of_both_stacks(tmp_path: Path) -> None:
    info = info_of(tmp_path, num_decoder_layers=2)
    assert info.num_layers == 5
    assert info.encoder_decoder == EncoderDecoder(encoder_layers=3, start_token_id=0)


def test_the_decoder_has_as_many_layers_as_the_encoder_by_default(tmp_path: Path) -> None:
    assert info_of(tmp_path, num_decoder_layers=None).num_layers == 6


def test_generation_config_goes_before_config(tmp_path: Path) -> None:
    generation = {"decoder_start_token_id": 2, "forced_bos_token_id": 3, "forced_eos_token_id": [4, 5]}
    info = info_of(tmp_path, generation, forced_bos_token_id=9)
    assert info.encoder_decoder == EncoderDecoder(
        encoder_layers=3, start_token_id=2, forced_bos_token_id=3, forced_eos_token_ids=(4, 5)
    )


FORCED_IN_CONFIG = {"forced_bos_token_id": 9, "forced_eos_token_id": 8, "bos_token_id": 6}


@pytest.mark.parametrize(
    ("generation", "start", "bos", "eos"),
    [
        (None, 0, 9, (8,)),
        ({}, 0, None, ()),
        ({"eos_token_id": 1}, 0, None, ()),
        ({"bos_token_id": 3}, 3, None, ()),
        ({"decoder_start_token_id": 2, "bos_token_id": 3}, 2, None, ()),
        ({"decoder_start_token_id": 2, "forced_bos_token_id": None, "forced_eos_token_id": 4}, 2, None, (4,)),
    ],
)
def test_if_there_is_a_generation_config_it_alone_counts(
    tmp_path: Path, generation: dict[str, Any] | None, start: int, bos: int | None, eos: tuple[int, ...]
) -> None:
    """`generate` does so, too. It fails if there is no start token: then that of config.json counts."""
    info = info_of(tmp_path, generation, **FORCED_IN_CONFIG)
    assert info.encoder_decoder == EncoderDecoder(
        encoder_layers=3, start_token_id=start, forced_bos_token_id=bos, forced_eos_token_ids=eos
    )


@pytest.mark.parametrize(
    ("value", "generation", "bos"),
    [(True, None, 6), (False, None, 9), (None, None, 9), (True, {"eos_token_id": 1}, None)],
)
def test_the_older_form_of_a_forced_bos_counts_without_a_generation_config(
    tmp_path: Path, value: bool | None, generation: dict[str, Any] | None, bos: int | None
) -> None:
    config = FORCED_IN_CONFIG | {"force_bos_token_to_be_generated": value}
    info = info_of(tmp_path, generation, **config)
    assert info.encoder_decoder is not None
    assert info.encoder_decoder.forced_bos_token_id == bos


SIZES = {"vocab_size": 60_000, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 20}


@pytest.mark.parametrize(
    ("family", "start", "bos", "eos"),
    [("bart", 2, 0, (2,)), ("m2m_100", 2, 0, (2,)), ("marian", 58_100, None, (0,))],
)
def test_families_of_barts_form_have_the_defaults_of_transformers(
    tmp_path: Path, family: str, start: int, bos: int | None, eos: tuple[int, ...]
) -> None:
    info = info_of(tmp_path, base={"model_type": family, **SIZES})
    assert (info.num_layers, info.max_model_len) == (3, 40)
    assert (info.bos_token_id, info.eos_token_ids) == (bos, eos)
    assert info.encoder_decoder == EncoderDecoder(
        encoder_layers=2,
        start_token_id=start,
        source_positions=20,
        target_positions=20,
        padding_token_id=1 if family == "m2m_100" else None,
    )
    whole = info_of(tmp_path, base={"model_type": family})
    assert (whole.num_layers, whole.max_model_len) == (24, 2048)


M2M = {"model_type": "m2m_100", **SIZES}


@pytest.mark.parametrize(("config", "padding"), [({}, 1), ({"pad_token_id": None}, 1), ({"pad_token_id": 0}, 0)])
def test_a_model_whose_padding_has_no_position_names_it(tmp_path: Path, config: dict[str, Any], padding: int) -> None:
    kind = info_of(tmp_path, base=M2M, **config).encoder_decoder
    assert kind is not None
    assert kind.padding_token_id == padding


@pytest.mark.parametrize(
    "config",
    [
        {"decoder_start_token_id": 1},
        {"forced_bos_token_id": 1},
        {"forced_eos_token_id": [2, 1]},
        {"eos_token_id": [2, 1]},
        {"pad_token_id": 2},
    ],
    ids=str,
)
def test_a_token_that_every_request_has_cannot_be_padding_without_position(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=r"config\.json: pad_token_id \d is also the start token, a forced token or"):
        info_of(tmp_path, base=M2M, **config)


def test_mbart_has_no_start_token_of_its_own(tmp_path: Path) -> None:
    base = {"model_type": "mbart", **SIZES}
    with pytest.raises(ModelError, match=r"config\.json: decoder_start_token_id has to be one token id"):
        info_of(tmp_path, base=base)
    model = info_of(tmp_path, base=base, decoder_start_token_id=7).encoder_decoder
    assert model is not None
    assert model.start_token_id == 7


def test_learned_positions_bound_the_length(tmp_path: Path) -> None:
    info_of(tmp_path, base={"model_type": "bart", **SIZES})
    assert load_model_info(tmp_path, max_model_len=40).max_model_len == 40
    with pytest.raises(ModelError, match=r"max_model_len 41 is outside 3\.\.40"):
        load_model_info(tmp_path, max_model_len=41)


@pytest.mark.parametrize(
    ("shares", "of_targets", "is_served"),
    [
        (None, 50_000, True),
        (True, 50_000, True),
        (False, None, True),
        (False, 60_000, True),
        (False, 50_000, False),
        (False, "x", False),
    ],
)
def test_two_vocabularies_are_refused(tmp_path: Path, shares: bool | None, of_targets: object, is_served: bool) -> None:
    values = {"decoder_vocab_size": of_targets} | (
        {} if shares is None else {"share_encoder_decoder_embeddings": shares}
    )
    base = {"model_type": "marian", **SIZES, **values}
    if is_served:
        assert info_of(tmp_path, base=base).vocab_size == 60_000
        return
    with pytest.raises(ModelError, match=r"config\.json: decoder_vocab_size is .* two vocabularies"):
        info_of(tmp_path, base=base)


@pytest.mark.parametrize("order", [("encoder_layers", "num_hidden_layers"), ("num_hidden_layers", "encoder_layers")])
def test_of_two_names_of_a_size_the_general_one_counts_as_in_transformers(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    sizes = {"encoder_layers": 2, "num_hidden_layers": 5}
    base = {"model_type": "bart", "decoder_layers": 1, **{key: sizes[key] for key in order}}
    assert info_of(tmp_path, base=base).num_layers == 6


def test_bos_is_the_start_token_if_no_config_has_another(tmp_path: Path) -> None:
    info = info_of(tmp_path, decoder_start_token_id=None, bos_token_id=8)
    assert info.encoder_decoder is not None
    assert info.encoder_decoder.start_token_id == 8


@pytest.mark.parametrize("value", [None, 100, -1, True, "0", [1, 2]])
def test_a_bad_start_token_is_refused_with_file_and_key(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json: decoder_start_token_id"):
        info_of(tmp_path, decoder_start_token_id=value)


@pytest.mark.parametrize("key", ["forced_bos_token_id", "forced_eos_token_id"])
def test_a_forced_token_outside_the_vocabulary_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} is 100"):
        info_of(tmp_path, {key: 100})


def test_a_length_beyond_that_of_pretraining_may_be_set(tmp_path: Path) -> None:
    assert info_of(tmp_path).max_model_len == 1024
    assert info_of(tmp_path, n_positions=64).max_model_len == 128
    assert load_model_info(tmp_path, max_model_len=5000).max_model_len == 5000
    with pytest.raises(ModelError, match="max_model_len 0 is below 3"):
        load_model_info(tmp_path, max_model_len=0)


def test_a_decoder_only_model_has_no_source(tmp_path: Path) -> None:
    sizes = {"model_type": "gpt2", "decoder_start_token_id": 0, "num_decoder_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert load_model_info(tmp_path).encoder_decoder is None
