"""Measure what certificates cost a step: `python -m orca.bench.parts.encryption [epochs]`.

Two groups of two stages with a model of a few thousand weights, one encrypted and one not, take turns step by step. One
step is in flight; its time goes from submit to result, over both stages and back. The tokens of the two groups are
compared. Prints one JSON line.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orca.bench.parts.stage_processes import Stages, engine_for, new_request
from orca.bench.parts.tiny_model import write_tiny_model
from orca.core.domain.step import Epoch, Row, Step
from orca.core.transport.tls_files import TlsFiles
from orca.operator.cluster.credentials import issue
from orca.operator.domain.certificates import CA, CERTIFICATE, KEY

STEPS, WARM_UP = 500, 20
BATCHES = (1, 16)
NAME = "all.parts.svc"


class TwoStageGroup:
    """Two stages and their master."""

    def __init__(self, folder: Path, shown: TlsFiles | None, *flags: str) -> None:
        folder.mkdir()
        model = write_tiny_model(folder / "model")
        self.stages = Stages(model, stages=2, tensor=1, log_folder=folder, slots=16384, flags=flags)
        self._engine = engine_for(self.stages.addresses, certificates=shown, uses_local_links=False)
        self._epoch = Epoch(0, "")
        self._next: Step | None = None

    async def begin(self, batch: int) -> None:
        """Form an epoch, with this many requests."""
        epoch = self.stages.next_epoch()
        await self._engine.form(epoch)
        new = tuple(new_request(handle, (handle, 1), STEPS) for handle in range(1, batch + 1))
        rows = tuple(Row(handle=each.handle, start=0, count=2, sample=True) for each in new)
        self._epoch, self._next = epoch, Step(epoch=epoch, number=1, new=new, rows=rows)
        self._results = self._engine.results()

    async def step(self) -> tuple[float, list[int]]:
        """Run the next step. Returns: milliseconds, and the tokens drawn."""
        assert self._next is not None
        number = self._next.number
        started = time.perf_counter()
        await self._engine.submit(self._next)
        result = await anext(self._results)
        took_ms = (time.perf_counter() - started) * 1000
        rows = tuple(
            Row(handle=sampled.handle, start=number + 1, count=1, sample=True, token=sampled.token.id)
            for sampled in result.sampled
        )
        self._next = Step(epoch=self._epoch, number=number + 1, rows=rows)
        return took_ms, [sampled.token.id for sampled in result.sampled]

    async def close(self) -> None:
        await self._engine.close()
        self.stages.stop()


async def measure(epochs: int, folder: Path) -> dict[str, Any]:
    for name, text in issue("measured", NAME, None, time.time()).items():
        (folder / name).write_text(text)
    shown = TlsFiles(folder / CA, folder / CERTIFICATE, folder / KEY, NAME)
    flags = ["--tls-ca-file", shown.ca, "--tls-certificate-file", shown.certificate, "--tls-key-file", shown.key]
    encrypted = TwoStageGroup(folder / "encrypted", shown, *map(str, flags), "--tls-server-name", NAME)
    plain = TwoStageGroup(folder / "plain", None)
    times: dict[int, list[tuple[float, float]]] = {batch: [] for batch in BATCHES}
    try:
        for _ in range(epochs):
            for batch in BATCHES:
                times[batch] += await _take_turns(plain, encrypted, batch)
    finally:
        await encrypted.close()
        await plain.close()
    return {"steps": epochs * (STEPS - 1 - WARM_UP)} | {f"batch {batch}": _compared(times[batch]) for batch in BATCHES}


async def _take_turns(plain: TwoStageGroup, encrypted: TwoStageGroup, batch: int) -> list[tuple[float, float]]:
    """Return the milliseconds of each pair of steps, plain and encrypted. The two groups alternate in going first."""
    await plain.begin(batch)
    await encrypted.begin(batch)
    pairs = []
    for number in range(1, STEPS):
        if number % 2:
            of_plain, of_encrypted = await plain.step(), await encrypted.step()
        else:
            of_encrypted, of_plain = await encrypted.step(), await plain.step()
        assert of_plain[1] == of_encrypted[1], f"step {number}: {of_plain[1]} and {of_encrypted[1]}"
        pairs.append((of_plain[0], of_encrypted[0]))
    return pairs[WARM_UP:]


def _compared(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians, and the quartiles of the differences within a pair."""
    quartiles = statistics.quantiles([encrypted - plain for plain, encrypted in pairs], n=4)
    return {
        "plain_ms": round(statistics.median(plain for plain, _ in pairs), 3),
        "encrypted_ms": round(statistics.median(encrypted for _, encrypted in pairs), 3),
        "difference_ms_quartiles": [round(each, 3) for each in quartiles],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(asyncio.run(measure(int(sys.argv[1]) if sys.argv[1:] else 4, Path(scratch)))))
