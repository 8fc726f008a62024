"""The oracle against its own formula, the published random numbers, and itself with something wrong."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from checker.oracles.chain_model import ChainModel, load_chain_model, make_chain_model
from checker.oracles.chain_oracle import PRIME, drawn_index, expected_tokens, philox
from checker.oracles.model_folder import text_of, tokens_of

# Random123, kat_vectors: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def model(tmp_path: Path) -> ChainModel:
    return make_chain_model(tmp_path)


def sampled(model: ChainModel, prompt: list[int], count: int = 20) -> list[int]:
    return expected_tokens(model, prompt, count, seed=7, temperature=1.0)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected


def test_the_drawn_index_is_the_highest_four_bits_of_the_first_word() -> None:
    assert drawn_index(0, 0) == 0x6  # of 0x6627E8D5
    largest = 2**63 - 1
    assert drawn_index(largest, largest) == philox((0xFFFFFFFF, 0x7FFFFFFF, 0, 0), (0xFFFFFFFF, 0x7FFFFFFF))[0] >> 28


def test_each_of_sixteen_indices_is_drawn_equally_often() -> None:
    places = [drawn_index(seed, index) for seed in range(100) for index in range(160)]
    # 1000 each are expected, with a standard deviation of 31.
    assert all(850 < places.count(place) < 1150 for place in range(16))


def test_the_first_token_follows_the_formula(tmp_path: Path) -> None:
    model = make_chain_model(tmp_path, layers=1, heads=2, kv_heads=1, head_dim=1)
    layer = model.layers[0]

    def fold(number: int) -> int:
        return number**5 % PRIME

    states = [fold(fold(token + model.embedding_salt) + place) for place, token in enumerate(PROMPT)]
    seen = sum(fold(state + layer.keep[0]) % 256 for state in states)
    last = fold(states[-1] + layer.mix[0] * seen + layer.mix[1] * seen)
    first = fold(last + model.head_salt) % (1000 - 15)
    assert expected_tokens(model, PROMPT, 1, seed=7, temperature=0.0) == [first]
    assert expected_tokens(model, PROMPT, 1, seed=7, temperature=1.0) == [first + drawn_index(7, 0)]


def test_an_output_restarted_from_its_log_continues_unchanged(model: ChainModel) -> None:
    output = expected_tokens(model, PROMPT, 20, seed=7, temperature=0.0)
    for known in range(20):
        rest = expected_tokens(model, PROMPT + output[:known], 20 - known, seed=7, temperature=0.0)
        assert output[:known] + rest == output


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param([3, 1, 4, 2, 5, 9, 2, 6], id="one token another"),
        pytest.param([3, 1, 4, 5, 1, 9, 2, 6], id="two tokens exchanged"),
        pytest.param([3, 1, 4, 1, 5, 9, 2], id="last token left out"),
        pytest.param([1, 4, 1, 5, 9, 2, 6], id="first token left out"),
        pytest.param([3, 1, 4, 1, 5, 9, 2, 6, 6], id="last token twice"),
    ],
)
def test_all_tokens_after_a_wrong_context_differ(model: ChainModel, wrong: list[int]) -> None:
    pairs = zip(sampled(model, PROMPT), sampled(model, wrong), strict=True)
    assert all(one != other for one, other in pairs)


def test_tokens_depend_on_seed_and_on_the_weights(model: ChainModel, tmp_path: Path) -> None:
    other = make_chain_model(tmp_path / "other", seed=1)
    assert sampled(model, PROMPT) != sampled(other, PROMPT)
    assert sampled(model, PROMPT) != expected_tokens(model, PROMPT, 20, seed=8, temperature=1.0)
    assert sampled(model, PROMPT) == expected_tokens(model, PROMPT, 20, seed=7, temperature=0.3)


def test_an_output_ends_in_its_first_eos_unless_that_is_ignored(model: ChainModel) -> None:
    output = sampled(model, PROMPT)
    ending = replace(model, eos_token_id=output[4])
    assert sampled(ending, PROMPT) == output[:5]
    assert expected_tokens(ending, PROMPT, 20, seed=7, temperature=1.0, ignore_eos=True) == output


def test_a_token_outside_the_vocabulary_is_refused(model: ChainModel) -> None:
    with pytest.raises(ValueError, match="token 1000 is not one of 1000"):
        sampled(model, [1000])


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = make_chain_model(tmp_path, layers=2, vocab_size=50, heads=6, kv_heads=3, head_dim=2, eos_token_id=5)
    assert load_chain_model(tmp_path) == written


def test_a_folder_with_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="type llama, not orca_chain"):
        load_chain_model(tmp_path)


def test_tokens_can_be_read_from_the_text_as_the_tokenizer_does(tmp_path: Path) -> None:
    make_chain_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = random.Random(1).sample(range(1000), 200)
    text = text_of(tokens)
    assert text == tokenizer.decode(tokens) == "".join(tokenizer.id_to_token(token) for token in tokens)
    assert tokens_of(text) == tokenizer.encode(text).ids == tokens
    assert tokenizer.encode("Hello <5>, <1000>!").ids == [0, 5, 0, 0, 0]


@pytest.mark.parametrize("text", ["<1", "1>", "<1><2", "<1> <2>", "<01>", "<>"])
def test_a_text_of_anything_but_whole_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a sequence of tokens"):
        tokens_of(text)
