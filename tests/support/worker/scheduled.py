"""The real scheduler loop over an engine under test: Algorithm 1, real time, and a pool in memory."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import Any

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.engine import Engine
from orca.core.domain.request import End, Request, SamplingParams
from orca.core.domain.step import Epoch
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import Caller, LogSlice, OnDisconnect, Submission
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.engines.virtual_time import VirtualClock
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.observer import IterationHistory
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import Policy
from support.worker.engine_builders import generate, until

REVISION = "r1"


def a_request(name: str, prompt: Sequence[int], new_tokens: int, **sampling: Any) -> Request:
    """A request named `<name>.0`; greedy unless `sampling` says more."""
    return Request(
        parent=name,
        choice=0,
        revision=REVISION,
        prompt=tuple(prompt),
        max_new_tokens=new_tokens,
        sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
    )


class Scheduled:
    """A group that serves while the context is open: entered when its epoch is formed, left when it has drained.

    The engine is closed then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch_size: int,
        prefetch: int = 0,
        pool: MemoryPool | None = None,
        policy: Policy | None = None,
        cycle: CycleControls | None = None,
        is_encoder_decoder: bool = False,
    ) -> None:
        self.pool = pool or MemoryPool(VirtualClock())
        self.log = IterationHistory()
        self._engine = engine
        dependencies = Dependencies(
            pool=self.pool,
            engine=engine,
            policy=policy or IterationPolicy(),
            caller=Caller(group="g0", process="g0-p1", revision=REVISION),
            calls=count(1),
            clock_ns=time.monotonic_ns,
            observer=self.log,
        )
        options = SchedulingOptions(
            max_batch_size=max_batch_size, prefetch=prefetch, is_encoder_decoder=is_encoder_decoder, cycle=cycle
        )
        self._scheduler = GroupScheduler(dependencies, options)

    async def __aenter__(self) -> "Scheduled":
        self._running = asyncio.create_task(self._scheduler.run())
        await until(self._is_serving)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduler.stop()
        try:
            await self._running
        finally:
            await self._engine.close()

    async def _is_serving(self) -> bool:
        self._raise_dead()
        return self._scheduler.is_serving

    async def submit(self, request: Request) -> None:
        await self.pool.submit(
            Submission(parent=request.parent, requests=(request,), reader="test", on_disconnect=OnDisconnect.KEEP)
        )

    async def first_token_of(self, request: Request) -> None:
        """Wait until anybody may read it."""
        await self._until(request, lambda part: len(part.tokens) > 0)

    async def outcome_of(self, request: Request) -> tuple[list[int], End]:
        """Wait for its end. Returns: its log."""
        part = await self._until(request, lambda part: part.end is not None)
        assert part.end is not None
        return [token.id for token in part.tokens], part.end

    def steps_of(self, request: Request) -> list[int]:
        """Numbers of the steps that held it, as the loop's iteration log says."""
        return [record.step for record in self.log.records if request.id in [row.request_id for row in record.rows]]

    async def _until(self, request: Request, is_true: Callable[[LogSlice], bool]) -> LogSlice:
        async def is_reached() -> bool:
            self._raise_dead()
            return is_true(await self.pool.read(request.id, 0))

        await until(is_reached)
        return await self.pool.read(request.id, 0)

    def _raise_dead(self) -> None:
        if self._running.done():
            self._running.result()


async def alone(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """The tokens of each request when nothing else runs: a step at a time, without scheduler or pool.

    The requests are named request<number>; the engine is closed.
    """
    tokens = {}
    for number, request in enumerate(requests, start=1):
        handle = int(request.parent.removeprefix("request"))
        epoch = Epoch(number, "test")
        await engine.form(epoch)
        new = new_request(handle, request.prompt, request.max_new_tokens)
        drawn = await generate(engine, epoch, [new], [request.max_new_tokens], stages=1)
        tokens[request.id] = drawn[handle]
    await engine.close()
    return tokens
