"""The tokens that a request may draw next, where a grammar or a list of tokens decides it.

Only the rank that samples has masks. A mask is computed while the next forward pass runs: as soon as a token is drawn,
a thread gives it to the request's matcher and writes the mask of the token after it. llguidance does this outside the
interpreter. A request that starts, or starts again, builds its matcher in the same way, from the tokens of its log.

A mask that cannot be computed, or leaves no token, is a failure of its request alone (core.domain.refusal).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from orca.core.domain.ending_tokens import EndingTokens
from orca.core.domain.errors import ModelError
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import NewRequest
from orca.core.domain.text import Tokenizer
from orca.core.grammars.matching import GrammarMatcher, GrammarVocabulary

BITS = 32
"""Tokens in one word of a mask; the lowest bit is the token with the lowest id."""

_THREADS_MAX = 8

_NO_TOKEN = "the grammar and the other limits on tokens leave no token for token {index} of the output"

TokenMask = NDArray[np.uint32]
"""[words]: a bit for each token of the vocabulary, set if the token may be drawn."""

ReadVocabulary = Callable[[], GrammarVocabulary]
"""Returns the vocabulary of the model. The first call may take a second. Raises: ModelError."""


_reading = Lock()


def vocabulary_reader(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> ReadVocabulary:
    """Return a function that reads the tokenizer of a model's folder, once in a process and only if it is called.

    Most ranks never have a grammar.
    """
    return partial(_read_once, folder, vocab_size, tuple(eos_token_ids))


def _read_once(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
    with _reading:
        return _read(folder, vocab_size, eos_token_ids)


@cache
def _read(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
    return GrammarVocabulary(Tokenizer.from_folder(folder), vocab_size, eos_token_ids)


def mask_threads(processors: int) -> int:
    """Return how many threads compute masks beside the forward pass. Args: processors: that this process may use."""
    return min(max(processors // 4, 1), _THREADS_MAX)


def mask_of(tokens: Iterable[int], vocab_size: int) -> TokenMask:
    """Return the mask that allows these tokens alone. Args: tokens: all below `vocab_size`."""
    allowed = np.zeros(_words(vocab_size) * BITS, np.bool_)
    allowed[list(tokens)] = True
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class RequestMask:
    """The mask of one request's next token.

    Args:
        never: tokens that the model must not draw.
        output: the tokens of its log so far.
    """

    def __init__(
        self,
        params: SamplingParams,
        output: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        never: Sequence[int],
        read_vocabulary: ReadVocabulary,
    ) -> None:
        self.mask: TokenMask = np.zeros(_words(vocab_size), np.uint32)
        self.failure: str | None = None  # why no token can be drawn
        self._grammar = params.grammar
        self._read_vocabulary = read_vocabulary
        self._matcher: GrammarMatcher | None = None
        self._count = 0  # tokens of the output that the mask follows
        self._tokens = tuple(output)  # taken by `update`
        ending = EndingTokens.of(params, eos_token_ids)
        self._min_tokens = params.min_tokens
        self._fixed = mask_of(params.allowed_token_ids or range(vocab_size), vocab_size)
        self._fixed &= ~mask_of({*params.forbidden_token_ids, *never}, vocab_size)
        self._not_eos = ~mask_of(eos_token_ids, vocab_size)
        self._not_ending = ~mask_of(ending.eos | ending.stop | frozenset(eos_token_ids), vocab_size)

    def take(self, token: int) -> None:
        """Add the token that was drawn; `update` computes with it."""
        self._tokens = (*self._tokens, token)

    def update(self) -> None:
        """Compute the mask of the token after those that were added."""
        if self.failure is not None:
            return
        tokens, self._tokens = self._tokens, ()
        self._count += len(tokens)
        if self._grammar is None:
            self.mask[:] = self._fixed
        else:
            self._match(self._grammar, tokens)
            if self.failure is not None or not (self.mask & self._not_eos).any():
                return  # a complete output may only end, whatever the other limits say
        self.mask &= self._fixed
        if self._count < self._min_tokens:
            self.mask &= self._not_ending
        if not self.mask.any():
            self.failure = _NO_TOKEN.format(index=self._count)

    def _match(self, grammar: str, tokens: Sequence[int]) -> None:
        """Give tokens to the matcher, and write its mask."""
        if self._matcher is None:
            try:
                self._matcher = self._read_vocabulary().matcher(grammar)
            except ModelError as error:
                self.failure = f"its grammar cannot be used: {error}"
                return
        matcher = self._matcher
        matcher.consume(tokens)
        if matcher.failure is None:
            matcher.write_mask(self.mask.ctypes.data, self.mask.nbytes)
        if matcher.failure is not None:
            self.failure = f"its grammar failed at token {self._count} of the output: {matcher.failure}"


class TokenMasks:
    """The masks of a rank's requests, by line.

    Args:
        never: tokens that no request draws.
        threads: that compute masks beside the forward pass.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        never: Sequence[int],
        read_vocabulary: ReadVocabulary,
        threads: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._never = never
        self._read_vocabulary = read_vocabulary
        self._thread_count = threads
        self._by_line: dict[int, RequestMask] = {}
        self._updates: dict[int, Future[None]] = {}  # by line; one may update several requests

    def start(self, line: int, new: NewRequest) -> None:
        """Set a line up for a request that starts, or starts again. The line's earlier request has ended."""
        if self._by_line.pop(line, None) is not None:
            del self._updates[line]
        if not new.sampling.has_token_mask:
            return
        self._by_line[line] = RequestMask(
            new.sampling,
            new.target[new.target_start :],
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            never=self._never,
            read_vocabulary=self._read_vocabulary,
        )
        self._update([line])

    def of_lines(self, lines: Iterable[int]) -> dict[int, RequestMask]:
        """Return the masks of those of these lines that have one. Waits until they are computed."""
        found = {line: mask for line in lines if (mask := self._by_line.get(line)) is not None}
        for line in found:
            self._updates[line].result()
        return found

    def take(self, tokens: Mapping[int, int]) -> None:
        """Begin to compute the next masks. Args: tokens: drawn a moment ago, by line; all lines have masks."""
        lines = list(tokens)
        for line in lines:
            self._by_line[line].take(tokens[line])
        # Each thread gets its own part of the lines.
        for first in range(min(self._thread_count, len(lines))):
            self._update(lines[first :: self._thread_count])

    def _update(self, lines: Sequence[int]) -> None:
        future = self._threads.submit(_update_all, [self._by_line[line] for line in lines])
        for line in lines:
            self._updates[line] = future

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._thread_count, thread_name_prefix="masks")


def _update_all(masks: Sequence[RequestMask]) -> None:
    for mask in masks:
        mask.update()


def _words(vocab_size: int) -> int:
    return -(-vocab_size // BITS)
