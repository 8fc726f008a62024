"""The training of the small model that restores case and punctuation, in a toy size, and the model that it made."""

import json
import random
import struct
import zlib
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from orca.cli.small_model import train_restore
from orca.cli.small_model.cased_tokenizer import learn_tokenizer
from orca.cli.small_model.copying import begin_as_copier, first_embeddings
from orca.cli.small_model.novels import chapters_of, read_novels

NAMES = ("Emma", "Anne", "Fanny", "Jane", "Mary", "Lucy")
VERBS = ("saw", "met", "knew", "liked", "asked", "wrote to")


def novel_lines(seed: int) -> list[str]:
    """Return a novel of 24 chapters, in lines as the package holds them."""
    draw = random.Random(seed)
    lines = ["A NOVEL", ""]
    for chapter in range(24):
        lines += [f"Chapter {chapter + 1}", ""]
        for _ in range(3):
            lines.append(
                f"{draw.choice(NAMES)} {draw.choice(VERBS)} Mr. {draw.choice(NAMES)}. Then, {draw.choice(NAMES)}"
            )
            lines += ["was not at _home_ that day; nor was she glad.", ""]
    return lines


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Write novels in the format of R's lazy-load databases."""
    file = tmp_path / "package" / "usr" / "lib" / "R" / "janeaustenr" / "data" / "Rdata.rdb"
    file.parent.mkdir(parents=True)
    entries = []
    for seed in range(2):
        strings = [line.encode() for line in novel_lines(seed)]
        packed = b"".join(struct.pack(">ii", 9, len(string)) + string for string in strings)
        stream = zlib.compress(b"X\n" + bytes(12) + struct.pack(">i5sii", 5, b"UTF-8", 16, len(strings)) + packed)
        entries.append(struct.pack(">i", len(stream)) + stream)
    file.write_bytes(b"".join(entries))
    return tmp_path / "package"


TOY = ("--vocabulary", "400", "--width", "32", "--heads", "4", "--encoder-layers", "2", "--decoder-layers", "1")


def train(package: Path, out: Path, checkpoint: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Train a toy, and return the weights that it wrote."""
    places = ["--package", str(package), "--out", str(out), "--checkpoint", str(checkpoint)]
    train_restore.main([*places, *TOY, "--tokens", "200", "--report-steps", "3", *flags])
    return dict(T5ForConditionalGeneration.from_pretrained(out).state_dict())


def test_novels_are_read_as_chapters_of_paragraphs(package: Path) -> None:
    novels = read_novels(package)
    assert [len(chapters_of(novel)) for novel in novels] == [24, 24]
    [paragraph, *_] = chapters_of(novels[0])[0]
    assert paragraph.endswith("was not at home that day; nor was she glad.")


def test_a_resumed_training_writes_the_weights_of_one_that_was_not_interrupted(package: Path, tmp_path: Path) -> None:
    whole = train(package, tmp_path / "whole", tmp_path / "whole.pt", "--steps", "7")
    train(package, tmp_path / "first", tmp_path / "cut.pt", "--steps", "4")
    resumed = train(package, tmp_path / "second", tmp_path / "cut.pt", "--steps", "7", "--resume")
    assert resumed.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_the_folder_has_what_a_server_reads(package: Path, tmp_path: Path) -> None:
    train(package, tmp_path / "model", tmp_path / "checkpoint.pt", "--steps", "1")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (config["model_type"], config["feed_forward_proj"], config["dtype"]) == ("t5", "gated-gelu", "float16")
    assert {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}.items() <= generation.items()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("it was mr darcy").input_ids
    assert ids[-1] == 1
    assert tokenizer.decode([0, *ids], skip_special_tokens=True) == "it was mr darcy"


def test_first_weights_attend_to_the_token_that_comes_next() -> None:
    torch.manual_seed(3)
    tokenizer = learn_tokenizer(["she was not at home that day nor was he glad"], vocabulary=300)
    config = T5Config(vocab_size=300, d_model=192, d_kv=32, num_heads=6, num_layers=2, attn_implementation="eager")
    model = T5ForConditionalGeneration(config)
    begin_as_copier(model, first_embeddings(tokenizer, 96))
    ids = torch.randperm(298)[None, :40] + 2
    outputs = model(input_ids=ids, decoder_input_ids=ids, output_attentions=True)
    places = outputs.cross_attentions[0][0, :3, 1:-1].argmax(-1)
    assert (places == torch.arange(2, 40)).float().mean() > 0.6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", "0"), "--steps: must be at least 1, not 0"),
        (("--heads", "3"), "--heads: must be an even number that divides --width 32, not 3"),
        (("--vocabulary", "100"), "--vocabulary: must be at least 258, not 100"),
        (("--resume",), "--resume: there is no checkpoint"),
        (("--checkpoint", "/nowhere/file.pt"), "--checkpoint: there is no folder /nowhere"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(
    flags: tuple[str, ...], message: str, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(package, tmp_path / "model", tmp_path / "checkpoint.pt", *flags)
    assert message in capsys.readouterr().err


def test_a_package_without_the_novels_is_refused_with_the_command_that_unpacks_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"janeaustenr/data/Rdata.rdb once, not 0 times.*dpkg -x"):
        train(tmp_path, tmp_path / "model", tmp_path / "checkpoint.pt")


def test_a_checkpoint_of_other_settings_is_refused_by_name(package: Path, tmp_path: Path) -> None:
    train(package, tmp_path / "model", tmp_path / "checkpoint.pt", "--steps", "1")
    with pytest.raises(SystemExit, match=r"--resume: .*checkpoint.pt was made with --width 32, not 64"):
        train(package, tmp_path / "model", tmp_path / "checkpoint.pt", "--steps", "2", "--resume", "--width", "64")
