"""What a place that holds models offers to the download: a list of files with their digests, and bytes from a point on.

Two places implement it: hub.py and bucket.py.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Hasher(Protocol):
    """As those of hashlib."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Digest:
    """What the content of a file must give."""

    hasher: Callable[[], Hasher]
    expected: str  # as its `hexdigest` writes it


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    size_bytes: int
    digest: Digest | None  # None where the place has none that can be computed: then its size has to do


@dataclass(frozen=True, slots=True)
class Listing:
    """One revision of a model."""

    identity: str  # letters and digits; another content is another identity
    files: tuple[RemoteFile, ...]


class Source(Protocol):
    """All methods raise FetchError, and nothing else that comes from the place."""

    def listing(self) -> Listing:
        """All files of the model's folder itself, also those that nobody wants; later reads are of this revision."""
        ...

    def read(self, file: RemoteFile, from_byte: int) -> AbstractContextManager[Iterator[bytes]]:
        """The content from that byte on, which is less than its size, in pieces of a megabyte or so."""
        ...


def sha256(expected: str) -> Digest:
    return Digest(hashlib.sha256, expected)


def md5(expected: str) -> Digest:
    return Digest(lambda: hashlib.md5(usedforsecurity=False), expected)


def git_blob(size_bytes: int, expected: str) -> Digest:
    """The id of a file in a git repository: SHA-1 of the word blob, its size, a zero byte, and the content."""
    return Digest(lambda: hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False), expected)


def md5_of_parts(part_bytes: int, expected: str) -> Digest:
    """The ETag of an object that was uploaded in equal parts."""
    return Digest(lambda: _PartsHasher(part_bytes), expected)


class _PartsHasher:
    """MD5 of the MD5s of all parts, a dash, and their number."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._all = hashlib.md5(usedforsecurity=False)
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0
        self._parts = 0

    def update(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            taken = view[: self._part_bytes - self._in_part]
            self._part.update(taken)
            self._in_part += len(taken)
            view = view[len(taken) :]
            if self._in_part == self._part_bytes:
                self._end_part()

    def hexdigest(self) -> str:
        """To be asked once, at the end."""
        if self._in_part:
            self._end_part()
        return f"{self._all.hexdigest()}-{self._parts}"

    def _end_part(self) -> None:
        self._all.update(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0
        self._parts += 1
