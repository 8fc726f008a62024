"""An engine in one process: the stages of a group chained in one thread, without sockets or ranks.

It serves tests, and measures the speed of the model alone. It keeps the contract of core.domain.engine.Engine, prefetch
included, and computes the same as real stages, but runs one step at a time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch, StageTiming, Step, StepResult
from orca.worker.models.build import StageModel
from orca.worker.rank.device_tokens import DeviceTokenQueue
from orca.worker.stage.screen import RequestScreen
from orca.worker.stage.stage import Stage
from orca.worker.stage.step_runner import StepOutput


class LocalEngine:
    """An engine whose master and stages are one object."""

    def __init__(
        self,
        models: Sequence[StageModel],
        *,
        slots: int,
        block_tokens: int,
        prefetch: int,
        max_model_len: int | None = None,
    ) -> None:
        """
        Args:
            models: the weights of each stage, stage 0 first, one rank each.
            slots: KV slots, rounded down to whole blocks.
            prefetch: with 1, rows may leave their input token to the step that samples it.
            max_model_len: None: the model's own.
        """
        self._models = models
        self._info = models[0].info
        self._feeds_tokens = prefetch > 0
        self._shape = EngineShape(
            stages=len(models),
            slots=slots // block_tokens * block_tokens,
            block_tokens=block_tokens,
            max_model_len=max_model_len or self._info.max_model_len,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-engine")
        self._epoch: Epoch | None = None
        self._last = 0
        self._stages: list[Stage] = []
        self._screen = self._new_screen()
        self._device_tokens = DeviceTokenQueue()
        self._running: asyncio.Queue[asyncio.Future[StepResult] | None] = asyncio.Queue()

    async def form(self, epoch: Epoch) -> EngineShape:
        """See core.domain.engine.Engine."""
        if self._epoch is not None and epoch.number <= self._epoch.number:
            known = self._epoch.number
            raise EngineError(f"epoch {epoch.number} is not above {known}", reported_epoch=known)
        await self._end_epoch()
        self._stages = [
            Stage(
                model,
                slots=self._shape.slots,
                block_tokens=self._shape.block_tokens,
                eos_token_ids=self._info.eos_token_ids,
                feeds_tokens=self._feeds_tokens,
            )
            for model in self._models
        ]
        self._screen = self._new_screen()
        self._device_tokens = DeviceTokenQueue()
        self._epoch, self._last = epoch, 0
        self._running = asyncio.Queue()
        return self._shape

    async def submit(self, step: Step) -> None:
        """See core.domain.engine.Engine."""
        if step.epoch != self._epoch:
            raise EngineError(f"epoch {step.epoch.number} is over")
        if step.number != self._last + 1:
            raise EngineError(f"step {step.number} came after step {self._last}")
        self._last = step.number
        received_ns = time.monotonic_ns()
        loop = asyncio.get_running_loop()
        self._running.put_nowait(loop.run_in_executor(self._thread, self._run, step, received_ns))

    async def results(self) -> AsyncIterator[StepResult]:
        """See core.domain.engine.Engine."""
        running = self._running
        while (result := await running.get()) is not None:
            try:
                yield await result
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"{type(error).__name__}: {error}", is_from_inside=True) from error
        running.put_nowait(None)  # the end, for every reader

    async def close(self) -> None:
        """See core.domain.engine.Engine."""
        await self._end_epoch()
        self._epoch = None
        self._thread.shutdown()

    @property
    def slots_in_use(self) -> int:
        """KV slots in blocks held by requests, on each stage."""
        return max((stage.slots_in_use for stage in self._stages), default=0)

    async def _end_epoch(self) -> None:
        """Wait until nothing runs, and drop results that were not read."""
        unread = []
        while not self._running.empty():
            unread.append(self._running.get_nowait())
        await asyncio.gather(*(step for step in unread if step is not None), return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._stages.clear)
        self._running.put_nowait(None)

    def _new_screen(self) -> RequestScreen:
        return RequestScreen.of(self._models[0], self._info.eos_token_ids)

    def _run(self, step: Step, received_ns: int) -> StepResult:
        """Run one step through all stages, in the engine's thread."""
        start_ns = time.monotonic_ns()
        screened = self._screen.screen(step)
        step = screened.step
        prepared = [stage.begin(step) for stage in self._stages]
        self._device_tokens.deliver(next(stage for stage in self._stages if stage.begins_targets), step)
        output: StepOutput | None = None
        if step.tokens:
            for stage, stage_step in zip(self._stages, prepared, strict=True):
                output = stage.forward(stage_step, None if output is None else output.tensor)
        sample = None if output is None else self._stages[-1].sample(prepared[-1], output)
        drawn = [] if sample is None else sample.read()
        if self._feeds_tokens and sample is not None and drawn:
            self._device_tokens.expect(tuple(each.handle for each in drawn), sample.tokens)
        timing = StageTiming(
            stage=len(self._stages) - 1, received_ns=received_ns, start_ns=start_ns, end_ns=time.monotonic_ns()
        )
        return StepResult.of(step, drawn, screened.refused, timing)
