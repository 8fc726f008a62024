"""Steps of which all between what is told of the requests and their tokens is recorded, and run again on other numbers
(kernels/contract/recording.py): it takes the Python out of them. On a GPU they are those in which each request runs one
token.

On a CPU only kernels can be recorded, so a head whose product is another library's runs behind the recording. On a GPU
a step may be captured on several streams, as Nimble does (streams/): with fused kernels there is little to run side by
side (the items of attention are made beside the first products), so it is the bench that asks for it.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.contract.recording import (
    LINE,
    POSITION,
    Recorder,
    RecordingSize,
    RequestLines,
    StepDescription,
    StepInputs,
)
from orca.kernels.contract.transfer import to_device
from orca.kernels.device import Kernels, Sampler, kernels_of
from orca.worker.models.blocks import Part, StepContext
from orca.worker.models.build import StageModel
from orca.worker.parallel.shard import SingleRank
from orca.worker.stage.kv_cache import KVCache
from orca.worker.stage.step_context import StepContexts

log = logging.getLogger(__name__)


class Ran(NamedTuple):
    """What a run has made, good until the next one: of all tokens, or of those that are wanted."""

    output: Tensor  # [rows, hidden]; on the last stage float32 logits [rows, vocab]
    largest: NDArray[np.int64] | None = None  # [rows]: the first of each row's largest logits, where the host draws
    drawn: Tensor | None = None  # [rows] int64: the tokens, where the device draws


class _Made(NamedTuple):
    """As `Ran`, with memory for the most rows."""

    output: Tensor
    largest: Tensor | None = None
    drawn: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Recording:
    """One recording, and the memory that it reads and writes."""

    inputs: StepInputs
    hidden: Tensor | None  # [tokens, hidden] from the stage before
    turns: Tensor | None  # [tokens, 1, head_dim / 2] where they do not follow from positions alone
    context: StepContext
    made: _Made
    run: Callable[[], None]
    compute: Callable[[], _Made]  # what was recorded: it holds the rest of what is read
    parts: dict[int, Ran] = field(default_factory=dict)

    def part(self, rows: int) -> Ran:
        """What a run with so many rows has made.

        Kept, though it is but views: behind a step the processor's caches hold weights instead of PyTorch's code, and
        making two views took 105 us then.
        """
        part = self.parts.get(rows)
        if part is None:
            output, largest, drawn = (None if each is None else each[:rows] for each in self.made)
            assert output is not None
            part = self.parts[rows] = Ran(output, None if largest is None else largest.numpy(), drawn)
        return part


class RecordedSteps:
    """Of a rank that is alone in its stage."""

    def __init__(
        self,
        model: StageModel,
        cache: KVCache,
        recorder: Recorder,
        kernels: Kernels,
        sampler: Sampler | None,
        *,
        on_streams: bool,
    ) -> None:
        self._model, self._cache, self._recorder, self._kernels = model, cache, recorder, kernels
        self._sampler, self._on_streams = sampler, on_streams
        self._contexts = StepContexts(model, cache)
        self._records_head = model.head is not None and _is_recordable(model.head, recorder)
        self._read: tuple[object, ...] = ()  # memory that recordings read, of what is kept of the requests
        self._recordings: OrderedDict[RecordingSize, _Recording] = OrderedDict()

    @classmethod
    def of(
        cls, model: StageModel, cache: KVCache, sampler: Sampler | None = None, *, on_streams: bool = False
    ) -> "RecordedSteps | None":
        """None where this rank's steps cannot be recorded.

        Args:
            sampler: where the device draws, on the last stage.
            on_streams: capture on several streams, where a device has them.
        """
        kernels = kernels_of(model.device)
        recorder = kernels.recorder(model.device)
        if recorder is None or not isinstance(model.group, SingleRank):
            return None
        parts = model.layers if model.embed is None else [model.embed, *model.layers]
        if not all(_is_recordable(part, recorder) for part in parts):
            return None
        return cls(model, cache, recorder, kernels, sampler, on_streams=on_streams)

    @property
    def chunk_tokens_max(self) -> int:
        """Tokens of a step that is recorded though some of its requests run several, or draw none."""
        rotary = self._model.rotary
        # `_tell` computes the turns of one token of each request.
        return 0 if rotary is not None and rotary.needs_lengths else self._recorder.chunk_tokens_max

    def __call__(self, said: StepDescription, lines: RequestLines, hidden: Tensor | None) -> Ran:
        """Run a step.

        Args:
            said: of one token of each request, all wanted, or of no more tokens than `chunk_tokens_max`.
            hidden: [tokens, hidden] from the stage before; the first one has none.
        """
        self._forget_what_moved(lines)
        size = self._recorder.size_of(said)
        if size not in self._recordings:
            self._recordings[size] = self._record(size, lines)
            if len(self._recordings) > self._recorder.recordings_max:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(size)
        recording = self._recordings[size]
        self._tell(recording, said, lines, hidden)
        recording.run()
        return self._behind_head(recording, said.tokens if said.wanted is None else said.wanted)

    def _forget_what_moved(self, lines: RequestLines) -> None:
        """Recordings whose memory is given up."""
        read = (*map(id, lines), None if self._sampler is None else self._sampler.lines.generation)
        if read != self._read:
            self._recordings.clear()
            self._recorder.clear()
            self._read = read

    def _tell(self, recording: _Recording, said: StepDescription, lines: RequestLines, hidden: Tensor | None) -> None:
        recording.inputs.put(said)
        if recording.hidden is not None:
            assert hidden is not None
            assert hidden.shape == (said.tokens, self._model.config.hidden_size)
            recording.hidden[: len(hidden)].copy_(hidden)
        if recording.turns is not None:
            assert self._model.rotary is not None
            at, positions = to_device(said.requests[:, (LINE, POSITION)].T.copy(), self._model.device)
            turns = self._model.rotary.rows(positions, lines.prompts[at], longest=0)
            recording.turns[: len(turns)].copy_(turns)

    def _behind_head(self, recording: _Recording, rows: int) -> Ran:
        """What a run has made, behind the head also where that is not recorded."""
        model, part = self._model, recording.part(rows)
        if model.head is None:
            # It may still be on its way to the next stage when the next step runs.
            return Ran(part.output.clone())
        if not self._records_head:
            if not rows:
                return Ran(part.output.new_empty(0, model.config.vocab_size, dtype=torch.float32))
            logits = model.head(part.output, recording.context)
            return Ran(logits, largest=self._kernels.argmax(logits).numpy())
        return part

    def _record(self, size: RecordingSize, lines: RequestLines) -> _Recording:
        # What is recorded holds no reference to this object, which would live on in a circle with all of its memory.
        model, kernels, sampler, records_head = self._model, self._kernels, self._sampler, self._records_head
        inputs = self._recorder.inputs(size, lines, slots=self._cache.slots, block_tokens=self._cache.block_tokens)
        context = self._contexts.of_inputs(inputs)
        given = turns = known = None
        if not model.shard.is_first:
            given = torch.zeros(size.tokens, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if model.rotary is not None and model.rotary.needs_lengths:
            turns = torch.zeros(size.tokens, 1, model.config.head_dim // 2, dtype=torch.complex64, device=model.device)
        elif model.rotary is not None:
            known = model.rotary.known(lines.tables.shape[1] * self._cache.block_tokens)

        def compute() -> _Made:
            inputs.build([each for each in (given, turns) if each is not None])
            own = replace(context, turns=turns if known is None else kernels.take_rows(known, inputs.positions))
            hidden = given if model.embed is None else model.embed(inputs.ids, own)
            assert hidden is not None
            for layer in model.layers:
                hidden = layer(hidden, own)
            if model.head is None or not records_head:
                return _Made(hidden)
            logits = model.head(hidden, own)
            if sampler is None or inputs.sampled is None:
                return _Made(logits, largest=kernels.argmax(logits))
            return _Made(logits, drawn=sampler.sample(logits, *inputs.sampled))

        captured = on_streams(compute) if self._on_streams and not self._recorder.only_kernels else None
        made, run = self._recorder.record(compute, captured)
        return _Recording(inputs, given, turns, context, made, run, compute)


def on_streams(compute: Callable[[], _Made]) -> Callable[[], _Made]:
    """The same computation with its tasks on the streams that Nimble's algorithm gives them, to be called in a capture.

    Nothing is computed here.
    """
    # What traces takes a second to import, which other stages need not wait for.
    from orca.worker.stage.stream_capture import CudaStreams, run_on_streams
    from orca.worker.stage.task_graph import trace
    from orca.worker.streams.assignment import assign_streams

    names: list[str] = []

    def tensors() -> tuple[Tensor, ...]:
        made = {name: each for name, each in compute()._asdict().items() if each is not None}
        names[:] = made
        return tuple(made.values())

    graph = trace(tensors)
    assignment = assign_streams(len(graph.tasks), graph.edges)
    sizes = (len(graph.tasks), assignment.stream_count, len(assignment.syncs))
    log.info("a step of %d tasks is captured on %d streams with %d synchronisations", *sizes)

    def captured() -> _Made:
        made = cast("tuple[Tensor, ...]", run_on_streams(graph, assignment, (), CudaStreams()))
        return _Made(**dict(zip(names, made, strict=True)))

    return captured


def _is_recordable(part: Part, recorder: Recorder) -> bool:
    return part.only_kernels or not recorder.only_kernels
