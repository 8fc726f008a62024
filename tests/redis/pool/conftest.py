"""Fixtures of the pool's tests: a Redis of each version at hand, and a bed on each implementation."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.schemas import SCHEMAS, Schemas
from orca.pool.settings import PoolSettings
from support.pool.beds import SETTINGS, Bed, MemoryBed, RedisBed
from support.pool.kinds import KINDS, redis_binary


@pytest.fixture(params=KINDS[1:])
def own_redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis that a test may freeze, kill and reconfigure."""
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary(request.param)) as server:
        yield server


@pytest.fixture(params=KINDS[1:])
async def redis_bed(request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedRedis]) -> AsyncIterator[RedisBed]:
    """A bed in a shared Redis, for what only Redis has."""
    bed = RedisBed(servers(request.param).url, SETTINGS)
    yield bed
    await bed.recount()
    await bed.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], EmbeddedRedis]]:
    """The shared Redis of a kind, started when first asked for."""
    running: dict[str, EmbeddedRedis] = {}

    def get(kind: str) -> EmbeddedRedis:
        if kind not in running:
            running[kind] = EmbeddedRedis(tmp_path_factory.mktemp(kind), binary=redis_binary(kind))
        return running[kind]

    yield get
    for server in running.values():
        server.stop()


BEDS = [f"{kind}{suffix}" for kind in KINDS for suffix in ("", "-repeated")]
SLOW_BEDS = ("redis-6.2-repeated", "redis-7")
"""Beds of the slow tests. The others cover each Redis, and repeated calls on one Redis."""


@pytest.fixture(params=[pytest.param(bed, marks=pytest.mark.slow if bed in SLOW_BEDS else ()) for bed in BEDS])
async def make_bed(
    request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedRedis]
) -> AsyncIterator[Callable[..., Bed]]:
    """Builds beds of one kind; `-repeated` ones lose the first reply to every call."""
    kind = request.param.removesuffix("-repeated")
    is_repeated = kind != request.param
    beds: list[Bed] = []

    def make(settings: PoolSettings = SETTINGS, schemas: Schemas = SCHEMAS) -> Bed:
        if kind == "memory":
            bed: Bed = MemoryBed(settings, is_repeated=is_repeated, schemas=schemas)
        else:
            bed = RedisBed(servers(kind).url, settings, is_repeated=is_repeated, schemas=schemas)
        beds.append(bed)
        return bed

    yield make
    for bed in beds:
        await bed.recount()
        await bed.close()


@pytest.fixture
def bed(make_bed: Callable[..., Bed]) -> Bed:
    return make_bed()
