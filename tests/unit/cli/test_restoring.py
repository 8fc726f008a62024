"""The examples and scores of the small model that restores case and punctuation."""

import random

import pytest

from orca.cli.small_model.cased_tokenizer import END_ID, learn_tokenizer
from orca.cli.small_model.restoring import (
    WORDS_MIN,
    Restored,
    balanced,
    compare,
    examples_of,
    plain,
    sentences_of,
)

PARAGRAPH = (
    '"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?" '
    "Mr. Bennet replied that he had not. It was a well-known truth--or so she thought."
)


def test_a_paragraph_is_cut_after_sentences_but_not_after_titles() -> None:
    assert sentences_of(PARAGRAPH) == [
        '"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"',
        "Mr. Bennet replied that he had not.",
        "It was a well-known truth--or so she thought.",
    ]


def test_an_exclamation_that_goes_on_in_lower_case_ends_no_sentence() -> None:
    assert sentences_of('"Oh!" said she. "Indeed!"') == ['"Oh!" said she.', '"Indeed!"']


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It was Mr. Darcy's.", "it was mr darcys"),
        ("a well-known truth--or so", "a well known truth or so"),
        (' "Oh! (she cried);" ', "oh she cried"),
        ("--", ""),
    ],
)
def test_plain_text_has_no_case_and_no_punctuation(text: str, words: str) -> None:
    assert plain(text) == words


@pytest.mark.parametrize(
    ("window", "is_open", "text"),
    [
        ('"I am glad to hear it."', False, "I am glad to hear it."),
        ("I am glad to hear it.", True, "I am glad to hear it."),
        ('"I am glad. I am.', False, "I am glad. I am."),
        ('I am glad," said she.', True, '"I am glad," said she.'),
        ('She said, "I am glad.', False, 'She said, "I am glad."'),
        ('"I am," said she, "glad."', False, '"I am," said she, "glad."'),
        ("She was glad.", False, "She was glad."),
    ],
)
def test_a_window_has_whole_quotations_or_none(window: str, is_open: bool, text: str) -> None:
    assert balanced(window, is_open=is_open) == text


def test_windows_cover_each_sentence_once_and_keep_the_bounds() -> None:
    sentences = [f"Sentence {n} has {'very ' * (n % 9)}many words." for n in range(200)]
    examples = list(examples_of([[" ".join(sentences)]], words_max=20, draw=random.Random(1)))
    assert sentences_of(" ".join(example.target for example in examples)) == sentences
    lengths = [len(example.source.split()) for example in examples]
    assert min(lengths) >= WORDS_MIN
    assert max(lengths) <= 20
    assert len(set(lengths)) > 5
    assert all(example.source == plain(example.target) for example in examples)


def test_sentences_that_are_too_long_or_too_short_are_left_out() -> None:
    paragraphs = ["Too short.", "This one " + "is " * 30 + "too long. This one has six words."]
    examples = list(examples_of([paragraphs], words_max=20, draw=random.Random(1)))
    assert [example.target for example in examples] == ["This one has six words."]


@pytest.mark.parametrize(
    ("output", "restored"),
    [
        ('"Oh, Mr. Darcy!" she said.', Restored(words=5, copied=5, exact=5)),
        ("oh mr darcy she said", Restored(words=5, copied=5, exact=1)),
        ('"Oh, Mr. Darcy!" she she cried.', Restored(words=5, copied=4, exact=4)),
        ("", Restored(words=5, copied=0, exact=0)),
    ],
)
def test_words_are_counted_as_copied_and_as_restored_exactly(output: str, restored: Restored) -> None:
    assert compare(output, '"Oh, Mr. Darcy!" she said.') == restored


def test_a_word_with_a_capital_has_the_tokens_of_the_word_but_for_the_first() -> None:
    texts = ["the netherfield ball was given at netherfield park", "all of them were there that evening"] * 3
    tokenizer = learn_tokenizer(texts, vocabulary=400)
    assert tokenizer.get_vocab_size() <= 400
    for small, large in (("netherfield", "Netherfield"), (" netherfield", " Netherfield"), (" evening", " Evening")):
        pieces, cased = tokenizer.encode(small).tokens, tokenizer.encode(large).tokens
        assert cased[0] != pieces[0]
        assert cased[0].lower() == pieces[0].lower()
        assert cased[1:] == pieces[1:]


def test_the_tokenizer_ends_a_text_and_gives_it_back_without_a_leading_space() -> None:
    tokenizer = learn_tokenizer(["it is a truth universally acknowledged"], vocabulary=300)
    text = 'It is a truth, "universally" acknowledged: été, 北京!'
    ids = tokenizer.encode(text).ids
    assert ids[-1] == END_ID
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, *ids]) == text
