"""Measure the engine's own cost: `python -m orca.bench.parts.round_trip [stages] [tensor]`.

A model of a few thousand weights runs on real processes. So nearly all of the time is the round trip: master, each
stage's controller and rank, and the results. One step is in flight. Local links and gRPC take turns, and the tokens of
both are compared. For each, the output has the median and the 99th percentile from submit to result. It also has the
processor time of a step in the master and in the controllers. Prints one JSON line.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca.bench.parts.stage_processes import Stages, engine_for, new_request
from orca.bench.parts.tiny_model import write_tiny_model
from orca.core.domain.step import Epoch, Row, Step
from orca.core.process.cpu_time import cpu_time_s
from orca.scheduler.engines.grpc_engine import GrpcEngine

STEPS, WARM_UP, TURNS = 500, 20, 3
WAYS = {"local": True, "grpc": False}


async def measure(stages: int, tensor: int, folder: Path) -> dict[str, Any]:
    started = time.monotonic()
    group = Stages(write_tiny_model(folder / "model"), stages=stages, tensor=tensor, log_folder=folder, slots=16384)
    figures: dict[str, Any] = {"stages": stages, "tensor": tensor}
    measured: dict[tuple[int, str], list[_Turn]] = {(batch, way): [] for batch in (1, 16) for way in WAYS}
    try:
        for _ in range(TURNS):
            for (batch, way), turns in measured.items():
                turns.append(await _turn(group, batch, way))
        assert len({tuple(turn.tokens) for key, turns in measured.items() if key[0] == 16 for turn in turns}) == 1
    finally:
        group.stop()
    figures["took_s"] = round(time.monotonic() - started, 1)
    return figures | {f"batch {batch}, {way}": _summed_up(turns) for (batch, way), turns in measured.items()}


@dataclass(frozen=True, slots=True)
class _Turn:
    """The steps of an epoch, without warm-up."""

    times_ms: list[float]
    master_ms: float  # processor time of a step
    controllers_ms: float
    tokens: list[int]


async def _turn(group: Stages, batch: int, way: str) -> _Turn:
    engine = engine_for(group.addresses, prefetch=0, uses_local_links=WAYS[way])
    try:
        epoch = group.next_epoch()
        await engine.form(epoch)
        times: list[float] = []
        tokens: list[int] = []
        async for took_ms, drawn in _round_trips(engine, epoch, batch):
            times.append(took_ms)
            tokens += drawn
            if len(times) == WARM_UP:
                before = time.process_time(), _controllers_s(group)
        steps = len(times) - WARM_UP
        master_s, controllers_s = time.process_time() - before[0], _controllers_s(group) - before[1]
        return _Turn(times[WARM_UP:], 1000 * master_s / steps, 1000 * controllers_s / steps, tokens)
    finally:
        await engine.close()


def _controllers_s(group: Stages) -> float:
    return sum(cpu_time_s(process.pid) for process in group.processes)


def _summed_up(turns: list[_Turn]) -> dict[str, float]:
    times = [ms for turn in turns for ms in turn.times_ms]
    return {
        "round_trip_ms": round(statistics.median(times), 2),
        "round_trip_p99_ms": round(statistics.quantiles(times, n=100)[-1], 2),
        "master_ms": round(statistics.median(turn.master_ms for turn in turns), 2),
        "controllers_ms": round(statistics.median(turn.controllers_ms for turn in turns), 2),
    }


async def _round_trips(engine: GrpcEngine, epoch: Epoch, batch: int) -> AsyncIterator[tuple[float, list[int]]]:
    """Yield the milliseconds of each step, and the tokens it drew."""
    results = engine.results()
    new = tuple(new_request(handle, (handle, 1), STEPS) for handle in range(1, batch + 1))
    handles = [each.handle for each in new]
    rows = tuple(Row(handle=handle, start=0, count=2, sample=True) for handle in handles)
    step = Step(epoch=epoch, number=1, new=new, rows=rows)
    for number in range(1, STEPS):
        started = time.perf_counter()
        await engine.submit(step)
        result = await anext(results)
        yield (time.perf_counter() - started) * 1000, [sampled.token.id for sampled in result.sampled]
        rows = tuple(
            Row(handle=sampled.handle, start=number + 1, count=1, sample=True, token=sampled.token.id)
            for sampled in result.sampled
        )
        step = Step(epoch=epoch, number=number + 1, rows=rows)


if __name__ == "__main__":
    shape = [int(argument) for argument in sys.argv[1:3]] or [2, 1]
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(asyncio.run(measure(shape[0], shape[1], Path(scratch)))))
