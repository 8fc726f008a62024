"""The oracle of the encoder-decoder chain model against its own formula, and itself with something wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from checker.oracles.chain_oracle import PRIME, drawn_index
from checker.oracles.seq2seq_chain_model import (
    Seq2SeqChainModel,
    load_seq2seq_chain_model,
    make_seq2seq_chain_model,
)
from checker.oracles.seq2seq_chain_oracle import expected_answer

SOURCE, PREFIX = [3, 1, 4, 1, 5, 9, 2, 6], (27, 18)


@pytest.fixture
def model(tmp_path: Path) -> Seq2SeqChainModel:
    return make_seq2seq_chain_model(tmp_path)


def answer(model: Seq2SeqChainModel, source: list[int], prefix: tuple[int, ...] = PREFIX, count: int = 20) -> list[int]:
    return expected_answer(model, source, count, seed=7, temperature=1.0, prefix=prefix)


def test_the_first_token_follows_the_formula(tmp_path: Path) -> None:
    model = make_seq2seq_chain_model(
        tmp_path, encoder_layers=1, decoder_layers=1, encoder_heads=1, heads=2, kv_heads=1, channels=1
    )
    [encoder], [decoder], [cross] = model.encoder, model.decoder, model.cross

    def fold(number: int) -> int:
        return number**5 % PRIME

    states = [fold(fold(token + model.encoder_salt) + place) for place, token in enumerate(SOURCE)]
    seen = sum(fold(state + encoder.keep[0]) % 256 for state in states)
    memory = [fold(state + encoder.mix[0] * seen) for state in states]
    read = sum(fold(number + cross.keep[0]) % 256 for number in memory)
    targets = [fold(fold(token + model.decoder_salt) + place) for place, token in enumerate((0, *PREFIX))]
    seen = sum(fold(state + decoder.keep[0]) % 256 for state in targets)
    last = fold(targets[-1] + sum(decoder.mix) * seen + sum(cross.mix) * read)
    first = fold(last + model.head_salt) % (1000 - 15)
    assert expected_answer(model, SOURCE, 1, seed=7, temperature=0.0, prefix=PREFIX) == [first]
    assert answer(model, SOURCE, count=1) == [first + drawn_index(7, 0)]


def test_an_answer_continued_as_a_prefix_is_the_same(model: Seq2SeqChainModel) -> None:
    whole = expected_answer(model, SOURCE, 20, seed=7, temperature=0.0, prefix=PREFIX)
    for known in (0, 1, 7, 19):
        prefix = (*PREFIX, *whole[:known])
        rest = expected_answer(model, SOURCE, 20 - known, seed=7, temperature=0.0, prefix=prefix)
        assert whole[:known] + rest == whole


@pytest.mark.parametrize(
    ("source", "prefix"),
    [
        pytest.param([3, 1, 4, 2, 5, 9, 2, 6], PREFIX, id="one source token another"),
        pytest.param([3, 1, 4, 5, 1, 9, 2, 6], PREFIX, id="two source tokens exchanged"),
        pytest.param([3, 1, 4, 1, 5, 9, 2], PREFIX, id="last source token left out"),
        pytest.param([1, 4, 1, 5, 9, 2, 6], PREFIX, id="first source token left out"),
        pytest.param([*SOURCE, *SOURCE], PREFIX, id="source twice"),
        pytest.param(SOURCE, (), id="no prefix"),
        pytest.param(SOURCE, (18, 27), id="prefix in another order"),
        pytest.param(SOURCE, (27,), id="prefix too short"),
        pytest.param([*SOURCE, 27], (18,), id="a token on the other side"),
    ],
)
def test_all_tokens_after_a_wrong_context_differ(
    model: Seq2SeqChainModel, source: list[int], prefix: tuple[int, ...]
) -> None:
    pairs = zip(answer(model, SOURCE), answer(model, source, prefix), strict=True)
    assert sum(one == other for one, other in pairs) <= 1, "one of 1000 is right by chance"


def test_a_prefix_may_begin_with_the_start_token(model: Seq2SeqChainModel) -> None:
    assert answer(model, SOURCE, (0, *PREFIX)) == answer(model, SOURCE)
    assert answer(model, SOURCE, (0,)) == answer(model, SOURCE, ())
    assert answer(model, SOURCE, (0, 0)) != answer(model, SOURCE, ())


def test_an_answer_ends_in_its_first_eos_unless_that_is_ignored(model: Seq2SeqChainModel) -> None:
    output = answer(model, SOURCE)
    ending = replace(model, eos_token_id=output[4])
    assert answer(ending, SOURCE) == output[:5]
    assert expected_answer(ending, SOURCE, 20, seed=7, temperature=1.0, prefix=PREFIX, ignore_eos=True) == output


@pytest.mark.parametrize(("source", "prefix"), [([1000], ()), ([1], (1000,))])
def test_a_token_outside_the_vocabulary_is_refused(
    model: Seq2SeqChainModel, source: list[int], prefix: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="token 1000 is not one of 1000"):
        answer(model, source, prefix)


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = make_seq2seq_chain_model(
        tmp_path, encoder_layers=1, decoder_layers=2, vocab_size=50, encoder_heads=5, heads=6, kv_heads=3, channels=2,
        start_token_id=4, eos_token_id=5,
    )  # fmt: skip
    assert load_seq2seq_chain_model(tmp_path) == written


def test_a_folder_with_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "orca_chain"}')
    with pytest.raises(ValueError, match="type orca_chain, not orca_seq2seq_chain"):
        load_seq2seq_chain_model(tmp_path)
