"""A folder's tokenizer gives the token ids and the text that AutoTokenizer gives, or is refused by name."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Inner
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from orca.core.domain.errors import ModelError
from orca.core.domain.text import OutputText, Tokenizer
from orca.core.domain.tokenizer_class import CLASSES, REFUSED
from orca.core.domain.tokenizer_folder import check_tokenizer
from support.core.odd_tokenizers import (
    byte_level,
    language_pieces,
    odd_texts,
    old_sentencepiece,
    sentencepiece,
    unigram,
    with_bos,
    write_folder,
)
from support.effort import IS_FULL

MASK = {
    "__type": "AddedToken",
    "content": "<mask>",
    "lstrip": True,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
LISTED = {
    "0": {
        "content": "<s>",
        "lstrip": True,
        "rstrip": True,
        "normalized": False,
        "single_word": False,
        "special": True,
    },
    "600": {
        "content": "<mask>",
        "lstrip": False,
        "rstrip": True,
        "normalized": True,
        "single_word": True,
        "special": False,
    },
}
PADDED = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
SENTINELS = ["<extra_id_0>", "<extra_id_1>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@functools.cache
def made(make: Callable[[], Inner], bos: bool = False, eos: bool = False) -> str:
    inner = make()
    return (with_bos(inner, eos=eos) if bos else inner).to_str()


def copy_of(source: str) -> Inner:
    return Inner.from_str(source)


def bytes_(bos: bool = False) -> Inner:
    return copy_of(made(byte_level, bos))


def pieces(bos: bool = False, eos: bool = False) -> Inner:
    return copy_of(made(sentencepiece, bos, eos))


def old_pieces() -> Inner:
    return copy_of(made(old_sentencepiece))


def vocabulary_files() -> dict[str, Any]:
    model = json.loads(made(byte_level))["model"]
    lines = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    return {"vocab.json": model["vocab"], "merges.txt": f"#version: 0.2\n{lines}\n"}


def large(inner: Inner) -> dict[str, Any]:
    """A vocabulary of more than 100,000 tokens, as those have that transformers repairs."""
    document = json.loads(inner.to_str())
    vocab = document["model"]["vocab"]
    for number in range(100_001):
        vocab[f"zz{number}"] = len(vocab)
    return {"tokenizer.json": document, "config.json": {"model_type": "mistral", "transformers_version": "4.50.0"}}


def flags(text: str) -> dict[str, Any]:
    return {**LISTED["0"], "content": text}


# name -> (tokenizer.json, tokenizer_config.json, model_type, more files)
Case = tuple[Callable[[], Inner | None], dict[str, Any], str, Callable[[], dict[str, Any]]]


def none() -> dict[str, Any]:
    return {}


def case(
    make: Callable[[], Inner | None],
    model_type: str = "llama",
    tokenizer_class: str | None = None,
    files: Callable[[], dict[str, Any]] = none,
    **settings: Any,
) -> Case:
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    return make, {**named, **settings}, model_type, files


CASES: dict[str, Case] = {
    "as it is": case(bytes_, tokenizer_class="PreTrainedTokenizerFast", **NAMED),
    "no settings at all, llama": case(lambda: pieces(bos=True)),
    "no settings at all, gpt2": case(bytes_, "gpt2"),
    "no settings at all, qwen3": case(bytes_, "qwen3"),
    "gpt2 with a prefix space": case(bytes_, "gpt2", "GPT2Tokenizer", add_prefix_space=True, **NAMED),
    "gpt2 without, opt": case(lambda: bytes_(bos=True), "opt", "GPT2TokenizerFast", add_prefix_space=False, **NAMED),
    "gpt2, BOS that the file has not": case(bytes_, "gpt2", "GPT2Tokenizer", add_bos_token=True, **NAMED),
    "opt without tokenizer.json": case(
        lambda: None, "opt", "GPT2Tokenizer", vocabulary_files, add_bos_token=True, **NAMED
    ),
    "qwen2 without tokenizer.json": case(lambda: None, "qwen2", None, vocabulary_files, eos_token="<|im_end|>"),
    "qwen2 of a distilled model": case(
        lambda: bytes_(bos=True), "qwen2", "LlamaTokenizerFast", add_bos_token=True, legacy=True, **NAMED
    ),
    "qwen2 with a prefix space": case(
        bytes_, "qwen2", "Qwen2Tokenizer", add_prefix_space=True, additional_special_tokens=["<tool>", "<new>"]
    ),
    "llama 2": case(lambda: pieces(bos=True), "llama", "LlamaTokenizer", add_bos_token=True, legacy=False, **NAMED),
    "llama, legacy": case(lambda: pieces(bos=True), "llama", "LlamaTokenizerFast", legacy=True, **NAMED),
    "llama without a prefix space": case(pieces, "llama", "LlamaTokenizer", add_prefix_space=False, **NAMED),
    "llama with an EOS in the file": case(
        lambda: pieces(bos=True, eos=True), "llama", "LlamaTokenizer", add_bos_token=False, add_eos_token=False, **NAMED
    ),
    "llama, old normalizer": case(old_pieces, "llama", "LlamaTokenizer", legacy=True, **NAMED),
    "llama 3, bytes under the name of llama": case(
        lambda: bytes_(bos=True), "llama", "LlamaTokenizerFast", clean_up_tokenization_spaces=True, **NAMED
    ),
    "mistral, whatever its class": case(
        lambda: pieces(bos=True), "mistral", "LlamaTokenizer", add_prefix_space=False, legacy=False, **NAMED
    ),
    "mistral with the wrong expression": case(
        lambda: None, "mistral", None, lambda: large(bytes_()), fix_mistral_regex=True
    ),
    "code llama": case(lambda: pieces(bos=True), "llama", "CodeLlamaTokenizer", **NAMED),
    "gpt-neox": case(lambda: bytes_(bos=True), "llama", "GPTNeoXTokenizerFast", add_prefix_space=True, **NAMED),
    "gemma": case(lambda: pieces(bos=True), "llama", "GemmaTokenizerFast", bos_token="<s>", eos_token="</s>"),
    "a class that transformers does not know": case(lambda: pieces(bos=True), "llama", "YiTokenizer", **NAMED),
    "special tokens split": case(bytes_, "llama", "PreTrainedTokenizerFast", split_special_tokens=True, **NAMED),
    "tokens with flags": case(
        pieces, "llama", "LlamaTokenizer", mask_token=MASK, pad_token="<think>", added_tokens_decoder=LISTED, **NAMED
    ),
    "tokens with flags, as it is": case(bytes_, added_tokens_decoder=LISTED, mask_token=MASK, **NAMED),
    "files of transformers 4": case(
        bytes_,
        "gpt2",
        "GPT2Tokenizer",
        lambda: {
            "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<tool>"]},
            "added_tokens.json": {"<pad>": 700, "<mask>": 701},
        },
        mask_token=MASK,
        pad_token="<pad>",
        **NAMED,
    ),
    "more special tokens": case(
        bytes_,
        additional_special_tokens=["<tool>", "<new>"],
        extra_special_tokens={"image_token": "<img>"},
        audio_token="<audio>",
        **NAMED,
    ),
    "t5": case(unigram, "t5", "T5Tokenizer", **PADDED),
    "t5, nothing named": case(unigram, "t5"),
    "mt5, few sentinels": case(unigram, "mt5", "T5TokenizerFast", extra_ids=2, **PADDED),
    "t5 as transformers 4 saved it": case(
        unigram, "t5", "T5Tokenizer", additional_special_tokens=SENTINELS, clean_up_tokenization_spaces=True, **PADDED
    ),
    "t5 without sentinels": case(unigram, "t5", "T5Tokenizer", extra_special_tokens=["<tool>"], **PADDED),
    "byt5": case(lambda: None, "t5", "ByT5Tokenizer", **PADDED),
    "byt5, nothing named but its class": case(lambda: None, "t5", "ByT5Tokenizer"),
    "byt5, as it is published": case(
        lambda: None,
        "t5",
        "ByT5Tokenizer",
        extra_ids=0,
        added_tokens_decoder={str(number): flags(text) for number, text in enumerate(("<pad>", "</s>", "<unk>"))},
        additional_special_tokens=SENTINELS,
        **PADDED,
    ),
    "umt5, whatever its class": case(unigram, "umt5", "T5Tokenizer", **PADDED),
    "t5 as it is": case(unigram, "t5", "PreTrainedTokenizerFast", **PADDED),
    "bart": case(lambda: bytes_(bos=True), "bart", "BartTokenizer", pad_token="<unk>"),
    "bart, nothing named": case(bytes_, "bart"),
    "bart with a prefix space": case(bytes_, "bart", "RobertaTokenizerFast", add_prefix_space=True, mask_token=MASK),
    "bart without tokenizer.json": case(lambda: None, "bart", "BartTokenizerFast", vocabulary_files),
    "mbart": case(unigram, "mbart", "MBartTokenizer", src_lang="de_DE"),
    "mbart, nothing named": case(unigram, "mbart"),
    "mbart with other languages": case(
        unigram, "mbart", "MBartTokenizer", additional_special_tokens=["en_XX", "de_DE", "<tool>"]
    ),
    "mbart 50": case(unigram, "mbart", "MBart50Tokenizer", src_lang="de_DE", clean_up_tokenization_spaces=True),
    "mbart 50, nothing named": case(unigram, "mbart", "MBart50TokenizerFast"),
    "nllb": case(language_pieces, "m2m_100", "NllbTokenizer", src_lang="fra_Latn", clean_up_tokenization_spaces=True),
    "nllb, language last": case(language_pieces, "m2m_100", "NllbTokenizerFast", legacy_behaviour=True),
    "nllb with its languages": case(
        language_pieces, "m2m_100", "NllbTokenizer", additional_special_tokens=["eng_Latn", "fra_Latn", "deu_Latn"]
    ),
    "clean-up of a byte-level vocabulary": case(
        bytes_,
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "truncation in the settings": case(bytes_, model_max_length=4, truncation_side="left", padding_side="left"),
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return odd_texts(2000 if IS_FULL else 200)


# Its large vocabulary takes seconds.
SLOW = ("mistral with the wrong expression",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
@pytest.mark.filterwarnings("ignore:This sequence already has")
def test_every_setting_gives_the_tokens_and_the_text_of_autotokenizer(
    name: str, texts: list[str], tmp_path: Path
) -> None:
    make, settings, model_type, files = CASES[name]
    folder = write_folder(tmp_path, make(), settings, model_type=model_type, files=files())
    expected, tokenizer = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    check_tokenizer(folder)
    assert tokenizer.named_special_tokens == expected.special_tokens_map
    assert tokenizer.vocab_size == len(expected)
    for text in texts:
        for adds in (True, False):
            ids = expected(text, add_special_tokens=adds).input_ids
            assert tokenizer.encode(text, add_special_tokens=adds) == ids, (text, adds)
        decoded = expected.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids) == decoded, text
        output = OutputText(tokenizer)
        shown = "".join(output.push(token).text for token in ids) + output.flush()
        # As the continuation of a prompt, an output keeps the space of its first word.
        assert shown == decoded or (tokenizer.continues_prompts and shown == f" {decoded}"), text


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output belongs to the process: the parent of a scheduler reads it. The library prints unknown keys."""
    listed = {number: {**token, "__type": "AddedToken", "unheard_of": 1} for number, token in LISTED.items()}
    folder = write_folder(
        tmp_path, bytes_(), {"added_tokens_decoder": listed, "mask_token": {**MASK, "id": 3}, **NAMED}
    )
    Tokenizer.from_folder(folder)
    assert capfd.readouterr() == ("", "")


