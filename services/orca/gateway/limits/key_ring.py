"""The keys in force in this process, and what each of them does at the moment.

A file of keys is looked at once a second. Kubernetes brings a changed Secret by swapping a link, an editor by a new
file, so what is compared is which file it is, its size and its times. A file that cannot be read leaves the keys in
force as they are, loudly; an empty one refuses everybody.
"""

import asyncio
import collections
import hmac
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from orca.core.api_keys import ApiKey, KeyFileError, check_distinct, key_digest, read_keys
from orca.core.domain.errors import SettingError
from orca.gateway.errors import ApiError
from orca.gateway.settings import Settings

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0

READING_LEAST = 16
"""Calls at a time that read on, ask or cancel, for a key that may make fewer: a few old connections that nobody has
seen die must not keep the new one out."""


class KeyRing:
    """`run` is one task of the process; it ends at once when there is no file to look at."""

    def __init__(self, settings: Settings, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Raises: SettingError when the file of keys cannot be read: at the start there are no others to keep."""
        self._calls_max = settings.calls_per_key_max
        self._clock_s = clock_s
        self._fixed = tuple(
            ApiKey(f"setting-{number}", key_digest(key)) for number, key in enumerate(settings.api_keys, start=1)
        )
        self._file = None if settings.api_keys_file is None else Path(settings.api_keys_file)
        self._seen = _signature(self._file)
        self._open_calls: collections.Counter[tuple[str, bool]] = collections.Counter()
        self._buckets: dict[str, TokenBucket] = {}
        self.is_file_broken = False
        try:
            self._keys = self._read()
        except KeyFileError as error:
            raise SettingError(f"setting api_keys_file: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether every call passes: there are no keys, and no file that could bring some."""
        return self._file is None and not self._fixed

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key.name for key in self._keys)

    def find(self, shown: str) -> ApiKey | None:
        """The key that a call shows. The time it takes does not tell how much of a key was right."""
        hashed = key_digest(shown)
        # All are compared, whichever fits.
        fitting = [key for key in self._keys if hmac.compare_digest(hashed, key.digest)]
        return fitting[0] if fitting else None

    def enter(self, key: ApiKey, *, makes_work: bool = True) -> None:
        """Count a call that is to `leave` with the same words. Raises: ApiError 429, and then it is not counted.

        Args: makes_work: False for calls that read on, ask or cancel. They have no rate and places of their own: what a
            key has running must be within its reach when its rate is used up, or it would be cancelled unread.
        """
        most = key.limits.calls or self._calls_max
        if most is not None and not makes_work:
            most = max(READING_LEAST, most)
        if most is not None and self._open_calls[key.name, makes_work] >= most:
            message = f"more than {most} {'calls' if makes_work else 'reading calls'} at a time with this key"
            raise ApiError(429, message, kind="overloaded_error", code="too_many_calls", retry_after_s=1)
        if makes_work:
            self._take_from_rate(key, 1)
        self._open_calls[key.name, makes_work] += 1

    def take_further(self, key: ApiKey, requests: int, *, param: str) -> None:
        """Count the others of a call of so many, which was let in as one. It has cost that one whatever comes of it.

        Args: param: the field that asks for so many.
        Raises: ApiError 429 when it has to wait for them, 400 when it would for ever.
        """
        bucket = self._bucket(key)
        if bucket is not None and requests > bucket.per_minute:
            message = f"{requests} requests in one call are more than the {bucket.per_minute} a minute of this key"
            raise ApiError(400, message, param=param, code="beyond_rate_limit")
        self._take_from_rate(key, requests, taken=1)

    def _take_from_rate(self, key: ApiKey, requests: int, *, taken: int = 0) -> None:
        """Args: taken: so many of the requests were counted before."""
        bucket, now_s = self._bucket(key), self._clock_s()
        if bucket is not None and not bucket.take(now_s, requests - taken):
            message = f"more than {bucket.per_minute} requests a minute with this key"
            # When the call comes again it is counted anew.
            wait_s = bucket.seconds_until(now_s, requests)
            raise ApiError(
                429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=max(1, wait_s)
            )

    def leave(self, key: ApiKey, *, makes_work: bool = True) -> None:
        self._open_calls[key.name, makes_work] -= 1
        if not self._open_calls[key.name, makes_work]:
            del self._open_calls[key.name, makes_work]

    def headers(self, key: ApiKey) -> dict[str, str]:
        """What an answer tells of the key's rate; nothing where none is set."""
        bucket = self._bucket(key)
        return {} if bucket is None else bucket.headers(self._clock_s())

    async def run(self) -> None:
        """Until cancelled: take over what changes in the file."""
        while self._file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except Exception:
                self.is_file_broken = True
                # What no file has: it is read again.
                self._seen = ()
                log.exception("looking at the file of API keys failed, the old keys stay in force")

    async def look(self) -> None:
        """Take over the file's keys if it has changed."""
        signature = await asyncio.to_thread(_signature, self._file)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keys = await asyncio.to_thread(self._read)
        except KeyFileError as error:
            self.is_file_broken = True
            log.error("the changed file of API keys cannot be used, the old keys stay in force: %s", error)
            return
        self.is_file_broken = False
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in self.names}
        if self._keys:
            log.info("API keys taken over from the changed file", extra={"keys": len(self._keys)})
        else:
            log.warning("the changed file of API keys is empty: every call is refused")

    def _read(self) -> tuple[ApiKey, ...]:
        """Raises: KeyFileError."""
        keys = self._fixed if self._file is None else (*self._fixed, *read_keys(self._file))
        check_distinct(keys)
        return keys

    def _bucket(self, key: ApiKey) -> "TokenBucket | None":
        per_minute = key.limits.requests_per_minute
        if per_minute is None:
            return None
        bucket = self._buckets.get(key.name)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[key.name] = TokenBucket(per_minute, self._clock_s())
        return bucket


def _signature(file: Path | None) -> tuple[int, ...] | None:
    """Differs when the file does; None when there is none."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class TokenBucket:
    """A bound on requests per minute: holds at most a minute's worth of them and refills evenly. Time comes in."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        """Full. Args: now_s: any clock that never goes back, in seconds; the same for all calls."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def take(self, now_s: float, requests: int = 1) -> bool:
        """Whether so many may pass; if so they are counted."""
        self._refill(now_s)
        if self._level < requests:
            return False
        self._level -= requests
        return True

    def remaining(self, now_s: float) -> int:
        """Requests that may pass at once."""
        self._refill(now_s)
        return int(self._level)

    def seconds_until(self, now_s: float, requests: int = 1) -> float:
        """Until so many may pass; 0 when they may now."""
        self._refill(now_s)
        return max(0.0, requests - self._level) * 60 / self.per_minute

    def seconds_until_full(self, now_s: float) -> float:
        self._refill(now_s)
        return (self.per_minute - self._level) * 60 / self.per_minute

    def headers(self, now_s: float) -> dict[str, str]:
        """As OpenAI writes them."""
        return {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(self.remaining(now_s)),
            "x-ratelimit-reset-requests": _duration(self.seconds_until_full(now_s)),
        }

    def _refill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._level = min(float(self.per_minute), self._level + passed_s * self.per_minute / 60)
        self._at_s = max(self._at_s, now_s)


def _duration(seconds: float) -> str:
    """`250ms`, `12s`, `1m0s`: rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
