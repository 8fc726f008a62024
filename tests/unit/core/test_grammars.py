"""Grammars and the tokens of a model: masks, ends, failures, and vocabularies of other widths than the tokenizer's."""

import random
from collections.abc import Sequence
from functools import cache

import orjson
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from orca.core.domain.text import Tokenizer
from orca.core.grammars.matching import NO_FORCING, GrammarError, GrammarMatcher, GrammarVocabulary

WORDS = ("<eos>", "<other_eos>", "<call>", '{"', '":', "true", *map(chr, range(33, 127)), "Ġ", "Ċ")
EOS, OTHER_EOS, CALL = range(3)
VOCAB = len(WORDS) + 2  # two rows of padding


@cache
def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(WORDS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in WORDS[:3]])
    decoder = orjson.loads(inner.to_str())["decoder"]
    return Tokenizer(inner, decoder=decoder, named_special_tokens={"eos_token": "<eos>"})


@cache
def vocabulary(width: int = VOCAB) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer(), width, (EOS, OTHER_EOS))


def matcher(grammar: str, width: int = VOCAB) -> GrammarMatcher:
    return vocabulary(width).matcher(f"{grammar}\n{NO_FORCING}")


def allowed(of: GrammarMatcher) -> set[int]:
    mask = of.mask()
    return {token for token in range(len(mask) * 8) if mask[token // 8] >> (token % 8) & 1}


def ids(text: str) -> list[int]:
    return [WORDS.index(character) for character in text]


def texts(tokens: Sequence[int]) -> set[str]:
    return {WORDS[token] for token in tokens}


def test_a_mask_has_every_token_that_the_text_may_continue_with() -> None:
    one = matcher('start: %json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
    assert texts(sorted(allowed(one))) == {"{", '{"'}
    one.consume([WORDS.index('{"')])
    assert texts(sorted(allowed(one))) == {"a"}
    one.consume([*ids("a"), WORDS.index('":')])
    assert {"true", "t", "f", "Ġ"} <= texts(sorted(allowed(one)))


def test_an_output_may_end_where_its_text_is_whole_and_must_end_where_nothing_follows() -> None:
    one = matcher('start: "a"+ "b"?')
    assert allowed(one) == set(ids("a"))
    one.consume(ids("aa"))
    assert allowed(one) == {EOS, OTHER_EOS, *ids("ab")}
    assert not one.is_complete
    one.consume(ids("b"))
    assert one.is_complete
    assert allowed(one) == {EOS, OTHER_EOS}


@pytest.mark.parametrize("grammar", ['start: "a"+', 'start: "a"'], ids=["whole", "complete"])
@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_after_its_end_an_output_takes_nothing_more(grammar: str, eos: int) -> None:
    one = matcher(grammar)
    one.consume([*ids("a"), eos])
    assert one.is_complete
    assert allowed(one) == {EOS, OTHER_EOS}
    one.consume([*ids("a"), eos, CALL])
    assert one.failure is None
    assert allowed(one) == {EOS, OTHER_EOS}


def test_a_special_token_has_a_name_and_no_text() -> None:
    one = matcher("start: <call> /.*/")
    assert allowed(one) == {CALL}
    one.consume([CALL])
    assert CALL not in allowed(one)
    assert set(ids("x<")) <= allowed(one)


def test_a_token_outside_the_grammar_is_a_failure_for_good() -> None:
    one = matcher('start: "a"+')
    one.consume(ids("ab"))
    assert one.failure
    assert "\n" not in one.failure, "it is for the client"
    one.consume(ids("a"))
    assert one.failure


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: (", "Expected"),
        ('begin: "a"', "start"),
        ("start: <nothing>", "<nothing>"),
        ('start: %json {"uniqueItems": true}', "uniqueItems"),
        ('start: %json {"$ref": "#"}', "no text matches"),
        ("start: /a(?=b)/", "look-around"),
        ('{"grammars": []}', ""),
        ("", ""),
    ],
)
def test_a_bad_grammar_is_a_failure_that_says_where(grammar: str, words: str) -> None:
    one = matcher(grammar)
    one.mask()
    assert one.failure is not None
    assert words in one.failure


@pytest.mark.parametrize("width", [VOCAB, len(WORDS), len(WORDS) - 20, 4 * VOCAB + 1])
def test_the_tokenizer_may_have_more_tokens_than_the_logits_or_fewer(width: int) -> None:
    one = matcher("start: /[^x]*/", width)
    expected = {EOS, OTHER_EOS, *range(3, min(width, len(WORDS)))} - set(ids("x")) - {WORDS.index("Ċ")}
    assert allowed(one) - {WORDS.index("Ċ")} == expected
    assert len(one.mask()) == -(-width // 32) * 4


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="no end token"):
        GrammarVocabulary(tokenizer(), VOCAB, ())


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_a_matcher_is_a_pure_function_of_the_tokens(seed: int) -> None:
    """One that takes the log at once allows what one allows that has seen token after token."""
    chance, grammar = random.Random(seed), f"start: %json {orjson.dumps(SCHEMA).decode()}"
    one, output = matcher(grammar), list[int]()
    while not one.is_complete and len(output) < 60:
        again = matcher(grammar)
        again.consume(output)
        choices = allowed(one)
        assert allowed(again) == choices
        output.append(chance.choice(sorted(choices)))
        one.consume(output[-1:])
    assert one.failure is None
    if output[-1] in (EOS, OTHER_EOS):
        document = orjson.loads(tokenizer().decode(output))
        assert set(document) <= {"name", "age", "tags"}
