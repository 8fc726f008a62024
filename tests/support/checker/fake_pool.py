"""A Redis that holds what a test says, for those who read the pool from outside."""

from typing import Any, cast

import redis.asyncio


class FakePool:
    """The two calls of Redis that the checker makes."""

    def __init__(self, entries: list[tuple[bytes, dict[bytes, bytes]]], keys: tuple[str, ...] = ()) -> None:
        self._entries = entries
        self._keys = keys

    async def xrange(self, _: str) -> Any:
        return self._entries

    async def scan_iter(self, _: str, **__: int) -> Any:
        for key in self._keys:
            yield key.encode()


def pool(*entries: tuple[bytes, dict[bytes, bytes]], keys: tuple[str, ...] = ()) -> redis.asyncio.Redis:
    """Return a client that stands in for the pool's Redis. Args: entries: of a log. keys: all key names."""
    return cast(redis.asyncio.Redis, FakePool(list(entries), keys))
