"""A bound on requests per minute as a token bucket. Pure: the time comes in."""

import math


class TokenBucket:
    """Holds at most a minute's worth of requests and refills evenly."""

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
