"""Reads a message catalogue of gettext (.mo): sources and their translations.

The file has a header of seven numbers, and two tables with the length and the place of each source and translation. A
source may begin with a context and EOT. A source with plural forms has two texts with NUL between them, and its
translation has one text for each form.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from orca.core.domain.errors import SettingError

MAGIC = 0x950412DE
_CONTEXT_END, _FORM_END = b"\x04", b"\x00"
_CHARSET = re.compile(rb"charset=([\w-]+)")


def read_messages(file: Path) -> list[tuple[str, str]]:
    """Return the sources with their translations. Of plural forms these are the first one and the last one.

    What has no translation is left out, and so is the header, whose source is empty.
    Raises: SettingError if the file is no catalogue.
    """
    try:
        content = file.read_bytes()
        pairs = list(_pairs(content))
        header = next((translation for source, translation in pairs if not source), b"")
        found = _CHARSET.search(header)
        charset = found[1].decode() if found else "utf-8"
        return [
            (source.decode(charset), translation.decode(charset))
            for sources, translations in pairs
            for source, translation in _forms(sources, translations)
            if source and translation
        ]
    except (OSError, struct.error, ValueError, LookupError) as error:
        raise SettingError(f"{file} is no message catalogue: {error}") from error


def _pairs(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield what the tables point at. Raises: struct.error, ValueError."""
    order = next((sign for sign in "<>" if struct.unpack_from(f"{sign}I", content)[0] == MAGIC), None)
    if order is None:
        raise ValueError("its first number is another one")
    count, sources_at, translations_at = struct.unpack_from(f"{order}III", content, 8)
    if count * 8 > len(content):
        raise ValueError(f"{count} messages do not fit into {len(content)} bytes")
    for number in range(count):
        texts = []
        for table in (sources_at, translations_at):
            length, place = struct.unpack_from(f"{order}II", content, table + 8 * number)
            if place + length > len(content):
                raise ValueError(f"message {number} is beyond its end")
            texts.append(content[place : place + length])
        yield texts[0], texts[1]


def _forms(sources: bytes, translations: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the first forms, and the last ones where there are several."""
    source_forms = sources.rpartition(_CONTEXT_END)[2].split(_FORM_END)
    translated = translations.split(_FORM_END)
    yield source_forms[0], translated[0]
    if len(source_forms) > 1 and len(translated) > 1:
        yield source_forms[-1], translated[-1]
