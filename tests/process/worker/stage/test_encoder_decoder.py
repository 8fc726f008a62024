"""Encoder-decoder models in one process: greedy output equals `generate` of transformers, in every setting."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca.bench.parts.tiny_families import ENCODER_DECODERS, reference_model, tiny_checkpoint
from orca.core.domain.errors import EngineError
from orca.core.domain.model import load_model_info
from orca.core.domain.step import Part, Row, Sampled, Step
from orca.kernels.cpu.attention import attention
from orca.kernels.cpu.team import team
from orca.worker.weights.linear import PanelLinear
from support.worker.stage_driver import EPOCH, Ask, Chain, Expected, differences, generate, serve

START = 2
PARTS = ((2, 1), (3, 1), (1, 2), (2, 2), (4, 1))
"""Stages x ranks. With four stages, some have only encoder layers, and one begins with the decoder."""


# `sampled` takes numbers that do not divide those of the settings, so that both forms of model meet most settings.
@pytest.fixture(scope="module", params=ENCODER_DECODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def some_asks(folder: Path, count: int, seed: int) -> list[Ask]:
    """Requests of mixed lengths; a third of them has a prefix, a third is claimed again."""
    draw, vocab = random.Random(seed), load_model_info(folder).vocab_size
    arrival, asks = 0, []
    for number in range(count):
        arrival += draw.choice((0, 0, 1, 2))
        source = [draw.randrange(3, vocab) for _ in range(draw.choice((1, 2, 5, 16, 17, 30)))]
        more = [draw.randrange(3, vocab) for _ in range(draw.randint(1, 5))] if number % 3 == 1 else []
        asks.append(Ask(source, draw.randint(1, 14), arrival=arrival, decoder_prefix=(START, *more)))
    return asks


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[Ask], list[Expected]]:
    model = reference_model(folder)
    asks = some_asks(folder, 24, seed=1)
    with torch.inference_mode():
        return asks, [generate(model, ask.prompt, ask.max_new_tokens, ask.decoder_prefix) for ask in asks]


def check(
    chain: Chain, expected: tuple[list[Ask], list[Expected]], batch: int, *, chunk: int | None = None
) -> list[Step]:
    templates, wanted = expected
    asks = []
    for number, ask in enumerate(templates):
        log = wanted[number].tokens[: ask.max_new_tokens // 2] if number % 3 == 2 else []
        asks.append(
            Ask(ask.prompt, ask.max_new_tokens, arrival=ask.arrival, log=log, decoder_prefix=ask.decoder_prefix)
        )
    steps = serve(chain, asks, max_batch_size=batch, chunk=chunk)
    assert differences(asks, wanted) <= 1
    assert all(stage.slots_in_use == 0 for ranks in chain.stages for stage in ranks)
    return steps


@pytest.mark.sampled(11)
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("feeds_tokens", [False, True])
def test_output_on_one_rank(
    folder: Path, expected: tuple[list[Ask], list[Expected]], batch: int, feeds_tokens: bool
) -> None:
    chain = Chain(folder, feeds_tokens=feeds_tokens)
    check(chain, expected, batch)
    chain.close()


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("stages", "tensor"), PARTS)
def test_output_on_stages_and_ranks(
    folder: Path, expected: tuple[list[Ask], list[Expected]], stages: int, tensor: int
) -> None:
    chain = Chain(folder, stages=stages, tensor=tensor, feeds_tokens=True)
    check(chain, expected, 3)
    chain.close()


@pytest.mark.sampled(11)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_output_with_layers_divided_by_hand(
    folder: Path, expected: tuple[list[Ask], list[Expected]], first: int
) -> None:
    """The border lies inside the encoder, between the stacks, or inside the decoder."""
    layers = load_model_info(folder).num_layers
    chain = Chain(folder, stages=2, layer_counts=(first, layers - first))
    check(chain, expected, 16)
    chain.close()


def test_output_with_packed_weights(folder: Path, expected: tuple[list[Ask], list[Expected]]) -> None:
    """Our own kernels do all linears, and steps run from recordings where they can."""
    chain = Chain(folder, packs=PanelLinear, feeds_tokens=True)
    check(chain, expected, 16)
    chain.close()


@pytest.mark.sampled(4, others="prove")
@pytest.mark.parametrize("packs", [False, PanelLinear])
@pytest.mark.parametrize("stages", [1, 2])
def test_output_of_targets_that_begin_token_by_token(
    folder: Path, expected: tuple[list[Ask], list[Expected]], stages: int, packs: bool | type[PanelLinear]
) -> None:
    """The source runs whole. Rows that are not the last of the target's beginning draw nothing, also in recordings."""
    chain = Chain(folder, stages=stages, packs=packs, feeds_tokens=True)
    steps = check(chain, expected, 3, chunk=1)
    chain.close()
    targets = [row for step in steps for row in step.rows if row.part is Part.TARGET]
    assert {row.count for row in targets} == {1}
    assert {row.sample for row in targets} == {False, True}


