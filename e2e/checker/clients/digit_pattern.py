"""Grammars for chain models, and the tokens that they allow, computed without a grammar engine.

The text of token 17 is `<17>`. A pattern is a cycle of sets of digits: the last digit of token i is in set i modulo
their number. So what is allowed depends on the number of tokens before, and a server that loses or repeats a part of
the log allows other tokens. The answer may end after `least` whole cycles and must end after `most`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_SET = re.compile(r"<\[0-9\]\*\[([0-9]+)\]>")
_REGEX = re.compile(rf"\(((?:{_SET.pattern})+)\)\{{([0-9]+),([0-9]+)\}}")


@dataclass(frozen=True, slots=True)
class DigitPattern:
    """A cycle of sets of digits, each with two or more, so that each window of 16 tokens has one that is allowed."""

    digits: tuple[str, ...]
    least: int  # cycles
    most: int

    @property
    def regex(self) -> str:
        """The pattern as a regular expression."""
        cycle = "".join(f"<[0-9]*[{each}]>" for each in self.digits)
        return f"({cycle}){{{self.least},{self.most}}}"

    @classmethod
    def parse(cls, regex: str) -> Self:
        """Return the pattern of a regular expression. Raises: ValueError if it has none."""
        found = _REGEX.fullmatch(regex)
        if found is None:
            raise ValueError(f"not a pattern of digits: {regex!r}")
        return cls(tuple(_SET.findall(found[1])), int(found[3]), int(found[4]))

    def candidates(self, index: int, window: Sequence[int], eos: int) -> list[int]:
        """Return the tokens that may be drawn as token `index`, in order of their ids.

        Args: window: the equally likely tokens of the model.
        """
        cycles, place = divmod(index, len(self.digits))
        if cycles == self.most:
            return [eos]
        may_end = place == 0 and cycles >= self.least
        return [token for token in window if (may_end if token == eos else str(token)[-1] in self.digits[place])]