def test_the_cases_are_as_different_as_they_look(texts: list[str], tmp_path: Path) -> None:
    pairs = [
        ("gpt2 with a prefix space", "gpt2 without, opt"),
        ("llama, legacy", "llama 2"),
        ("llama 2", "llama without a prefix space"),
        ("as it is", "special tokens split"),
    ]
    for number, names in enumerate(pairs):
        ids = []
        for name in names:
            make, settings, model_type, files = CASES[name]
            folder = write_folder(tmp_path / f"{number} {name}", make(), settings, model_type=model_type, files=files())
            ids.append([Tokenizer.from_folder(folder).encode(text, add_special_tokens=False) for text in texts])
        assert ids[0] != ids[1], names


REFUSED_FOLDERS: dict[str, tuple[Case, str]] = {
    "a class with code of its own": (case(bytes_, "llama", "BertTokenizer"), "tokenizer_class BertTokenizer is not"),
    "no vocabulary": (case(lambda: None, "llama", "LlamaTokenizer"), "tokenizer.json: no such file"),
    "other files": (case(bytes_, fast_tokenizer_files=["tokenizer.4.0.0.json"]), "fast_tokenizer_files"),
    "a class that is no name": (case(bytes_, "llama", files=none, tokenizer_class=7), "tokenizer_class is 7"),
}


@pytest.mark.parametrize("name", REFUSED_FOLDERS)
def test_what_is_not_applied_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (make, settings, model_type, files), reason = REFUSED_FOLDERS[name]
    folder = write_folder(tmp_path, make(), settings, model_type=model_type, files=files())
    with pytest.raises(ModelError, match=reason) as refused:
        Tokenizer.from_folder(folder)
    assert str(folder) in str(refused.value)


def test_each_class_of_transformers_is_either_built_or_refused() -> None:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    names = {name for name in dir(transformers) if name.endswith("Tokenizer")} - {
        "AutoTokenizer",
        "PreTrainedTokenizer",
        "BasicTokenizer",
        "CharacterTokenizer",
        "MecabTokenizer",
        "WordpieceTokenizer",
    }
    other = {name for name in names if tokenizer_class_from_name(name) is not TokenizersBackend}
    assert other - REFUSED == set(CLASSES)
