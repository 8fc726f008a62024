"""core.domain.model: what every service reads of a model folder, and what is refused."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.errors import ModelError
from orca.core.domain.model import count_parameters, load_model_info, weight_files
from orca.core.domain.tokenizer_folder import check_tokenizer
from orca.scheduler.service import refusals_of
from support.scheduler.scheduler_simulation import a_request


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_gives_its_name_limits_and_special_tokens(original: Path) -> None:
    info = load_model_info(original)
    assert (info.name, info.architecture, info.dtype) == ("tiny", "llama", "float32")
    assert (info.vocab_size, info.max_model_len, info.num_layers) == (199, 96, 3)
    assert (info.bos_token_id, info.eos_token_ids) == (0, (1,))


def test_reading_a_folder_needs_no_torch() -> None:
    import subprocess

    code = "import sys, orca.core.domain.model; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_generation_config_overrides_config_for_the_end_of_a_request(folder: Path) -> None:
    edit(folder, "generation_config.json", eos_token_id=[9, 4, 9])
    assert load_model_info(folder).eos_token_ids == (4, 9)
    edit(folder, "generation_config.json", eos_token_id=[4, 199, 50_000])
    assert load_model_info(folder).eos_token_ids == (4,), "what the vocabulary lacks is never drawn, and masks nothing"
    edit(folder, "generation_config.json", eos_token_id=None)
    assert load_model_info(folder).eos_token_ids == ()
    (folder / "generation_config.json").unlink()
    assert load_model_info(folder).eos_token_ids == (1,)


def test_where_no_config_names_an_eos_the_tokenizers_ends_outputs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    for value in ({"eos_token_id": None}, {"eos_token_id": [500]}):
        edit(folder, **value)
        assert load_model_info(folder).eos_token_ids == (1,)
    [line] = [record.getMessage() for record in caplog.records if "EOS" in record.getMessage()]
    assert line.endswith("the tokenizer's ends outputs: 1")
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model_info(folder).eos_token_ids == (1,), "not the family's default, 2"
    (folder / "tokenizer_config.json").write_text("{}")
    assert load_model_info(folder).eos_token_ids == (2,), "the family's default"


def test_a_shorter_length_may_be_asked_for_and_changes_no_revision(original: Path) -> None:
    info = load_model_info(original, name="mine", max_model_len=40)
    assert (info.name, info.max_model_len) == ("mine", 40)
    assert info.revision == load_model_info(original).revision


def test_a_copy_elsewhere_is_the_same_revision(original: Path, folder: Path) -> None:
    assert load_model_info(folder).revision == load_model_info(original).revision


def _flip_a_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: edit(folder, rms_norm_eps=1e-5),
        lambda folder: edit(folder, "generation_config.json", eos_token_id=7),
        lambda folder: edit(folder, "tokenizer.json", version="1.1"),
        _flip_a_weight,
    ],
    ids=["config", "generation-config", "tokenizer", "weights"],
)
def test_everything_that_decides_outputs_is_part_of_the_revision(folder: Path, change: Callable[[Path], None]) -> None:
    before = load_model_info(folder).revision
    change(folder)
    assert load_model_info(folder).revision != before


def test_the_dtype_is_part_of_the_revision(original: Path) -> None:
    assert load_model_info(original, dtype="bfloat16").revision != load_model_info(original).revision


def test_the_quantization_is_part_of_the_revision(original: Path) -> None:
    assert load_model_info(original, quantization="int8").revision != load_model_info(original).revision


def test_a_large_file_is_sampled_and_not_read_completely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca.core.domain.model._WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr("orca.core.domain.model._PIECES", 5)
    monkeypatch.setattr("orca.core.domain.model._PIECE_BYTES", 8)
    before = load_model_info(folder).revision
    _flip_a_weight(folder)  # inside the last piece
    assert load_model_info(folder).revision != before


def _replace(folder: Path, name: str, content: str | bytes | None) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (lambda folder: shutil.rmtree(folder), "is not a folder"),
    "no config": (lambda folder: _replace(folder, "config.json", None), "no config.json"),
    "bad JSON": (lambda folder: _replace(folder, "config.json", "{"), "cannot be read as JSON"),
    "a JSON list": (lambda folder: _replace(folder, "config.json", "[]"), "does not hold a JSON object"),
    "unknown family": (lambda folder: edit(folder, model_type="bert"), "model_type 'bert' is not one of gpt2, opt"),
    "not a text generator": (lambda folder: edit(folder, architectures=["LlamaModel"]), "architectures"),
    "no vocabulary": (lambda folder: edit(folder, vocab_size=None), "vocab_size is None"),
    "a layer count of 0": (lambda folder: edit(folder, num_hidden_layers=0), "num_hidden_layers is 0"),
    "odd EOS": (lambda folder: edit(folder, "generation_config.json", eos_token_id="x"), "eos_token_id 'x'"),
    "no weights": (lambda folder: _replace(folder, "model.safetensors", None), "no *.safetensors"),
    "cut weights": (lambda folder: _replace(folder, "model.safetensors", b"\0\1"), "not a whole safetensors file"),
    "a header beyond the file": (
        lambda folder: _replace(folder, "model.safetensors", b"\xff\0\0\0\0\0\0\0{}"),
        "its header length is 255",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_served_is_refused_with_the_reason(name: str, folder: Path) -> None:
    spoil, reason = REFUSED[name]
    spoil(folder)
    with pytest.raises(ModelError, match=reason.replace("*", r"\*")) as refused:
        load_model_info(folder)
    assert str(folder) in str(refused.value)


def test_pickled_weights_alone_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load_model_info(folder)


@pytest.mark.parametrize("more", [-1, 9])
def test_weights_of_another_length_are_refused_before_any_process_starts(folder: Path, more: int) -> None:
    path = folder / "model.safetensors"
    whole = path.stat().st_size
    os.truncate(path, whole + more)
    with pytest.raises(ModelError, match=f"{path} is not a whole .* it has {whole + more} bytes instead of {whole}"):
        count_parameters(folder)


def test_a_truncated_header_is_refused(folder: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e400]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="its header cannot be read"):
        count_parameters(folder)


def test_parameters_are_counted_over_all_files_by_their_headers(folder: Path) -> None:
    counted = count_parameters(folder)
    assert counted == sum(parameter.numel() for parameter in reference_model(folder).parameters())
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert count_parameters(folder) == 2 * counted


@pytest.mark.parametrize("header", [b"not JSON", b'{"x": 5}   ', b'["x"]'])
def test_a_header_without_shapes_is_refused(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="its header cannot be read"):
        count_parameters(folder)


def test_several_weight_files_need_an_index(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    with pytest.raises(ModelError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        load_model_info(folder)


@pytest.mark.parametrize("named", ["missing.safetensors", "../outside.safetensors"])
def test_an_index_may_only_name_files_of_its_folder(folder: Path, named: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": named}}))
    with pytest.raises(ModelError, match="which is not a file of"):
        load_model_info(folder)


def test_one_file_goes_before_an_index_which_may_be_left_from_an_older_model(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for stale in ({"weight_map": {"x": "model-00001-of-00002.safetensors"}}, [], "{"):
        index.write_text(stale if isinstance(stale, str) else json.dumps(stale))
        assert weight_files(folder) == (folder / "model.safetensors",)
    assert load_model_info(folder).num_layers == 3


def test_both_sources_of_weights_at_once_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    weight_files(folder)
    assert not caplog.records, "the two say the same"
    index.write_text(json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}}))
    for _ in range(2):
        weight_files(folder)
    [line] = [record.getMessage() for record in caplog.records]
    assert "has model.safetensors and an index of other files" in line


def test_the_weights_that_config_json_names_go_first(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    edit(folder, transformers_weights="other.safetensors")
    assert weight_files(folder) == (folder / "other.safetensors",)
    (folder / "other.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "other.safetensors"}}))
    edit(folder, transformers_weights="other.safetensors.index.json")
    assert weight_files(folder) == (folder / "other.safetensors",)
    edit(folder, transformers_weights="../other.safetensors")
    with pytest.raises(ModelError, match="which is not a file of"):
        weight_files(folder)


def test_a_length_below_1_is_refused(original: Path) -> None:
    with pytest.raises(ModelError, match="max_model_len 0 is below 2"):
        load_model_info(original, max_model_len=0)


def test_a_longer_length_may_be_asked_for_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_model_info(folder, max_model_len=400).max_model_len == 400
    [line] = [record.getMessage() for record in caplog.records]
    assert "max_model_len 400 is above 96" in line


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_cannot_be_exceeded(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path / family)
    assert load_model_info(folder, max_model_len=96).max_model_len == 96
    with pytest.raises(ModelError, match=r"max_model_len 97 is outside 2\.\.96.*the model knows no more positions"):
        load_model_info(folder, max_model_len=97)


def test_a_dtype_that_is_not_served_is_refused(original: Path) -> None:
    with pytest.raises(ModelError, match="'int8' is not one of"):
        load_model_info(original, dtype="int8")


def test_a_quantization_that_is_not_served_is_refused(original: Path) -> None:
    with pytest.raises(ModelError, match="'int4' is not one of int8"):
        load_model_info(original, quantization="int4")


def test_a_tokenizer_is_asked_for_only_where_one_is_needed(folder: Path) -> None:
    check_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    load_model_info(folder)
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        check_tokenizer(folder)


SCALINGS: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({}, 96),
    "linear": ({"rope_type": "linear", "factor": 2.5}, 240),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.5}, 240),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "yarn of a float": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}, 256),
    "yarn counted in": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}, 96),
    "yarn of the whole": ({"rope_type": "yarn", "factor": 4.0}, 384),
    "yarn by its positions": ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 24}, 96),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
        96,
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0],
            "long_factor": [2.0],
            "original_max_position_embeddings": 24,
        },
        96,
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_a_rope_scaling_lengthens_the_model_in_every_spelling(name: str, folder: Path) -> None:
    scaling, expected = SCALINGS[name]
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    if old.get("type") == "longrope":
        old["type"] = "su"
    inner = {key: value for key, value in scaling.items() if key != "original_max_position_embeddings"}
    outer = {key: value for key, value in scaling.items() if key not in inner}
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": {**scaling, "rope_theta": 1e4}},
        {"rope_parameters": None, "rope_scaling": old or None, "rope_theta": 1e4},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": scaling},
        {"rope_parameters": {**inner, "rope_theta": 1e4}, **outer},
    ]
    for spelling in spellings[: 4 if scaling else 2]:
        shutil.copy(folder / "config.json", folder / "before.json")
        edit(folder, **spelling)
        info = load_model_info(folder)
        assert info.max_model_len == expected, spelling
        # Other scalings turn a key by its position alone, so that prompts of any length may share its block.
        assert (info.no_prefix_cache is not None) == (name in ("dynamic", "longrope")), spelling
        shutil.copy(folder / "before.json", folder / "config.json")


def test_a_gpt2_has_no_use_for_a_rope_scaling(tmp_path: Path) -> None:
    folder = tiny_checkpoint("gpt2", tmp_path / "gpt2")
    edit(folder, rope_scaling={"type": "dynamic", "factor": 4.0})
    info = load_model_info(folder)
    assert (info.max_model_len, info.no_prefix_cache) == (96, None)


def test_only_learned_positions_bound_a_request(tmp_path: Path) -> None:
    families = ("gpt2", "opt", "llama", "t5", "bart")
    bounds = {family: load_model_info(tiny_checkpoint(family, tmp_path / family)).positions for family in families}
    assert bounds == {"gpt2": 96, "opt": 96, "llama": None, "t5": None, "bart": None}


def test_a_scheduler_refuses_a_request_past_the_learned_positions(tmp_path: Path) -> None:
    """Otherwise a stage would, after another request has begun with its blocks."""
    info = load_model_info(tiny_checkpoint("gpt2", tmp_path / "gpt2"))
    refuse = refusals_of(info)
    fits, longer = (replace(a_request("A", prompt=prompt, new=6), revision=info.revision) for prompt in (90, 91))
    assert refuse(fits) is None
    assert refuse(longer) == "prompt and output have 97 tokens, and the model has 96 positions"


def test_a_folder_is_named_as_the_first_conversions_of_llama_named_it(folder: Path) -> None:
    edit(folder, architectures=["LLaMAForCausalLM"])
    assert load_model_info(folder).architecture == "llama"


def test_code_that_comes_with_a_model_is_not_asked_for(folder: Path) -> None:
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    assert load_model_info(folder).architecture == "llama"
