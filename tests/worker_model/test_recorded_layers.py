"""Layers that are gathered once for each number of requests and run again: right, and without being called."""

from pathlib import Path

import pytest
from stage_driver import Ask, Chain, random_asks, serve
from tiny_models import tiny_checkpoint
from torch import Tensor

from orca.core.step import Step
from orca.worker import recorded_layers
from orca.worker.linear import PanelLinear
from orca.worker.models.blocks import Layer, StepContext


class CountedLayer:
    """A layer that counts its calls."""

    def __init__(self, layer: Layer) -> None:
        self.only_kernels = layer.only_kernels
        self.calls = 0
        self._layer = layer

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        self.calls += 1
        return self._layer(x, step)


def asks_of(vocab_size: int) -> list[Ask]:
    return random_asks(vocab_size, 30, seed=3, new_max=30)


def increments(steps: list[Step]) -> list[int]:
    """The number of requests in each step in which all of them run one token."""
    return [len(step.rows) for step in steps if step.rows and step.tokens == len(step.rows)]


@pytest.mark.parametrize(
    ("family", "vocab_size", "options"),
    [
        ("gpt2", 211, {}),
        ("llama", 199, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}),
        ("mistral", 197, {"sliding_window": 9}),  # which hides something only when contexts have grown
    ],
)
def test_recorded_layers_give_the_same_tokens(
    family: str, vocab_size: int, options: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, seed=1, **options)
    outputs = []
    for is_recorded in (True, False):
        chain, asks = Chain(folder, packs=PanelLinear), asks_of(vocab_size)
        [[stage]] = chain.stages
        assert stage._recorded is not None
        if not is_recorded:
            stage._recorded = None
        steps = serve(chain, asks, max_batch_size=20)
        outputs.append([ask.output for ask in asks])
    assert max(increments(steps)) > 10
    assert outputs[0] == outputs[1]


def test_layers_are_called_once_for_each_number_of_requests(tmp_path: Path) -> None:
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear)
    [[stage]] = chain.stages
    counted = [CountedLayer(layer) for layer in stage._model.layers]
    stage._model.layers[:] = counted
    steps = serve(chain, asks_of(211), max_batch_size=8)
    sizes = increments(steps)
    assert len(sizes) > 2 * len(set(sizes))
    others = sum(bool(step.rows) for step in steps) - len(sizes)
    assert {layer.calls for layer in counted} == {others + len(set(sizes))}


def test_few_recordings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_layers, "_KEPT", 2)
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear)
    steps = serve(chain, asks_of(211), max_batch_size=8)
    [[stage]] = chain.stages
    assert stage._recorded is not None
    latest = list(dict.fromkeys(reversed(increments(steps))))[:2]
    assert {key[0] for key in stage._recorded._recorded} == set(latest)


def test_a_stage_whose_output_is_passed_on_records_nothing(tmp_path: Path) -> None:
    """It may still be on its way when the next step begins."""
    chain = Chain(tiny_checkpoint("gpt2", tmp_path), packs=PanelLinear, stages=2)
    assert [[rank._recorded is None for rank in stage] for stage in chain.stages] == [[True], [False]]
