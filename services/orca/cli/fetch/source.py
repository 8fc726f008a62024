"""The interface of a place that holds models: it lists files with their digests, and reads a file from an offset.

hub.py and bucket.py implement it.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Hasher(Protocol):
    """A hash object as those of hashlib."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Digest:
    """The expected digest of a file's content."""

    hasher: Callable[[], Hasher]
    expected: str  # in the form of the hasher's `hexdigest`


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model at its source."""

    name: str
    size_bytes: int
    digest: Digest | None  # None if the source has no digest that can be computed: then only the size is checked


@dataclass(frozen=True, slots=True)
class ModelListing:
    """The files of one revision of a model."""

    identity: str  # letters and digits; other content has another identity
    files: tuple[RemoteFile, ...]


class Source(Protocol):
    """A place that holds one model. Every failure of the place raises FetchError."""

    def listing(self) -> ModelListing:
        """Return all files directly in the model's folder. Later calls of `read` read this revision."""
        ...

    def read(self, file: RemoteFile, from_byte: int) -> AbstractContextManager[Iterator[bytes]]:
        """Read the content from byte `from_byte` on, in pieces of about a megabyte. `from_byte` is below the size."""
        ...


def sha256(expected: str) -> Digest:
    return Digest(hashlib.sha256, expected)


def md5(expected: str) -> Digest:
    return Digest(lambda: hashlib.md5(usedforsecurity=False), expected)


def git_blob(size_bytes: int, expected: str) -> Digest:
    """Return the id of a file in a git repository: SHA-1 of the word blob, its size, a zero byte, and the content."""
    return Digest(lambda: hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False), expected)


def md5_of_parts(part_bytes: int, expected: str) -> Digest:
    """Return the ETag of an S3 object that was uploaded in equal parts."""
    return Digest(lambda: _PartsHasher(part_bytes), expected)


class _PartsHasher:
    """Computes the MD5 of the MD5s of all parts, followed by a dash and the number of parts."""

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
        """Return the digest. Call this once, at the end."""
        if self._in_part:
            self._end_part()
        return f"{self._all.hexdigest()}-{self._parts}"

    def _end_part(self) -> None:
        self._all.update(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0
        self._parts += 1
