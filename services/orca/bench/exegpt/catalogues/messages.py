"""The messages of a machine's catalogues, and their lengths in tokens.

A token is one of a byte-level BPE with 32,000 tokens that is learned from all of these messages, as the tokenizer of a
translation model is from its languages. So nothing is downloaded. A model folder may give its own tokenizer instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from orca.bench.exegpt.catalogues.mo_file import read_messages
from orca.core.domain.errors import SettingError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOCALE = Path("/usr/share/locale")
LANGUAGES = ("de", "es", "fr", "it", "sv")
VOCABULARY = 32_000

MESSAGES_MIN = 1_000
"""Fewest messages: a tenth of them decides a 99th percentile."""

Lengths = tuple[int, int]
"""Tokens of a source and of its translation."""


@dataclass(frozen=True, slots=True)
class SplitLengths:
    """Lengths, divided by chance."""

    sample: Sequence[Lengths]  # a tenth, which a plan is made from
    rest: Sequence[Lengths]
    left_out: int  # messages that are longer than the limit

    @property
    def left_out_percent(self) -> float:
        return 100 * self.left_out / (len(self.sample) + len(self.rest) + self.left_out)


def message_pairs(folder: Path, languages: Sequence[str]) -> list[tuple[str, str]]:
    """Return the messages of all catalogues of these languages, each pair once for a language.

    Raises: SettingError if there are too few, or a file is no catalogue.
    """
    pairs: list[tuple[str, str]] = []
    for language in languages:
        pairs += dict.fromkeys(pair for file in _catalogues(folder, language) for pair in read_messages(file))
    if len(pairs) < MESSAGES_MIN:
        raise SettingError(
            f"the message catalogues of {', '.join(languages)} in {folder} have {len(pairs)} messages, and"
            f" {MESSAGES_MIN:,} are needed. On Debian, `apt-get install iso-codes gnupg-l10n libc-l10n libglib2.0-data"
            " gettext git` brings some. An image for containers may leave translations out while it installs: remove"
            " the line with path-exclude and /usr/share/locale from /etc/dpkg/dpkg.cfg.d first. Or name a folder with"
            " --catalogues"
        )
    return pairs


def _catalogues(folder: Path, language: str) -> list[Path]:
    """Return the catalogues of a language. A file that several names lead to counts once."""
    files = sorted((folder / language / "LC_MESSAGES").glob("*.mo"))
    return list(dict.fromkeys(file.resolve() for file in files))


def token_lengths(pairs: Sequence[tuple[str, str]], model: Path | None) -> list[Lengths]:
    """Return the tokens of each source and translation, at least one each.

    Args: model: folder whose tokenizer counts; None: one that is learned from these messages.
    """
    tokenizer = _learned(pairs) if model is None else _of_model(model)

    def count(texts: Sequence[str]) -> Iterator[int]:
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield max(len(encoding.ids), 1)

    sources, translations = zip(*pairs, strict=True)
    return list(zip(count(sources), count(translations), strict=True))


def _learned(pairs: Sequence[tuple[str, str]]) -> "Tokenizer":
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return tokenizer


def _of_model(folder: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise SettingError(f"--model {folder} has no tokenizer.json")
    return Tokenizer.from_file(str(file))


def split(lengths: Sequence[Lengths], *, longest: int, seed: int = 0) -> SplitLengths:
    """Divide lengths by chance. Args: longest: source and translation together; longer messages are left out."""
    kept = [pair for pair in lengths if sum(pair) <= longest]
    Random(seed).shuffle(kept)
    count = max(len(kept) // 10, 1)
    return SplitLengths(kept[:count], kept[count:], len(lengths) - len(kept))
