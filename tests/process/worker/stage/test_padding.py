"""M2M-100 gives padding no position. Here no source and no prefix has padding, and no target draws it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Part, Row, Step
from orca.worker.models.build import load_stage
from orca.worker.stage.screen import RequestScreen
from support.worker.stage_driver import EPOCH, GREEDY, Ask, Chain, generate, serve

PADDING, START = 1, 2
SOURCES = [[7, 9, 50, 31], [100, 4], [20, 21, 22, 23, 24]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model for which padding is often the best token."""
    folder = tiny_checkpoint("m2m_100", tmp_path_factory.mktemp("padding"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    # It is a multiple of the token that follows it most often.
    tensors["model.shared.weight"][PADDING] = 1.2 * tensors["model.shared.weight"][generated(folder)]
    save_file(tensors, path, {"format": "pt"})
    return folder


def generated(folder: Path) -> int:
    model = reference_model(folder)
    tokens = [token for source in SOURCES for token in generate(model, source, 12, (START,)).tokens]
    return max(tokens, key=tokens.count)


def test_the_next_best_token_is_drawn_where_generate_would_draw_padding(folder: Path) -> None:
    model = reference_model(folder)
    ids = torch.tensor([SOURCES[0]])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, eos_token_id=None)
    assert PADDING in output[0].tolist()
    asks = [Ask(source, 12, GREEDY, decoder_prefix=(START,)) for source in SOURCES]
    random = [Ask(SOURCES[0], 12, SamplingParams(seed=seed), decoder_prefix=(START,)) for seed in range(3)]
    chain = Chain(folder, feeds_tokens=True)
    serve(chain, [*asks, *random])
    chain.close()
    assert [ask.output for ask in asks] == [generate(model, source, 12, (START,)).tokens for source in SOURCES]
    assert not any(PADDING in ask.output for ask in [*asks, *random])


@pytest.mark.parametrize(("source", "prefix"), [([5, PADDING], (START,)), ([5, 6], (START, PADDING))])
def test_a_stage_refuses_padding(folder: Path, source: list[int], prefix: tuple[int, ...]) -> None:
    screen = RequestScreen.of(load_stage(folder), (0,))
    ask = Ask(source, 3, decoder_prefix=prefix)
    rows = (
        Row(1, 0, 2, sample=False, part=Part.SOURCE),
        Row(1, 0, len(prefix), sample=True, part=Part.TARGET),
    )
    screened = screen.screen(Step(epoch=EPOCH, number=1, new=(ask.new(1),), rows=rows))
    assert not screened.step.rows
    assert {each.reason.split(" has ", 1)[1] for each in screened.refused} == {
        f"the padding token {PADDING}, and the model has no position for it"
    }
