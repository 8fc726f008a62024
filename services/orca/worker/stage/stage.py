"""One rank's share of a stage: the state of its requests, and the computation of a step.

The executor calls it on each rank, in step order:

    prepared = stage.begin(step)                 free, add, lay out; needs neither activations nor device tokens
    stage.put_device_tokens(handles, tokens)     prefetch, stage that embeds targets: tokens sampled earlier
    output = stage.forward(prepared, hidden)     [tokens, hidden] for the next stage; logits on the last stage
    sample = stage.sample(prepared, output)      rank 0 of the last stage; a device may still compute the tokens
    sampled = sample.read()

Most steps run from a recording (recorded_steps.py); the others are laid out (laid_out_steps.py). Steps of an
encoder-decoder model have two parts (encoder_decoder_steps.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orca.core.domain.request import Logprob
from orca.core.domain.step import Row, Step
from orca.worker.models.build import StageModel, prepare_each
from orca.worker.stage.encoder_decoder_steps import EncoderDecoderSteps
from orca.worker.stage.kv_cache import KVCache
from orca.worker.stage.laid_out_steps import LaidOutSteps
from orca.worker.stage.recorded_steps import RecordedSteps
from orca.worker.stage.requests import StageRequest, StageRequests
from orca.worker.stage.sampling import DeviceSampler, HostSample, SamplingRow, StepSample, sampler_for
from orca.worker.stage.step_runner import PreparedStep, StepOutput, StepRunner

_PROMPT_LOGITS_BYTES = 32 << 20
"""Float32 logits of prompt positions that are held at a time. Any client may ask for the logits of a whole prompt. They
take the vocabulary times the prompt's tokens, several times over, and no count of KV slots leaves room for that.
"""


@dataclass(frozen=True, slots=True)
class EmptyStep:
    """A step without rows for this stage, which only frees and adds requests (step_runner.PreparedStep)."""

    step: Step
    model: StageModel

    @property
    def sampling(self) -> Sequence[tuple[Row, StageRequest]]:
        return ()

    def run(self, hidden: Tensor | None) -> StepOutput:  # noqa: ARG002 (the protocol's signature)
        model = self.model
        if model.shard.is_last:
            return StepOutput(torch.empty(0, model.config.vocab_size, dtype=torch.float32))
        return StepOutput(torch.empty(0, model.config.hidden_size, dtype=model.dtype))


class Stage:
    """One rank of one stage, in one epoch.

    Args:
        slots: KV slots, a whole number of blocks.
        eos_token_ids: tokens that min_tokens forbids, besides a request's own stop ids.
        feeds_tokens: rows may leave their input token to `put_device_tokens`.
        prompt_logits_bytes: logits that are held at a time for the log probabilities of prompts; the same on every
            rank of the stage.
        on_streams: record steps on several streams of a device (recorded_steps.py).
    """

    def __init__(
        self,
        model: StageModel,
        *,
        slots: int,
        block_tokens: int,
        eos_token_ids: Sequence[int],
        feeds_tokens: bool,
        prompt_logits_bytes: int = _PROMPT_LOGITS_BYTES,
        on_streams: bool = False,
    ) -> None:
        self._model = model
        if any(block_tokens != each.block_tokens for each in model.sizes):  # loading compiled them for another size
            prepare_each([replace(each, block_tokens=block_tokens) for each in model.sizes])
        self.cache = KVCache(
            num_layers=len(model.layers),
            slots=slots,
            block_tokens=block_tokens,
            kv_heads=model.heads.num_kv,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            device=model.device,
            longest=model.info.max_model_len,
            has_sources=model.encoder_layers > 0,
        )
        samples = model.shard.is_last and model.shard.rank == 0
        self._sampler = sampler_for(model, tuple(eos_token_ids)) if samples else None
        kernel = self._sampler.kernel if isinstance(self._sampler, DeviceSampler) else None
        self._requests = StageRequests(model, self.cache, kernel, feeds_tokens=feeds_tokens)
        self._laid_out = LaidOutSteps(model, self.cache, self._requests, prompt_logits_bytes=prompt_logits_bytes)
        self._recorded = RecordedSteps.create(model, self.cache, self._requests, kernel, on_streams=on_streams)
        self._both: EncoderDecoderSteps | None = None
        if model.encoder_layers:
            self._both = EncoderDecoderSteps(model, self.cache, self._requests, self._laid_out, self._recorded)
        kinds = model.info.encoder_decoder
        # Of several tokens, `generate` makes all equally likely, and takes the lowest id if it is greedy.
        self._forced_token = min(kinds.forced_eos_token_ids, default=None) if kinds is not None else None

    @property
    def begins_targets(self) -> bool:
        """Return whether this stage embeds the tokens that the master's requests generate."""
        return self._model.embed is not None

    def rows_in(self, step: Step) -> int:
        """Return how many rows of activations the stage before sends for a step (StageModel.rows_in)."""
        return self._model.rows_in(step)

    def rows_out(self, step: Step) -> int:
        """Return how many rows of activations a step sends to the next stage; 0 on the last one."""
        return self._model.rows_out(step)

    @property
    def slots_in_use(self) -> int:
        """KV slots in blocks of requests and of kept tables."""
        return self.cache.slots_in_use

    def begin(self, step: Step) -> PreparedStep:
        """Apply a step's differences to the requests, and prepare its rows.

        Raises: EngineError if the step does not fit what this stage knows: the epoch is broken.
        """
        for handle in step.freed:
            self._requests.remove(handle)
        for handle in step.kept:
            self._requests.keep(handle)
        for kept in step.evicted:
            self.cache.blocks.evict(kept)
        for new in step.new:
            if new.prefix is not None:
                self._extend_filled(new.prefix.handle, step)
            request = self._requests.add(new)
            if self._sampler is not None:
                self._sampler.start(request.line, new)
        if not step.rows or (not self._model.layers and not step.source_tokens):
            return EmptyStep(step, self._model)
        if self._both is not None:
            return self._both.prepare(step)
        recorded = self._recorded
        runner: StepRunner = self._laid_out if recorded is None or not recorded.can_run(step) else recorded
        return runner.prepare(step)

    def _extend_filled(self, handle: int, step: Step) -> None:
        """Give a request the blocks that its row of this step fills: a request that is new with it begins with them."""
        for row in step.rows:
            if row.handle == handle:
                self.cache.extend(handle, row.start + row.count)

    def put_device_tokens(self, handles: Sequence[int], tokens: Tensor | Sequence[int]) -> None:
        """Take tokens that the last stage sampled, one for each handle: the inputs of rows that name none."""
        self._requests.put_device_tokens(handles, tokens)

    def forward(self, prepared: PreparedStep, hidden: Tensor | None = None) -> StepOutput:
        """Run the stage's layers over a step.

        Args:
            hidden: [rows, hidden] from the stage before, which is overwritten; None if it sends none (`rows_in`).
        """
        return prepared.run(hidden)

    def sample(self, prepared: PreparedStep, output: StepOutput) -> StepSample:
        """Sample a token for each sampling row, in row order, and remember what later samples depend on."""
        if not prepared.sampling:
            return HostSample()
        rows = []
        for row, request in prepared.sampling:
            index = row.start + row.count - request.prompt_length
            prompt_logprobs: tuple[Logprob, ...] = ()
            if index == 0:
                prompt_logprobs, request.prompt_logprobs = tuple(request.prompt_logprobs), []
            forced = self._forced_token if index == request.last_index else None
            rows.append(SamplingRow(row.handle, request.line, index, request.params, prompt_logprobs, forced))
        assert self._sampler is not None
        return self._sampler.sample(rows, output)

    def check(self) -> None:
        """Recount the invariants of cache and requests."""
        self.cache.check()
        self._requests.check()
