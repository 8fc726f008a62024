"""A byte-level BPE tokenizer that cuts a word at the same places in lower case and with a capital.

Restoring a capital then changes one token of a word and copies its other tokens. An ordinary BPE learns the two
spellings apart and cuts them differently: with as many tokens, a quarter of the words with a capital.
"""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, END = "<pad>", "</s>"
PAD_ID, END_ID = 0, 1
VOCABULARY_MIN = 2 + 256  # PAD, END and a token for each byte
SPACE = "\u0120"  # the byte-level alphabet's letter for a space


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn merges from lower-case texts, and add the merges of the same pieces with a capital.

    Any text has tokens, any tokens have a text, and every encoded text ends with END.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    tokens = {token: place for token, place in learned["vocab"].items() if len(token) == 1 or place in (PAD_ID, END_ID)}
    merges = []
    for left, right in learned["merges"]:
        pairs = [(left, right), *with_capital(left, right)]
        if len(tokens) + len(pairs) > vocabulary:
            break
        for pair in pairs:
            merges.append(pair)
            tokens.setdefault("".join(pair), len(tokens))
    tokenizer.model = models.BPE(vocab=tokens, merges=merges)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, END_ID)])
    return tokenizer


def with_capital(left: str, right: str) -> list[tuple[str, str]]:
    """Return the merge that makes the same piece with a capital, or nothing if the piece begins with no letter a-z."""
    if left == SPACE:
        return [(left, capital) for capital in capitals(right)]
    return [(capital, right) for capital in capitals(left)]


def capitals(token: str) -> list[str]:
    """Return the token with its first letter as a capital, or nothing if that is no letter a-z."""
    place = 1 if token.startswith(SPACE) else 0
    first = token[place : place + 1]
    return [token[:place] + first.upper() + token[place + 1 :]] if "a" <= first <= "z" else []
