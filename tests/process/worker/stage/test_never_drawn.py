"""Tokens that the settings of a model's folder forbid, as `generate` of transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.errors import ModelError
from orca.core.domain.model import load_model_info
from orca.core.domain.request import SamplingParams
from support.worker.stage_driver import Ask, Chain, generate, serve

PROMPTS = ([7, 9, 50, 31], [100, 4], [20, 21, 22, 23, 24])
PREFIXES = {"llama": (), "bart": (2,)}


def forbid(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Write settings into a file of the folder; the other one keeps none of them."""
    path = folder / name
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | settings))
    if name == "config.json":
        (folder / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("family", list(PREFIXES))
def test_the_next_best_token_is_drawn(family: str, name: str, tmp_path: Path) -> None:
    folder, prefix = tiny_checkpoint(family, tmp_path), PREFIXES[family]
    model = reference_model(folder)
    drawn = [token for prompt in PROMPTS for token in generate(model, prompt, 8, prefix).tokens]
    first, second = sorted(set(drawn), key=drawn.count)[-2:]
    forbid(folder, name, {"bad_words_ids": [[first]], "suppress_tokens": [second]})
    model = reference_model(folder)
    asks = [Ask(prompt, 8, decoder_prefix=prefix) for prompt in PROMPTS]
    random = [Ask(PROMPTS[0], 8, SamplingParams(seed=seed), decoder_prefix=prefix) for seed in range(4)]
    chain = Chain(folder, feeds_tokens=True)
    serve(chain, [*asks, *random])
    chain.close()
    assert [ask.output for ask in asks] == [generate(model, prompt, 8, prefix).tokens for prompt in PROMPTS]
    assert not {first, second} & {token for ask in [*asks, *random] for token in ask.output}


def test_an_end_token_is_no_bad_word_and_longer_ones_are_not_applied(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    forbid(folder, "generation_config.json", {"eos_token_id": 1, "bad_words_ids": [[1], [9], [4, 5]]})
    assert load_model_info(folder).never_drawn_ids == (9,)


@pytest.mark.parametrize(
    "settings",
    [
        {"bad_words_ids": [3]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [["a"]]},
        {"bad_words_ids": [[100_000]]},
        {"suppress_tokens": 5},
        {"suppress_tokens": [-1]},
        {"suppress_tokens": [True]},
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    forbid(folder, "generation_config.json", settings)
    [key] = settings
    with pytest.raises(ModelError, match=f"generation_config.json: {key} "):
        load_model_info(folder)
