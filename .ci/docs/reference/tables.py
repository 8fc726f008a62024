"""Markdown tables and words that all reference pages share."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with a blank line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines) + "\n"


def sentence(text: str) -> str:
    """Return `text` on one line, with a capital first letter unless it begins with a name such as maxBatchTokens."""
    text = " ".join(text.split())
    is_name = any(letter.isupper() or letter in "_." for letter in text.partition(" ")[0])
    return text if is_name else text[:1].upper() + text[1:]


def code(value: object) -> str:
    """Return a value in code style; nothing for an empty one."""
    return "" if value in (None, "", ()) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
