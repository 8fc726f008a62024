"""Steps that are recorded once and replayed with new inputs (kernels/contract/recording.py).

A recording holds everything from the inputs of a step, a few numbers for each request, to its tokens. No Python runs in
between. On a GPU only steps in which each request runs one token are recorded, as CUDA graphs.

On a CPU only kernels can be recorded, so a head whose product is another library's runs after the recording. On a GPU
a step may be captured on several streams, as Nimble does (streams/). With fused kernels there is little to run side by
side (attention's items are laid out beside the first products), so only the benchmark asks for several streams.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from orca.core.domain.step import Row, Step
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
from orca.worker.models.blocks import ModelPart, StepContext
from orca.worker.models.build import StageModel
from orca.worker.parallel.shard import SingleRank
from orca.worker.stage.kv_cache import KVCache
from orca.worker.stage.requests import StageRequest, StageRequests
from orca.worker.stage.step_context import StepContexts
from orca.worker.stage.step_runner import StepOutput

log = logging.getLogger(__name__)


class _RecordedOutput(NamedTuple):
    """The output of a recording, with memory for the most rows; otherwise as `StepOutput`."""

    tensor: Tensor
    argmax: Tensor | None = None
    tokens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Recording:
    """One recording, and the memory that it reads and writes."""

    inputs: StepInputs
    hidden: Tensor | None  # [tokens, hidden] from the stage before
    turns: Tensor | None  # [tokens, 1, head_dim / 2] if they do not follow from positions alone
    context: StepContext
    output: _RecordedOutput
    replay: Callable[[], None]
    compute: Callable[[], _RecordedOutput]  # what was recorded: it keeps the rest of the memory that is read alive
    views: dict[int, StepOutput] = field(default_factory=dict)

    def first_rows(self, rows: int) -> StepOutput:
        """Return the output of a replay with this many rows.

        The views are kept: after a step the processor's caches hold weights instead of PyTorch's code, and making two
        views took 105 us then.
        """
        view = self.views.get(rows)
        if view is None:
            tensor, argmax, tokens = (None if each is None else each[:rows] for each in self.output)
            assert tensor is not None
            view = StepOutput(tensor, tokens=tokens)
            if argmax is not None:
                view = StepOutput(tensor, argmax.numpy(), tensor.numpy())
            self.views[rows] = view
        return view


@dataclass(slots=True)
class RecordedStep:
    """A step that runs from a recording (step_runner.PreparedStep)."""

    runner: "RecordedSteps"
    step: Step
    sampling: list[tuple[Row, StageRequest]]
    description: StepDescription
    draws: bool  # the recording draws the tokens, too

    def run(self, hidden: Tensor | None) -> StepOutput:
        return self.runner.run(self.description, hidden, draws=self.draws)


class RecordedSteps:
    """The runner of most steps, for a rank that is alone in its stage (step_runner.StepRunner)."""

    def __init__(
        self,
        model: StageModel,
        cache: KVCache,
        requests: StageRequests,
        recorder: Recorder,
        kernels: Kernels,
        sampler: Sampler | None,
        *,
        on_streams: bool,
    ) -> None:
        self._model, self._cache, self._requests = model, cache, requests
        self._recorder, self._kernels = recorder, kernels
        self._sampler, self._on_streams = sampler, on_streams
        self._contexts = StepContexts(model, cache)
        self._records_head = model.head is not None and _is_recordable(model.head, recorder)
        self._memory_read: tuple[object, ...] = ()  # identifies the tables of requests that recordings read
        self._recordings: OrderedDict[tuple[RecordingSize, bool], _Recording] = OrderedDict()

    @classmethod
    def create(
        cls,
        model: StageModel,
        cache: KVCache,
        requests: StageRequests,
        sampler: Sampler | None = None,
        *,
        on_streams: bool = False,
    ) -> "RecordedSteps | None":
        """Return a runner, or None if this rank's steps cannot be recorded.

        Args:
            sampler: set on the last stage if the device samples.
            on_streams: capture on several streams, if the device has them.
        """
        kernels = kernels_of(model.device)
        recorder = kernels.recorder(model.device)
        if recorder is None or not isinstance(model.group, SingleRank) or not model.layers:
            return None
        parts = model.layers if model.embed is None else [model.embed, *model.layers]
        if not all(_is_recordable(part, recorder) for part in parts):
            return None
        return cls(model, cache, requests, recorder, kernels, sampler, on_streams=on_streams)

    def can_run(self, step: Step) -> bool:
        """Return whether a step with rows can run from a recording."""
        rows = step.rows
        if all(row.count == 1 and row.sample for row in rows):
            return True
        if step.tokens > self._chunk_tokens_max:
            return False
        if not self._model.shard.is_last:
            return True
        by_handle = self._requests.by_handle
        known = ((by_handle[row.handle], row) for row in rows if row.handle in by_handle)
        return not any(request.prompt_targets(row) for request, row in known)

    def prepare(self, step: Step) -> RecordedStep:
        """Describe a step to its recording in a few numbers for each request (StepRunner.prepare)."""
        shard, requests, begins = self._model.shard, self._requests, self._model.embed is not None
        columns: list[tuple[int, int, int, int, int, bool]] = []
        chunks: list[tuple[int, Sequence[int]]] = []
        sampling: list[tuple[Row, StageRequest]] = []
        tokens = 0
        for row in step.rows:
            block = self._cache.extend(row.handle, row.start + row.count, row.start)
            request = requests.by_handle[row.handle]
            known = requests.input_tokens(step, row, request) if begins else None
            if known is not None and row.count > 1:
                chunks.append((tokens, known))
            if shard.is_last and row.sample:
                sampling.append((row, request))
            token = -1 if known is None else known[0]
            columns.append((request.line, row.start, token, block, row.count, row.sample))
            tokens += row.count
        wanted = len(sampling) if shard.is_last and len(sampling) < tokens else None
        self._cache.publish(is_recorded=len(columns) == tokens)
        description = StepDescription(np.array(columns, np.int64), tokens, wanted, chunks)
        # A device draws no token before the host knows its mask.
        draws = self._sampler is not None and not any(request.params.has_token_mask for _, request in sampling)
        return RecordedStep(self, step, sampling, description, draws)

    def run(self, description: StepDescription, hidden: Tensor | None, *, draws: bool) -> StepOutput:
        """Replay the recording for a step, or record it first.

        Args:
            description: of one token of each request, all wanted, or of at most `_chunk_tokens_max` tokens.
            hidden: [tokens, hidden] from the stage before; None on the stage that embeds the tokens.
            draws: the recording draws the tokens, too; only if the device samples.
        """
        lines = self._requests.lines
        self._forget_moved(lines)
        size = self._recorder.size_of(description)
        key = size, draws
        if key not in self._recordings:
            self._recordings[key] = self._record(size, lines, self._sampler if draws else None)
            if len(self._recordings) > self._recorder.recordings_max:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        recording = self._recordings[key]
        self._set_inputs(recording, description, lines, hidden)
        recording.replay()
        return self._after_replay(recording, description.tokens if description.wanted is None else description.wanted)

    @property
    def _chunk_tokens_max(self) -> int:
        """Most tokens of a recorded step in which some request runs several, or samples none."""
        rotary = self._model.rotary
        # `_set_inputs` computes the turns of one token of each request.
        return 0 if rotary is not None and rotary.needs_lengths else self._recorder.chunk_tokens_max

    def _forget_moved(self, lines: RequestLines) -> None:
        """Drop all recordings if tables that they read have moved."""
        read = (*map(id, lines), None if self._sampler is None else self._sampler.lines.generation)
        if read != self._memory_read:
            self._recordings.clear()
            self._recorder.clear()
            self._memory_read = read

    def _set_inputs(
        self, recording: _Recording, description: StepDescription, lines: RequestLines, hidden: Tensor | None
    ) -> None:
        recording.inputs.put(description)
        if recording.hidden is not None:
            assert hidden is not None
            assert hidden.shape == (description.tokens, self._model.config.hidden_size)
            recording.hidden[: len(hidden)].copy_(hidden)
        if recording.turns is not None:
            assert self._model.rotary is not None
            at, positions = to_device(description.requests[:, (LINE, POSITION)].T.copy(), self._model.device)
            turns = self._model.rotary.turns(positions, lines.prompts[at], longest=0)
            recording.turns[: len(turns)].copy_(turns)

    def _after_replay(self, recording: _Recording, rows: int) -> StepOutput:
        """Return the output of a replay, and run the head if that is not recorded."""
        model, output = self._model, recording.first_rows(rows)
        if model.head is None:
            # The output may still be on its way to the next stage when the next step runs.
            return StepOutput(output.tensor.clone())
        if not self._records_head:
            if not rows:
                return StepOutput(output.tensor.new_empty(0, model.config.vocab_size, dtype=torch.float32))
            logits = model.head(output.tensor, recording.context)
            return StepOutput(logits, argmax=self._kernels.argmax(logits).numpy())
        return output

    def _record(self, size: RecordingSize, lines: RequestLines, sampler: Sampler | None) -> _Recording:
        # What is recorded holds no reference to this object: the two would keep each other, and all of their memory,
        # alive in a circle.
        model, kernels, records_head = self._model, self._kernels, self._records_head
        host_samples = self._sampler is None
        inputs = self._recorder.inputs(size, lines, slots=self._cache.slots, block_tokens=self._cache.block_tokens)
        context = self._contexts.for_inputs(inputs)
        given = turns = known = None
        if model.embed is None:
            given = torch.zeros(size.tokens, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if model.rotary is not None and model.rotary.needs_lengths:
            turns = torch.zeros(size.tokens, 1, model.config.head_dim // 2, dtype=torch.complex64, device=model.device)
        elif model.rotary is not None:
            known = model.rotary.table(lines.tables.shape[1] * self._cache.block_tokens)

        def compute() -> _RecordedOutput:
            inputs.build([each for each in (given, turns) if each is not None])
            own = replace(context, turns=turns if known is None else kernels.take_rows(known, inputs.positions))
            hidden = given if model.embed is None else model.embed(inputs.ids, own)
            assert hidden is not None
            for layer in model.layers:
                hidden = layer(hidden, own)
            if model.head is None or not records_head:
                return _RecordedOutput(hidden)
            logits = model.head(hidden, own)
            if host_samples:
                return _RecordedOutput(logits, argmax=kernels.argmax(logits))
            if sampler is None or inputs.sampled is None:
                return _RecordedOutput(logits)
            return _RecordedOutput(logits, tokens=sampler.sample(logits, *inputs.sampled))

        captured = _on_streams(compute) if self._on_streams and not self._recorder.only_kernels else None
        output, replay = self._recorder.record(compute, captured)
        return _Recording(inputs, given, turns, context, output, replay, compute)


def _on_streams(compute: Callable[[], _RecordedOutput]) -> Callable[[], _RecordedOutput]:
    """Return the same computation with its tasks on the streams that Nimble's algorithm assigns, to call in a capture.

    Nothing is computed here.
    """
    # The tracer takes a second to import, which other stages need not wait for.
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

    def captured() -> _RecordedOutput:
        made = cast("tuple[Tensor, ...]", run_on_streams(graph, assignment, (), CudaStreams()))
        return _RecordedOutput(**dict(zip(names, made, strict=True)))

    return captured


def _is_recordable(part: ModelPart, recorder: Recorder) -> bool:
    return part.only_kernels or not recorder.only_kernels
