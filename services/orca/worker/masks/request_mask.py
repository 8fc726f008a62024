"""The tokens that one request may draw next, where a grammar or a list of tokens decides it.

A mask that cannot be computed, or leaves no token, is a failure of its request alone (core.domain.refusal).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orca.core.domain.errors import ModelError
from orca.core.domain.request import SamplingParams

if TYPE_CHECKING:  # a rank without grammars needs neither llguidance nor a tokenizer
    from orca.core.grammars.matching import GrammarMatcher, GrammarVocabulary

BITS = 32
"""Tokens in one word of a mask; the lowest bit is the token with the lowest id."""

_NO_TOKEN = "the grammar and the other limits on tokens leave no token for token {index} of the output"

TokenMask = NDArray[np.uint32]
"""[words]: a bit for each token of the vocabulary, set if the token may be drawn."""

ReadVocabulary = Callable[[], "GrammarVocabulary"]
"""Returns the vocabulary of the model. The first call may take a second. Raises: ModelError."""


def mask_of(tokens: Iterable[int], vocab_size: int) -> TokenMask:
    """Return the mask that allows these tokens alone. Args: tokens: all below `vocab_size`."""
    allowed = np.zeros(_words(vocab_size) * BITS, np.bool_)
    allowed[list(tokens)] = True
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class ModelMasks:
    """The masks that all requests of a model share.

    Args:
        never: tokens that no request draws.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], never: Sequence[int], read_vocabulary: ReadVocabulary
    ) -> None:
        self.vocab_size = vocab_size
        self.read_vocabulary = read_vocabulary
        self.drawable = mask_of(range(vocab_size), vocab_size) & ~mask_of(never, vocab_size)
        self.not_eos = ~mask_of(eos_token_ids, vocab_size)


class RequestMask:
    """The mask of one request's next token. Args: output: the tokens of its log so far."""

    def __init__(self, params: SamplingParams, output: Sequence[int], shared: ModelMasks) -> None:
        self.mask: TokenMask = np.zeros(_words(shared.vocab_size), np.uint32)
        self.failure: str | None = None  # why no token can be drawn
        self._shared = shared
        self._grammar = params.grammar
        self._matcher: GrammarMatcher | None = None
        self._count = 0  # tokens of the output that the mask follows
        self._tokens = tuple(output)  # taken by `update`
        self._min_tokens = params.min_tokens
        self._listed = shared.drawable
        if params.allowed_token_ids:
            self._listed = self._listed & mask_of(params.allowed_token_ids, shared.vocab_size)
        if params.forbidden_token_ids:
            self._listed = self._listed & ~mask_of(params.forbidden_token_ids, shared.vocab_size)
        self._sequences: dict[int, list[tuple[int, ...]]] = {}  # forbidden, by the token before the last one
        for sequence in params.forbidden_sequences:
            self._sequences.setdefault(sequence[-2], []).append(sequence)
        longest = max(map(len, params.forbidden_sequences), default=1)
        self._end: deque[int] = deque(maxlen=longest - 1)  # of the output, as long as a sequence can follow it
        self._not_ending = shared.not_eos
        if params.stop_token_ids:
            self._not_ending = self._not_ending & ~mask_of(params.stop_token_ids, shared.vocab_size)

    def take(self, token: int) -> None:
        """Add the token that was drawn; `update` computes with it."""
        self._tokens = (*self._tokens, token)

    def update(self) -> None:
        """Compute the mask of the token after those that were added."""
        if self.failure is not None:
            return
        tokens, self._tokens = self._tokens, ()
        self._count += len(tokens)
        self._end.extend(tokens)
        if self._grammar is None:
            self.mask[:] = self._listed
        else:
            self._match(self._grammar, tokens)
            if self.failure is not None or not (self.mask & self._shared.not_eos).any():
                return  # a complete output may only end, whatever the other limits say
        self.mask &= self._listed
        self._forbid_sequences()
        if self._count < self._min_tokens:
            self.mask &= self._not_ending
        if not self.mask.any():
            self.failure = _NO_TOKEN.format(index=self._count)

    def _forbid_sequences(self) -> None:
        """Take out each token that would complete a forbidden sequence."""
        if not self._end:
            return
        end = tuple(self._end)
        for sequence in self._sequences.get(end[-1], ()):
            if end[1 - len(sequence) :] == sequence[:-1]:
                word, bit = divmod(sequence[-1], BITS)
                self.mask[word] &= ~np.uint32(1 << bit)

    def _match(self, grammar: str, tokens: Sequence[int]) -> None:
        """Give tokens to the matcher, and write its mask."""
        if self._matcher is None:
            try:
                self._matcher = self._shared.read_vocabulary().matcher(grammar)
            except ModelError as error:
                self.failure = f"its grammar cannot be used: {error}"
                return
        matcher = self._matcher
        matcher.consume(tokens)
        if matcher.failure is None:
            matcher.write_mask(self.mask.ctypes.data, self.mask.nbytes)
        if matcher.failure is not None:
            self.failure = f"its grammar failed at token {self._count} of the output: {matcher.failure}"


def _words(vocab_size: int) -> int:
    return -(-vocab_size // BITS)
