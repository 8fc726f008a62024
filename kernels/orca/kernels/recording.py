"""Steps that are recorded once and run again (the scheduling ahead of time of Nimble, dissertation, chapter 3).

In most steps each request runs one token. Between two of them only numbers change: which requests there are, at which
positions, and which blocks their keys and values have. So what a step needs is made on the device, out of what it keeps
of each request (`StepInputs`), and everything behind it can be recorded with its addresses (`Recorder`): kernels in
one native call on a CPU, a captured graph on a GPU.

What a device keeps of the requests, a line for each:

    tables  [lines, blocks] int32    the blocks of its keys and values, in order of positions (paged.py)
    fed     [lines] int64            the token that was drawn for it last
    prompts [lines] int64            how many tokens its prompt has
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.reference import RaggedAttention, Sight

Made = TypeVar("Made", bound=tuple[Tensor | None, ...])
"""What is recorded returns some tensors, which are written by each run."""

LINE, POSITION, TOKEN, BLOCK = range(4)
"""Columns of what is said of a step (`StepInputs.put`)."""
COLUMNS = 4


class Lines(NamedTuple):
    """What a device keeps of the requests."""

    tables: Tensor
    fed: Tensor
    prompts: Tensor


class StepInputs(Protocol):
    """What the rows of such a step are, at addresses that stay. Some rows may be padding: they touch no request."""

    ids: Tensor
    """[rows] int64: each row's token."""
    positions: Tensor
    """[rows] int64."""
    slots: Tensor
    """[rows] int64: where its key and value go."""
    sampled: tuple[Tensor, Tensor] | None
    """The lines and indices of the tokens that the rows draw, where the device does that (device.Sampler.sample)."""

    def put(self, said: NDArray[np.int64]) -> None:
        """Tell of a step, before its recording runs.

        Args:
            said: [requests, COLUMNS], at most as many as there are rows: the request's line; the position that it runs;
                its token, or -1 for the one that was fed; the block of that position.
        """
        ...

    def lay_out(self) -> None:
        """Make the inputs out of what was told. Recorded, ahead of all that reads them."""
        ...

    def attention(self, seen: Sight) -> RaggedAttention:
        """Attention of these rows, under one sliding window."""
        ...


class Recorder(Protocol):
    only_kernels: bool
    """Whether nothing but kernels of this package is recorded. Elsewhere PyTorch's operations are, too."""
    recordings_max: int
    """To be kept: each holds the activations of a layer and some scratch memory."""

    def rows_of(self, requests: int) -> int:
        """How many rows a recording for so many requests has."""
        ...

    def inputs(self, rows: int, lines: Lines, *, slots: int, block_tokens: int) -> StepInputs:
        """Args: slots: of the KV cache."""
        ...

    def forget(self) -> None:
        """All recordings are gone, and what they shared may go."""
        ...

    def record(
        self, compute: Callable[[], Made], captured: Callable[[], Made] | None = None
    ) -> tuple[Made, Callable[[], None]]:
        """Record what `compute` calls; on some devices it runs as well. It reads and writes memory that lives as long
        as the recording, and each kernel in it may only be given whole tensors that kernels made, no views of them.

        Args:
            captured: what a device captures instead: the same, in a form that runs nowhere else.
        Returns: what `compute` returned, whose tensors hold what the last run wrote; and how to run it.
        """
        ...
