"""Small tokenizers of the kinds that encoder-decoder models have."""

import json
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from orca.core.domain.text import Tokenizer as OrcaTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "Übergrößenträger überqueren die Straße. Où est la bibliothèque ? 日本語のテキスト。 Привет, мир!",
    "Emoji: 🐋 🐳 and numbers 12345, symbols €£¥ don't we 've I 'm it 's they 're n't ' hello ' world ! . ,",
] * 3
LANGUAGES = ("deu_Latn", "eng_Latn", "fra_Latn")


def unigram(*, decoder: Any = None) -> Tokenizer:
    """SentencePiece's Unigram as in T5: <pad>, </s>, <unk>, then pieces, then sentinels."""
    # Training a Unigram model gives another vocabulary each time.
    words = dict.fromkeys(word for text in CORPUS for word in text.split())
    characters = dict.fromkeys("".join(words))
    pieces = dict.fromkeys([*(f"▁{word}" for word in words), "▁", *characters, "▁▁", "▁ ▁x", "th", "er", "s."])
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(piece, -4.0 if len(piece) > 2 else -9.0) for piece in pieces]
    vocab += [(f"<extra_id_{i}>", 0.0) for i in (1, 0)]
    inner = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    inner.decoder = decoder or decoders.Metaspace(prepend_scheme="always")
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = ("<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>")
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return inner


def bart_like() -> Tokenizer:
    """Byte-level BPE as in BART: <s> and </s> around each text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    return inner


def nllb_like() -> Tokenizer:
    """BPE with marked word starts and language tokens as in NLLB: `eng_Latn`, the text, </s>."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>", *LANGUAGES]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    inner = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Replace("  ", " ")
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    ids = [(text, inner.token_to_id(text)) for text in ("eng_Latn", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single="eng_Latn $A </s>", special_tokens=ids)
    return inner


def llama_like() -> Tokenizer:
    """The same vocabulary with the decoder of Llama 2, which strips one space of the whole text."""
    return unigram(decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]))


KINDS = {
    "t5": unigram,
    "t5, old decoder": lambda: unigram(decoder=decoders.Metaspace(prepend_scheme="first")),
    "t5, no space is added": lambda: unigram(decoder=decoders.Metaspace(prepend_scheme="never")),
    "bart": bart_like,
    "nllb": nllb_like,
    "llama": llama_like,
}


def wrap(
    inner: Tokenizer, *, continues_prompts: bool = False, cleans_up: bool = False, template: str | None = None
) -> OrcaTokenizer:
    """Return the tokenizer as the services have it."""
    return OrcaTokenizer(
        inner,
        decoder=orjson.loads(inner.to_str())["decoder"],
        named_special_tokens={"eos_token": "</s>"},
        chat_template=template,
        continues_prompts=continues_prompts,
        cleans_up=cleans_up,
    )
