"""The keys that are valid in this process, with the open calls and the rate of each.

A file of keys is checked once a second. Kubernetes changes a Secret by swapping a link, an editor writes a new file, so
the check compares the file's identity, size and times. If the file cannot be read, the valid keys stay and an error is
logged. An empty file refuses every call.
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
from orca.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0

READING_LEAST = 16
"""Calls at a time that resume, poll or cancel, even for a key that may make fewer. Dead connections that nobody has
noticed yet must not keep a new one out.
"""


class KeyRing:
    """All valid keys. `run` is one task of the process; it ends at once if there is no file."""

    def __init__(self, settings: GatewaySettings, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Raises: SettingError if the file of keys cannot be read: at the start there are no earlier keys to keep."""
        self._calls_max = settings.calls_per_key_max
        self._clock_s = clock_s
        self._fixed = tuple(
            ApiKey(f"setting-{number}", key_digest(key)) for number, key in enumerate(settings.api_keys, start=1)
        )
        self._file = None if settings.api_keys_file is None else Path(settings.api_keys_file)
        self._signature = _signature_of(self._file)
        self._open_calls: collections.Counter[tuple[str, bool]] = collections.Counter()
        self._buckets: dict[str, TokenBucket] = {}
        self.is_file_broken = False
        try:
            self._keys = self._read()
        except KeyFileError as error:
            raise SettingError(f"setting api_keys_file: {error}") from error

    @property
    def is_open(self) -> bool:
        """True if every call passes: there are no keys, and no file that could add some."""
        return self._file is None and not self._fixed

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key.name for key in self._keys)

    def find(self, shown: str) -> ApiKey | None:
        """Return the key that a call shows. The time that it takes does not reveal how much of a key was right."""
        hashed = key_digest(shown)
        # All keys are compared, even after a match.
        matches = [key for key in self._keys if hmac.compare_digest(hashed, key.digest)]
        return matches[0] if matches else None

    def enter(self, key: ApiKey, *, makes_work: bool = True) -> None:
        """Count a call, which has to `leave` with the same arguments. Raises: ApiError 429; then it is not counted.

        Args: makes_work: False for calls that resume, poll or cancel. They have no rate and a limit of their own: a key
            must reach its running requests even if its rate is used up, or they would be cancelled unread.
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
        """Count all requests of a call but the first, which was counted when the call entered and stays counted.

        Args: requests: of the whole call; param: the field that asks for them.
        Raises: ApiError 429 if the call has to wait for them, 400 if it would wait for ever.
        """
        bucket = self._bucket(key)
        if bucket is not None and requests > bucket.per_minute:
            message = f"{requests} requests in one call are more than the {bucket.per_minute} a minute of this key"
            # A code with "rate limit" in it would be taken for a 429: LiteLLM and others look for the words.
            raise ApiError(400, message, param=param, code="too_many_requests_in_call")
        self._take_from_rate(key, requests, taken=1)

    def _take_from_rate(self, key: ApiKey, requests: int, *, taken: int = 0) -> None:
        """Args: taken: the number of the requests that were counted before."""
        bucket, now_s = self._bucket(key), self._clock_s()
        if bucket is not None and not bucket.take(now_s, requests - taken):
            # When the call is repeated, all its requests are counted again.
            wait_s = max(1, bucket.seconds_until(now_s, requests))
            message = (
                f"Rate limit reached for requests per minute with this key: Limit {bucket.per_minute}. "
                f"Please try again in {math.ceil(wait_s)}s."
            )
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=wait_s)

    def leave(self, key: ApiKey, *, makes_work: bool = True) -> None:
        self._open_calls[key.name, makes_work] -= 1
        if not self._open_calls[key.name, makes_work]:
            del self._open_calls[key.name, makes_work]

    def headers(self, key: ApiKey) -> dict[str, str]:
        """Return an answer's headers about the key's rate; none if no rate is set."""
        bucket = self._bucket(key)
        return {} if bucket is None else bucket.headers(self._clock_s())

    async def run(self) -> None:
        """Read changes of the file, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self.reload()
            except Exception:
                self.is_file_broken = True
                # No file has this signature, so the file is read again.
                self._signature = ()
                log.exception("checking the file of API keys failed, the old keys stay valid")

    async def reload(self) -> None:
        """Read the file's keys if it has changed."""
        signature = await asyncio.to_thread(_signature_of, self._file)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._keys = await asyncio.to_thread(self._read)
        except KeyFileError as error:
            self.is_file_broken = True
            log.error("the changed file of API keys cannot be used, the old keys stay valid: %s", error)
            return
        self.is_file_broken = False
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in self.names}
        if self._keys:
            log.info("API keys read from the changed file", extra={"keys": len(self._keys)})
        else:
            log.warning("the changed file of API keys is empty: every call is refused")

    def _read(self) -> tuple[ApiKey, ...]:
        """Read all keys. Raises: KeyFileError."""
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


def _signature_of(file: Path | None) -> tuple[int, ...] | None:
    """Return numbers that differ when the file differs; None if there is no file."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class TokenBucket:
    """A limit on requests per minute: it holds at most a minute's worth of them and refills evenly.

    Pure: all methods get the time as an argument.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        """Start full. Args: now_s: any clock that never goes back, in seconds; the same for all methods."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def take(self, now_s: float, requests: int = 1) -> bool:
        """Count these requests if they may pass. Returns: whether they may."""
        self._refill(now_s)
        if self._level < requests:
            return False
        self._level -= requests
        return True

    def remaining(self, now_s: float) -> int:
        """Return the number of requests that may pass now."""
        self._refill(now_s)
        return int(self._level)

    def seconds_until(self, now_s: float, requests: int = 1) -> float:
        """Return the seconds until this many requests may pass; 0 if they may now."""
        self._refill(now_s)
        return max(0.0, requests - self._level) * 60 / self.per_minute

    def seconds_until_full(self, now_s: float) -> float:
        self._refill(now_s)
        return (self.per_minute - self._level) * 60 / self.per_minute

    def headers(self, now_s: float) -> dict[str, str]:
        """Return the headers as OpenAI writes them."""
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
    """Write a duration rounded up: `250ms`, `12s`, `1m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
