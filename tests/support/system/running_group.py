"""A real group for tests: stage processes with their ranks, and schedulers that come and go on them.

The stages keep their processes and weights from one scheduler to the next, as they do when a scheduler dies. Every
`serve` takes the seat again, forms a new epoch with its own choices, and leaves.
"""

import asyncio
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from orca.core.domain.model import load_model_info
from orca.core.domain.request import End, Request, SamplingParams, Token
from orca.core.process.ports import free_port
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import Caller, OnDisconnect, OwnershipState, Submission
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.observer import IterationHistory
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy

REVISION = "r1"
BLOCK_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request to generate, and when to submit it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    wait_s: float = 0.0  # after the one before it was submitted
    after: int | None = None  # submitted once the work of this index has ended
    decoder_prefix: tuple[int, ...] = ()  # with an encoder-decoder model, whose source is `prompt`


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens of a request, and its end."""

    tokens: tuple[Token, ...]
    end: End

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class WallClock:
    """Stands in for the clock of a pool in memory: real time."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class RunningGroup:
    """Stage controllers on loopback, each with its ranks. A context manager: leaving it ends every process."""

    def __init__(self, folder: Path, *, stages: int = 1, tensor: int = 1, slots_max: int = 4096, **flags: Any) -> None:
        self._logs = tempfile.TemporaryDirectory()
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(stages)]
        common = {"model": folder, "stages": stages, "tensor": tensor, "threads": 1, "slots_max": slots_max} | flags
        self._processes = [
            self._start(index, {"stage": index, "listen": address} | common)
            for index, address in enumerate(self.addresses)
        ]
        self._eos_token_ids = load_model_info(folder).eos_token_ids
        self._words = (f"scheduler-{number}" for number in itertools.count())
        self.pool = MemoryPool(WallClock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(timeout=20)
        self._logs.cleanup()

    def logs(self) -> str:
        """The end of what the stages logged: the story of a failure."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(Path(self._logs.name).iterdir()))

    async def serve(
        self,
        works: Sequence[Work],
        *,
        log: IterationHistory | None = None,
        limit_s: float = 250.0,
        slots: int | None = None,
        **choices: Any,
    ) -> list[Output]:
        """Run a scheduler with these choices until every work has ended. Returns: outputs in order of `works`.

        The policy is Algorithm 1, or round-robin allocation if the choices have a `cycle`.
        """
        prefetch = choices.get("prefetch", 0)
        engine = GrpcEngine(
            self.addresses,
            listen="127.0.0.1:0",
            slots=slots,
            block_tokens=BLOCK_TOKENS,
            prefetch=prefetch,
            step_timeout_s=60.0,
            join_timeout_s=60.0,
        )
        dependencies = Dependencies(
            pool=self.pool,
            engine=engine,
            policy=RoundRobinPolicy() if choices.get("cycle") else IterationPolicy(),
            caller=Caller(group="g0", process=next(self._words), revision=REVISION),
            calls=itertools.count(1),
            clock_ns=time.monotonic_ns,
            observer=log or IterationHistory(),
            eos_token_ids=self._eos_token_ids,
        )
        scheduler = GroupScheduler(dependencies, SchedulingOptions(**choices))
        running = asyncio.create_task(scheduler.run())
        try:
            async with asyncio.timeout(limit_s):
                await self._until(running, lambda: scheduler.is_serving)
                names = await self._submit_all(running, works)
                return [await self._output(running, name) for name in names]
        except TimeoutError as error:
            raise AssertionError(f"not done in {limit_s} s; the stages said:\n{self.logs()}") from error
        finally:
            scheduler.stop()
            await running
            await engine.close()

    async def _submit_all(self, running: asyncio.Task[None], works: Sequence[Work]) -> list[str]:
        names: list[str] = []
        for work in works:
            await asyncio.sleep(work.wait_s)
            if work.after is not None:
                await self._output(running, names[work.after])
            name = f"w{random.getrandbits(64):016x}"
            request = Request(
                parent=name,
                choice=0,
                revision=REVISION,
                prompt=work.prompt,
                max_new_tokens=work.max_new_tokens,
                sampling=work.sampling,
                decoder_prefix=work.decoder_prefix,
            )
            submission = Submission(
                parent=name, requests=(request,), reader="test", on_disconnect=OnDisconnect.KEEP, render="{}"
            )
            await self.pool.submit(submission)
            names.append(request.id)
        return names

    async def _output(self, running: asyncio.Task[None], request_id: str) -> Output:
        while (await self.pool.status(request_id)).state is not OwnershipState.ENDED:
            assert not running.done(), f"the scheduler ended: {running}"
            await asyncio.sleep(0.005)
        log = await self.pool.read(request_id, 0)
        assert log.end is not None
        return Output(log.tokens, log.end)

    @staticmethod
    async def _until(running: asyncio.Task[None], condition: Any) -> None:
        while not condition():
            assert not running.done(), f"the scheduler ended: {running}"
            await asyncio.sleep(0.01)

    def _start(self, index: int, flags: dict[str, Any]) -> subprocess.Popen[bytes]:
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        with (Path(self._logs.name) / f"stage-{index}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-m", "orca.worker.service", *words], stdout=log, stderr=log)
