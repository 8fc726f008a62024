"""Small tokenizers, trained on the spot, of the kinds that served models have."""

import orjson
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from orca.core.domain.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "Übergrößenträger überqueren die Straße. Où est la bibliothèque ? 日本語のテキスト。 Привет, мир!",
    "Emoji: 🐋 🐳 👩‍👩‍👧‍👦 🏳️‍🌈 and numbers 12345, symbols €£¥, code: def f(x): return x\n\tend",
] * 3
SPECIAL = ["<|end|>", "<|user|>"]


def wrap(inner: tokenizers.Tokenizer, **named: str) -> Tokenizer:
    return Tokenizer(inner, decoder=orjson.loads(inner.to_str())["decoder"], named_special_tokens=named)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen: a token may hold part of a character."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    inner.add_tokens([AddedToken("<think>", special=False)])
    return wrap(inner, eos_token="<|end|>")


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """BPE with byte fallback as in Llama 2 and Mistral: word starts marked, unknown characters as bytes."""
    bytes_ = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = ["▁", "▁the", "▁fox", "a", "b", "c", "é", "日本", "ab", "stop", "▁stop"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | bytes_ | {word: 259 + i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return wrap(inner, bos_token="<s>", eos_token="</s>")
