"""Reads the resources of a system at rest, from its metrics, its Redis and the process table."""

import re
import time

import httpx
import redis.asyncio
import redis.exceptions

from checker.history.records import Resources
from checker.systems.pool_reader import count_keys
from checker.systems.processes import open_files, role_of
from checker.systems.system import System

GAUGES = (
    "orca_open_generations",
    "orca_pool_requests_waiting",
    "orca_pool_requests_running",
    "orca_pool_requests_ended",
    "orca_pool_reserved_bytes",
    "orca_num_requests_running",
    "orca_num_requests_claimed",
    "orca_kv_cache_usage_perc",
    "orca_requests_uncommitted",
)
"""Metrics that must be 0 in a system at rest."""


async def read_resources(
    moment: str, system: System, http: httpx.AsyncClient, pool: redis.asyncio.Redis
) -> Resources | None:
    """Return the resources now; None if a part does not answer."""
    parts = system.parts()
    try:
        held = await count_keys(pool)
        addresses = system.addresses
        for name, address in addresses.items():
            if role_of(name) == "gateway":
                held |= await _gauges(http, name, f"http://{address}/metrics")
            elif name.startswith("scheduler"):
                held |= await _gauges(http, name, address)
    except (httpx.HTTPError, redis.exceptions.RedisError):
        return None
    files = {name: open_files(process) for name, process in parts.items() if role_of(name) != "redis"}
    held |= {f"open_files {name}": float(count) for name, count in files.items() if count is not None}
    return Resources(at=time.monotonic(), moment=moment, held=held)


async def _gauges(http: httpx.AsyncClient, part: str, url: str) -> dict[str, float]:
    text = (await http.get(url)).text
    found = re.findall(r"^(orca_\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {f"{name} {part}": float(value) for name, value in found if name in GAUGES}
