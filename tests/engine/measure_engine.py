"""Measure the engine's own cost: `python tests/engine/measure_engine.py [stages] [tensor]` prints one JSON line.

A model of a few thousand weights on real processes, so that what is left is the way there and back: master, each
stage's controller and rank, and the result stream. One step in flight; median and 99th percentile of submit to result.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_builders import Stages, engine_for, new_request
from tiny_model import write_tiny_model

from orca.core.step import Epoch, Row, Step
from orca.scheduler.grpc_engine import GrpcEngine

STEPS, WARM_UP = 200, 20


async def measure(stages: int, tensor: int, folder: Path) -> dict[str, Any]:
    started = time.monotonic()
    group = Stages(write_tiny_model(folder / "model"), stages=stages, tensor=tensor, log_folder=folder, slots=8192)
    engine = engine_for(group.addresses, prefetch=0)
    try:
        await engine.wait_loaded()
        figures: dict[str, Any] = {"stages": stages, "tensor": tensor, "start_s": round(time.monotonic() - started, 2)}
        for batch in (1, 16):
            epoch = group.next_epoch()
            forming = time.monotonic()
            await engine.form(epoch)
            figures[f"form_ms_{epoch.number}"] = round((time.monotonic() - forming) * 1000, 1)
            times = [ms async for ms in _round_trips(engine, epoch, batch)][WARM_UP:]
            figures[f"round_trip_ms_batch_{batch}"] = round(statistics.median(times), 2)
            figures[f"round_trip_p99_ms_batch_{batch}"] = round(statistics.quantiles(times, n=100)[-1], 2)
        return figures
    finally:
        await engine.close()
        group.stop()


async def _round_trips(engine: GrpcEngine, epoch: Epoch, batch: int) -> Any:
    results = engine.results()
    new = tuple(new_request(handle, (handle, 1), STEPS) for handle in range(1, batch + 1))
    handles = [each.handle for each in new]
    rows = tuple(Row(handle=handle, start=0, count=2, sample=True) for handle in handles)
    step = Step(epoch=epoch, number=1, new=new, rows=rows)
    for number in range(1, STEPS):
        started = time.perf_counter()
        await engine.submit(step)
        result = await anext(results)
        yield (time.perf_counter() - started) * 1000
        rows = tuple(
            Row(handle=sampled.handle, start=number + 1, count=1, sample=True, token=sampled.token.id)
            for sampled in result.sampled
        )
        step = Step(epoch=epoch, number=number + 1, rows=rows)


if __name__ == "__main__":
    shape = [int(argument) for argument in sys.argv[1:3]] or [2, 1]
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(asyncio.run(measure(*shape, folder=Path(scratch)))))
