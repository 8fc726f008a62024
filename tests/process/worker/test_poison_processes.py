"""A request that kills the rank which runs it, on real processes: it ends with an error, and no other one does."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from orca.bench.parts.stage_processes import engine_for
from orca.core.domain.request import End, FinishReason, Request, SamplingParams
from orca.pool.memory.pool import MemoryPool
from orca.pool.poison import FAILURES_MAX
from orca.pool.records import Caller, LogSlice, OnDisconnect, OwnershipState, Submission
from orca.scheduler.dependencies import Dependencies, LoopTimings
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.observer import IterationHistory
from orca.scheduler.policy.iteration import IterationPolicy
from orca.worker.controller.controller import Controller
from orca.worker.settings import WorkerSettings
from support.worker import poisoned_rank
from support.worker.poisoned_rank import FATAL_TOKENS, POISON

POISONED_RANK = (sys.executable, poisoned_rank.__file__)
STAGES = 2
PROMPTS = {"a": (5, 6, 7), "b": (8, 9, 10, 11), "c": (12, 13)}
NEW_TOKENS = 12
LIMIT_S = 200


class WallClock:
    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Group:
    """A pool and a scheduler on real stages."""

    pool: MemoryPool

    async def submit(self, parent: str, prompt: tuple[int, ...]) -> None:
        request = Request(
            parent=parent,
            choice=0,
            revision="r1",
            prompt=prompt,
            max_new_tokens=NEW_TOKENS,
            sampling=SamplingParams(temperature=0.0),
        )
        await self.pool.submit(
            Submission(parent=parent, requests=(request,), reader="test", on_disconnect=OnDisconnect.KEEP)
        )

    async def log_of(self, parent: str) -> LogSlice:
        """The whole log of a parent's request, once it has ended."""
        while (await self.pool.status(f"{parent}.0")).state is not OwnershipState.ENDED:
            await asyncio.sleep(0.02)
        return await self.pool.read(f"{parent}.0", 0)


class Blames(IterationHistory):
    """Keeps who was blamed, and who ended for it."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []
        self.poisoned: list[str] = []

    def blamed(self, failed: Sequence[str], poisoned: Sequence[str]) -> None:
        self.failed += failed
        self.poisoned += poisoned


@pytest.fixture
def blames() -> Blames:
    return Blames()


@pytest.fixture
async def group(tiny_model: Path, blames: Blames) -> AsyncIterator[Group]:
    async with contextlib.AsyncExitStack() as stack:
        controllers = []
        for stage in range(STAGES):
            settings = WorkerSettings(model=str(tiny_model), stage=stage, stages=STAGES, slots_max=256)
            controllers.append(Controller(settings, POISONED_RANK))
            stack.push_async_callback(controllers[-1].close)
            await controllers[-1].start()
        pool = MemoryPool(WallClock())
        await pool.set_revision("r1", 1)
        engine = engine_for([controller.address for controller in controllers])
        stack.push_async_callback(engine.close)
        dependencies = Dependencies(
            pool=pool,
            engine=engine,
            policy=IterationPolicy(),
            caller=Caller(group="g", process="p", revision="r1"),
            calls=count(1),
            clock_ns=time.monotonic_ns,
            observer=blames,
            timings=LoopTimings(form_retry_s=0.05, form_retry_max_s=0.2),
        )
        scheduler = GroupScheduler(dependencies, SchedulingOptions(max_batch_size=4))
        running = asyncio.create_task(scheduler.run())
        yield Group(pool)
        scheduler.stop()
        await running


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
async def test_a_request_that_kills_its_rank_ends_with_an_error_and_the_others_with_their_tokens(
    group: Group, blames: Blames
) -> None:
    async with asyncio.timeout(LIMIT_S):
        for parent, prompt in PROMPTS.items():
            await group.submit(parent, prompt)
        alone = {parent: (await group.log_of(parent)).tokens for parent in PROMPTS}
        for parent, prompt in {"a2": PROMPTS["a"], "poison": (POISON, 1, 2), "b2": PROMPTS["b"]}.items():
            await group.submit(parent, prompt)
        assert (await group.log_of("a2")).tokens == alone["a"]
        assert (await group.log_of("b2")).tokens == alone["b"]
        assert (await group.log_of("poison")).end == End(FinishReason.ERROR, FATAL_TOKENS)
        await group.submit("c2", PROMPTS["c"])
        assert (await group.log_of("c2")).tokens == alone["c"], "the group serves on"
    assert blames.poisoned == ["poison.0"]
    assert blames.failed.count("poison.0") == FAILURES_MAX - 1
