"""Stop strings with the text of a special token, such as `<|im_end|>`.

A special token has no text in an output, so a search in the text never finds such a string. Here the token itself
counts: each special token of a stop string is replaced by a mark, in the string and in the output that is searched.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Lone surrogates, which no decoded text has.
_FIRST_MARK, _LAST_MARK = 0xD800, 0xDFFE
_OTHER = chr(0xDFFF)  # a special token that no stop string names: it separates what is before and after it
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{_OTHER}]")


@dataclass(frozen=True, slots=True)
class SpecialStop:
    """A stop string that the newest token has completed."""

    stop: str
    after: int  # characters of the output's text that follow it in the newest token
    characters: int  # characters of the output's text that belong to it


class SpecialStops:
    """Finds stop strings with special tokens in the growing output of one request."""

    def __init__(self, stop: Sequence[str], special_texts: "re.Pattern[str]", special_ids: Mapping[str, int]) -> None:
        """Args: stop: those with a special token; special_texts: matches the longest one; special_ids: text -> id."""
        self._marks: dict[int, str] = {}
        self._special_ids = frozenset(special_ids.values())
        self._stop = {special_texts.sub(lambda found: self._mark(special_ids[found[0]]), text): text for text in stop}
        self._prefixes = frozenset(text[:length] for text in self._stop for length in range(1, len(text)))
        self._longest_prefix = max(len(text) - 1 for text in self._stop)
        self._tail = ""  # the newest end of the output, long enough to hold the beginning of any of them

    @classmethod
    def among(
        cls, stop: Sequence[str], special_texts: "re.Pattern[str] | None", special_ids: Mapping[str, int]
    ) -> "SpecialStops | None":
        """Make one for the stop strings that have a special token; None if none has."""
        if special_texts is None:
            return None
        found = [text for text in stop if special_texts.search(text)]
        return cls(found, special_texts, special_ids) if found else None

    def push(self, token_id: int, new: str) -> SpecialStop | None:
        """Add the next token. Args: new: the text that it makes available, without what was held back before."""
        piece = self._marks.get(token_id, _OTHER if token_id in self._special_ids else new)
        text = self._tail + piece
        first: tuple[int, int, str] | None = None
        for pattern in self._stop:
            # One that ended before this token was not counted, or the output would have ended.
            start = text.find(pattern, max(0, len(self._tail) - len(pattern) + 1)) if piece else -1
            if start >= 0 and (first is None or (start + len(pattern), start) < first[:2]):
                first = (start + len(pattern), start, pattern)
        self._tail = text[max(0, len(text) - self._longest_prefix) :]
        if first is None:
            return None
        end, start, pattern = first
        return SpecialStop(self._stop[pattern], _visible(text[end:]), _visible(text[start:end]))

    @property
    def held(self) -> int:
        """Characters of the text that may belong to a stop string that is not complete."""
        for length in range(len(self._tail), 0, -1):
            if self._tail[-length:] in self._prefixes:
                return _visible(self._tail[-length:])
        return 0

    def _mark(self, token_id: int) -> str:
        # 16 strings of 1,024 characters could name more tokens than there are marks. The further ones share the last.
        return self._marks.setdefault(token_id, chr(min(_FIRST_MARK + len(self._marks), _LAST_MARK)))


def _visible(text: str) -> int:
    return len(_MARKS.sub("", text))
