"""Samples the resources of each part of a running system every few seconds, during load and faults."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import psutil
import redis.asyncio
import redis.exceptions

from checker.history.records import HistoryWriter, Sample
from checker.systems.pool_reader import redis_sizes
from checker.systems.processes import role_of
from checker.systems.system import System

EVERY_S = 5.0
WARM_UP_S = 60.0
"""Warm-up of a process: what it loads during its first calls is not growth."""
ANSWERS_WITHIN_S = 3.0


@dataclass(slots=True)
class Sampler:
    """Takes samples inside `async with sampler.running():`; its owner sets `is_quiet`."""

    system: System
    history: HistoryWriter
    http: httpx.AsyncClient
    pool: redis.asyncio.Redis
    is_quiet: bool = False
    warm_up_s: float = WARM_UP_S

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        taking = asyncio.create_task(self._take_for_ever())
        try:
            yield
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _take_for_ever(self) -> None:
        while True:
            for sample in await self.take():
                self.history.add(sample)
            await asyncio.sleep(EVERY_S)

    async def take(self) -> list[Sample]:
        """Return one sample of each running part; values that a part does not return now are left out."""
        parts = self.system.parts()
        held = {name: _of_process(process) for name, process in parts.items()}
        addresses = self.system.addresses
        for name in held:
            if role_of(name) == "gateway":
                held[name] |= await self._of_metrics(f"http://{addresses.get(name)}/metrics")
            elif role_of(name) == "scheduler":
                held[name] |= await self._of_metrics(addresses.get(name, ""))
            elif role_of(name) == "redis":
                held[name] |= await self._of_redis()
        return [self._sample(name, process, held[name]) for name, process in parts.items() if held[name]]

    def _sample(self, name: str, process: psutil.Process, held: dict[str, float]) -> Sample:
        # The process table has the start of a process in wall-clock time.
        is_warm = time.time() - process.create_time() > self.warm_up_s
        return Sample(at=time.monotonic(), part=name, pid=process.pid, is_steady=self.is_quiet and is_warm, held=held)

    async def _of_metrics(self, url: str) -> dict[str, float]:
        try:
            text = (await self.http.get(url, timeout=ANSWERS_WITHIN_S)).text
        except (httpx.HTTPError, httpx.InvalidURL):
            return {}
        found = re.search(r"^orca_asyncio_tasks(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        return {} if found is None else {"asyncio_tasks": float(found[1])}

    async def _of_redis(self) -> dict[str, float]:
        try:
            return await redis_sizes(self.pool)
        except redis.exceptions.RedisError:
            return {}


def _of_process(process: psutil.Process) -> dict[str, float]:
    """Return the resources of a process; nothing if it has ended."""
    try:
        with process.oneshot():
            return {
                "rss_bytes": float(process.memory_info().rss),
                "open_files": float(process.num_fds()),
                "threads": float(process.num_threads()),
                "connections": float(len(process.net_connections())),
            }
    except psutil.Error:
        return {}
