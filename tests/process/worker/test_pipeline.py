"""Pipelining with real processes under the real scheduler: three stages of 30 ms each, prefetch 0 (ORCA, Figure 8a).

A bubble that loop or engine leave is there in every step; other work on the machine delays some steps and spares
others. So each part of a step's way is judged by its quicker steps, on a busy machine too. The idle time of the stages
is judged by the whole run, where the machine had time for it.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orca.bench.parts.stage_processes import BLOCK_TOKENS, Stages, engine_for
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import CommitAnswer, CommitEntry
from orca.scheduler.engines.virtual_time import VirtualClock
from orca.scheduler.observer import IterationRecord
from orca.worker.models.build import load_stage
from orca.worker.rank.local_engine import LocalEngine
from support.worker.priority import ahead_of_others, waited_s
from support.worker.scheduled import Scheduled, a_request, alone


def measures_time(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test whose result depends on the machine: `make prove` runs it, and no other test meanwhile."""
    marked: Callable[..., None] = pytest.mark.prove(pytest.mark.alone(test))
    return marked


STAGES = 3
DELAY_MS = 30
COMMIT_MS = 20
TOKENS = 30  # of each request
STEPS = TOKENS * STAGES
WARM_UP = 9
IDLE_MAX = 0.10
HOP_MAX_MS = 5.0
"""Bound for the quicker steps; the slowest of the hops takes one millisecond when the machine has time."""
WAITED_SHARE_MAX = 0.4
"""The share of the time for which the threads of loop and engine may wait for a processor in total, on a machine that
counts as theirs. On two processors they wait for each other for a quarter of it.
"""
ATTEMPTS = 3
REQUESTS = [a_request(f"request{number}", (number, 3), TOKENS) for number in range(1, 7)]

Log = list[dict[str, Any]]


class SlowPool(MemoryPool):
    """A pool whose commits take their time: who waits for one before the next step shows it."""

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        await asyncio.sleep(COMMIT_MS / 1000)
        return await super().commit(entries)


@dataclass(frozen=True)
class Run:
    """The times that stages and loop record of each step, and the share of the time that their threads waited for a
    processor.
    """

    stages: list[Log]
    loop: list[IterationRecord]
    tokens: dict[str, list[int]]
    waited_share: float

    @property
    def idle_share(self) -> float:
        """Return the idle share of the stage that is idle most, over all steps between warm-up and the last ones."""
        return max(_idle_share(log[WARM_UP : STEPS - STAGES]) for log in self.stages)

    @property
    def is_told_early(self) -> bool:
        """Did the control message of each step reach the last stage before the first had computed it?"""
        return all(
            last["received_ns"] < first["end_ns"] for first, last in zip(self.stages[0], self.stages[-1], strict=True)
        )

    def hops_ms(self) -> dict[str, list[float]]:
        """Return the time between two computations of a batch: by hop, how long each step took for it.

        Steps that found their stage at work are left out: they waited for that, and it hid the hop.
        """
        first, last = self.stages[0], self.stages[-1]
        steps = range(WARM_UP, STEPS - STAGES)
        hops = {
            "last stage to loop": [self.loop[n].returned_ns - last[n]["end_ns"] for n in steps],
            "loop to first stage": [first[n + STAGES]["received_ns"] - self.loop[n].returned_ns for n in steps],
            "first stage to its rank": _waits_ns(first, "received_ns", first, steps),
        }
        for stage, (before, after) in enumerate(pairwise(self.stages)):
            hops[f"rank {stage} to {stage + 1}"] = _waits_ns(before, "end_ns", after, steps)
        return {hop: [ns / 1e6 for ns in times] for hop, times in hops.items()}


@pytest.fixture(scope="module")
def run(start_stages: Callable[..., Stages]) -> Run:
    """Run six requests in batches of two: AB, CD, EF, AB, ..."""
    return asyncio.run(_run(start_stages(STAGES, 1, "--delay-ms", str(DELAY_MS))))


@pytest.fixture(scope="module")
def quiet_run(start_stages: Callable[..., Stages]) -> Run:
    """Run them again when the machine was busy with other work."""
    group = start_stages(STAGES, 1, "--delay-ms", str(DELAY_MS))
    for _ in range(ATTEMPTS):
        run = asyncio.run(_run(group))
        if run.idle_share < IDLE_MAX and run.is_told_early:
            break
    return run


