"""The special tokens of a folder without generation_config.json are those that transformers reads from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.model import load_model_info
from support.worker.stage_driver import Ask, Chain, serve

FAMILIES = ("bart", "mbart", "m2m_100", "marian")
SOURCE = [7, 9, 50, 31]
ABSENT = "absent"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    (folder / "generation_config.json").unlink()
    return folder


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """Copy a folder. Args: changes: values of config.json; ABSENT takes the key out."""
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != ABSENT}))
    return to


def read(folder: Path) -> EncoderDecoder:
    kind = load_model_info(folder).encoder_decoder
    assert kind is not None
    return kind


@pytest.mark.parametrize(
    "changes",
    [
        {"forced_eos_token_id": ABSENT},
        {"forced_eos_token_id": None},
        {"forced_eos_token_id": 8},
        {"forced_eos_token_id": [8, 5], "forced_bos_token_id": 6},
        {"force_bos_token_to_be_generated": True},
        {"force_bos_token_to_be_generated": True, "forced_bos_token_id": 6},
    ],
    ids=str,
)
def test_forced_tokens_are_those_of_transformers(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    kind = read(changed(folder, tmp_path, **changes))
    model = reference_model(tmp_path)
    theirs = model.generation_config
    wanted = theirs.forced_eos_token_id
    assert kind.forced_bos_token_id == theirs.forced_bos_token_id
    assert list(kind.forced_eos_token_ids) == (
        wanted if isinstance(wanted, list) else [] if wanted is None else [wanted]
    )
    assert kind.start_token_id == theirs.decoder_start_token_id
    # The defaults of the family's config class do not count.
    ids = torch.tensor([SOURCE])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)[0].tolist()
    beginning = kind.beginning()
    assert tuple(output[: len(beginning)]) == beginning
    ask = Ask(SOURCE, 7 - len(beginning), decoder_prefix=beginning)
    chain = Chain(tmp_path)
    serve(chain, [ask])
    chain.close()
    assert [*beginning, *ask.output] == output


@pytest.mark.parametrize("family", ["bart", "mbart", "marian"])
def test_bos_is_the_start_token_as_in_generate_if_config_names_no_other(tmp_path: Path, family: str) -> None:
    """BART's own default, 2, does not count."""
    folder = tiny_checkpoint(family, tmp_path / "whole")
    (folder / "generation_config.json").unlink()
    (tmp_path / "changed").mkdir()
    kind = read(changed(folder, tmp_path / "changed", decoder_start_token_id=ABSENT))
    ids = torch.tensor([SOURCE])
    output = reference_model(tmp_path / "changed").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    assert output[0, 0] == kind.start_token_id == 3
