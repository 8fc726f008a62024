"""Times the steps of one view on one rank, along the way that a step takes through a rank process.

The clock runs from the bytes of a step's message to the bytes of its result: message, screen, state, computation,
sampling and result (worker.rank.executor). Activations are there at once, and nobody gets the output: sending is timed
apart (links.py).
"""

import time
from typing import Any, cast

import torch
from torch import Tensor

from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed
from orca.core.domain.step import StageTiming, Step
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.planner.profile.measuring.points import Point
from orca.planner.profile.measuring.process_order import StepTime
from orca.planner.profile.measuring.steps import PointSteps
from orca.worker.models.build import StageModel
from orca.worker.parallel.process_groups import EpochGroups
from orca.worker.parallel.progress import RankProgress
from orca.worker.rank.executor import Executor
from orca.worker.rank.stage_log import StageLog
from orca.worker.stage.screen import RequestScreen
from orca.worker.stage.stage import Stage


class StepTimer:
    """Runs the steps of one view of a model (views.py).

    Args:
        slots: KV slots that its largest step needs.
    """

    def __init__(self, model: StageModel, *, slots: int, progress: RankProgress) -> None:
        self._device = model.device
        stage = Stage(
            model,
            slots=slots_needed(max(slots, DEFAULT_BLOCK_TOKENS), DEFAULT_BLOCK_TOKENS),
            block_tokens=DEFAULT_BLOCK_TOKENS,
            eos_token_ids=model.info.eos_token_ids,
            feeds_tokens=False,
        )
        # Memory that was never written is one page of zeros, which the processor's cache holds.
        for layer in stage.cache.layers:
            layer.copy_(_small_numbers(layer[:1]).expand_as(layer))
        self._links = _NoLinks(model)
        self._timing = _LastTiming()
        self._executor = Executor(
            model.shard,
            stage,
            cast("EpochGroups", self._links),
            screen=RequestScreen.of(model, model.info.eos_token_ids),
            feeds_tokens=False,
            progress=progress,
            iteration_log=cast("StageLog", self._timing),
            delay_ms=0.0,
        )
        self._steps = PointSteps(model.config.vocab_size, model.info.encoder_decoder)

    def begin(self, point: Point) -> StepTime:
        """Bring the requests of a point, and run its step for the first time."""
        return self._run(self._steps.first(point))

    def again(self, point: Point) -> StepTime:
        """Run the step of the same point again."""
        return self._run(self._steps.again(point))

    def _run(self, step: Step) -> StepTime:
        message = wire.step_to_wire(step).SerializeToString()
        self._links.refill()
        start_ns = time.monotonic_ns()
        received = self._executor.receive(wire.step_from_wire(pb.StepMessage.FromString(message)), start_ns)
        launched = self._executor.run(received)
        if launched is not None:
            wire.result_to_wire(self._executor.result(launched)).SerializeToString()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end_ns = time.monotonic_ns()
        timing = self._timing.last
        compute_ns = timing.end_ns - timing.start_ns
        if self._device.type == "cuda":  # the host has only launched it
            compute_ns = end_ns - timing.start_ns
        return StepTime((end_ns - start_ns) / 1000, compute_ns / 1000)


class _LastTiming:
    """Takes the place of a stage's iteration log, and keeps the last line."""

    def __init__(self) -> None:
        self.last = StageTiming(stage=0, received_ns=0, start_ns=0, end_ns=0)

    def write(self, step: Step, timing: StageTiming) -> None:  # noqa: ARG002 (the log's signature)
        self.last = timing


class _NoLinks:
    """Takes the place of an epoch's links (EpochGroups): activations have arrived, and sends go nowhere."""

    def __init__(self, model: StageModel) -> None:
        self._shape = model.config.hidden_size
        self._dtype, self._device = model.dtype, model.device
        self._hidden = torch.empty(0, self._shape, dtype=self._dtype, device=self._device)
        self._count = 0

    def refill(self) -> None:
        """Write the activations of the next step, because layers add to them in place."""
        self._hidden[:] = _small_numbers(self._hidden[:1]) if len(self._hidden) else 0

    def receive_hidden(self, tokens: int) -> Any:
        if tokens > len(self._hidden):
            self._hidden = torch.empty(tokens, self._shape, dtype=self._dtype, device=self._device)
            self.refill()
        self._count = tokens
        return self

    def wait(self) -> Tensor:
        return self._hidden[: self._count]

    def send_hidden(self, hidden: Tensor) -> None:
        del hidden


def _small_numbers(like: Tensor) -> Tensor:
    """Return random numbers in the form of a tensor; of whole numbers zeros."""
    if not like.is_floating_point():
        return torch.zeros_like(like)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).mul_(0.1).to(like)
