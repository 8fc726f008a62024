"""Records claims, commits, joins and steps inside the processes, with their times and results.

A commit is stale if its call began after a later claim of the same request had been answered. A step is stale if it
arrived after its stage had joined a later epoch. The checker judges both from these lines and their monotonic times.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from checker.points.patching import after_import


class Recorder:
    """Writes lines to a file of this process, each in one call, so that a kill never cuts a line."""

    def __init__(self, folder: Path, part: str) -> None:
        path = folder / "records"
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / f"{part}-{os.getpid()}.jsonl").open("ab", buffering=0)

    def record(self, what: str, **fields: Any) -> None:
        self._file.write(json.dumps({"what": what, **fields}).encode() + b"\n")


def install(folder: Path, part: str) -> None:
    recorder = Recorder(folder, part)
    if part == "scheduler":
        after_import("orca.pool.redis.pool", lambda module: _record_pool(module.RedisPool, recorder))
    if part == "worker":
        after_import("orca.worker.controller.controller", lambda module: _record_steps(module.Controller, recorder))


def _record_pool(pool: Any, recorder: Recorder) -> None:
    claim, commit = pool.claim, pool.commit

    async def recorded_claim(self: Any, *args: Any, **options: Any) -> Any:
        answer = await claim(self, *args, **options)
        for grant in answer.claimed:
            recorder.record("claimed", at=time.monotonic(), request=grant.request.id, claim=grant.claim.number)
        return answer

    async def recorded_commit(self: Any, entries: Any) -> Any:
        began = time.monotonic()
        answers = await commit(self, entries)
        for entry, answer in zip(entries, answers, strict=True):
            fields = {"request": entry.request_id, "claim": entry.claim.number, "index": entry.index}
            recorder.record("committed", at=began, answer=answer.value, tokens=len(entry.tokens), **fields)
        return answers

    pool.claim, pool.commit = recorded_claim, recorded_commit


def _record_steps(controller: Any, recorder: Recorder) -> None:
    join, run = controller.Join, controller.Run

    async def recorded_join(self: Any, request: Any, context: Any) -> Any:
        reply = await join(self, request, context)
        recorder.record("joined", at=time.monotonic(), stage=self._settings.stage, epoch=request.epoch.number)
        return reply

    async def recorded_run(self: Any, request: Any, context: Any) -> Any:
        began, fields = time.monotonic(), {"stage": self._settings.stage, "holder": request.epoch.holder}
        reply = await run(self, request, context)
        # 1 is ACCEPTED in engine.proto: only with this verdict does a step run.
        ran = int(reply.verdict) == 1
        recorder.record("step", at=began, epoch=request.epoch.number, step=request.number, ran=ran, **fields)
        return reply

    controller.Join, controller.Run = recorded_join, recorded_run
