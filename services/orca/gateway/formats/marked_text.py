"""The text of an answer with the markers that are special tokens, which have no text of their own."""

import re
from collections import deque
from dataclasses import replace

from orca.core.domain.text import Tokenizer
from orca.gateway.formats.tables import ModelFormats, NamedCall

_FIRST_MARK = 0xD800
"""Special tokens have no text. In the parser's text each marker among them is a character that no text can have."""


class Markers:
    """The tables of a model with the markers as they stand in the parser's text."""

    def __init__(self, formats: ModelFormats, tokenizer: Tokenizer, *, shows_special: bool = False) -> None:
        """Args: shows_special: a special token that marks nothing has its text."""
        self.by_token: dict[int, str] = {}
        self._texts: dict[str, str] = {}  # of the marks
        self._shows_special = shows_special
        self._special, self._pattern = tokenizer.special_ids, tokenizer.special_pattern
        tool, reasoning = formats.tool, formats.reasoning
        if tool is not None:
            body = tool.body
            if isinstance(body, NamedCall):
                body = replace(body, between=self._shown(body.between))
            tool = replace(tool, begin=self._shown(tool.begin), end=self._shown(tool.end), body=body)
        if reasoning is not None:
            reasoning = replace(reasoning, begin=self._shown(reasoning.begin), end=self._shown(reasoning.end))
        self.formats = ModelFormats(tool, reasoning)

    def _shown(self, marker: str) -> str:
        """Return a marker with a mark in the place of each special token."""
        return marker if self._pattern is None else self._pattern.sub(self._mark, marker)

    def _mark(self, found: re.Match[str]) -> str:
        token_id = self._special[found[0]]
        mark = self.by_token.setdefault(token_id, chr(_FIRST_MARK + len(self.by_token)))
        self._texts[mark] = found[0] if self._shows_special else ""
        return mark

    def visible(self, text: str) -> str:
        """Return a text for the client: without special tokens, or with their texts."""
        for mark, shown in self._texts.items():
            text = text.replace(mark, shown)
        return text


class MarkedText:
    """Puts marks into the text of one output, where their tokens stand.

    A stop string may hold text back. Then a token comes before the end of the text in front of it.
    """

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._due: deque[tuple[int, str]] = deque()  # characters of the text before a special token, and its mark
        self._length = 0  # characters of the text so far
        self._marks = 0  # marks in it

    @property
    def length(self) -> int:
        """Characters that were returned, marks included."""
        return self._length + self._marks

    def push(self, token_id: int, text: str, held: int) -> str:
        """Return more of the text, with the marks in it. Args: as for `AnswerParser.push`."""
        mark = self._markers.by_token.get(token_id)
        if mark is not None:
            self._due.append((self._length + len(text) + held, mark))
        return self.add(text)

    def add(self, text: str) -> str:
        """Return text that no token adds, with the marks that were due in it."""
        start, self._length = self._length, self._length + len(text)
        if not self._due:
            return text
        parts, taken = [], 0
        while self._due and self._due[0][0] <= self._length:
            offset, mark = self._due.popleft()
            parts += [text[taken : offset - start], mark]
            taken = offset - start
            self._marks += 1
        return "".join([*parts, text[taken:]])
