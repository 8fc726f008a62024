"""The engine alone (ORCA, section 6.1, Figure 9): one batch of equal requests, injected until all of them end.

There is no scheduler, no pool and no HTTP, so the time is the model's own under selective batching. All requests start
and end together, so this is also the best case of request-level batching.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.cli.model_folder import find_model
from orca.core.domain.engine import Engine, EngineShape
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed
from orca.core.domain.step import Claim, Epoch, NewRequest, Row, Step, StepResult
from orca.planner.workload.trace import GREEDY
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import SimulatedEngine
from orca.scheduler.engines.step_cost import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """A batch of equal requests."""

    requests: int
    prompt_tokens: int
    new_tokens: int

    def slots(self, block_tokens: int) -> int:
        return self.requests * slots_needed(self.prompt_tokens + self.new_tokens, block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """The time of a batch, the median of some rounds."""

    batch: BatchShape
    seconds: float  # from the first injection to the last token
    first_s: float  # of these, the first iteration: all prompts

    @property
    def tokens_per_s(self) -> float:
        return self.batch.requests * self.batch.new_tokens / self.seconds


def time_local(
    model: str,
    batches: Sequence[BatchShape],
    *,
    dtype: str,
    quantization: str | None,
    stages: int,
    threads: int,
    rounds: int,
) -> list[BatchTime]:
    """Time the in-process engine on a model folder: stages in one thread, one step at a time. Raises: ModelError."""
    import torch

    from orca.worker.models.build import load_stage
    from orca.worker.parallel.shard import Shard
    from orca.worker.rank.local_engine import LocalEngine

    torch.set_num_threads(threads)
    folder, _ = find_model(model)
    models = [
        load_stage(folder, Shard(stage=stage, stages=stages), dtype=dtype, quantization=quantization)
        for stage in range(stages)
    ]
    slots = max(batch.slots(DEFAULT_BLOCK_TOKENS) for batch in batches)
    vocab_size = models[0].config.vocab_size

    async def run() -> list[BatchTime]:
        engine = LocalEngine(models, slots=slots, block_tokens=DEFAULT_BLOCK_TOKENS, prefetch=0)
        try:
            return await time_batches(engine, batches, vocab_size=vocab_size, rounds=rounds, warm_ups=1)
        finally:
            await engine.close()

    return asyncio.run(run())


def time_simulated(
    shape: EngineShape, cost: StepCost | Sequence[StepCost], batches: Sequence[BatchShape]
) -> list[BatchTime]:
    """Time the simulated engine in virtual time. One round is enough, because all rounds take the same time."""
    engine = SimulatedEngine(shape, cost=cost)
    return virtual_time.run(time_batches(engine, batches, vocab_size=1, rounds=1, warm_ups=0))


async def time_batches(
    engine: Engine, batches: Sequence[BatchShape], *, vocab_size: int, rounds: int, warm_ups: int
) -> list[BatchTime]:
    """Run each batch `warm_ups` times without timing it, then time it `rounds` times by the running loop's clock.

    Raises: EngineError, also when a batch does not fit into the engine's slots or length.
    """
    times, numbers = [], iter(range(1, 1 + len(batches) * (rounds + warm_ups)))
    for batch in batches:
        runs = [
            await _run_batch(engine, Epoch(next(numbers), "bench"), batch, vocab_size) for _ in range(warm_ups + rounds)
        ][warm_ups:]
        times.append(
            BatchTime(batch=batch, seconds=median(run[1] for run in runs), first_s=median(run[0] for run in runs))
        )
    return times


async def _run_batch(engine: Engine, epoch: Epoch, batch: BatchShape, vocab_size: int) -> tuple[float, float]:
    """Run one batch in an epoch of its own. Returns: seconds to the first and to the last iteration's end."""
    clock = asyncio.get_running_loop().time
    await engine.form(epoch)
    results = engine.results()
    start_s = clock()
    await engine.submit(_first_step(epoch, batch, vocab_size))
    result = await anext(results)
    first_s = clock() - start_s
    for number in range(2, batch.new_tokens + 1):
        await engine.submit(_next_step(epoch, number, batch, result))
        result = await anext(results)
    return first_s, clock() - start_s


def _first_step(epoch: Epoch, batch: BatchShape, vocab_size: int) -> Step:
    handles = range(1, batch.requests + 1)
    return Step(
        epoch=epoch,
        number=1,
        new=tuple(
            NewRequest(
                handle=handle,
                request_id=f"bench-{handle}",
                claim=Claim(1, "bench/1"),
                tokens=tuple(Random(handle).choices(range(vocab_size), k=batch.prompt_tokens)),
                prompt_length=batch.prompt_tokens,
                max_total_tokens=batch.prompt_tokens + batch.new_tokens,
                sampling=GREEDY,
            )
            for handle in handles
        ),
        rows=tuple(Row(handle=handle, start=0, count=batch.prompt_tokens, sample=True) for handle in handles),
    )


def _next_step(epoch: Epoch, number: int, batch: BatchShape, before: StepResult) -> Step:
    """Return the next step: each request runs the token that the previous step drew."""
    start = batch.prompt_tokens + number - 2
    rows = [
        Row(handle=drawn.handle, start=start, count=1, sample=True, token=drawn.token.id) for drawn in before.sampled
    ]
    return Step(epoch=epoch, number=number, rows=tuple(rows))


def lines(times: Sequence[BatchTime]) -> list[str]:
    """Return the table of Figure 9: execution time of a batch over its size, per prompt length."""
    rows = [f"{'prompt':>6}{'batch size':>12}{'batch ms':>12}{'first ms':>10}{'ms/token':>10}{'tokens/s':>10}"]
    for each in times:
        batch = each.batch
        rows.append(
            f"{batch.prompt_tokens:>6}{batch.requests:>12}{1000 * each.seconds:>12.1f}{1000 * each.first_s:>10.1f}"
            f"{1000 * each.seconds / batch.new_tokens:>10.2f}{each.tokens_per_s:>10.1f}"
        )
    return rows


def to_json(times: Sequence[BatchTime]) -> list[dict[str, Any]]:
    """Return the times as plain data."""
    return [
        {
            "requests": each.batch.requests,
            "prompt_tokens": each.batch.prompt_tokens,
            "new_tokens": each.batch.new_tokens,
            "seconds": each.seconds,
            "first_iteration_s": each.first_s,
            "tokens_per_s": each.tokens_per_s,
        }
        for each in times
    ]


def figures(times: Sequence[BatchTime], settings: Mapping[str, Setting | None], *, rounds: int) -> list[Measured]:
    """Return the times as figures of an engine with these settings. Args: rounds: runs behind each median."""
    found = []
    for each in times:
        batch = each.batch
        chosen = {
            **settings,
            "batch": batch.requests,
            "prompt_tokens": batch.prompt_tokens,
            "new_tokens": batch.new_tokens,
        }
        found.append(measured("Generated tokens per second", each.tokens_per_s, "tokens/s", chosen, runs=rounds))
        found.append(measured("Time of all prompts", each.first_s, "ms", chosen, scale=1000, runs=rounds))
    return found
