"""Steps whose inputs are laid out on the device, and whose layers are called in turn. Any step can run so.

Only these steps report log probabilities of prompts.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orca.core.domain.step import Row, Step
from orca.kernels.contract.reference import ContextRow
from orca.kernels.contract.transfer import to_device
from orca.kernels.device import kernels_of
from orca.worker.models.blocks import StepContext, WantedRows
from orca.worker.models.build import StageModel
from orca.worker.parallel.shard import SingleRank
from orca.worker.stage.host_sampler import logprobs
from orca.worker.stage.kv_cache import KVCache
from orca.worker.stage.requests import StageRequest, StageRequests
from orca.worker.stage.step_context import StepContexts
from orca.worker.stage.step_runner import StepOutput


@dataclass(frozen=True, slots=True)
class InputIds:
    """The token ids of a step's flat rows, on the stage that embeds them."""

    ids: Tensor  # [tokens] int64; device tokens are filled in when the step runs
    device_rows: Tensor | None  # the flat rows of the device tokens; None: there are none
    device_lines: Tensor | None  # the lines of their requests

    def read(self, device_tokens: Tensor) -> Tensor:
        """Fill the device tokens in. Args: device_tokens: [lines] int64."""
        if self.device_rows is not None and self.device_lines is not None:
            self.ids.index_copy_(0, self.device_rows, device_tokens.index_select(0, self.device_lines))
        return self.ids


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Prompt tokens whose log probabilities a step reports, on the last stage."""

    tokens: list[tuple[StageRequest, int]]
    rows: Tensor  # the flat row whose logits give each token's log probability


@dataclass(slots=True, kw_only=True)
class LaidOutStep:
    """A step whose inputs lie on the device (step_runner.PreparedStep)."""

    runner: "LaidOutSteps"
    step: Step
    tokens: int  # flat rows
    context: StepContext
    inputs: InputIds | None  # on the stage that embeds them
    # On the last stage; None: no row samples, or none reports log probabilities of its prompt.
    sampling: list[tuple[Row, StageRequest]]
    sampling_rows: Tensor | None  # the flat row of each sampling row's last token
    prompt_targets: PromptTargets | None

    def run(self, hidden: Tensor | None) -> StepOutput:
        return self.runner.run(self, hidden)


class LaidOutSteps:
    """The runner for any step of one rank (step_runner.StepRunner).

    Args:
        prompt_logits_bytes: logits of prompt positions that are held at a time; the same on every rank of the stage.
    """

    def __init__(self, model: StageModel, cache: KVCache, requests: StageRequests, *, prompt_logits_bytes: int) -> None:
        self._model, self._cache, self._requests = model, cache, requests
        self._contexts = StepContexts(model, cache)
        self._prompt_rows_max = max(1, prompt_logits_bytes // (4 * model.config.vocab_size))
        parts = model.layers if model.embed is None else [model.embed, *model.layers]
        self._only_kernels = isinstance(model.group, SingleRank) and all(part.only_kernels for part in parts)

    def prepare(self, step: Step) -> LaidOutStep:
        """Build all inputs of the forward pass (StepRunner.prepare)."""
        rows: list[ContextRow] = []
        first = 0
        for row in step.rows:
            self._cache.extend(row.handle, row.start + row.count, row.start)
            request = self._requests.by_handle[row.handle]
            rows.append(ContextRow(first, row.count, row.start, request.line, len(request.source) or None))
            first += row.count
        self._cache.publish()
        shard = self._model.shard
        prepared = LaidOutStep(
            runner=self,
            step=step,
            tokens=first,
            context=self._contexts.for_rows(rows, self._requests.lines.prompts),
            inputs=self._input_ids(step) if self._model.embed is not None else None,
            sampling=[],
            sampling_rows=None,
            prompt_targets=None,
        )
        if shard.is_last:
            self._lay_out_logits(prepared)
            prepared.context.wanted = self._wanted(prepared, rows)
        return prepared

    @staticmethod
    def put_memory(prepared: LaidOutStep, memory: Tensor, slots: Tensor) -> None:
        """Give a step the encoder output of its sources.

        Args:
            memory: [source tokens, hidden].
            slots: [source tokens], where their keys and values go.
        """
        cross = prepared.context.cross
        assert cross is not None
        cross.memory, cross.slots = memory, slots

    @torch.inference_mode()
    def run(self, prepared: LaidOutStep, hidden: Tensor | None) -> StepOutput:
        """Run the layers; on the last stage also the head, over the sampling rows and over prompt targets."""
        model, context = self._model, prepared.context
        context.group = model.group
        hidden = self._run_layers(prepared, hidden)
        if model.head is None:
            return StepOutput(hidden)
        if prepared.prompt_targets is not None:
            self._score_prompts(prepared.prompt_targets, hidden, context)
        if prepared.sampling_rows is None:
            return StepOutput(hidden.new_empty(0, model.config.vocab_size, dtype=torch.float32))
        if len(hidden) > len(prepared.sampling_rows):
            hidden = hidden.index_select(0, prepared.sampling_rows)
        return StepOutput(model.head(hidden, context))

    def _run_layers(self, prepared: LaidOutStep, hidden: Tensor | None) -> Tensor:
        model, context = self._model, prepared.context
        ids = None if prepared.inputs is None else prepared.inputs.read(self._requests.lines.last_tokens)
        with kernels_of(model.device).deferred() if self._only_kernels else nullcontext():
            if model.embed is not None:
                assert ids is not None
                hidden = model.embed(ids, context)
            assert hidden is not None
            assert hidden.shape == (prepared.tokens, model.config.hidden_size)
            for layer in model.layers[:-1]:
                hidden = layer(hidden, context)
            if model.shard.is_last and prepared.sampling_rows is None and prepared.prompt_targets is None:
                model.layers[-1].keep(hidden, context)
                return hidden[:0]
            return model.layers[-1](hidden, context)

    def _score_prompts(self, targets: PromptTargets, hidden: Tensor, context: StepContext) -> None:
        """Gather the log probabilities of prompt tokens, some rows at a time.

        Every rank of the stage takes part in each product of the head; only the rank that samples keeps the results.
        """
        assert self._model.head is not None
        for first in range(0, len(targets.tokens), self._prompt_rows_max):
            part = slice(first, first + self._prompt_rows_max)
            logits = self._model.head(hidden.index_select(0, targets.rows[part]), context)
            if self._model.shard.rank > 0:
                continue
            asking = targets.tokens[part]
            tops = [request.params.prompt_logprobs or 0 for request, _ in asking]
            scores = logprobs(logits, [token for _, token in asking], tops)
            for (request, _), logprob in zip(asking, scores, strict=True):
                request.prompt_logprobs.append(logprob)

    def _input_ids(self, step: Step) -> InputIds:
        ids: list[int] = []
        device_rows: list[int] = []
        device_lines: list[int] = []
        for row in step.rows:
            request = self._requests.by_handle[row.handle]
            known = self._requests.input_tokens(step, row, request)
            if known is None:
                device_rows.append(len(ids))
                device_lines.append(request.line)
            ids.extend((0,) if known is None else known)
        if not device_rows:
            return InputIds(self._to_device(ids), None, None)
        return InputIds(self._to_device(ids), self._to_device(device_rows), self._to_device(device_lines))

    def _lay_out_logits(self, prepared: LaidOutStep) -> None:
        """Find the rows whose logits are needed: the last token of sampling rows, and prompt targets."""
        sampling_rows: list[int] = []
        targets: list[tuple[StageRequest, int]] = []
        target_rows: list[int] = []
        first = 0
        for row in prepared.step.rows:
            request = self._requests.by_handle[row.handle]
            tokens = request.prompt_targets(row)
            targets.extend((request, token) for token in tokens)
            target_rows.extend(range(first, first + len(tokens)))
            if row.sample:
                prepared.sampling.append((row, request))
                sampling_rows.append(first + row.count - 1)
            first += row.count
        if sampling_rows:
            prepared.sampling_rows = self._to_device(sampling_rows)
        if targets:
            prepared.prompt_targets = PromptTargets(targets, self._to_device(target_rows))

    def _wanted(self, prepared: LaidOutStep, rows: Sequence[ContextRow]) -> WantedRows | None:
        """Return the last tokens of sampling rows if the model's last layer needs no others."""
        sampling_rows = prepared.sampling_rows
        if sampling_rows is None or prepared.prompt_targets is not None or len(sampling_rows) == prepared.tokens:
            return None
        sampling = (row for row, each in zip(rows, prepared.step.rows, strict=True) if each.sample)
        last = [ContextRow(place, 1, row.end - 1, row.line, row.keys) for place, row in enumerate(sampling)]
        attention = self._contexts.attention(last, self._model.windows[-1:])
        return WantedRows(sampling_rows, attention, self._contexts.cross_attention(last))

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        return to_device(np.array(numbers, np.int64), self._model.device)
