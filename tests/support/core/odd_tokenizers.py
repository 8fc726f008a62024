"""Small tokenizers of the kinds that language models have, and odd texts to try on them."""

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "Übergrößenträger überqueren die Straße. Où est la bibliothèque ? 日本語のテキスト。 Привет, мир!",
    "Emoji: 🐋 🐳 👩‍👩‍👧‍👦 and numbers 12345, symbols €£¥, code: def f(x): return x\n\tend don't we'll I'm",
    "hello world hello there, world wide web   many   spaces\r\nlines\n\n\nmore",
] * 3
SPECIAL = ("<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "<tool>")


def byte_level(**options: Any) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return inner


def sentencepiece() -> Tokenizer:
    """BPE with marked word starts and byte fallback as in Llama 2 and Mistral."""
    inner = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    alphabet = sorted({character for text in CORPUS for character in text if ord(character) < 0x250} | {"▁"})
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=[*SPECIAL, *pieces], initial_alphabet=alphabet, show_progress=False
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    inner.model = models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return inner


def old_sentencepiece() -> Tokenizer:
    """The same with a normalizer instead of a pre-tokenizer, as transformers 4 wrote it."""
    inner = sentencepiece()
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.pre_tokenizer = None
    return inner


def unigram() -> Tokenizer:
    """SentencePiece's Unigram as in T5 and mBART; its special tokens stand where those of both families do."""
    words = dict.fromkeys(word for text in CORPUS for word in text.split())
    characters = dict.fromkeys("".join(words))
    pieces = dict.fromkeys([*(f"▁{word}" for word in words), "▁", *characters, "th", "er", "ing", "▁▁"])
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(piece, -4.0 - number / 100) for number, piece in enumerate(pieces)]
    vocab += [(text, 0.0) for text in ("<extra_id_1>", "<extra_id_0>", "en_XX", "de_DE", "eng_Latn")]
    inner = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("x", "y")])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<pad>", "</s>")])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return inner


def language_pieces() -> Tokenizer:
    """BPE with marked word starts and some languages, as in NLLB."""
    inner = sentencepiece()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("eng_Latn", "fra_Latn")])
    inner.decoder = decoders.ByteLevel()
    return inner


def with_bos(inner: Tokenizer, *, eos: bool = False) -> Tokenizer:
    """Put <s> before each text, and </s> after it if `eos`, as a tokenizer.json does."""
    single = "<s> $A </s>" if eos else "<s> $A"
    ids = [(text, inner.token_to_id(text)) for text in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)
    return inner


def write_folder(
    folder: Path,
    inner: Tokenizer | None,
    settings: dict[str, Any],
    *,
    model_type: str = "llama",
    files: dict[str, Any] | None = None,
) -> Path:
    """Write a model folder without weights. Args: files: more JSON files, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    if inner is not None:
        (folder / "tokenizer.json").write_text(inner.to_str())
    every = {"tokenizer_config.json": settings, "config.json": {"model_type": model_type}, **(files or {})}
    for name, content in every.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


_PIECES = (
    *"aeiou tn\n\t\r 019.,!?'\"()[]{}<>|_-▁",
    *("hello", "world", "the", " the", "  ", "    ", "\r\n", "\n\n", " \n ", "don't", "I'LL", "we're", "12345", "3.14"),
    *("é", "e\u0301", "ß", "İ", "ﬁ", "ǆ", "①", "Ⅷ", "한", "日本", "Привет", "עִבְרִית", "हिन्दी", "ไทย"),
    *(
        "🐋",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x00",
        "\x07",
        "\x7f",
        "\ufffd",
    ),
    *SPECIAL,
    *PLAIN,
    *("<mask>", " <mask> ", "<pad>", "▁<PRE>", "<|im_", "im_end|>", "<0x0A>", "</S>", "< s >", "def f(x):\n\treturn x"),
)


def odd_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts that tokenizers disagree about, among them the empty one."""
    draw = random.Random(seed)
    texts = ["", " ", "\n", "hello", " hello", "hello ", "  hello  world", "<s>", "</s>hello", "hello<|im_end|>\n"]
    while len(texts) < count:
        pieces = draw.choices(_PIECES, k=draw.choice((1, 2, 3, 5, 8, 13, 40)))
        text = draw.choice(("", " ")).join(pieces) if draw.random() < 0.3 else "".join(pieces)
        form = draw.choice((None, None, None, "NFC", "NFD", "NFKC"))
        texts.append(text if form is None else unicodedata.normalize(form, text))
    return texts[:count]
