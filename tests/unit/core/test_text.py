"""The text of an output while it grows: whole characters, whole stop strings, the same however it is cut."""

import copy
from pathlib import Path

import orjson
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from orca.core.domain.errors import ModelError
from orca.core.domain.special_stops import PatternSearch
from orca.core.domain.text import Detokenizer, OutputText, Tokenizer
from orca.core.domain.tokenizer_folder import has_chat_template


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def run(tokenizer: Tokenizer, ids: list[int], stop: list[str], min_tokens: int = 0) -> tuple[str, str | None, int]:
    """Text given out, stop string, and tokens used."""
    output = OutputText(tokenizer, stop, min_tokens)
    text = ""
    for used, token_id in enumerate(ids, start=1):
        delta = output.push(token_id)
        text += delta.text
        if delta.stop is not None:
            return text, delta.stop, used
    return text + output.flush(), None, len(ids)


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False)]


@given(text=st.text(max_size=60))
def test_a_text_gets_the_token_ids_that_the_library_gives(
    text: str, byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        for adds in (True, False):
            alone = tokenizer._inner.encode(text, add_special_tokens=adds).ids
            assert tokenizer.encode(text, add_special_tokens=adds) == alone


@given(data=st.data())
def test_the_pieces_of_any_token_sequence_join_to_the_decoded_whole(data: st.DataObject, byte_level: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    assert "".join(pieces(byte_level, ids)) == byte_level.decode(ids)


@given(text=st.text(max_size=60))
def test_text_is_decoded_from_its_tokens_without_intermediate_replacement_characters(
    text: str, byte_level: Tokenizer
) -> None:
    parts = pieces(byte_level, ids_of(byte_level, text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts if "\ufffd" not in text)


@given(text=st.text(max_size=60))
def test_byte_fallback_decodes_to_whole_characters(text: str, byte_fallback: Tokenizer) -> None:
    assume(not any(special in text for special in ("<unk>", "<s>", "</s>")))
    text = text.replace("▁", "")
    ids = byte_fallback.encode(text, add_special_tokens=False)
    parts = pieces(byte_fallback, ids)
    # The encoder puts a word mark before the first word; in an output it is a real space.
    assert "".join(parts) == (f" {text}" if text else "")
    assert not any("\ufffd" in part for part in parts if "\ufffd" not in text)


def test_the_bytes_of_an_emoji_are_held_back_until_it_is_complete(byte_level: Tokenizer) -> None:
    assert pieces(byte_level, single_byte_ids(byte_level, "🦑")) == ["", "", "", "🦑", ""]


def test_the_offsets_of_a_prompt_are_found_while_other_threads_run(byte_level: Tokenizer) -> None:
    """Only the batch calls of `tokenizers` release the interpreter's lock."""

    class Batches:
        encode_batch = byte_level._inner.encode_batch

    text, other = "a fox 🦑", copy.copy(byte_level)
    vars(other)["_inner"] = Batches()
    whole = byte_level._inner.encode(text, add_special_tokens=False)
    assert other.character_offsets(text, whole.ids) == [start for start, _ in whole.offsets]


def test_an_unfinished_character_ends_as_one_replacement_character(byte_level: Tokenizer) -> None:
    assert pieces(byte_level, single_byte_ids(byte_level, "🦑")[:3]) == ["", "", "", "\ufffd"]


def test_an_invalid_character_is_emitted_as_soon_as_it_cannot_be_completed(byte_level: Tokenizer) -> None:
    ids = [*single_byte_ids(byte_level, "🦑")[:2], *ids_of(byte_level, "a")]
    assert pieces(byte_level, ids) == ["", "", "\ufffda", ""]


def test_special_tokens_have_no_text_and_other_added_tokens_have(byte_level: Tokenizer) -> None:
    assert "".join(pieces(byte_level, ids_of(byte_level, "a<|end|><think>b"))) == "a<think>b"


def test_a_token_id_that_the_tokenizer_does_not_know_has_no_text(byte_level: Tokenizer) -> None:
    assert "".join(pieces(byte_level, [10**6, *ids_of(byte_level, "a"), -1])) == "a"


def test_token_text_shows_partial_characters_as_bytes(byte_level: Tokenizer) -> None:
    first = single_byte_ids(byte_level, "🦑")[0]
    assert byte_level.token_text(first) == "bytes:\\xf0"
    assert byte_level.token_bytes(first) == b"\xf0"
    assert byte_level.token_text(ids_of(byte_level, "<|end|>")[0]) == "<|end|>"


def test_a_stop_string_across_tokens_is_found_and_not_emitted(byte_level: Tokenizer) -> None:
    ids = ids_of(byte_level, "one ", "ST", "O", "P", " two")
    assert run(byte_level, ids, ["STOP"])[:2] == ("one ", "STOP")


def test_text_after_the_stop_string_in_its_last_token_is_dropped(byte_level: Tokenizer) -> None:
    the = ids_of(byte_level, " the")
    assert len(the) == 1
    assert run(byte_level, the, ["th"]) == (" ", "th", 1)


def test_text_that_only_began_like_a_stop_string_is_emitted(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, ["ab!"])
    texts = [output.push(token_id).text for token_id in ids_of(byte_level, "x", "a", "b", "c")]
    assert texts == ["x", "", "", "abc"]


def test_the_end_emits_text_that_was_held_back(byte_level: Tokenizer) -> None:
    assert run(byte_level, ids_of(byte_level, "so STO"), ["STOP"]) == (
        "so STO",
        None,
        len(ids_of(byte_level, "so STO")),
    )


def test_the_stop_string_that_is_complete_first_counts(byte_level: Tokenizer) -> None:
    for parts in (["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]):
        assert run(byte_level, ids_of(byte_level, *parts), ["abcd", "bc"])[:2] == ("a", "bc")


@pytest.mark.parametrize(("min_tokens", "text", "used"), [(1, "a", 2), (2, "a!b", 4), (3, "a!b", 4), (4, "a!b!c", 5)])
def test_the_first_min_tokens_complete_no_stop_string(
    min_tokens: int, text: str, used: int, byte_level: Tokenizer
) -> None:
    stop = None if used == 5 else "!"
    assert run(byte_level, ids_of(byte_level, "a", "!", "b", "!", "c"), ["!"], min_tokens) == (text, stop, used)


def test_a_stop_string_that_begins_within_min_tokens_and_ends_after_counts(byte_level: Tokenizer) -> None:
    assert run(byte_level, ids_of(byte_level, "x", "a", "b"), ["ab"], min_tokens=2) == ("x", "ab", 3)


def test_a_stop_string_complete_within_min_tokens_is_not_found_later(byte_level: Tokenizer) -> None:
    ids = ids_of(byte_level, "a", "a", "b", "c")
    assert run(byte_level, ids, ["aa", "aabd"], min_tokens=2) == ("aabc", None, 4)


@given(data=st.data(), stop=st.lists(st.text("abé🐋", min_size=1, max_size=4), max_size=3))
def test_the_result_equals_that_of_searching_the_whole_text(
    data: st.DataObject, stop: list[str], byte_level: Tokenizer
) -> None:
    texts = data.draw(st.lists(st.text("abé🐋 ", max_size=5), max_size=12))
    whole = "".join(texts)
    # The first prefix of the whole text that ends with a stop string; the longest such stop string.
    found = next(
        (
            max((s for s in stop if whole[:end].endswith(s)), key=len)
            for end in range(len(whole) + 1)
            if whole[:end].endswith(tuple(stop))
        ),
        None,
    )
    end = min((whole.find(s) + len(s) for s in stop if s in whole), default=None)
    expected = (whole, None) if found is None or end is None else (whole[: end - len(found)], found)
    assert run(byte_level, ids_of(byte_level, *texts), stop)[:2] == expected


@given(data=st.data(), stop=st.lists(st.text("abé🐋", min_size=1, max_size=3), min_size=1, max_size=2))
def test_emitted_text_never_has_to_be_retracted(data: st.DataObject, stop: list[str], byte_level: Tokenizer) -> None:
    ids = data.draw(st.lists(st.sampled_from(ids_of(byte_level, "ab a é🐋<think>")), max_size=20))
    final = run(byte_level, ids, stop)[0]
    for used in range(len(ids)):
        output = OutputText(byte_level, stop)
        so_far = ""
        for token_id in ids[:used]:
            delta = output.push(token_id)
            so_far += delta.text
            if delta.stop is not None:
                break
        assert final.startswith(so_far)


SPECIAL_STOPS: list[tuple[list[str], list[str], str, str | None, int]] = [
    # stop strings, tokens, text, the one found, tokens used
    (["<|user|>"], ["a", "<|user|>", "c"], "a", "<|user|>", 2),
    (["<|user|>"], ["<|user|>"], "", "<|user|>", 1),
    (["<|user|>"], ["a", "<|end|>", "c"], "ac", None, 3),
    (["b<|user|>"], ["a", "b", "<|user|>"], "a", "b<|user|>", 3),
    (["b<|user|>"], ["a", "b", "<|end|>", "<|user|>"], "ab", None, 4),
    (["<|user|>\n"], ["a", "<|user|>", "\n", "b"], "a", "<|user|>\n", 3),
    (["<|user|>\n"], ["a", "<|user|>", "b"], "ab", None, 3),
    (["<|end|><|user|>"], ["a", "<|end|>", "b", "<|end|>", "<|user|>"], "ab", "<|end|><|user|>", 5),
    (["b<|end|>c<|user|>d"], ["b", "<|end|>", "c", "<|user|>", "d"], "", "b<|end|>c<|user|>d", 5),
    (["b<|end|>c", "bc"], ["a", "b", "<|end|>", "c"], "a", "b<|end|>c", 4),
    (["bc", "<|end|>d"], ["a", "b", "<|end|>", "c"], "a", "bc", 4),
    (["<|end|>", "b<|end|>"], ["a", "b", "<|end|>"], "a", "b<|end|>", 3),
    (["<|user|>"], ["a", "<", "|user", "|>"], "a", "<|user|>", 0),  # as ordinary text
    (["bx", "<|user|>"], ["a", "b", "<|user|>"], "ab", "<|user|>", 3),
]


@pytest.mark.parametrize(("stop", "texts", "text", "found", "used"), SPECIAL_STOPS, ids=lambda value: str(value)[:40])
def test_a_special_token_in_a_stop_string_is_found_by_its_id(
    stop: list[str], texts: list[str], text: str, found: str | None, used: int, byte_level: Tokenizer
) -> None:
    ids = ids_of(byte_level, *texts)
    result = run(byte_level, ids, stop)
    assert result[:2] == (text, found)
    assert result[2] == used or not used


def test_a_character_that_a_special_stop_cuts_off_ends_as_one_replacement_character(byte_level: Tokenizer) -> None:
    ids = [*ids_of(byte_level, "a"), *single_byte_ids(byte_level, "🦑")[:2], *ids_of(byte_level, "<|user|>")]
    assert run(byte_level, ids, ["<|user|>"])[:2] == ("a\ufffd", "<|user|>")


def test_a_special_stop_does_not_begin_before_an_incomplete_character(byte_level: Tokenizer) -> None:
    cut = [*ids_of(byte_level, "o "), *single_byte_ids(byte_level, "€")[:2], *ids_of(byte_level, "<|user|>")]
    assert run(byte_level, cut, ["o <|user|>"]) == ("o \ufffd", None, len(cut))
    assert run(byte_level, [*cut, *ids_of(byte_level, "a")], ["<|user|>a"])[1] is None
    assert run(byte_level, cut, ["o <|user|>", "<|user|>"]) == ("o \ufffd", "<|user|>", len(cut))


def test_a_special_token_within_min_tokens_completes_no_stop_string(byte_level: Tokenizer) -> None:
    ids = ids_of(byte_level, "a", "<|user|>", "b", "<|user|>", "c")
    assert run(byte_level, ids, ["<|user|>"], min_tokens=2) == ("ab", "<|user|>", 4)


@given(data=st.data(), stop=st.lists(st.text("abUE", min_size=1, max_size=4), min_size=1, max_size=3))
def test_special_tokens_are_searched_as_letters_would_be(
    data: st.DataObject, stop: list[str], byte_level: Tokenizer
) -> None:
    """U and E stand for special tokens. Stop strings without them do not see them: those are left out here."""
    stop = [text for text in stop if set(text) & {"U", "E"}] or ["U"]
    whole = data.draw(st.text("abUE", max_size=12))
    letters = {"U": "<|user|>", "E": "<|end|>"}
    ids = [token_id for letter in whole for token_id in ids_of(byte_level, letters.get(letter, letter))]
    written = ["".join(letters.get(letter, letter) for letter in text) for text in stop]
    ends = [(whole.find(text) + len(text), whole.find(text)) for text in stop if text in whole]
    shown = whole[: min(ends)[1]] if ends else whole
    text, found, used = run(byte_level, ids, written)
    assert text == shown.replace("U", "").replace("E", "")
    assert (found is not None, used) == (bool(ends), min(ends)[0] if ends else len(ids))


@pytest.mark.parametrize(
    "output", ["a" * 5000, ("a" * 1000 + "b") * 5, "ab" * 2500, "z" * 5000], ids=["a", "aab", "ab", "z"]
)
@pytest.mark.parametrize("start", ["a", "ab", "abcdefgh"])
def test_a_long_pattern_costs_few_steps_per_character(output: str, start: str) -> None:
    pattern = (start * 1024)[:1023] + "!"
    search = PatternSearch(pattern)
    before = search.steps
    assert before <= 2 * len(pattern)
    for character in output:
        assert search.push(character) == 0
    assert search.steps - before <= 2 * len(output)


@given(pattern=st.text("ab", min_size=1, max_size=5), cut=st.lists(st.text("ab", max_size=4), max_size=8))
def test_a_pattern_is_found_in_a_growing_text_as_in_a_whole_one(pattern: str, cut: list[str]) -> None:
    search, whole = PatternSearch(pattern), ""
    for piece in cut:
        ends = [n for n in range(1, len(piece) + 1) if (whole + piece[:n]).endswith(pattern)]
        assert search.push(piece) == (ends[0] if ends else 0)
        whole += piece
        assert search.matched == max(n for n in range(len(pattern)) if whole.endswith(pattern[:n]))


def single_byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as one token per byte."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    return [by_byte[bytes([byte])] for byte in text.encode()]


def save(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    return folder


def word_level(**extra: int) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<eos>": 1, **extra}, unk_token="a"))
    inner.decoder = decoders.ByteLevel()
    return inner


def test_a_folder_provides_special_tokens_and_chat_template(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<eos>"}, "chat_template": [{"name": "default", "template": "hello"}]}
    tokenizer = Tokenizer.from_folder(save(tmp_path, word_level(), config))
    assert tokenizer.named_special_tokens == {"eos_token": "<eos>"}
    assert tokenizer.decode([0, 1]) == "a"
    assert tokenizer.chat_template == "hello"
    assert has_chat_template(tmp_path)


def test_a_folder_without_a_chat_template_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(save(tmp_path, word_level(), {})).chat_template is None
    assert not has_chat_template(tmp_path)


def test_the_template_file_overrides_the_template_in_the_config(tmp_path: Path) -> None:
    save(tmp_path, word_level(), {"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.from_folder(tmp_path).chat_template == "new"


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    inner = word_level()
    inner.enable_truncation(1)
    inner.enable_padding(length=4)
    assert Tokenizer.from_folder(save(tmp_path, inner, {})).encode("<eos><eos>") == [0]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "added_tokens_decoder is .*, not an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"one": {"content": "a"}}}', "'one' is not a token id"),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}', "extra_special_tokens is 5, not a list"),
        ("tokenizer_config.json", '{"additional_special_tokens": "x"}', "extra_special_tokens is 'x', not a list"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', "an entry of chat_template is 'x', not an object"),
        ("tokenizer.json", '{"added_tokens": {"a": 1}}', "added_tokens is .*, not a list"),
        ("tokenizer.json", '{"added_tokens": [5]}', "an entry of added_tokens is 5, not an object"),
        ("tokenizer.json", '{"added_tokens": [{"content": "a"}]}', "None is not a token id"),
        ("added_tokens.json", '{"a": "one"}', "'one' is not a token id"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_naming_the_file(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    save(tmp_path, word_level(), {})
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name}: {problem}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt"])
def test_a_text_that_is_not_utf_8_is_refused_naming_the_file(tmp_path: Path, name: str) -> None:
    save(tmp_path, word_level(), {})
    if name == "merges.txt":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.json").write_text('{"a": 0}')
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(ModelError, match=f"{name}: not a text in UTF-8"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_whose_text_depends_on_neighbours_is_refused(tmp_path: Path) -> None:
    inner = word_level()
    inner.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_folder(save(tmp_path, inner, {}))
