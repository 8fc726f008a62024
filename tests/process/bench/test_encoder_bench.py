"""`orca bench encoder`: what it counts, and what it refuses."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from orca.bench.main import main as bench
from orca.bench.parts.encoder import Sources, lines, load_encoder, measure
from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.bench.peers.engine_peer import products
from orca.core.domain.errors import SettingError
from orca.worker.models.build import load_stage
from orca.worker.weights.linear import PanelLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("bart", tmp_path_factory.mktemp("bart"))


def test_operations_are_those_of_the_encoders_matrices_and_of_its_attention(folder: Path) -> None:
    [one, many] = measure(load_encoder(folder, dtype="float32", threads=1), [Sources(1, 12), Sources(3, 4)], rounds=2)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, layers = config["d_model"], config["encoder_ffn_dim"], config["encoder_layers"]
    products = 2 * 12 * layers * (4 * hidden * hidden + 2 * hidden * inner)
    assert one.product_operations == many.product_operations == products
    assert one.operations == products + 4 * layers * hidden * 12 * 12
    assert many.operations == products + 4 * layers * hidden * 3 * 4 * 4
    for each in (one, many):
        assert len(each.encoder_s) == len(each.products_s) == len(each.attention_s) == 2
    assert [line.split()[0] for line in lines([one, many], [1e-5])] == ["sources", "1x12", "3x4", "a"]


def test_products_keep_their_inputs_alive(folder: Path) -> None:
    """A recording reads memory by its address, and whoever runs it does not have the inputs."""
    model = load_stage(folder, packs=PanelLinear)
    pairs = [(linear, torch.randn(4, linear.inputs)) for linear in model.linears]
    inputs = [weakref.ref(x) for _, x in pairs]
    run = products(pairs)
    del pairs
    gc.collect()
    assert all(each() is not None for each in inputs)
    run()


def test_the_command_writes_its_figures(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    options = ["--model", str(folder), "--sources", "2x3", "--rounds", "1", "--threads", "1", "--figures", str(file)]
    assert bench(["encoder", *options]) == 0
    figures = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["settings"].get("part") for each in figures] == [
        None,
        None,
        "whole",
        "products alone",
        "attention alone",
    ]


def test_a_decoder_only_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with pytest.raises(SettingError, match="a decoder-only model has no encoder"):
        bench(["encoder", "--model", str(folder)])


@pytest.mark.parametrize("bad", ["16", "0x3", "3x", "axb", "3x-1"])
def test_bad_sources_are_refused(bad: str) -> None:
    with pytest.raises(SettingError, match="argument --sources"):
        bench(["encoder", "--sources", bad])
