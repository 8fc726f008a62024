"""The seam between a stage and its two ways to run a step.

    RecordedSteps (recorded_steps.py)   replays a recording: it needs only a few numbers for each request
    LaidOutSteps (laid_out_steps.py)    builds all inputs of the step and calls the layers one after the other

A stage asks a runner to prepare a step before its activations arrive, and runs the prepared step when they are there.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from orca.core.domain.step import Row, Step
from orca.worker.stage.requests import StageRequest


class StepOutput(NamedTuple):
    """The output of a stage's layers for a step. On the last stage it is valid only until the next step runs."""

    tensor: Tensor  # [tokens, hidden]; on the last stage float32 logits [sampling rows, vocab]
    argmax: NDArray[np.int64] | None = None  # [rows]: Kernels.argmax of the logits, if the host samples
    logits: NDArray[np.float32] | None = None  # [rows, vocab]: `tensor` as an array, if it is kept from step to step
    tokens: Tensor | None = None  # [rows] int64: the sampled tokens, if the device samples in the recording


class PreparedStep(Protocol):
    """A step of which everything is ready but its activations and device tokens."""

    @property
    def step(self) -> Step: ...

    @property
    def sampling(self) -> Sequence[tuple[Row, StageRequest]]:
        """The rows that sample a token, in row order. Empty on all stages but the last."""
        ...

    def run(self, hidden: Tensor | None) -> StepOutput:
        """Run the stage's layers.

        Args:
            hidden: [rows, hidden] from the stage before, which is overwritten; None if it sends none.
        """
        ...


class StepRunner(Protocol):
    """One way to run steps."""

    def prepare(self, step: Step) -> PreparedStep:
        """Prepare a step with at least one row.

        Raises: EngineError if the step does not fit what this stage knows.
        """
        ...
