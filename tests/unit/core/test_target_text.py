"""The text of a target, which continues no prompt: token by token it is what `decode` makes of all its tokens."""

import functools
import tempfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.text import Detokenizer, OutputText, Tokenizer
from orca.core.domain.text_clean_up import REPLACEMENTS, CleanUp, clean_up
from support.core.target_tokenizers import KINDS, bart_like, nllb_like, unigram, wrap


@functools.cache
def tokenizer(kind: str, *, continues_prompts: bool = False, cleans_up: bool = False) -> Tokenizer:
    return wrap(KINDS[kind](), continues_prompts=continues_prompts, cleans_up=cleans_up)


def ids_of(kind: str, *pieces: str) -> list[int]:
    found = [tokenizer(kind)._inner.token_to_id(piece) for piece in pieces]
    assert None not in found, pieces
    return [token_id for token_id in found if token_id is not None]


def pieces(one: Tokenizer, ids: list[int]) -> list[str]:
    output = OutputText(one)
    return [*(output.push(token_id).text for token_id in ids), output.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_pieces_of_any_token_sequence_join_to_the_decoded_whole(data: st.DataObject, kind: str) -> None:
    one = tokenizer(kind)
    last = one.vocab_size + 2
    # Tokens at the start, where the kinds differ, are mostly special tokens and word marks.
    odd = [0, 1, 2, last, one._inner.token_to_id("▁") or 3, one._inner.token_to_id("▁▁") or 3]
    ids = data.draw(st.lists(st.sampled_from(odd), max_size=4)) + data.draw(st.lists(st.integers(0, last), max_size=30))
    assert "".join(pieces(one, ids)) == one._inner.decode(ids, skip_special_tokens=True)
    assert one.decode(ids) == one._inner.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_cleaned_pieces_join_to_the_cleaned_whole(data: st.DataObject, kind: str) -> None:
    one = tokenizer(kind, cleans_up=True)
    ids = data.draw(st.lists(st.integers(0, one.vocab_size), max_size=40))
    expected = clean_up(one._inner.decode(ids, skip_special_tokens=True))
    assert "".join(pieces(one, ids)) == expected == one.decode(ids)


@given(parts=st.lists(st.text(" .?!,'ntmsver", max_size=6), max_size=12))
def test_a_text_in_any_pieces_is_cleaned_as_a_whole(parts: list[str]) -> None:
    whole = "".join(parts)
    expected = whole
    for old, new in REPLACEMENTS:
        expected = expected.replace(old, new)
    stream = CleanUp()
    assert "".join([*(stream.push(part) for part in parts), stream.flush()]) == expected == clean_up(whole)


def test_only_an_end_that_may_change_is_held_back() -> None:
    stream = CleanUp()
    assert [stream.push(part) for part in ("a", " ", "b", " '", "x", " . ", "c")] == [
        "a",
        "",
        " b",
        "",
        " 'x",
        ".",
        " c",
    ]


def test_a_target_has_no_space_before_its_first_word() -> None:
    ids = ids_of("t5", "▁the", "▁the")
    assert pieces(tokenizer("t5"), ids) == ["the", " the", ""]
    assert pieces(tokenizer("t5", continues_prompts=True), ids) == [" the", " the", ""]


@pytest.mark.parametrize("before", [["<pad>"], ["</s>", "<extra_id_0>"], ["<pad>", "<unk>"]])
def test_special_tokens_before_the_first_word_do_not_count(before: list[str]) -> None:
    ids = ids_of("t5", *before, "▁the", "▁the")
    assert "".join(pieces(tokenizer("t5"), ids)) == "the the"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_text_after_given_words_is_the_rest_of_the_decoded_whole(data: st.DataObject, kind: str) -> None:
    one = tokenizer(kind)
    words = one.encode("the lazy", add_special_tokens=False)
    ids = data.draw(st.lists(st.integers(0, one.vocab_size), max_size=20))
    output = OutputText(one, beginning=(0, *words))
    text = "".join([*(output.push(token_id).text for token_id in ids), output.flush()])
    assert one.decode(words) + text == one._inner.decode([*words, *ids], skip_special_tokens=True)


def test_only_words_before_a_target_keep_the_space_of_its_first_word() -> None:
    the, language = ids_of("nllb", "▁the")[0], ids_of("nllb", "deu_Latn")[0]
    beginnings = {(): "the", (2,): "the", (2, language): "the", (2, 2): "the", (the,): "the", (2, the): " the"}
    beginnings[2, language, the] = " the"
    for beginning, text in beginnings.items():
        assert OutputText(tokenizer("nllb"), beginning=beginning).push(the).text == text
        assert OutputText(tokenizer("nllb", continues_prompts=True), beginning=beginning).push(the).text == " the"


def test_only_the_first_token_loses_its_mark() -> None:
    assert "".join(pieces(tokenizer("t5"), ids_of("t5", "▁", "▁the"))) == " the"
    assert "".join(pieces(tokenizer("t5"), ids_of("t5", "▁▁", "▁the"))) == " the"
    assert "".join(pieces(tokenizer("llama"), ids_of("llama", "▁", "▁the"))) == " the"
    assert "".join(pieces(tokenizer("llama"), ids_of("llama", "▁▁", "▁the"))) == "  the"


def test_byte_level_targets_keep_a_leading_space_as_decode_does() -> None:
    one = tokenizer("bart")
    ids = one.encode(" the", add_special_tokens=False)
    assert "".join(pieces(one, ids)) == " the" == one._inner.decode(ids)


def test_a_file_of_an_older_release_names_the_added_space_otherwise() -> None:
    inner = unigram()
    for adds, text in ((True, "the the"), (False, " the the")):
        decoder = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": adds}
        one = Tokenizer(inner, decoder=decoder, named_special_tokens={}, continues_prompts=False)
        assert "".join(pieces(one, ids_of("t5", "▁the", "▁the"))) == text


def test_a_stop_string_is_searched_in_the_text_that_is_shown() -> None:
    ids = ids_of("t5", "▁the", "▁the", "▁the")
    for stop, shown in (("the", ""), (" the", "the"), ("e t", "th")):
        output = OutputText(tokenizer("t5"), [stop])
        deltas = [output.push(token_id) for token_id in ids[: 1 if stop == "the" else 2]]
        assert ("".join(delta.text for delta in deltas), deltas[-1].stop) == (shown, stop)


def test_a_stop_string_is_found_in_cleaned_text() -> None:
    one = tokenizer("t5", cleans_up=True)
    output = OutputText(one, ["e."])
    found = [output.push(token_id) for token_id in ids_of("t5", "▁the", "▁", ".")]
    assert [delta.text for delta in found] == ["th", "", ""]
    assert found[-1].stop == "e."


@pytest.mark.parametrize("kind", ["t5", "nllb"])
def test_a_special_stop_ends_the_text_before_it(kind: str) -> None:
    special = {"t5": "<extra_id_1>", "nllb": "fra_Latn"}[kind]
    for cleans_up in (False, True):
        output = OutputText(tokenizer(kind, cleans_up=cleans_up), [special])
        first, last = [output.push(token_id) for token_id in ids_of(kind, "▁the", special)]
        assert (first.text + last.text, last.stop) == ("the", special)


def test_every_character_is_shown_when_special_tokens_are_asked_for() -> None:
    one = tokenizer("t5", cleans_up=True)
    detokenizer = Detokenizer(one, shows_special=True)
    ids = ids_of("t5", "<pad>", "▁the", "▁.")
    assert "".join(map(detokenizer.push, ids)) == "<pad> the ."


@pytest.mark.parametrize(
    ("make", "ends"),
    [(unigram, ["</s>"]), (bart_like, ["<s>", "</s>"]), (nllb_like, ["eng_Latn", "</s>"])],
)
def test_a_source_has_the_special_tokens_of_its_tokenizer(make: object, ends: list[str]) -> None:
    one = wrap(make())  # type: ignore[operator]
    ids = one.encode("the fox")
    added = [token_id for token_id in ids if one.is_special(token_id)]
    assert [one._inner.id_to_token(token_id) for token_id in added] == ends
    assert [token_id for token_id in ids if token_id not in added] == one.encode("the fox", add_special_tokens=False)


def test_the_decoder_is_that_of_the_file() -> None:
    document = orjson.loads(unigram().to_str())
    assert document["decoder"]["prepend_scheme"] == "always"


@functools.cache
def byt5() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (
            ("config.json", '{"model_type": "t5"}'),
            ("tokenizer_config.json", '{"tokenizer_class": "ByT5Tokenizer"}'),
        ):
            (Path(folder) / name).write_text(content)
        return Tokenizer.from_folder(folder)


@given(text=st.text(max_size=20), noise=st.lists(st.integers(0, 400), max_size=8), at=st.integers(0, 20))
def test_bytes_that_make_no_character_are_left_out_as_in_byt5(text: str, noise: list[int], at: int) -> None:
    ids = [3 + byte for byte in text.encode()]
    ids[at:at] = noise
    known = bytes(token_id - 3 for token_id in ids if 3 <= token_id < 259)
    assert "".join(pieces(byt5(), ids)) == known.decode(errors="ignore") == byt5().decode(ids)


def test_byt5_adds_its_end_once() -> None:
    assert byt5().encode("a</s>") == byt5().encode("a") == [100, 1]
    assert byt5().encode("a</s></s>") == [100, 1, 1]
    assert byt5().encode("a", add_special_tokens=False) == [100]
