"""API keys of clients as a file holds them: one line for each key, with a name and a hash.

    # who may call, and how much
    alice: sha256:5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
    batch: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 requests_per_minute=60 calls=4
    ops: sha256:ef2d127de37b942baad06145e54b0c619a1f22327b2ebbcfbec78f5564afe39d most_urgent_priority=-4

`orca keys make NAME` makes a key and its line. A key has 256 random bits, so its plain SHA-256 does not reveal it; a
slow hash would only make calls slow. Names appear in logs and metrics, keys nowhere.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from orca.core.domain.errors import OrcaError
from orca.core.priority import DEFAULT_PRIORITY, LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY

KEYS_MAX = 1_000
"""Each call's key is compared with all of them, and each name is a label of metrics."""

FILE_BYTES_MAX = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_PRIORITY, _PRIORITY_TEXT = "most_urgent_priority", re.compile(r"-?[0-9]")


class KeyFileError(OrcaError):
    """A file of keys that cannot be used. The message names the line and never quotes it: the line may hold a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of one key; None means no limit, but for priorities. Each gateway counts for itself."""

    requests_per_minute: int | None = None  # prompts x n of a call; a minute's worth may come at once
    # Calls that are being answered; unset means the setting calls_per_key_max. A background call is answered at once.
    calls: int | None = None
    queue_percent: int | None = None  # refuse calls once the pool's queue is filled this far, [1, 100]
    # The lowest number of `priority` that calls may have, [-8, 8]; None means 0, the default of calls.
    most_urgent_priority: int | None = None

    @property
    def priority_bound(self) -> int:
        """The most urgent priority that calls may have."""
        return DEFAULT_PRIORITY if self.most_urgent_priority is None else self.most_urgent_priority


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    digest: bytes  # SHA-256 of the key
    limits: KeyLimits = KeyLimits()


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of a key: the gateway stores and compares this."""
    return hashlib.sha256(key.encode()).digest()


def make_key() -> str:
    """Return a new key. Scanners for leaked secrets recognize it by its first letters."""
    return f"orca-{secrets.token_urlsafe(32)}"


def key_line(key: ApiKey) -> str:
    """Return the line that stands for this key in a file of keys."""
    given = [(limit.name, getattr(key.limits, limit.name)) for limit in fields(KeyLimits)]
    words = [f"{name}={value}" for name, value in given if value is not None]
    return " ".join([f"{key.name}: sha256:{key.digest.hex()}", *words])


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file; none if it holds only comments. Raises: KeyFileError."""
    try:
        with file.open("rb") as source:
            content = source.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileError(f"{file}: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise KeyFileError(f"{file}: is larger than {FILE_BYTES_MAX} bytes")
    try:
        return parse_keys(content.decode())
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{file}: is not text in UTF-8") from error
    except KeyFileError as error:
        raise KeyFileError(f"{file}: {error}") from error


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Read keys from the text of a file. Raises: KeyFileError naming the line."""
    keys = []
    for number, content in enumerate(text.splitlines(), start=1):
        if words := content.partition("#")[0].split():
            try:
                keys.append(_parse_line(words))
            except KeyFileError as error:
                raise KeyFileError(f"line {number}: {error}") from error
    check_distinct(keys)
    return tuple(keys)


def check_distinct(keys: Sequence[ApiKey]) -> None:
    """Raise for a name or a key that occurs twice, and for too many keys. Raises: KeyFileError."""
    if len(keys) > KEYS_MAX:
        raise KeyFileError(f"more than {KEYS_MAX} keys")
    if name := _first_repeated(key.name for key in keys):
        raise KeyFileError(f"the name {name} occurs twice")
    if len({key.digest for key in keys}) < len(keys):
        raise KeyFileError("one key has two names")


def is_name(text: str) -> bool:
    """Return whether a key may have this name: letters, digits, dots, dashes, underscores."""
    return _NAME.fullmatch(text) is not None


def _parse_line(words: Sequence[str]) -> ApiKey:
    name = words[0].removesuffix(":")
    hashed = _HASH.fullmatch(words[1]) if len(words) > 1 else None
    if not words[0].endswith(":") or not is_name(name) or hashed is None:
        raise KeyFileError("is not `name: sha256:<64 hex digits> [limit=N ..]`")
    return ApiKey(name, bytes.fromhex(hashed[1]), _parse_limits(words[2:]))


def _parse_limits(words: Sequence[str]) -> KeyLimits:
    known = {limit.name for limit in fields(KeyLimits)}
    limits: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in known:
            raise KeyFileError(f"has an unknown limit; the limits are {', '.join(sorted(known))}")
        if name == _PRIORITY:
            if name in limits or not _is_priority(number):
                bounds = f"{MOST_URGENT_PRIORITY} to {LEAST_URGENT_PRIORITY}"
                raise KeyFileError(f"{name} must occur once and be a whole number from {bounds}")
        elif name in limits or not number.isdecimal() or len(number) > 9 or int(number) < 1:
            raise KeyFileError(f"{name} must occur once and be a whole number of 1 or more")
        limits[name] = int(number)
    if limits.get("queue_percent", 0) > 100:
        raise KeyFileError("queue_percent must be 100 or less")
    return KeyLimits(**limits)


def _is_priority(text: str) -> bool:
    is_number = _PRIORITY_TEXT.fullmatch(text) is not None
    return is_number and MOST_URGENT_PRIORITY <= int(text) <= LEAST_URGENT_PRIORITY


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
