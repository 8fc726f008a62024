"""The log probabilities of a message's tokens: those of the tokens whose text the message has.

Markers, reasoning and tool calls have none, and neither has the token that ends the output. A token whose text is held
back comes with the text.
"""

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

from orca.core.domain.request import Request
from orca.core.domain.text import Detokenizer, Tokenizer
from orca.gateway.formats.parts import AnswerDelta
from orca.gateway.render.logprobs import ScoredToken, chat_logprobs


class ScoredText:
    """Places the tokens of one output in the text with marks, and gives each to the content that its text is in."""

    def __init__(self, request: Request, tokenizer: Tokenizer, marker_ids: Container[int]) -> None:
        """Args: marker_ids: special tokens whose marks are one character of it each."""
        self._tokenizer = tokenizer
        self._marker_ids = marker_ids
        self._detokenizer = Detokenizer.of(tokenizer, request)
        self._length = 0  # characters of the text so far
        self._waiting: deque[tuple[int, int, ScoredToken]] = deque()  # start and end of their text, in order

    def push(self, scored: Sequence[ScoredToken]) -> None:
        """Take the next tokens of the log."""
        for entry in scored:
            start = self._length
            self._length += len(self._detokenizer.push(entry.token)) + (entry.token in self._marker_ids)
            if not self._tokenizer.is_special(entry.token):
                # Before the last token of a character, its other tokens have no text.
                self._waiting.append((start, max(self._length, start + 1), entry))

    def take(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """Return the log probabilities of the content of a delta, in OpenAI's shape."""
        found = []
        while delta.content and self._waiting and self._waiting[0][0] < delta.end:
            _, end, entry = self._waiting.popleft()
            if end > delta.start:
                found.append(entry)
        content: list[dict[str, Any]] = chat_logprobs(found, self._tokenizer)["content"]
        return content
