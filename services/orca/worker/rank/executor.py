"""A rank's work on the steps of one epoch: receive inputs, compute, send outputs, sample.

The order inside a step: its receive is posted before an earlier step computes, if its control message has arrived by
then (worker.messages.inbox), so that its activations arrive meanwhile. Then follow state differences, device tokens,
activations and computation. Then the output is put on the link, and the next step begins without waiting for it to
arrive.

One thread does all of this, between computations and never during one: NCCL requires the calls on a link one at a time
and in their order, and control messages are a whole step ahead while the pipeline is full.

The waits form no circle. No rank waits for a later stage, with one exception: sampled tokens go from the last stage
back to the one that embeds them. That is the first stage, or the first one with decoder layers. It reads them before it
runs a step that needs them, and the last one never does.

If a device samples the tokens, the host launches a step and returns before it has run. The step's tokens are read after
the next step has been launched.
"""

import time
from dataclasses import dataclass, replace

from torch import Tensor

from orca.core.domain.step import Refused, StageTiming, Step, StepResult
from orca.worker.parallel.process_groups import EpochGroups, IncomingTensor
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.rank.device_tokens import DeviceTokenQueue
from orca.worker.rank.stage_log import StageLog
from orca.worker.stage.sampling import StepSample
from orca.worker.stage.screen import RequestScreen
from orca.worker.stage.stage import Stage
from orca.worker.stage.step_runner import PreparedStep

_DELAY_PIECE_S = 0.25


@dataclass(slots=True)
class ReceivedStep:
    """A step whose control message has arrived on this rank, without the requests that are refused."""

    step: Step
    received_ns: int  # when the controller read the message, or the rank if it has a link to the master
    refused: tuple[Refused, ...] = ()
    hidden: IncomingTensor | None = None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the rank that samples. A device may still compute it."""

    step: Step
    refused: tuple[Refused, ...]
    timing: StageTiming  # on a device start and end of the launch; `result` sets the end if it waits for the device
    sample: StepSample | None
    units: int  # the time limit of its computation, in units of the usual one (progress.py)

    @property
    def is_ready(self) -> bool:
        """Return whether its tokens can be read without waiting."""
        return self.sample is None or self.sample.is_ready


class Executor:
    """Runs the steps of one epoch on one rank, in the order of their numbers."""

    def __init__(
        self,
        shard: Shard,
        stage: Stage,
        groups: EpochGroups,
        *,
        screen: RequestScreen,
        feeds_tokens: bool,
        progress: RankProgress,
        iteration_log: StageLog | None,
        delay_ms: float,
    ) -> None:
        self._shard = shard
        self._samples = shard.is_last and shard.rank == 0
        self._stage = stage
        self._groups = groups
        self._screen = screen
        self._feeds_tokens = feeds_tokens
        self._device_tokens = DeviceTokenQueue()
        self._progress = progress
        self._log = iteration_log
        self._delay_s = delay_ms / 1000
        self._is_device_computing = False

    def receive(self, step: Step, received_ns: int) -> ReceivedStep:
        """Take a step's control message, and post the receive of its activations, whose size the message gives."""
        screened = self._screen.screen(step)
        step = screened.step
        rows = self._stage.rows_in(step)
        hidden = self._groups.receive_hidden(rows) if rows else None
        return ReceivedStep(step, received_ns, screened.refused, hidden)

    def run(self, received: ReceivedStep) -> LaunchedStep | None:
        """Run a step, or launch it on a device. Returns: the launched step on the rank that samples, otherwise None.

        Raises: whatever breaks the epoch: a link's RuntimeError, or a broken invariant of the stage.
        """
        step = received.step
        self._progress.begin_step(step)
        prepared = self._stage.begin(step)
        if self._stage.begins_targets and self._feeds_tokens:
            self._progress.at(f"step {step.number}: waits for sampled tokens", is_waiting=True)
            self._device_tokens.deliver(self._stage, step)
        self._progress.at(f"step {step.number}: waits for activations", is_waiting=True)
        hidden = received.hidden.wait() if received.hidden is not None else None
        start_ns = time.monotonic_ns()
        self._progress.at(f"step {step.number}: computes")
        sample = self._compute(prepared, hidden) if step.tokens else None
        timing = StageTiming(
            stage=self._shard.stage,
            received_ns=received.received_ns,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
        )
        self._send_back(step, sample)
        if self._log is not None:
            self._log.write(step, timing)
        self._progress.end_step(step)
        if not self._samples:
            return None
        return LaunchedStep(step, received.refused, timing, sample, self._progress.units)

    def report_computing(self, launched: LaunchedStep) -> None:
        """Report that a device computes a step: until its result, a mark that does not move is a hang."""
        self._is_device_computing = True
        self._progress.units = launched.units
        self._progress.at(f"step {launched.step.number}: computes")

    def result(self, launched: LaunchedStep) -> StepResult:
        """Wait for the step's tokens, and return the result for the master."""
        timing = launched.timing
        if not launched.is_ready:
            self.report_computing(launched)
        drawn = [] if launched.sample is None else launched.sample.read()
        if self._is_device_computing:
            self._is_device_computing = False
            self._progress.end_step(launched.step)
            timing = replace(timing, end_ns=time.monotonic_ns())
        return StepResult.of(launched.step, drawn, launched.refused, timing)

    def _compute(self, prepared: PreparedStep, hidden: Tensor | None) -> StepSample | None:
        output = self._stage.forward(prepared, hidden)
        self._delay()
        if not self._shard.is_last:
            if self._stage.rows_out(prepared.step):
                self._groups.send_hidden(output.tensor)
            return None
        return self._stage.sample(prepared, output) if self._samples else None

    def _delay(self) -> None:
        """Apply the test setting delay_ms. As in a long computation, the progress mark moves all the time."""
        until = time.monotonic() + self._delay_s
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _DELAY_PIECE_S))
            self._progress.move()

    def _send_back(self, step: Step, sample: StepSample | None) -> None:
        """Prefetch: send the sampled tokens to every rank of the stage that embeds them, which queues them."""
        handles = tuple(row.handle for row in step.rows if row.sample)
        if not self._feeds_tokens or not handles:
            return
        if sample is not None:
            self._groups.send_device_tokens(sample.tokens)
        if self._stage.begins_targets and not (sample is not None and sample.is_on_device):
            tokens = self._groups.receive_device_tokens(len(handles)) if sample is None else sample.tokens
            self._device_tokens.expect(handles, tokens)
