"""The token masks of a rank's requests, which threads compute beside the forward pass.

Only the rank that samples has masks. A mask is computed while the next forward pass runs. When a token is drawn, a
thread gives it to the request's matcher, and writes the mask of the token after it. llguidance does this outside the
interpreter. A request that starts, or starts again, builds its matcher in the same way, from the tokens of its log.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from orca.core.domain.step import NewRequest
from orca.worker.masks.request_mask import ModelMasks, ReadVocabulary, RequestMask

if TYPE_CHECKING:
    from orca.core.grammars.matching import GrammarVocabulary

_THREADS_MAX = 8

_reading = Lock()


def vocabulary_reader(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> ReadVocabulary:
    """Return a function that reads the tokenizer of a model's folder, once in a process and only if it is called.

    Most ranks never have a grammar.
    """
    return partial(_read_once, folder, vocab_size, tuple(eos_token_ids))


def _read_once(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "GrammarVocabulary":
    with _reading:
        return _read(folder, vocab_size, eos_token_ids)


@cache
def _read(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "GrammarVocabulary":
    # A rank without grammars needs neither llguidance nor a tokenizer.
    from orca.core.domain.text import Tokenizer
    from orca.core.grammars.matching import GrammarVocabulary

    return GrammarVocabulary(Tokenizer.from_folder(folder), vocab_size, eos_token_ids)


def mask_threads(processors: int) -> int:
    """Return how many threads compute masks beside the forward pass. Args: processors: that this process may use."""
    return min(max(processors // 4, 1), _THREADS_MAX)


class TokenMasks:
    """The masks of a rank's requests, by line.

    Args: threads: that compute masks beside the forward pass.
    """

    def __init__(self, shared: ModelMasks, *, threads: int) -> None:
        self._shared = shared
        self._thread_count = threads
        self._by_line: dict[int, RequestMask] = {}
        self._updates: dict[int, Future[None]] = {}  # by line; one may update several requests

    def start(self, line: int, new: NewRequest) -> None:
        """Set a line up for a request that starts, or starts again. The line's earlier request has ended."""
        if self._by_line.pop(line, None) is not None:
            del self._updates[line]
        if not new.sampling.has_token_mask:
            return
        self._by_line[line] = RequestMask(new.sampling, new.target[new.target_start :], self._shared)
        self._update([line])

    def of_lines(self, lines: Iterable[int]) -> dict[int, RequestMask]:
        """Return the masks of those of these lines that have one. Waits until they are computed."""
        if not self._by_line:
            return {}
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
