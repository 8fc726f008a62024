"""The text of an output whose call asks for more than `core.domain.text` shows: the stop string, or special tokens.

`OutputText` decides here, too, so a stop string is found at the token at which the scheduler has found it. Without the
special tokens' texts, and without the stop string, the text is the one of any other call. One exception: a special
token between the parts of a character makes two incomplete characters of it, as in transformers.
"""

from collections import deque
from collections.abc import Container
from enum import IntFlag

from orca.core.domain.request import Request
from orca.core.domain.text import Detokenizer, OutputText, Tokenizer


class TextFlag(IntFlag):
    """The bits of `RenderOptions.text_flags`."""

    KEEPS_STOP = 1  # the text ends with the stop string, or with the text of the token that ended the output
    SHOWS_SPECIAL = 2  # special tokens have their text


class SpecialDetokenizer:
    """A detokenizer with the texts of special tokens. An incomplete character ends before such a text."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._tokenizer = tokenizer
        self._plain = Detokenizer.of(tokenizer, request)

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return self.flush() + self.special_text(token_id)
        return self._plain.push(token_id)

    def special_text(self, token_id: int) -> str:
        """Return the text of a special token."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def flush(self) -> str:
        """Return what was held back."""
        return self._plain.flush()


class ShownText:
    """The text of one output, token by token.

    A piece of text waits for its turn as long as `OutputText` holds the same characters back. Texts of special tokens,
    which it does not have, wait with the characters around them.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, flags: TextFlag, markers: Container[int] = ()) -> None:
        """Args: markers: special tokens without a text, because a parser reads them."""
        self._output = OutputText.of(tokenizer, request)
        self._keeps_stop = TextFlag.KEEPS_STOP in flags
        self._special = SpecialDetokenizer(tokenizer, request) if TextFlag.SHOWS_SPECIAL in flags else None
        self._tokenizer = tokenizer
        self._markers = markers
        # Pieces that wait: their characters of the plain text (None for a special token), and their own text.
        self._waiting: deque[tuple[int | None, str]] = deque()
        self._plain = 0  # characters of the plain text so far, with those that are held back
        self._special_count = 0  # special tokens so far
        self._taken = 0  # characters of the plain text that were returned
        self._special_taken = 0

    def push(self, token_id: int, *, is_last: bool = False) -> str:
        """Add the next token, and return the text that it makes available.

        Args: is_last: the token ends the output by itself.
        """
        if is_last:
            return self._push_last(token_id) if self._keeps_stop else ""
        held = self._output.held
        delta = self._output.push(token_id)
        kept = delta.stop if delta.stop is not None and self._keeps_stop else ""
        if self._special is None:
            return delta.text + kept
        available = self._plain - held + len(delta.text)
        if delta.stop is None:
            new = len(delta.text) + self._output.held - held
            self._add(token_id, new, self._special)
            self._plain += new
            return self._take(available, self._special_count - self._output.held_special)
        if self._tokenizer.is_special(token_id):
            # It has no characters. What the delta has beyond those before it is the end of an incomplete one.
            available = min(available, self._plain)
        self._add(token_id, None, self._special)
        text = self._take(available, self._special_count - delta.special)
        self._waiting.clear()
        return text + kept

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return self._output.held if self._special is None else sum(len(text) for _, text in self._waiting)

    def flush(self) -> str:
        """Return all that was held back, when the output has ended without a stop string."""
        if self._special is None:
            return self._output.flush()
        text = "".join(text for _, text in self._waiting) + self._special.flush()
        self._waiting.clear()
        return text

    def _push_last(self, token_id: int) -> str:
        if self._special is None:
            return self._output.end_with(token_id)
        self._add(token_id, None, self._special)
        return self.flush()

    def _add(self, token_id: int, plain: int | None, special: SpecialDetokenizer) -> None:
        """Let the text of a token wait. Args: plain: its characters of the plain text; None: those of its text."""
        if self._tokenizer.is_special(token_id):
            self._waiting.append((0, special.flush()))
            self._waiting.append((None, "" if token_id in self._markers else special.special_text(token_id)))
            self._special_count += 1
            return
        text = special.push(token_id)
        self._waiting.append((len(text) if plain is None else plain, text))

    def _take(self, plain: int, special: int) -> str:
        """Return pieces in their order, up to so many characters of the plain text and special tokens of the output."""
        texts = []
        while self._waiting:
            count, text = self._waiting[0]
            if count is None:
                if self._special_taken >= special:
                    break
                self._special_taken += 1
            elif self._taken + count > plain:
                fitting = plain - self._taken
                texts.append(text[:fitting])
                self._waiting[0] = (count - fitting, text[fitting:])
                self._taken = plain
                break
            else:
                self._taken += count
            texts.append(text)
            self._waiting.popleft()
        return "".join(texts)
