"""Steps of an encoder-decoder model: sources, then targets, each in a flat tensor of its own.

    ids of sources -> encoder layers -> encoder output -> keys and values of cross attention, in every decoder layer
    ids of targets -> decoder layers (self attention, cross attention) -> logits

A stage has encoder layers, decoder layers, or both. Between two stages travel [rows, hidden]: the sources of the step
(the encoder output, once it is complete), and behind them the targets, once the decoder has begun. The decoder's part
of a step runs as a step of any other model: from a recording, or laid out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Part, Row, Step
from orca.kernels.contract.transfer import to_device
from orca.worker.models.build import StageModel
from orca.worker.stage.encoder_steps import EncoderSteps, PreparedSources
from orca.worker.stage.kv_cache import KVCache
from orca.worker.stage.laid_out_steps import LaidOutStep, LaidOutSteps
from orca.worker.stage.recorded_steps import RecordedSteps
from orca.worker.stage.requests import StageRequest, StageRequests
from orca.worker.stage.step_runner import PreparedStep, StepOutput


@dataclass(slots=True, kw_only=True)
class EncoderDecoderStep:
    """A step of an encoder-decoder model (step_runner.PreparedStep)."""

    runner: "EncoderDecoderSteps"
    step: Step
    source_tokens: int
    sources: PreparedSources | None  # None: the step has no sources, or the stage has no encoder layers
    source_slots: Tensor | None  # [source tokens]: places of the keys and values of cross attention
    targets: PreparedStep | None  # None: the stage has no decoder layers

    @property
    def sampling(self) -> Sequence[tuple[Row, StageRequest]]:
        return () if self.targets is None else self.targets.sampling

    def run(self, hidden: Tensor | None) -> StepOutput:
        return self.runner.run(self, hidden)


class EncoderDecoderSteps:
    """The runner for all steps of an encoder-decoder model (step_runner.StepRunner).

    Args:
        laid_out: runs any targets.
        recorded: runs targets of steps without sources; None if they cannot be recorded.
    """

    def __init__(
        self,
        model: StageModel,
        cache: KVCache,
        requests: StageRequests,
        laid_out: LaidOutSteps,
        recorded: RecordedSteps | None,
    ) -> None:
        self._model, self._cache, self._requests = model, cache, requests
        self._laid_out, self._recorded = laid_out, recorded
        self._encoder = None if model.encoder is None else EncoderSteps(model, model.encoder, cache.block_tokens)

    def prepare(self, step: Step) -> EncoderDecoderStep:
        """Prepare both parts of a step (StepRunner.prepare)."""
        sources = [row for row in step.rows if row.part is Part.SOURCE]
        tokens = [self._source(step, row) for row in sources]
        targets = source_slots = prepared = None
        if tokens and self._encoder is not None:
            prepared = self._encoder.prepare(tokens)
        if self._model.layers:
            if sources:
                source_slots = self._place(sources)
            # Source rows come first.
            targets = self._prepare_targets(step, step.rows[len(sources) :], has_sources=bool(sources))
        return EncoderDecoderStep(
            runner=self,
            step=step,
            source_tokens=sum(map(len, tokens)),
            sources=prepared,
            source_slots=source_slots,
            targets=targets,
        )

    @torch.inference_mode()
    def run(self, prepared: EncoderDecoderStep, hidden: Tensor | None) -> StepOutput:
        """Run the layers of both stacks.

        Args:
            hidden: sources, then targets, from the stage before, which is overwritten; None if it sends none.
        """
        model, count = self._model, prepared.source_tokens
        memory = None if hidden is None or not count else hidden[:count]
        if prepared.sources is not None:
            assert self._encoder is not None
            memory = self._encoder.run(prepared.sources, memory)
        if prepared.targets is None:
            return StepOutput(self._nothing() if memory is None else memory)
        if memory is not None:
            assert isinstance(prepared.targets, LaidOutStep)
            assert prepared.source_slots is not None
            self._laid_out.put_memory(prepared.targets, memory, prepared.source_slots)
        output = prepared.targets.run(None if hidden is None or model.embed is not None else hidden[count:])
        if model.shard.is_last or memory is None:
            return output
        return StepOutput(torch.cat((memory, output.tensor)))

    def _source(self, step: Step, row: Row) -> tuple[int, ...]:
        """Return the tokens of a source row. Raises: EngineError if it is not the whole source of a known request."""
        request = self._requests.by_handle.get(row.handle)
        if request is None or row.start or row.count != len(request.source):
            raise EngineError(
                f"step {step.number}: tokens {row.start}..{row.start + row.count - 1} of the source of request "
                f"{row.handle} are not the whole source"
            )
        return request.source

    def _place(self, sources: Sequence[Row]) -> Tensor:
        """Give sources their blocks. Returns: the slot of each of their tokens."""
        for row in sources:
            self._cache.extend_source(row.handle, row.count)
        counts = np.array([row.count for row in sources], np.int64)
        lines = np.array([self._requests.by_handle[row.handle].line for row in sources], np.int64)
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        assert self._cache.sources is not None
        return to_device(self._cache.sources.slots_of(np.repeat(lines, counts), places), self._model.device)

    def _prepare_targets(self, step: Step, rows: tuple[Row, ...], *, has_sources: bool) -> PreparedStep:
        targets, recorded = replace(step, rows=rows), self._recorded
        if has_sources or recorded is None or not recorded.can_run(targets):
            return self._laid_out.prepare(targets)
        return recorded.prepare(targets)

    def _nothing(self) -> Tensor:
        return torch.empty(0, self._model.config.hidden_size, dtype=self._model.dtype)
