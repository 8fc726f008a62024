"""Stop strings with the text of a special token, such as `<|im_end|>`.

A special token has no text in an output, so a search in the text never finds such a string. Here the token itself
counts: each special token of a stop string is replaced by a mark, in the string and in the output that is searched.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    special: int  # special tokens that belong to it


class SpecialStops:
    """Finds stop strings with special tokens in the growing output of one request."""

    def __init__(self, stop: Sequence[str], special_texts: "re.Pattern[str]", special_ids: Mapping[str, int]) -> None:
        """Args: stop: those with a special token; special_texts: matches the longest one; special_ids: text -> id."""
        self._marks: dict[int, str] = {}
        self._special_ids = frozenset(special_ids.values())
        texts = {special_texts.sub(lambda found: self._mark(special_ids[found[0]]), text): text for text in stop}
        self._searches = [PatternSearch(pattern) for pattern in texts]
        self._stop = list(texts.values())

    @classmethod
    def among(
        cls, stop: Sequence[str], special_texts: "re.Pattern[str] | None", special_ids: Mapping[str, int]
    ) -> "SpecialStops | None":
        """Make one for the stop strings that have a special token; None if none has."""
        if special_texts is None:
            return None
        found = [text for text in stop if special_texts.search(text)]
        return cls(found, special_texts, special_ids) if found else None

    def push(self, token_id: int, new: str, *, cuts_character: bool = False) -> SpecialStop | None:
        """Add the next token.

        Args:
            new: the text that it makes available, without what was held back before.
            cuts_character: a character before it is incomplete.
        """
        if token_id not in self._special_ids:
            piece = new
        else:
            # The incomplete character is part of the text, so no stop string goes on across it.
            piece = _OTHER * cuts_character + self._marks.get(token_id, _OTHER)
        first: tuple[int, int, str, int] | None = None  # end, minus the length, stop string, characters of the text
        for search, stop in zip(self._searches, self._stop, strict=True):
            end = search.push(piece)
            # Of those that end at the same character, the longest counts.
            if end and (first is None or (end, -len(search.pattern)) < first[:2]):
                first = (end, -len(search.pattern), stop, search.visible_before(len(search.pattern)))
        if first is None:
            return None
        end, negative_length, stop, characters = first
        return SpecialStop(stop, _visible(piece[end:]), characters, -negative_length - characters)

    @property
    def held(self) -> int:
        """Characters of the text that may belong to a stop string that is not complete."""
        longest = max(self._searches, key=lambda search: search.matched)
        return longest.visible_before(longest.matched)

    @property
    def held_special(self) -> int:
        """Special tokens that may belong to a stop string that is not complete."""
        longest = max(self._searches, key=lambda search: search.matched)
        return longest.matched - longest.visible_before(longest.matched)

    def _mark(self, token_id: int) -> str:
        # 16 strings of 1,024 characters could name more tokens than there are marks. The further ones share the last.
        return self._marks.setdefault(token_id, chr(min(_FIRST_MARK + len(self._marks), _LAST_MARK)))


class PatternSearch:
    """Finds one pattern in a growing text by the algorithm of Knuth, Morris and Pratt.

    It keeps no text, and a character costs a constant number of steps on average.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # characters of the pattern, not all of them, that the text ends in
        self.steps = 0  # comparisons so far
        # For each number of matched characters, the next smaller one with which the text ends, too.
        self._borders = array("I", (0, 0))
        for character in pattern[1:]:
            self._borders.append(self._next(self._borders[-1], character))
        self._visible_before = array("I", accumulate((not _MARKS.match(one) for one in pattern), initial=0))

    def push(self, piece: str) -> int:
        """Add text. Return the number of its characters up to the end of the first match; 0 if there is none."""
        first = 0
        for count, character in enumerate(piece, start=1):
            self.matched = self._next(self.matched, character)
            if self.matched == len(self.pattern):
                first = first or count
                self.matched = self._borders[-1]
        return first

    def visible_before(self, length: int) -> int:
        """Return the characters of an output's text among the first ones of the pattern."""
        return self._visible_before[length]

    def _next(self, matched: int, character: str) -> int:
        self.steps += 1
        while matched and self.pattern[matched] != character:
            matched = self._borders[matched]
            self.steps += 1
        return matched + (self.pattern[matched] == character)


def _visible(text: str) -> int:
    return len(_MARKS.sub("", text))
