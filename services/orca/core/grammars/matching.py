"""Matches an output against its grammar, token by token, with llguidance.

A grammar is a text in llguidance's dialect of Lark. It describes the text of an output: the bytes of its tokens, one
after the other. Special tokens and EOS have no text. A grammar may name a special token (`<|python_tag|>`).

A matcher is a pure function of grammar and tokens. So the rank that samples rebuilds it from the log after a failure.
The gateway that checks a grammar sees what the rank will see, because both have the same limits. The limits decide
which tokens an output gets, so they are a part of the contract between scheduler and stages (transport/wire.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from orca.core.domain.errors import ModelError
from orca.core.domain.text import Tokenizer

NO_FORCING = '%llguidance {"no_forcing": true}'
"""The last line of each grammar: a mask has every token that the grammar allows.

Otherwise llguidance would allow one single token where the next bytes are known, the first of its own tokenization.
"""

_LIMITS = LLParserLimits(verbose_errors=False)
_KEPT_MAX = 64
"""Grammars whose matchers are kept, at the start of an output."""
_UNSATISFIABLE = ("NoExtension", "NoExtensionBias")
"""Errors of a grammar without any text."""


class GrammarError(ModelError):
    """A grammar that cannot be matched with a model."""


@dataclass(slots=True)
class _Words:
    """A vocabulary in the form in which LLTokenizer reads it."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text. Nothing forces tokens (NO_FORCING), so nobody needs them."""
        raise NotImplementedError


class GrammarVocabulary:
    """The tokens of a model as grammars see them. Building it reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """
        Args:
            tokenizer: it may have more tokens than the logits, or fewer.
            vocab_size: width of the logits.
            eos_token_ids: of the model.
        Raises: GrammarError if the model has no EOS, and so no way to end a complete output.
        """
        if not eos_token_ids:
            raise GrammarError("the model has no end token, so no output of a grammar could end")
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        special = {token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)}
        words: Any = _Words(
            tokens=[tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
            special_token_ids=sorted(special.union(eos_token_ids)),
            eos_token_id=eos_token_ids[0],
        )
        self._inner = LLTokenizer(words, eos_token=list(eos_token_ids))
        self._fresh = lru_cache(_KEPT_MAX)(self._build)

    def matcher(self, grammar: str) -> "GrammarMatcher":
        """Return a matcher at the start of an output. If the grammar is not valid, it has failed.

        Many requests have the same grammar, and a copy costs a few microseconds instead of milliseconds.
        """
        return GrammarMatcher(self._fresh(grammar).deep_copy(), self.eos_token_ids)

    def _build(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._inner, grammar, log_level=0, limits=_LIMITS)


class GrammarMatcher:
    """One output and its grammar. One thread at a time may use it."""

    def __init__(self, inner: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._has_ended = False

    @property
    def failure(self) -> str | None:
        """The reason why the matcher cannot go on: a bad grammar, a limit, or a token outside the grammar."""
        return _for_client(self._inner.get_error()) if self._inner.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Return whether the output is whole, and nothing but its end may follow."""
        return self._has_ended or (self._inner.is_stopped() and not self._inner.is_error())

    def consume(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the output. After its end it takes nothing more."""
        for token in tokens:
            if self.is_complete:
                self._has_ended = True
                return
            self._inner.consume_token(token)

    def write_mask(self, address: int, size: int) -> None:
        """Write the mask of the next token: a bit for each token of the vocabulary, the lowest bit first.

        If nothing but the end may follow, the mask has all EOS tokens. After a failure it has no meaning.

        Args:
            address: of memory that is aligned to 4 bytes.
            size: bytes of the mask; 4 for every 32 tokens.
        """
        self._inner.unsafe_compute_mask_ptr(address, size)

    def mask(self) -> bytes:
        """Return the mask of the next token (`write_mask`)."""
        return self._inner.compute_bitmask()


def _for_client(error: str) -> str:
    """Return the part of llguidance's message that is for the author of the grammar."""
    first, *more = [line.strip() for line in error.splitlines()] or [""]
    if first in _UNSATISFIABLE:
        return "no text matches the grammar"
    # An expression is quoted over several lines, before the reason.
    reason = next((line.removeprefix("error: ") for line in more if line.startswith("error: ")), None)
    return first if reason is None else f"{first} {reason}"
