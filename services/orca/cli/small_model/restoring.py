"""Examples of restoring case and punctuation: windows of whole sentences, as they stand and as plain text."""

import difflib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

WORDS_MIN, WORDS_MAX = 4, 60  # words of a window
ABBREVIATIONS = frozenset({"Mr.", "Mrs.", "Dr.", "St.", "Rev.", "Hon.", "Messrs.", "Esq."})


@dataclass(frozen=True, slots=True)
class Example:
    """One pair for the model: lower-case words without punctuation, and the text that they come from."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Restored:
    """Counts of words: those of the targets, those that an output has too, and those with its case and punctuation."""

    words: int
    copied: int
    exact: int

    def __add__(self, other: "Restored") -> "Restored":
        return Restored(self.words + other.words, self.copied + other.copied, self.exact + other.exact)


def examples_of(chapters: list[list[str]], *, words_max: int, draw: random.Random) -> Iterator[Example]:
    """Yield examples that cover every sentence of at most `words_max` words once.

    A window holds consecutive sentences of one paragraph. Its length is drawn, so that each pass over the chapters
    cuts them at other places.
    """
    for chapter in chapters:
        for paragraph in chapter:
            for window in windows_of(sentences_of(paragraph), words_max=words_max, draw=draw):
                yield Example(plain(window), window)


def sentences_of(paragraph: str) -> list[str]:
    """Cut a paragraph after each full stop, question or exclamation mark that a capital follows."""
    sentences: list[list[str]] = [[]]
    words = paragraph.split()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        sentences[-1].append(word)
        is_end = re.search(r"[.!?][\"')]*$", word) and word.lstrip("\"'(") not in ABBREVIATIONS
        if is_end and re.match(r"[\"'(]*[A-Z]", following):
            sentences.append([])
    return [" ".join(sentence) for sentence in sentences if sentence]


def windows_of(sentences: list[str], *, words_max: int, draw: random.Random) -> Iterator[str]:
    """Yield runs of sentences of a drawn length, from WORDS_MIN to `words_max` words. Longer sentences are left out."""
    window: list[str] = []
    words = quotes = 0  # of the window; of the paragraph before it
    limit = draw.randint(WORDS_MIN, words_max)
    for sentence in [*sentences, ""]:
        length = len(plain(sentence).split())
        if window and (words + length > limit or not sentence):
            text = " ".join(window)
            if WORDS_MIN <= words <= words_max:
                yield balanced(text, is_open=quotes % 2 == 1)
            quotes += text.count('"')
            window, words, limit = [], 0, draw.randint(WORDS_MIN, words_max)
        window.append(sentence)
        words += length


def balanced(window: str, *, is_open: bool) -> str:
    """Close the quotations of a window, or remove the quotes if all of it is one quotation.

    Args:
        window: consecutive sentences of a paragraph.
        is_open: the window begins inside a quotation.
    """
    text = f'"{window}' if is_open else window
    if text.count('"') % 2:
        text += '"'
    is_one_quotation = text.count('"') == 2 and text.startswith('"') and text.endswith('"')
    return text[1:-1] if is_one_quotation else text


def pieces_of(text: str) -> list[str]:
    """Cut a text into words with the punctuation around them. A dash or hyphen ends a piece."""
    return [piece for piece in re.sub(r"(-+)", r"\1 ", text).split() if plain(piece)]


def plain(text: str) -> str:
    """Return the words in lower case without punctuation. An apostrophe joins its letters; other marks are spaces."""
    return " ".join(re.sub(r"[^\w\s]|_", " ", text.lower().replace("'", "")).split())


def compare(output: str, target: str) -> Restored:
    """Count the words of the target that the output has in the same order, and those that are exactly equal there."""
    expected, given = pieces_of(target), pieces_of(output)
    matcher = difflib.SequenceMatcher(None, [plain(p) for p in expected], [plain(p) for p in given], autojunk=False)
    copied = exact = 0
    for block in matcher.get_matching_blocks():
        copied += block.size
        pairs = zip(expected[block.a : block.a + block.size], given[block.b : block.b + block.size], strict=True)
        exact += sum(wanted == found for wanted, found in pairs)
    return Restored(len(expected), copied, exact)
