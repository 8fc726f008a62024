"""The text that both small models learn: Jane Austen's six novels, from Debian's package r-cran-janeaustenr."""

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

PLAIN_PUNCTUATION = str.maketrans(
    {"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2014": "--", "\ufeff": None}
)


def read_novels(package: Path) -> list[list[str]]:
    """Return the paragraphs of each novel from the package's lazy-load database.

    An entry of Rdata.rdb is a big-endian 4-byte length and a zlib stream of a serialized R string vector. The vector is
    a 14-byte head, the encoding's name, its type and its count. Each string follows: 4 bytes of flags, 4 bytes of
    length, UTF-8.
    """
    databases = list(package.rglob("janeaustenr/data/Rdata.rdb"))
    if len(databases) != 1:
        raise SystemExit(
            f"--package: {package} must hold janeaustenr/data/Rdata.rdb once, not {len(databases)} times. "
            "Unpack r-cran-janeaustenr_*.deb there with `dpkg -x`"
        )
    packed = databases[0].read_bytes()
    novels = []
    while packed:
        stream = zlib.decompressobj()
        novels.append(paragraphs(strings_of(stream.decompress(packed[4:]))))
        packed = stream.unused_data
    return novels


def strings_of(serialized: bytes) -> Iterator[str]:
    """Yield the strings of a serialized R string vector."""
    (name_length,) = struct.unpack_from(">I", serialized, 14)
    place = 18 + name_length
    (count,) = struct.unpack_from(">I", serialized, place + 4)
    place += 8
    for _ in range(count):
        (length,) = struct.unpack_from(">I", serialized, place + 4)
        yield serialized[place + 8 : place + 8 + length].decode()
        place += 8 + length


def paragraphs(lines: Iterator[str]) -> list[str]:
    """Join wrapped lines into paragraphs. Blank lines separate them; italics lose their marks, quotes become plain."""
    text = "\n".join(line.strip() for line in lines).replace("_", "")
    text = text.translate(PLAIN_PUNCTUATION)
    text, _, _ = text.partition("Transcriber's Note")
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def is_heading(paragraph: str) -> bool:
    """Check whether a paragraph is the heading of a chapter or volume."""
    return paragraph.upper().startswith(("CHAPTER", "VOLUME"))


def chapters_of(novel: list[str]) -> list[list[str]]:
    """Return the paragraphs of each chapter, without headings. What stands before the first heading is the title."""
    chapters: list[list[str]] = []
    for paragraph in novel:
        if is_heading(paragraph):
            chapters.append([])
        elif chapters:
            chapters[-1].append(paragraph)
    return [chapter for chapter in chapters if chapter]
