"""Well-known encoder-decoder models by their published files, with random weights: greedy output equals `generate`.

The settings that Orca does not apply (docs/how-to/translation.md) are switched off in `generate`. Its start token,
forced first token and forced last token come from the files, on both sides.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from orca.bench.parts.tiny_families import give_effect, reference_model, untie
from orca.core.domain.model import load_model_info
from support.worker.published_encoder_decoders import CONFIGS, GENERATIONS
from support.worker.stage_driver import Ask, Chain, Expected, differences, serve

EQUAL = ("flan-t5-small", "bart-base", "opus-mt-en-de", "nllb-200-distilled-600M")
NOT_APPLIED: dict[str, Any] = {"num_beams": 1, "no_repeat_ngram_size": None, "min_length": None}
SMALL_VOCAB = 61
GAIN = 2.0  # as large as the outputs, with random weights, still depend on source and target; found by trying
PARTS = ((1, 1), (2, 1), (1, 2))
"""Stages x ranks."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Return the same file with small sizes, and with token ids that its vocabulary has; all other keys stay."""
    small = dict(values)
    sizes = {"d_model": 24, "d_ff": 36, "d_kv": 6, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 36}
    sizes |= {"vocab_size": SMALL_VOCAB, "decoder_vocab_size": SMALL_VOCAB}
    small |= {key: value for key, value in sizes.items() if key in small}
    for key, value in small.items():
        if key.endswith("token_id"):
            small[key] = min(value, SMALL_VOCAB - 1)
    if "bad_words_ids" in small:
        small["bad_words_ids"] = [[SMALL_VOCAB - 1]]
    return small


def made(name: str, folder: Path, *, is_small: bool, **changes: Any) -> Path:
    """Save a random model under the published files."""
    files = {"config.json": CONFIGS[name] | changes, "generation_config.json": GENERATIONS.get(name)}
    if is_small:
        files = {file: values and shrunk(values) for file, values in files.items()}
    folder.mkdir()
    config = files["config.json"]
    assert config is not None
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.from_pretrained(folder)).float()
    # T5 draws a weight by the size of its matrix, BART and its relatives all weights alike.
    gain = 1 if config["model_type"] == "t5" else GAIN / config["d_model"] ** 0.5
    give_effect(model, config["model_type"], gain=gain)
    if config.get("tie_word_embeddings") is False:
        untie(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    for file, values in files.items():
        if values is not None:
            (folder / file).write_text(json.dumps(values))
    return folder


def generated(model: Any, ask: Ask, prefix: Sequence[int]) -> Expected:
    """Return the output of `generate` after the beginning. Without a prefix it makes that itself, from the files."""
    ids = torch.tensor([ask.prompt])
    given = {"decoder_input_ids": torch.tensor([ask.decoder_prefix])} if prefix else {}
    beginning = len(ask.decoder_prefix)
    result = model.generate(
        ids,
        **given,
        attention_mask=torch.ones_like(ids),
        max_length=beginning + ask.max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **NOT_APPLIED,
    )
    tokens = result.sequences[0].tolist()
    assert tuple(tokens[:beginning]) == ask.decoder_prefix
    best = torch.cat(result.logits).topk(2, dim=-1).values[-ask.max_new_tokens :]
    return Expected(tokens[beginning:], (best[:, 0] - best[:, 1]).tolist())


def check(folder: Path, parts: Sequence[tuple[int, int]], *, count: int) -> None:
    """Compare the outputs on each layout; every second call has a prefix."""
    info = load_model_info(folder)
    assert info.encoder_decoder is not None
    draw, templates = random.Random(5), list[tuple[Ask, list[int]]]()
    for number in range(count):
        source = [draw.randrange(3, info.vocab_size) for _ in range(draw.choice((1, 5, 17, 30)))]
        prefix = [draw.randrange(3, info.vocab_size) for _ in range(draw.randint(1, 5) if number % 2 else 0)]
        beginning = info.encoder_decoder.beginning(prefix)
        templates.append((Ask(source, draw.randint(1, 14), arrival=number // 2, decoder_prefix=beginning), prefix))
    model = reference_model(folder)
    with torch.inference_mode():
        expected = [generated(model, ask, prefix) for ask, prefix in templates]
    del model
    # The last token may be a forced one.
    assert len({token for each in expected for token in each.tokens[:-1]}) >= 3, "the outputs say nothing"
    for stages, tensor in parts:
        asks = [
            Ask(ask.prompt, ask.max_new_tokens, arrival=ask.arrival, decoder_prefix=ask.decoder_prefix)
            for ask, _ in templates
        ]
        chain = Chain(folder, stages=stages, tensor=tensor)
        serve(chain, asks, max_batch_size=3)
        chain.close()
        assert differences(asks, expected) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    folder = made(name, tmp_path / "model", is_small=True)
    check(folder, PARTS, count=8)


@pytest.mark.prove
@pytest.mark.parametrize("parts", [PARTS[:2], PARTS[2:]], ids=["stages", "ranks"])
@pytest.mark.parametrize("name", EQUAL)
def test_a_published_model_of_full_size_computes_what_transformers_computes(
    name: str, parts: Sequence[tuple[int, int]], tmp_path: Path
) -> None:
    # Ten layers more in each stack would take 2.5 GB of weights, and twice as much while they are compared.
    fewer = {"encoder_layers": 2, "decoder_layers": 2} if name.startswith("nllb") else {}
    folder = made(name, tmp_path / "model", is_small=False, **fewer)
    check(folder, parts, count=6)
