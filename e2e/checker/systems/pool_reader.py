"""Reads the pool in Redis from outside: logs, and the number of keys of each kind. Writes nothing."""

import struct
from collections import Counter
from typing import Any

import redis.asyncio

from checker.history.records import PoolLog

PREFIX = "orca:{local}:"
"""Prefix of all keys of the deployment that `orca up` makes."""

LASTING = frozenset(
    {
        *("meta", "seat", "seats", "closed_at", "parts", "promises", "blocks", "forgotten"),
        *("lengths", "latencies", "outcomes", "periods", "results", "classes", "steps"),
    }
)
"""Kinds of keys that outlive all requests, some of them for a minute."""


READER = "checker"
READER_ACL = f"user {READER} on nopass ~{PREFIX}* resetchannels -@all +@read +@connection +info\n"
"""Line in Redis's ACL file: the services' own user may not scan keys."""
OPEN_ACL = f"user default on nopass ~* &* +@all\n{READER_ACL}"
"""Whole ACL file of a Redis that the checker starts itself, which accepts every client."""


def connect(url: str) -> redis.asyncio.Redis:
    """Connect to Redis. Each call is tried once, because the caller knows if the pool may be down."""
    return redis.asyncio.Redis.from_url(url, username=READER, password="any", socket_timeout=5.0)


async def read_log(pool: redis.asyncio.Redis, request: str, *, at: float) -> PoolLog | None:
    """Return the log of a request; None if there is none. Raises: redis.RedisError."""
    entries: Any = await pool.xrange(f"{PREFIX}log:{request}")
    if not entries:
        return None
    tokens = tuple(_token(fields[b"token"]) for _, fields in entries if b"token" in fields)
    ends = [fields for _, fields in entries if b"end" in fields]
    places = [name.decode() for name, _ in entries]
    is_dense = places == [f"{i + 1}-0" for i in range(len(entries))] and (not ends or b"end" in entries[-1][1])
    return PoolLog(
        at=at,
        request=request,
        tokens=tokens,
        reason=ends[0][b"end"].decode() if ends else None,
        count=int(ends[0][b"count"]) if ends else None,
        is_dense=is_dense and len(ends) <= 1,
        claims=tuple(int(fields[b"claim"]) for _, fields in entries if b"claim" in fields),
    )


async def count_keys(pool: redis.asyncio.Redis) -> dict[str, float]:
    """Count the keys of each kind that should be gone when all requests are gone. Raises: redis.RedisError."""
    kinds: Counter[str] = Counter()
    async for key in pool.scan_iter(f"{PREFIX}*", count=1000):
        kinds[key.decode().removeprefix(PREFIX).partition(":")[0]] += 1
    return {f"keys {kind}": float(count) for kind, count in kinds.items() if kind not in LASTING}


async def redis_sizes(pool: redis.asyncio.Redis) -> dict[str, float]:
    """Return the number of all keys and the bytes in use. Raises: redis.RedisError."""
    memory = await pool.info("memory")
    return {"keys": float(await pool.dbsize()), "used_memory_bytes": float(memory["used_memory"])}


def _token(value: bytes) -> int:
    """Parse a token's id in the log: decimal, or packed with log probabilities, both perhaps behind a cached count."""
    if value[:1] == b"C":
        value = value[5:]
    return int(struct.unpack_from("<I", value, 1)[0]) if value[:1] == b"L" else int(value)
