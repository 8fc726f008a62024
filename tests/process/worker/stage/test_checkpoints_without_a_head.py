"""A checkpoint of the class without the head, such as facebook/bart-base: the embedding is the head."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.errors import ModelError
from orca.core.domain.model import FAMILIES, load_model_info
from support.worker.stage_driver import Ask, Chain, differences, generate, serve

START = 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.base_architecture is not None])
def test_it_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole, folder = tiny_checkpoint(family, tmp_path / "whole"), tmp_path / "base"
    transformers.AutoModel.from_pretrained(whole).save_pretrained(folder)
    shutil.copy(whole / "tokenizer.json", folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[family].base_architecture]
    draw, vocab = random.Random(2), load_model_info(folder).vocab_size
    beginning = (START,) if config.get("is_encoder_decoder") else ()
    asks = [Ask([draw.randrange(3, vocab) for _ in range(9)], 8, decoder_prefix=beginning) for _ in range(4)]
    chain = Chain(folder, stages=2)
    serve(chain, asks)
    chain.close()
    model = reference_model(folder)
    assert differences(asks, [generate(model, ask.prompt, 8, beginning) for ask in asks]) == 0


@pytest.mark.parametrize("architectures", [["LlamaModel"], ["BartModel"], ["LlamaForCausalLM", "LlamaModel"]])
def test_another_class_is_refused(architectures: list[str], tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architectures}))
    with pytest.raises(ModelError, match="the only one served for model_type 'llama'"):
        load_model_info(folder)
