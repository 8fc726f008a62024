"""The encoder-decoder model that checks the server, on real stages: its tokens are those of the oracle."""

import json
import random
from pathlib import Path

import pytest

from checker.oracles.seq2seq_chain_model import Seq2SeqChainModel, make_seq2seq_chain_model
from orca.core.domain.errors import ModelError
from orca.core.domain.request import SamplingParams
from orca.worker.models.build import load_stage
from support.worker.seq2seq_chain import VOCAB, expected
from support.worker.stage_driver import Ask, Chain, serve


def some_asks(chain_model: Seq2SeqChainModel, count: int, seed: int) -> list[Ask]:
    """Requests of mixed lengths: a third is greedy, a third has a prefix, a third is claimed again."""
    draw, arrival, asks = random.Random(seed), 0, list[Ask]()
    for number in range(count):
        arrival += draw.choice((0, 0, 1, 2))
        source = [draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 4, 5, 16, 17, 33)))]
        prefix = tuple(draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 9) if number % 3 == 1 else 0))
        params = SamplingParams(temperature=draw.choice((0.0, 0.7, 1.0)), seed=draw.getrandbits(draw.randint(1, 63)))
        ask = Ask(source, draw.randint(1, 14), params, arrival, decoder_prefix=chain_model.beginning(prefix))
        if draw.random() < 0.33:
            ask.log = expected(chain_model, ask)[: draw.randrange(ask.max_new_tokens)]
        asks.append(ask)
    return asks


def check(chain_folder: Path, chain_model: Seq2SeqChainModel, asks: list[Ask], *, batch: int, **layout: object) -> None:
    chain = Chain(chain_folder, **layout)  # type: ignore[arg-type]
    serve(chain, asks, max_batch_size=batch)
    assert [ask.output for ask in asks] == [expected(chain_model, ask) for ask in asks]
    assert all(stage.slots_in_use == 0 for ranks in chain.stages for stage in ranks)
    chain.close()


@pytest.mark.parametrize(
    ("stages", "tensor", "batch", "feeds_tokens"),
    [
        (1, 1, 1, False),
        (1, 1, 16, True),
        (2, 1, 3, False),
        (2, 1, 16, True),
        (3, 1, 1, True),
        (3, 1, 16, False),
        (1, 2, 3, True),
        (1, 2, 16, False),
        (2, 2, 16, False),
        (2, 2, 3, True),
    ],
)
def test_any_stages_ranks_batches_and_prefetch_give_the_tokens_of_the_oracle(
    chain_folder: Path, chain_model: Seq2SeqChainModel, stages: int, tensor: int, batch: int, feeds_tokens: bool
) -> None:
    asks = some_asks(chain_model, 6 if batch == 1 else 18, seed=100 * stages + 10 * tensor + batch)
    check(chain_folder, chain_model, asks, batch=batch, stages=stages, tensor=tensor, feeds_tokens=feeds_tokens)


@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (1, 1, 1, 1, 1), (2, 1, 2)])
def test_layers_divided_by_hand_give_the_tokens_of_the_oracle(
    chain_folder: Path, chain_model: Seq2SeqChainModel, counts: tuple[int, ...]
) -> None:
    check(
        chain_folder, chain_model, some_asks(chain_model, 8, seed=1), batch=5, stages=len(counts), layer_counts=counts
    )


@pytest.mark.parametrize(
    ("encoder_heads", "heads", "kv_heads", "channels", "tensor"), [(3, 6, 2, 2, 3), (5, 3, 1, 7, 2), (2, 3, 3, 3, 2)]
)
def test_heads_that_ranks_share_unevenly_give_the_tokens_of_the_oracle(
    tmp_path: Path, encoder_heads: int, heads: int, kv_heads: int, channels: int, tensor: int
) -> None:
    chain_model = make_seq2seq_chain_model(
        tmp_path,
        encoder_layers=1,
        decoder_layers=1,
        encoder_heads=encoder_heads,
        heads=heads,
        kv_heads=kv_heads,
        channels=channels,
        seed=4,
    )
    check(tmp_path, chain_model, some_asks(chain_model, 10, seed=5), batch=4, stages=2, tensor=tensor)


def test_sums_over_the_longest_source_and_target_are_exact(tmp_path: Path) -> None:
    chain_model = make_seq2seq_chain_model(tmp_path, encoder_layers=1, decoder_layers=1, positions=4096)
    draw = random.Random(6)
    source, prefix = ([draw.randrange(1, VOCAB) for _ in range(count)] for count in (4096, 4089))
    ask = Ask(source, 6, SamplingParams(seed=1), decoder_prefix=chain_model.beginning(tuple(prefix)))
    check(tmp_path, chain_model, [ask], batch=1, stages=2, tensor=2, slots=8192)


def test_a_dtype_that_rounds_whole_numbers_is_refused(chain_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"only float32 holds; dtype is torch\.bfloat16"):
        load_stage(chain_folder, dtype="bfloat16")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 15, "vocab_size 15 is below 16"),
        ("max_position_embeddings", 4097, "4097 is above 4096"),
        ("head_dim", 1, "head_dim is 1: a head has a channel that marks position 0"),
        ("encoder_attention_heads", 32769, "encoder_attention_heads 32769 x head_dim 4 is above 131072 channels"),
        ("num_attention_heads", 32770, "num_attention_heads 32770 x head_dim 4 is above 131072 channels"),
        ("num_key_value_heads", 3, "4 heads do not share 3 key-value heads evenly"),
        ("decoder_start_token_id", None, "decoder_start_token_id has to be one token id"),
        ("decoder_start_token_id", 1000, "decoder_start_token_id is 1000, not a token id below 1000"),
    ],
)
def test_a_config_whose_numbers_would_not_be_exact_is_refused(
    tmp_path: Path, key: str, value: int | None, message: str
) -> None:
    make_seq2seq_chain_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=message):
        load_stage(tmp_path)
