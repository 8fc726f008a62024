"""Steps that are recorded once and run again (the scheduling ahead of time of Nimble, dissertation, chapter 3).

Between two steps only numbers change: which requests there are, at which positions, which blocks their keys and values
have, and how many tokens each runs: one in most steps. So what a step needs is made on the device, out of what it keeps
of each request (`StepInputs`), and everything behind it can be recorded with its addresses (`Recorder`): kernels in one
native call on a CPU, for any number of tokens; a captured graph on a GPU, for one token of each request.

What a device keeps of the requests, a line for each:

    tables  [lines, blocks] int32    the blocks of its keys and values, in order of positions (paged.py)
    fed     [lines] int64            the token that was drawn for it last
    prompts [lines] int64            how many tokens its prompt has
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.contract.reference import AttentionView, RaggedAttention

Made = TypeVar("Made", bound=tuple[Tensor | None, ...])
"""What is recorded returns some tensors, which are written by each run."""

LINE, POSITION, TOKEN, BLOCK, COUNT, IS_WANTED = range(6)
"""Columns of what is said of a step (`StepDescription`)."""
COLUMNS = 6


class StepDescription(NamedTuple):
    """What a device is told of a step."""

    requests: NDArray[np.int64]
    """[requests, COLUMNS]: the request's line; the position of the first token that it runs; that token, or -1 for the
    one that was fed, and where the stage has no need of tokens; the block of its last position; how many tokens it
    runs; whether its last one is wanted (`wanted`)."""
    tokens: int
    wanted: int | None = None
    """The requests behind whose last token alone the last layer has something to do, once it has kept keys and values;
    None: it has behind all tokens."""
    chunks: Sequence[tuple[int, Sequence[int]]] = ()
    """Of each that runs several tokens the flat row of the first, and all of them; none where the stage has no need of
    tokens. The tables have all blocks of these requests."""


class RecordingSize(NamedTuple):
    """Of a recording, which has memory for so many."""

    tokens: int
    wanted: int | None  # None: all tokens


class RequestLines(NamedTuple):
    """What a device keeps of the requests."""

    tables: Tensor
    last_tokens: Tensor
    prompts: Tensor


class StepInputs(Protocol):
    """What the rows of such a step, its tokens, are, at addresses that stay. Some rows may be padding: they touch no
    request."""

    ids: Tensor
    """[rows] int64: each row's token."""
    positions: Tensor
    """[rows] int64."""
    slots: Tensor
    """[rows] int64: where its key and value go."""
    wanted: Tensor | None
    """[wanted] int64: the rows behind whose keys and values the last layer has something to do; None: all."""
    sampled: tuple[Tensor, Tensor] | None
    """The lines and indices of the tokens that the rows draw, where the device does that (device.Sampler.sample)."""

    def put(self, said: StepDescription) -> None:
        """Tell of a step, before its recording runs. It fits the size of the recording."""
        ...

    def build(self, extra_inputs: Sequence[Tensor] = ()) -> None:
        """Make the inputs out of what was told. Recorded, ahead of all that reads them, behind `attention`.

        Args:
            beside: [rows, ...], what is given of each token besides: what is read of tokens in the recording is
                either made in it, or these inputs, or among this.
        """
        ...

    def attention(self, seen: AttentionView, *, wanted_only: bool = False) -> RaggedAttention:
        """Attention of these rows, or of those that are wanted, under one sliding window."""
        ...


class Recorder(Protocol):
    only_kernels: bool
    """Whether nothing but kernels of this package is recorded. Elsewhere PyTorch's operations are, too."""
    recordings_max: int
    """To be kept: each holds the activations of a layer and some scratch memory."""
    chunk_tokens_max: int
    """Tokens of a recorded step in which requests run several, or not all are wanted; 0 where none such is recorded."""

    def size_of(self, said: StepDescription) -> RecordingSize:
        """That of the recording for a step."""
        ...

    def inputs(self, size: RecordingSize, lines: RequestLines, *, slots: int, block_tokens: int) -> StepInputs:
        """Args: slots: of the KV cache."""
        ...

    def clear(self) -> None:
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
