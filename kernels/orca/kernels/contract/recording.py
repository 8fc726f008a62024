"""Steps that are captured once and replayed with new inputs, as CUDA graphs are (ahead-of-time scheduling of Nimble,
dissertation, chapter 3).

Only numbers change between two steps: the requests, their positions, the blocks of their keys and values, and the
number of tokens of each, which is one in most steps. So the device builds the inputs of a step from its state of each
request (`StepInputs`), and all later kernels can be recorded with their addresses (`Recorder`). A recording is one
native call on a CPU, for any number of tokens; it is a captured graph on a GPU, for one token of each request.

The state that a device keeps, a line per request:

    tables        [lines, blocks] int32    the blocks of its keys and values, in order of positions (paged.py)
    last_tokens   [lines] int64            the token that was drawn last for the request
    prompts       [lines] int64            number of its tokens before the first one that was drawn

With an encoder-decoder model these are the target's, and there are two more:

    source_tables [lines, blocks] int32    the blocks of the keys and values of its source
    sources       [lines] int64            number of tokens of its source
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.contract.reference import AttentionView, RaggedAttention

Recorded = TypeVar("Recorded", bound=tuple[Tensor | None, ...])
"""The tensors that a recorded function returns; each run writes them again."""

LINE, POSITION, TOKEN, BLOCK, COUNT, IS_WANTED = range(6)
"""Columns of `StepDescription.requests`."""
COLUMNS = 6


class StepDescription(NamedTuple):
    """The input of one step."""

    requests: NDArray[np.int64]
    """[requests, COLUMNS]. LINE is the request's line. POSITION is that of its first token in this step. TOKEN is that
    token, or -1 for the last drawn one and on stages that need no tokens. BLOCK is the block of its last position.
    COUNT is its number of tokens in this step. IS_WANTED is 1 if its last token is wanted (`wanted`).
    """
    tokens: int
    wanted: int | None = None
    """Number of requests whose last token the last layer must compute to the end; for all other tokens it only writes
    keys and values. None: it computes all tokens."""
    chunks: Sequence[tuple[int, Sequence[int]]] = ()
    """The flat row of the first token, and the tokens, of each request that has several. Empty on stages that need no
    tokens. The tables contain all blocks of these requests."""


class RecordingSize(NamedTuple):
    """The largest step that a recording has memory for."""

    tokens: int
    wanted: int | None  # None: all tokens are wanted


class RequestLines(NamedTuple):
    """The state that a device keeps of the requests (see the head of this module)."""

    tables: Tensor
    last_tokens: Tensor
    prompts: Tensor
    # None with decoder-only models, whose recordings have no cross attention.
    source_tables: Tensor | None = None
    sources: Tensor | None = None


class StepInputs(Protocol):
    """The inputs of a recorded step, a row per token, at fixed addresses. Padding rows belong to no request."""

    ids: Tensor
    """[rows] int64: the token of each row."""
    positions: Tensor
    """[rows] int64: its position."""
    slots: Tensor
    """[rows] int64: the cache slot of its key and value."""
    wanted: Tensor | None
    """[wanted] int64: the rows that the last layer computes to the end; None: all rows."""
    sampled: tuple[Tensor, Tensor] | None
    """Lines and indices of the tokens that the rows draw (device.Sampler.sample); None if the host draws them."""

    def put(self, step: StepDescription) -> None:
        """Store the input of a step before its recording runs. The step must fit the size of the recording."""
        ...

    def build(self, extra_inputs: Sequence[Tensor] = ()) -> None:
        """Build the inputs from the stored step. Call it while recording: after `attention`, before any reader.

        Args:
            extra_inputs: [rows, ...], other tensors with a row per token. All that the recording reads of tokens is
                computed inside it, or is one of these inputs, or is among `extra_inputs`.
        """
        ...

    def attention(self, view: AttentionView, *, wanted_only: bool = False) -> RaggedAttention:
        """Return the attention of these rows, or of the wanted ones, under one sliding window.

        Args:
            view: of the lines' `tables`; if it is not causal, of their `source_tables`. Each row then sees the whole
                source of its line (cross attention). Sources themselves are not recorded.
        """
        ...


class Recorder(Protocol):
    """Records steps on one device."""

    only_kernels: bool
    """True if a recording may contain only kernels of this package; otherwise PyTorch's operations are recorded too."""
    recordings_max: int
    """Most recordings to keep: each holds the activations of a layer and some scratch memory."""
    chunk_tokens_max: int
    """Most tokens of a recorded step in which a request has several tokens or not all tokens are wanted; 0: such steps
    are not recorded."""

    def size_of(self, step: StepDescription) -> RecordingSize:
        """Return the size of the recording that a step needs."""
        ...

    def inputs(self, size: RecordingSize, lines: RequestLines, *, slots: int, block_tokens: int) -> StepInputs:
        """Make the inputs of a recording. Args: slots: number of slots of the KV cache."""
        ...

    def clear(self) -> None:
        """Free the memory that recordings share, after all recordings are gone."""
        ...

    def record(
        self, compute: Callable[[], Recorded], captured: Callable[[], Recorded] | None = None
    ) -> tuple[Recorded, Callable[[], None]]:
        """Record the kernels that `compute` calls; on some devices they also run.

        The memory that they read and write must live as long as the recording. Kernels may only get whole tensors that
        other kernels made, not views of them.

        Args:
            captured: a variant of `compute` for devices that capture graphs; it runs only during a capture.
        Returns: the result of `compute`, whose tensors hold the values of the last run; and a function that runs the
            recording.
        """
        ...
