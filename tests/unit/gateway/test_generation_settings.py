"""Settings of a model's files that Orca does not apply are named in one log line, and the model is served."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from orca.cli.small_model import CONTINUES, RESTORES, small_model_folder
from orca.gateway.models.generation_settings import unapplied_settings
from orca.gateway.models.models import load_newest
from orca.gateway.settings import GatewaySettings
from support.worker.published_configs import SERVED
from support.worker.published_encoder_decoders import CONFIGS, GENERATIONS


def unapplied(folder: Path, config: Any, generation: Any = None, *, is_encoder_decoder: bool = True) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return unapplied_settings(folder, is_encoder_decoder=is_encoder_decoder)


def test_a_published_summarizer_names_its_beams_and_penalties(tmp_path: Path) -> None:
    found = unapplied(tmp_path, CONFIGS["bart-large-cnn"], GENERATIONS["bart-large-cnn"])
    assert found.pop("task_specific_params").startswith('{"summarization": {"early_stopping": true')
    assert found == {
        "early_stopping": "true",
        "length_penalty": "2.0",
        "max_length": "142",
        "min_length": "56",
        "no_repeat_ngram_size": "3",
        "num_beams": "4",
    }


def test_forbidden_words_of_one_token_are_applied_and_longer_ones_named(tmp_path: Path) -> None:
    generation = GENERATIONS["opus-mt-en-de"]
    found = unapplied(tmp_path, CONFIGS["opus-mt-en-de"], generation)
    assert found == {"max_length": "512", "num_beams": "6", "renormalize_logits": "true"}
    words = [*generation["bad_words_ids"], [7, 8]]
    found = unapplied(tmp_path, CONFIGS["opus-mt-en-de"], generation | {"bad_words_ids": words})
    assert found["bad_words_ids"] == "[[7, 8]]"


def test_without_a_generation_config_the_settings_of_the_config_are_named(tmp_path: Path) -> None:
    found = unapplied(tmp_path, CONFIGS["bart-base"])
    assert list(found) == ["early_stopping", "no_repeat_ngram_size", "num_beams", "task_specific_params"]


def test_with_a_generation_config_the_settings_of_the_config_do_not_count(tmp_path: Path) -> None:
    assert unapplied(tmp_path, {"num_beams": 4, "temperature": 0.5}, {"eos_token_id": 2}) == {}


def test_a_decoder_only_model_names_its_sampling_and_forced_tokens(tmp_path: Path) -> None:
    generation = {"bos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_k": 20, "forced_eos_token_id": 2}
    found = unapplied(tmp_path, SERVED["Qwen3-0.6B"], generation, is_encoder_decoder=False)
    assert found == {"do_sample": "true", "forced_eos_token_id": "2", "temperature": "0.6", "top_k": "20"}


@pytest.mark.parametrize(
    "generation",
    [
        {"num_beams": 1, "temperature": 1.0, "top_p": 1, "top_k": 0, "length_penalty": 1.0, "max_length": 20},
        {"early_stopping": False, "do_sample": False, "bad_words_ids": None, "suppress_tokens": [], "min_length": 0},
        {"_from_model_config": True, "transformers_version": "5.0", "use_cache": True, "output_scores": True},
        {"decoder_start_token_id": 2, "forced_bos_token_id": 5, "forced_eos_token_id": [2], "pad_token_id": 0},
    ],
)
def test_values_that_change_nothing_are_not_named(generation: dict[str, Any], tmp_path: Path) -> None:
    assert unapplied(tmp_path, {}, generation) == {}


def test_an_unknown_setting_is_named_and_a_long_value_is_cut(tmp_path: Path) -> None:
    found = unapplied(tmp_path, {}, {"chat_format": "chatml", "begin_suppress_tokens": list(range(1000))})
    assert found["chat_format"] == '"chatml"'
    assert found["begin_suppress_tokens"].endswith("...")
    assert len(found["begin_suppress_tokens"]) == 60


def test_numbers_that_only_python_writes_are_named_and_not_refused(tmp_path: Path) -> None:
    assert unapplied(tmp_path, {}, {"max_time": float("inf")}) == {"max_time": "Infinity"}


@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        (CONTINUES, {}, "do_sample = true, temperature = 0.8, top_p = 0.95"),
        (RESTORES, {}, None),
        (RESTORES, {"num_beams": 4, "no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3, num_beams = 4"),
    ],
)
def test_the_gateway_logs_the_settings_in_one_line_and_serves_the_model(
    name: str, changes: dict[str, int], settings: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = shutil.copytree(small_model_folder(name), tmp_path / name)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert load_newest(GatewaySettings(model=str(folder))).info.name == name
    lines = [record.getMessage() for record in caplog.records if "not applied" in record.getMessage()]
    says = f"{name}: these settings of the model's files are not applied, each call brings its own: "
    assert lines == ([] if settings is None else [says + settings])
