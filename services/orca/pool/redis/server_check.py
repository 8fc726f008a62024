"""Check that this Redis can keep what the pool accepts, at the start and then for as long as the process serves.

Somebody may configure the server while we use it, or replace it at the same address (a managed fail-over). A demoted
server need not report that: it may keep its connections and answer reads. New work is refused until the server is fit
again. Requests that were accepted before go on meanwhile: stopping them would not help them.

The server's disk may hang as well. No answered call is lost by that (durability.py). But a new call would be stored,
wait in vain for Redis to write it, and be cancelled: that costs its client seconds, and a slow pool more work. So if
polls see an fsync in progress for FSYNC_HANGS_S, new work is refused until a poll sees none. With two polls a second
that is within 1.5 s of the moment at which the disk began to hang. Under `appendfsync always` Redis itself waits for
the disk, and answers nobody.
"""

import logging
import math
import time
from collections.abc import Callable

from orca.core.domain.errors import PoolNotDurable, PoolUnavailable, SettingError
from orca.pool import codec
from orca.pool.redis.keys import Keys
from orca.pool.redis.link import CallPurpose, RedisLink, read_info
from orca.pool.schemas import Schemas
from orca.pool.settings import PoolSettings

log = logging.getLogger(__name__)

FSYNC_HANGS_S = 0.9
"""Three polls half a second apart. A disk below it is only slow: it need not finish an fsync in a second."""

_POLLS_APART_MAX_S = 0.8
"""Polls further apart may have seen two short fsyncs, which start a second apart."""


class ServerCheck:
    """Polls the Redis of this process, and refuses new work while that Redis is not fit for it."""

    def __init__(
        self,
        link: RedisLink,
        keys: Keys,
        settings: PoolSettings,
        schemas: Schemas,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: clock_s: any clock that never goes back, in seconds."""
        self._link = link
        self._meta = keys.single("meta")
        self._settings = settings
        self._schemas = schemas
        self._clock_s = clock_s
        self._refusal: str | None = None
        self._connects_seen = 0
        self._polled_s = -math.inf
        self._fsync_since_s: float | None = None  # the first of the polls in a row that saw an fsync in progress

    async def check(self) -> None:
        """Check the server once, at the start.

        Raises: SettingError if the server is not fit, PoolUnavailable if it is a replica or does not answer.
        """
        await self._info()

    async def poll(self) -> None:
        """Check the server with each sweep: the result decides about new work until the next poll.

        Raises: PoolUnavailable.
        """
        try:
            self._note_fsync(await self._info())
        except SettingError as error:
            self._decide(str(error))
        else:
            self._decide("pool: the disk of Redis hangs" if self._is_hanging() else None)

    async def admit(self) -> None:
        """Refuse new work if the server is not fit.

        Call it before new work and again after it: the call may have reached another server than the one polled last.

        Raises: PoolNotDurable; PoolUnavailable if a poll was needed and got no answer.
        """
        if self._link.connects != self._connects_seen:
            await self.poll()
        if self._refusal is not None:
            raise PoolNotDurable(self._refusal)

    async def _info(self) -> dict[str, str | int]:
        """Return the server's INFO. Raises: SettingError, PoolUnavailable; see `check`."""
        commands = ("INFO",), ("HGET", self._meta, "schema")
        answer, schema = await self._link.pipeline(*commands, purpose=CallPurpose.ALL_CLIENTS)
        # This call itself may have connected.
        self._connects_seen = self._link.connects
        info = read_info(answer)
        if info.get("role") == "slave":
            self._link.reconnect()
            raise PoolUnavailable("Redis is a replica: the address does not lead to its master yet")
        _check_redis(info, self._settings)
        if schema is not None and int(schema) not in self._schemas:
            ours = f"{self._schemas.oldest} to {self._schemas.newest}"
            raise SettingError(f"pool: schema {int(schema)} is in force, this release writes {ours}")
        return info

    def _note_fsync(self, info: dict[str, str | int]) -> None:
        polled_before_s, self._polled_s = self._polled_s, self._clock_s()
        if not info.get("aof_pending_bio_fsync"):
            self._fsync_since_s = None
        elif self._fsync_since_s is None or self._polled_s - polled_before_s > _POLLS_APART_MAX_S:
            self._fsync_since_s = self._polled_s

    def _is_hanging(self) -> bool:
        since_s = self._fsync_since_s
        is_long = since_s is not None and self._polled_s - since_s >= FSYNC_HANGS_S
        return is_long and not self._settings.accepts_loss

    def _decide(self, refusal: str | None) -> None:
        if refusal is not None and self._refusal is None:
            log.warning("new work is refused: %s", refusal)
        if refusal is None and self._refusal is not None:
            log.info("new work is accepted again; it was refused: %s", self._refusal)
        self._refusal = refusal


def _check_redis(info: dict[str, str | int], settings: PoolSettings) -> None:
    """Raises: SettingError if the server is too old, may evict or forget requests, or has too little memory."""
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < (6, 2):
        raise SettingError(f"pool: Redis {info['redis_version']} is too old, 6.2 or later is needed")
    if info["maxmemory_policy"] != "noeviction":
        raise SettingError(f"pool: Redis has maxmemory-policy {info['maxmemory_policy']}, it must be noeviction")
    # An error and not a warning: otherwise an accepted request would end with the process that holds it.
    if not info["aof_enabled"] and not settings.accepts_loss:
        raise SettingError(
            "pool: Redis has no append-only file (appendonly no), so a restart would forget every accepted request; "
            "set appendonly to yes, or set ORCA_POOL_ACCEPTS_LOSS=true to accept that loss"
        )
    # Without a maxmemory the pool's own bound is the only one, which is enough.
    room = codec.room_for_requests(int(info["maxmemory"]))
    if info["maxmemory"] and room < settings.bytes_max:
        raise SettingError(
            f"pool: bytes_max is {settings.bytes_max}, but Redis' maxmemory of {info['maxmemory']} leaves "
            f"{room} (four fifths, less 12 MiB)"
        )
