"""Clients that leave at any moment leave nothing behind: no slots, no records, no readers, no tasks, no open files."""

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from checker.clients.leaving import AT_A_TIME, STAY_SECONDS_MAX, leave_at_random
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from orca.pool.settings import PoolSettings
from support.gateway.gateway_rig import until
from support.gateway.gateway_server import Served, served

GRACE_MS = 300
SETTINGS = GatewaySettings(model="tiny", port=0, drain_seconds=1, round_seconds=0.05)
POOL = PoolSettings(resume_grace_ms=GRACE_MS, reader_lease_ms=2_000, max_queued=10_000)


def tasks_and_files() -> tuple[int, int]:
    return len(asyncio.all_tasks()), len(list(Path("/proc/self/fd").iterdir()))


async def ends_seen(pool: MemoryPool, ends: dict[int, float]) -> None:
    """Record until cancelled when the request of each client has ended and left queue and group."""
    while True:
        for record in pool.state.records.values():
            if record.end is not None:
                ends.setdefault(record.request.sampling.seed, time.monotonic())
        await asyncio.sleep(0.01)


def is_at_rest(one: Served) -> bool:
    """Nothing waits, runs, reads or is connected."""
    gateway, pool = one.rig.app.state.gateway, one.rig.pool
    assert isinstance(pool, MemoryPool)
    held: list[Any] = [
        any(pool.state.queues.values()),
        any(pool.state.own.values()),
        one.rig.scheduler.running,
        gateway.readers._open,
        gateway.drain._open,
        gateway.finishing,
        one.server.server_state.connections,
        one.server.server_state.tasks,
        gateway.metrics.open_connections._value.get(),
    ]
    return not any(held)


async def free_seconds(clients: int, seed: int) -> list[float]:
    """Let clients leave; how long each one's request stayed afterwards. Asserts that nothing is left."""
    async with served(SETTINGS, pool_settings=POOL) as one:
        one.rig.scheduler.batch_size_max, one.rig.scheduler.turn_seconds = AT_A_TIME // 2, 0.01
        ends: dict[int, float] = {}
        places = [("127.0.0.1", one.server.port)]
        body = {"prompt": "the fox", "max_tokens": 100, "ignore_eos": True}
        one.rig.scheduler.answer = lambda request: [5] * request.max_new_tokens
        await leave_at_random(places, clients=1, seed=seed, body=body)
        await until(lambda: is_at_rest(one))
        before = tasks_and_files()
        watching = asyncio.create_task(ends_seen(one.rig.pool, ends))
        gone = await leave_at_random(places, clients=clients, seed=seed, body=body)
        await until(lambda: is_at_rest(one))
        await asyncio.sleep(0.02)
        watching.cancel()
        await until(lambda: tasks_and_files() <= before)
        one.rig.pool.state.check()
        assert one.rig.scheduler.running == {}
    return [ends[client.number] - client.at_s for client in gone if client.number in ends]


@pytest.mark.parametrize(
    "clients", [100, pytest.param(1_000, marks=[pytest.mark.prove, pytest.mark.timeout(600)])], ids=str
)
async def test_disconnected_clients_free_their_resources_soon_and_nothing_leaks(clients: int) -> None:
    seconds = await free_seconds(clients, seed=7)
    p99 = statistics.quantiles(seconds, n=100)[98]
    print(f"{clients} clients left, {len(seconds)} with a request: free after p99 {p99:.2f} s (grace {GRACE_MS} ms)")
    assert len(seconds) > clients / 2
    # Most of it is the grace in which they might have come back; the rest is room for a busy machine.
    assert p99 < GRACE_MS / 1000 + STAY_SECONDS_MAX + 10
