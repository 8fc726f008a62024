"""The small models that ship with Orca, as transformers reads them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from orca.cli.small_model import CONTINUES, RESTORES, small_model_folder
from orca.cli.small_model.restoring import plain
from orca.core.domain.text import Tokenizer

SENTENCES = (
    "Is Mr. Darcy at home?",
    "The weather was so bad that Mrs. Allen could not go to the pump-room, and Catherine was obliged to stay at home.",
)


@pytest.mark.parametrize("name", [CONTINUES, RESTORES])
def test_a_small_model_takes_less_than_eight_megabytes(name: str) -> None:
    assert sum(file.stat().st_size for file in small_model_folder(name).iterdir()) < 8_000_000


def test_the_restoring_model_is_a_gated_t5_in_float16() -> None:
    model = T5ForConditionalGeneration.from_pretrained(small_model_folder(RESTORES))
    assert model.dtype == torch.float16
    assert model.config.feed_forward_proj == "gated-gelu"
    assert model.config.is_gated_act
    assert (model.config.pad_token_id, model.config.eos_token_id, model.config.decoder_start_token_id) == (0, 1, 0)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_restoring_model_gives_back_case_and_punctuation(sentence: str) -> None:
    folder = small_model_folder(RESTORES)
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = tokenizer(plain(sentence), return_tensors="pt")
    [output] = model.generate(**source, max_new_tokens=64, do_sample=False)
    assert tokenizer.decode(output, skip_special_tokens=True) == sentence


def test_orca_reads_its_tokenizer_as_transformers_does() -> None:
    folder: Path = small_model_folder(RESTORES)
    text = "it was mr darcy who met mrs bennet in bath"
    ids = Tokenizer.from_folder(folder).encode(text)
    assert ids == AutoTokenizer.from_pretrained(folder)(text).input_ids
    assert ids[-1] == 1