async def _run(group: Stages) -> Run:
    engine = engine_for(group.addresses)
    await engine.wait_loaded()
    pids = [os.getpid(), *(process.pid for process in group.processes)]
    pids += [pid for stage in range(STAGES) for pid in group.rank_pids(stage)]
    with ahead_of_others(pids):
        async with Scheduled(engine, max_batch_size=2, pool=SlowPool(VirtualClock())) as scheduled:
            started_s, waited_before_s = time.monotonic(), waited_s(pids)
            for request in REQUESTS:
                await scheduled.submit(request)
            tokens = {request.id: (await scheduled.outcome_of(request))[0] for request in REQUESTS}
            waited_share = (waited_s(pids) - waited_before_s) / (time.monotonic() - started_s)
    loop = scheduled.log.records[:STEPS]
    logs = [group.log(stage, loop[0].epoch)[:STEPS] for stage in range(STAGES)]
    return Run(stages=logs, loop=loop, tokens=tokens, waited_share=waited_share)


async def test_the_loop_over_grpc_gives_each_request_the_tokens_that_it_gets_alone(run: Run, tiny_model: Path) -> None:
    engine = LocalEngine([load_stage(tiny_model, packs=False)], slots=64, block_tokens=BLOCK_TOKENS, prefetch=0)
    assert run.tokens == await alone(engine, REQUESTS)


def test_batches_take_their_turns_as_in_figure_8a(run: Run) -> None:
    for log in run.stages:
        assert [line["step"] for line in log] == list(range(1, STEPS + 1))
        assert [line["handles"] for line in log] == [[1, 2], [3, 4], [5, 6]] * TOKENS


def test_a_batch_is_on_one_stage_after_the_other_and_a_stage_on_one_batch_at_a_time(run: Run) -> None:
    for step in range(STEPS):
        for before, after in pairwise(run.stages):
            assert before[step]["start_ns"] + DELAY_MS * 1_000_000 <= after[step]["start_ns"]
    for log in run.stages:
        assert all(first["end_ns"] <= second["start_ns"] for first, second in pairwise(log))


@measures_time
def test_all_stages_compute_at_the_same_time_each_another_batch(quiet_run: Run) -> None:
    together_ms = []
    for step in range(WARM_UP, STEPS - STAGES):
        lines = [log[step + STAGES - 1 - stage] for stage, log in enumerate(quiet_run.stages)]
        assert len({tuple(line["handles"]) for line in lines}) == STAGES
        together_ms.append((min(line["end_ns"] for line in lines) - max(line["start_ns"] for line in lines)) / 1e6)
    assert statistics.median(together_ms) > DELAY_MS / 2, "for most of a step; the machine may disturb some"


@measures_time
def test_the_control_message_of_each_step_reaches_the_last_stage_before_the_first_has_computed_it(
    quiet_run: Run,
) -> None:
    assert quiet_run.is_told_early


@measures_time
def test_no_stage_has_a_bubble_between_a_batch_and_its_next_step(quiet_run: Run) -> None:
    # A hop that hardly any step had to wait for is none.
    quicker_ms = {
        hop: statistics.quantiles(times, n=4)[0] for hop, times in quiet_run.hops_ms().items() if len(times) > STAGES
    }
    assert max(quicker_ms.values()) < HOP_MAX_MS, quicker_ms


@measures_time
def test_every_stage_is_idle_under_a_tenth_of_the_time_after_warm_up(quiet_run: Run) -> None:
    if quiet_run.idle_share >= IDLE_MAX and quiet_run.waited_share > WAITED_SHARE_MAX:
        pytest.skip(
            f"the machine is busy: {ATTEMPTS} runs, waits for a processor {quiet_run.waited_share:.2f} of the time"
        )
    assert quiet_run.idle_share < IDLE_MAX, f"waits for a processor: {quiet_run.waited_share:.2f} of the time"


def _idle_share(log: Log) -> float:
    """Return the idle share between the end of the first step and that of the last one."""
    busy_ns = sum(line["end_ns"] - line["start_ns"] for line in log[1:])
    return float(1 - busy_ns / (log[-1]["end_ns"] - log[0]["end_ns"]))


def _waits_ns(log: Log, sent: str, stage: Log, steps: range) -> list[int]:
    """Return the time from `sent` of each step in `log` to its start on a stage that was idle in between."""
    return [stage[n]["start_ns"] - log[n][sent] for n in steps if stage[n - 1]["end_ns"] <= log[n][sent]]
