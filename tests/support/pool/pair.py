"""The twin and Redis side by side under one clock that stands still until a test sets it."""

import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from orca.core.domain.errors import OrcaError
from orca.pool.api import ProcessClosed, SeatLost, StaleCall
from orca.pool.memory.pool import MemoryPool
from support.pool.beds import REVISION, RedisBed
from support.pool.preloaded import preloaded_redis

_SHIM = Path(__file__).with_name("set_clock.c")

REFUSALS = (OrcaError, ProcessClosed, SeatLost, StaleCall)

Places = dict[str, tuple[float, int, str]]
"""Score, arrival and class of each request of an index."""


class SetClock:
    """A clock that a redis-server of its own and the twin share. `binary` is that server."""

    def __init__(self, folder: Path, kind: str) -> None:
        path = folder / "clock"
        path.write_bytes(struct.pack("=q", 1_700_000_000_000))
        with path.open("r+b") as file:
            self._shown = mmap.mmap(file.fileno(), 8)
        self.binary = preloaded_redis(folder, kind, _SHIM, SET_CLOCK=path)

    def wall_ms(self) -> int:
        return int(struct.unpack("=q", self._shown[:])[0])

    def set(self, wall_ms: int) -> None:
        self._shown[:] = struct.pack("=q", wall_ms)


class Difference(AssertionError):
    """The twin and Redis do not agree."""


class Pair:
    """Two pools that get the same calls, and must give the same answers."""

    def __init__(self, twin: MemoryPool, bed: RedisBed, clock: SetClock) -> None:
        self.twin = twin
        self.bed = bed
        self.clock = clock

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call both pools. Returns: their answer, or what both raise. Raises: Difference."""
        try:
            expected = await _outcome(self.twin, name, *args, **options)
        except KeyError as error:  # its index names a request that is gone
            raise Difference(f"{name}{args}{options}: the twin does not know {error}") from error
        found = await _outcome(self.bed.pool, name, *args, **options)
        if not _are_equal(found, expected):
            raise Difference(f"{name}{args}{options}", *_differences(found, expected))
        return found

    async def compare(self, requests: Iterable[str]) -> None:
        """Compare all that both hold. Raises: Difference."""
        await self.call("stats")
        for request_id in requests:
            status = await self.call("status", request_id)
            if not isinstance(status, REFUSALS):
                await self.call("read", request_id, 0)
                expected, found = self.twin.state.records[request_id], await self.bed.writers(request_id)
                if found != expected.writers:
                    raise Difference(f"{request_id}: entries of claims {found}, in the twin {expected.writers}")
        expected_places, found_places = self._places_in_twin(), await self._places_in_redis()
        if found_places != expected_places:
            raise Difference(f"index: {found_places.items() ^ expected_places.items()}")
        self.twin.state.check()

    def _places_in_twin(self) -> Places:
        index = self.twin.state.waiting.indexes.get(REVISION)
        places = index.places.items() if index else ()
        return {request_id: (place.score, place.arrival, str(of)) for request_id, (of, place) in places}

    async def _places_in_redis(self) -> Places:
        redis, keys = self.bed.redis, self.bed.keys
        places: Places = {}
        for of, count in (await redis.hgetall(keys.named("classes", REVISION))).items():
            if not of:
                continue
            members = await redis.zrange(keys.named("waiting", f"{REVISION}/{of.decode()}"), 0, -1, withscores=True)
            for member, score in members:
                arrival, request_id = member.decode().split(" ")
                places[request_id] = score, int(arrival), of.decode()
            if len(members) != int(count):
                raise Difference(f"class {of.decode()} counts {count}, and has {len(members)}")
        return places


async def _outcome(pool: Any, name: str, *args: Any, **options: Any) -> Any:
    try:
        return await getattr(pool, name)(*args, **options)
    except REFUSALS as error:
        return error


def _differences(found: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Yield what differs in two answers, with its place in them."""
    if found == expected:
        return
    if is_dataclass(found) and type(found) is type(expected):
        for field in fields(found):
            yield from _differences(getattr(found, field.name), getattr(expected, field.name), f"{place}.{field.name}")
    elif isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in found.keys() | expected.keys():
            yield from _differences(found.get(key), expected.get(key), f"{place}[{key}]")
    else:
        yield f"{place}: Redis has {found}, the twin {expected}"


def _are_equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, REFUSALS):
        return (type(found), str(found)) == (type(expected), str(expected))
    return bool(found == expected)
