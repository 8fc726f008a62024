"""The model that checks the server, on real stages: its tokens are those of the oracle, which shares no code."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from checker.oracles.chain_model import ChainModel, load_chain_model, make_chain_model
from checker.oracles.chain_oracle import CHOICES, drawn_index, expected_tokens
from orca.core.domain.errors import ModelError
from orca.core.domain.request import SamplingParams
from orca.worker.models.build import load_stage
from orca.worker.stage.host_sampler import Draw, SamplingState, sample
from orca.worker.stage.random_numbers import uniforms
from support.worker.stage_driver import Ask, Chain, random_asks, serve

VOCAB = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("chain")
    make_chain_model(folder, layers=4)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> ChainModel:
    return load_chain_model(folder)


def some_asks(count: int, seed: int) -> list[Ask]:
    """Requests of mixed lengths, every third of them greedy, with seeds of all sizes."""
    draw = random.Random(seed)
    asks = random_asks(VOCAB, count, seed)
    for ask in asks:
        params = SamplingParams(temperature=draw.choice((0.0, 0.7, 1.0)), seed=draw.getrandbits(draw.randint(1, 63)))
        ask.params = params
    return asks


def expected(model: ChainModel, ask: Ask) -> list[int]:
    params = ask.params
    return expected_tokens(model, ask.prompt, ask.max_new_tokens, seed=params.seed, temperature=params.temperature)


@pytest.mark.parametrize(
    ("stages", "tensor", "chunk", "feeds_tokens"),
    [(1, 1, None, False), (2, 1, 3, True), (3, 1, 5, True), (1, 2, None, True), (3, 2, 4, False), (2, 4, 7, True)],
)
def test_any_stages_ranks_chunks_and_prefetch_give_the_tokens_of_the_oracle(
    folder: Path, model: ChainModel, stages: int, tensor: int, chunk: int | None, feeds_tokens: bool
) -> None:
    asks = some_asks(60, seed=10 * stages + tensor)
    chain = Chain(folder, stages=stages, tensor=tensor, feeds_tokens=feeds_tokens)
    serve(chain, asks, max_batch_size=7, chunk=chunk)
    chain.close()
    assert [ask.output for ask in asks] == [expected(model, ask) for ask in asks]


def test_a_restart_from_prompt_and_log_continues_with_the_tokens_of_the_oracle(folder: Path, model: ChainModel) -> None:
    asks = some_asks(60, seed=3)
    for place, ask in enumerate(asks):
        output = expected(model, ask)
        ask.log = output[: place % len(output)]
    chain = Chain(folder, stages=3)
    serve(chain, asks, chunk=6)
    chain.close()
    assert [ask.output for ask in asks] == [expected(model, ask) for ask in asks]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "tensor"), [(6, 2, 3, 3), (5, 1, 8, 4), (3, 3, 1, 2)])
def test_heads_that_ranks_share_unevenly_give_the_tokens_of_the_oracle(
    tmp_path: Path, heads: int, kv_heads: int, head_dim: int, tensor: int
) -> None:
    model = make_chain_model(tmp_path, layers=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=4)
    asks = some_asks(10, seed=5)
    chain = Chain(tmp_path, stages=2, tensor=tensor)
    serve(chain, asks, chunk=5)
    chain.close()
    assert [ask.output for ask in asks] == [expected(model, ask) for ask in asks]


def test_sums_over_the_longest_context_are_exact(tmp_path: Path) -> None:
    model = make_chain_model(tmp_path, max_model_len=4096)
    draw = random.Random(6)
    whole, cut = (Ask([draw.randrange(VOCAB) for _ in range(4090)], 6, SamplingParams(seed=place)) for place in (1, 2))
    for ask, chunk in ((whole, None), (cut, 700)):
        chain = Chain(tmp_path, stages=2, slots=4096)
        serve(chain, [ask], chunk=chunk)
        chain.close()
        assert ask.output == expected(model, ask)


def test_the_oracle_draws_as_the_sampler_does_in_a_million_draws() -> None:
    draw = random.Random(7)
    seeds = [draw.getrandbits(draw.randint(1, 63)) for _ in range(1000)]
    pairs = [(seed, index) for seed in seeds for index in range(1000)]
    numbers = uniforms([seed for seed, _ in pairs], [index for _, index in pairs])
    places = np.floor(numbers * CHOICES).astype(int)  # exact: 53 bits times a power of two
    assert [drawn_index(*pair) for pair in pairs[::50]] == places[::50].tolist()
    assert np.array_equal((numbers * 2.0**53).astype(np.int64) * CHOICES >> 53, places)


def test_the_sampler_chooses_the_same_place_for_any_temperature_and_cut() -> None:
    logits = torch.full((500, 64), -10_000.0)
    logits[:, 20 : 20 + CHOICES] = 0.0
    for choice in ({"temperature": 0.2}, {"temperature": 1.9}, {"top_k": 16, "top_p": 0.5}, {"min_p": 0.9}):
        draws = [
            Draw(SamplingState.start(SamplingParams(seed=seed, **choice), (), 0, ()), index=3 * seed)
            for seed in range(500)
        ]
        assert sample(logits, draws).tokens == [20 + drawn_index(seed, 3 * seed) for seed in range(500)]


def test_a_dtype_that_rounds_whole_numbers_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"only float32 holds; dtype is torch\.bfloat16"):
        load_stage(folder, dtype="bfloat16")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 15, "vocab_size 15 is below 16"),
        ("max_position_embeddings", 4097, "4097 is above 4096"),
    ],
)
def test_a_config_whose_numbers_would_not_be_exact_is_refused(
    tmp_path: Path, key: str, value: float, message: str
) -> None:
    make_chain_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=message):
        load_stage(tmp_path)