@pytest.mark.parametrize(("family", "tensor"), [("bart", 3), ("umt5", 5)])
def test_output_with_one_head_on_each_rank(tmp_path: Path, family: str, tensor: int) -> None:
    """Each rank has one head of the decoder. BART's encoder has four, which three ranks divide unevenly."""
    folder = tiny_checkpoint(family, tmp_path)
    asks, model = some_asks(folder, 6, seed=3), reference_model(folder)
    chain = Chain(folder, tensor=tensor, feeds_tokens=True)
    assert [stage._model.heads.num_kv for stage in chain.stages[0]] == [1] * tensor
    serve(chain, asks)
    chain.close()
    wanted = [generate(model, ask.prompt, ask.max_new_tokens, ask.decoder_prefix) for ask in asks]
    assert differences(asks, wanted) <= 1


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_head_is_recorded_with_and_without_a_bias_of_logits(tmp_path: Path, is_tied: bool, has_bias: bool) -> None:
    folder = tiny_checkpoint("marian", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert tensors["final_logits_bias"].any()
    if not has_bias:
        tensors["final_logits_bias"].zero_()
    if not is_tied:  # transformers believes the files, whatever config.json says
        tensors["lm_head.weight"] = tensors["model.shared.weight"].flip(1).contiguous()
    save_file(tensors, path, {"format": "pt"})
    asks, model = some_asks(folder, 6, seed=4), reference_model(folder)
    wanted = [generate(model, ask.prompt, ask.max_new_tokens, ask.decoder_prefix) for ask in asks]
    chain = Chain(folder, packs=PanelLinear, feeds_tokens=True)
    [[stage]] = chain.stages
    assert stage._recorded is not None
    assert stage._recorded._records_head
    serve(chain, asks)
    chain.close()
    assert stage._recorded._recordings
    assert differences(asks, wanted) <= 1


def test_no_kernel_is_compiled_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of the two stacks have different sizes, and so have their kernels. Compiling one takes seconds."""
    compiled: list[str] = []
    compile_body = team.compile_body
    monkeypatch.setattr(team, "compile_body", lambda name, body: (compiled.append(name), compile_body(name, body))[1])
    attention.kernel.cache_clear()
    folder = tiny_checkpoint("bart", tmp_path)
    chain = Chain(folder, packs=PanelLinear)
    assert {"attention-torch.float32-6", "attention-torch.float32-8"} <= set(compiled)
    compiled.clear()
    serve(chain, some_asks(folder, 3, seed=2))
    chain.close()
    assert not compiled


class CountedChain(Chain):
    """A chain that compares the slots in use with what its requests hold, after each step."""

    compared = 0

    def run(self, step: Step) -> list[Sampled]:
        for handle in step.freed:
            self.held.pop(handle, None)
        for new in step.new:
            self.held[new.handle] = [new.prompt_length, 0]
        sampled = super().run(step)
        for row in step.rows:
            if row.part is Part.TARGET:
                self.held[row.handle][1] = row.start + row.count
        tokens, tables = sum(map(sum, self.held.values())), 2 * len(self.held)
        for ranks in self.stages:
            for stage in ranks:
                if stage._model.layers:
                    assert 0 <= stage.slots_in_use - tokens < 4 * tables + 1
                else:
                    assert stage.slots_in_use == 0
                self.compared += 1
        return sampled

    @property
    def held(self) -> dict[int, list[int]]:
        return self.__dict__.setdefault("_held", {})


def test_slots_in_use_stay_within_one_block_per_table_of_what_requests_hold(tmp_path: Path) -> None:
    folder = tiny_checkpoint("umt5", tmp_path)
    chain = CountedChain(folder, stages=3, layer_counts=(2, 2, 1))
    serve(chain, some_asks(folder, 12, seed=5), max_batch_size=5)
    assert chain.compared > 30
    assert [ranks[0].slots_in_use for ranks in chain.stages] == [0, 0, 0]
    chain.close()


def test_nothing_is_left_of_a_request_that_is_cancelled(tmp_path: Path) -> None:
    chain = Chain(tiny_checkpoint("bart", tmp_path), slots=40)
    source, target = Row(1, 0, 9, sample=False, part=Part.SOURCE), Row(1, 0, 2, sample=True, part=Part.TARGET)
    ask = Ask(list(range(5, 14)), 5, decoder_prefix=(START, 4))
    for turn in range(5):  # with the slots of two requests, a slot that is lost would show
        chain.run(Step(epoch=EPOCH, number=2 * turn + 1, new=(ask.new(1),), rows=(source, target)))
        assert chain.stages[0][0].slots_in_use == 16
        chain.run(Step(epoch=EPOCH, number=2 * turn + 2, freed=(1,)))
        assert chain.stages[0][0].slots_in_use == 0
    chain.close()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((Row(1, 0, 8, sample=False, part=Part.SOURCE), Row(1, 0, 1, sample=True, part=Part.TARGET)), "whole source"),
        ((Row(1, 1, 8, sample=False, part=Part.SOURCE), Row(1, 0, 1, sample=True, part=Part.TARGET)), "whole source"),
        ((Row(2, 0, 9, sample=False, part=Part.SOURCE), Row(1, 0, 1, sample=True, part=Part.TARGET)), "whole source"),
        ((Row(1, 0, 9, sample=False, part=Part.SOURCE), Row(1, 0, 3, sample=True, part=Part.TARGET)), "are not known"),
    ],
)
def test_a_step_that_does_not_fit_its_requests_breaks_the_epoch(
    tmp_path: Path, rows: tuple[Row, ...], message: str
) -> None:
    chain = Chain(tiny_checkpoint("bart", tmp_path))
    ask = Ask(list(range(5, 14)), 5, decoder_prefix=(START, 4))
    with pytest.raises(EngineError, match=message):
        chain.run(Step(epoch=EPOCH, number=1, new=(ask.new(1),), rows=rows))
    chain.close()
