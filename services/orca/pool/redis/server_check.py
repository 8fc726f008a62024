"""Can this Redis keep what the pool accepts? Asked at the start, and again for as long as it serves.

It may be configured anew under us, or replaced by another at the same address (a managed fail-over). A server that was
demoted need not say so: it may keep its connections, and answers what only reads. New work is refused until it is fit
again. What was accepted before goes on meanwhile: it would be no better off standing still.

Its disk may hang as well. Nothing that was answered is lost by that (durability.py), but a new call would be stored,
wait in vain for Redis to write it, and be cancelled: seconds for its client, and work for a pool that is behind
already. So an fsync that is seen at looks over FSYNC_HANGS_S closes the door until a look sees none. With looks twice a
second that is within 1.5 s of the moment at which the disk began to hang. Under `appendfsync always` Redis itself waits
for the disk, and answers nobody.
"""

import logging
import math
import time
from collections.abc import Callable

from orca.core.domain.errors import PoolNotDurable, PoolUnavailable, SettingError
from orca.pool import codec
from orca.pool.redis.keys import Keys
from orca.pool.redis.link import Purpose, RedisLink, read_info
from orca.pool.schemas import Schemas
from orca.pool.settings import PoolSettings

log = logging.getLogger(__name__)

FSYNC_HANGS_S = 0.9
"""Three looks half a second apart. Below it a disk is slow: it need not finish an fsync in a second."""

_LOOKS_APART_MAX_S = 0.8
"""Looks further apart may have seen two short fsyncs, which start a second apart."""


class ServerCheck:
    """What is known of the Redis that this process talks to."""

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
        self._looked_s = -math.inf
        self._fsync_since_s: float | None = None  # the first of the looks in a row that saw an fsync under way

    async def check(self) -> None:
        """Raises: SettingError when the server is not fit, PoolUnavailable when it is a replica or does not answer."""
        await self._look()

    async def look(self) -> None:
        """Once a round: what it finds decides about new work until the next. Raises: PoolUnavailable."""
        try:
            self._note_fsync(await self._look())
        except SettingError as error:
            self._decide(str(error))
        else:
            self._decide("pool: the disk of Redis hangs" if self._is_hanging() else None)

    async def admit(self) -> None:
        """Before new work, and behind it: the call may have come to another server than the one that was looked at.

        Raises: PoolNotDurable; PoolUnavailable when it had to look and got no answer.
        """
        if self._link.connects != self._connects_seen:
            await self.look()
        if self._refusal is not None:
            raise PoolNotDurable(self._refusal)

    async def _look(self) -> dict[str, str | int]:
        answer, schema = await self._link.pipeline(("INFO",), ("HGET", self._meta, "schema"), purpose=Purpose.ALL)
        # The look itself may have connected.
        self._connects_seen = self._link.connects
        info = read_info(answer)
        if info.get("role") == "slave":
            self._link.connect_anew()
            raise PoolUnavailable("Redis is a replica: the address does not lead to its master yet")
        _check_redis(info, self._settings)
        if schema is not None and int(schema) not in self._schemas:
            ours = f"{self._schemas.oldest} to {self._schemas.newest}"
            raise SettingError(f"pool: schema {int(schema)} is in force, this release writes {ours}")
        return info

    def _note_fsync(self, info: dict[str, str | int]) -> None:
        looked_s, self._looked_s = self._looked_s, self._clock_s()
        if not info.get("aof_pending_bio_fsync"):
            self._fsync_since_s = None
        elif self._fsync_since_s is None or self._looked_s - looked_s > _LOOKS_APART_MAX_S:
            self._fsync_since_s = self._looked_s

    def _is_hanging(self) -> bool:
        since_s = self._fsync_since_s
        is_long = since_s is not None and self._looked_s - since_s >= FSYNC_HANGS_S
        return is_long and not self._settings.accepts_loss

    def _decide(self, refusal: str | None) -> None:
        if refusal is not None and self._refusal is None:
            log.warning("new work is refused: %s", refusal)
        if refusal is None and self._refusal is not None:
            log.info("new work is accepted again, before: %s", self._refusal)
        self._refusal = refusal


def _check_redis(info: dict[str, str | int], settings: PoolSettings) -> None:
    """Raises: SettingError."""
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < (6, 2):
        raise SettingError(f"pool: Redis {info['redis_version']} is too old, 6.2 or later is needed")
    if info["maxmemory_policy"] != "noeviction":
        raise SettingError(f"pool: Redis has maxmemory-policy {info['maxmemory_policy']}, it must be noeviction")
    # Refused and not warned of: an accepted request would be as mortal as the process that holds it.
    if not info["aof_enabled"] and not settings.accepts_loss:
        raise SettingError(
            "pool: Redis has no append-only file (appendonly no), a restart would forget every accepted request; "
            "ORCA_POOL_ACCEPTS_LOSS=true serves on it all the same"
        )
    # Without a maxmemory the pool's own bound is the only one, which is as good.
    room = codec.room_for_requests(int(info["maxmemory"]))
    if info["maxmemory"] and room < settings.bytes_max:
        raise SettingError(
            f"pool: bytes_max is {settings.bytes_max}, but Redis' maxmemory of {info['maxmemory']} leaves "
            f"{room} (four fifths, less 12 MiB)"
        )
