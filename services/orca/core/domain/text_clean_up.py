"""Removes the spaces that a tokenizer puts before punctuation, in a text that grows.

`clean_up_tokenization_spaces` of tokenizer_config.json asks for it, as most folders that transformers 4 has saved do.
The pieces, joined, are what `clean_up_tokenization` of transformers makes of the whole text: each of its replacements
runs over the result of the one before.
"""

REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def clean_up(text: str) -> str:
    """Return a whole text without these spaces."""
    for old, new in REPLACEMENTS:
        text = text.replace(old, new)
    return text


class CleanUp:
    """The same for one text, piece by piece. An end that may still change is held back."""

    def __init__(self) -> None:
        self._stages = [_Replacement(old, new) for old, new in REPLACEMENTS]
        self._is_holding = False

    def push(self, text: str) -> str:
        # Each replacement begins with a space.
        if not self._is_holding and " " not in text:
            return text
        for stage in self._stages:
            text = stage.push(text)
        self._is_holding = any(stage.held for stage in self._stages)
        return text

    def flush(self) -> str:
        """Return all that was held back."""
        text = ""
        for stage in self._stages:
            text = stage.push(text) + stage.held
            stage.held = ""
        self._is_holding = False
        return text


class _Replacement:
    """`str.replace` for a text that grows."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._beginnings = [old[:length] for length in range(len(old) - 1, 0, -1)]
        self.held = ""  # the longest end of the text that `old` begins with

    def push(self, text: str) -> str:
        if not text:
            return ""
        *done, rest = (self.held + text).split(self._old)
        self.held = next(filter(rest.endswith, self._beginnings), "")
        return self._new.join([*done, rest[: len(rest) - len(self.held)]])
