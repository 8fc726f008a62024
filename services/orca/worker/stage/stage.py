"""One rank's share of a stage: the state of its requests, and what it computes for a step.

The runtime drives it, on each rank, in step order:

    plan = stage.begin(step)                 frees, takes up, lays out; needs neither activations nor fed tokens
    stage.feed(handles, tokens)              first stage, prefetch: tokens that the last stage drew earlier
    out = stage.forward(plan, hidden)        [tokens, hidden] for the next stage; on the last one, logits
    drawn = stage.draw(plan, out)            rank 0 of the last stage: tokens that may be on their way yet
    sampled = drawn.read()

Most steps need nothing laid out but a few numbers for each request (recorded_steps.py).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from orca.core.domain.errors import EngineError
from orca.core.domain.request import Logprob, SamplingParams
from orca.core.domain.step import NewRequest, Row, Sampled, Step
from orca.kernels.contract.recording import RequestLines, StepDescription
from orca.kernels.contract.reference import ContextRow
from orca.kernels.contract.transfer import host_view, scatter, to_device
from orca.kernels.device import kernels_of
from orca.worker.models.blocks import StepContext, WantedRows
from orca.worker.models.build import StageModel
from orca.worker.parallel.shard import SingleRank
from orca.worker.stage.host_sampler import logprobs
from orca.worker.stage.kv_cache import KVCache
from orca.worker.stage.recorded_steps import Ran, RecordedSteps
from orca.worker.stage.sampling import Asked, DeviceDrawing, Drawn, HostDrawn, drawing_of
from orca.worker.stage.step_context import StepContexts

_PROMPT_LOGITS_BYTES = 32 << 20
"""Of float32 logits of prompt positions at a time. Those of a whole prompt, which any client may ask for, would take
as many times the vocabulary as the prompt has tokens, several times over: no count of KV slots leaves room for that."""


@dataclass(slots=True)
class _Request:
    """What a stage remembers of a request between its first step and the one that frees it."""

    params: SamplingParams
    tokens: tuple[int, ...]  # known when it was brought: prompt, then the log
    prompt_length: int
    line: int  # its place in what the device keeps of the requests
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # gathered chunk by chunk


@dataclass(slots=True, kw_only=True)
class Plan:
    """A step laid out for this rank."""

    step: Step
    tokens: int  # rows of the flat tensor
    # Where steps are recorded: what the recording is told, and, once it has run, what it has made. There is no context
    # then.
    said: StepDescription | None = None
    ran: Ran | None = None
    context: StepContext | None = None  # None when the step runs no rows
    ids: Tensor | None = None  # [tokens], first stage; fed tokens still to be filled in
    fed_rows: Tensor | None = None  # flat rows whose token is fed, and where the buffer has it
    fed_lines: Tensor | None = None
    # Last stage: the rows that sample, and their flat rows, in the same order; None where none does.
    draws: list[tuple[Row, _Request]] = field(default_factory=list)
    draw_rows: Tensor | None = None
    # Last stage: prompt tokens whose log probability is told, and the flat rows that tell them, in the same order.
    told: list[tuple[_Request, int]] = field(default_factory=list)
    told_rows: Tensor | None = None


class Stage:
    """One rank of one stage, in one epoch.

    Args:
        slots: KV slots, a whole number of blocks.
        eos_token_ids: what min_tokens keeps from being drawn, besides a request's own stop ids.
        feeds_tokens: whether rows may leave their input token to `feed`.
        prompt_logits_bytes: of logits that are held at a time to tell the log probabilities of prompts; the same on
            every rank of the stage.
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
        self._told_rows_max = max(1, prompt_logits_bytes // (4 * model.config.vocab_size))
        self._feeds_tokens = feeds_tokens
        is_alone = isinstance(model.group, SingleRank)
        parts = model.layers if model.embed is None else [model.embed, *model.layers]
        self._only_kernels = is_alone and all(part.only_kernels for part in parts)
        self._requests: dict[int, _Request] = {}
        if block_tokens != model.sizes.block_tokens:  # for which kernels were compiled while the model was loaded
            kernels_of(model.device).prepare(replace(model.sizes, block_tokens=block_tokens))
        self.cache = KVCache(
            num_layers=len(model.layers),
            slots=slots,
            block_tokens=block_tokens,
            kv_heads=model.heads.num_kv,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            device=model.device,
            longest=model.info.max_model_len,
        )
        draws = model.shard.is_last and model.shard.rank == 0
        self._drawing = drawing_of(model, tuple(eos_token_ids)) if draws else None
        self._sampler = self._drawing.sampler if isinstance(self._drawing, DeviceDrawing) else None
        nothing = torch.zeros(0, dtype=torch.int64, device=model.device)
        self._grow(RequestLines(self.cache.tables, last_tokens=nothing, prompts=nothing))
        self._contexts = StepContexts(model, self.cache)
        self._recorded = RecordedSteps.of(model, self.cache, self._sampler, on_streams=on_streams)

    @property
    def slots_in_use(self) -> int:
        """KV slots in blocks held by requests."""
        return self.cache.slots_in_use

    def begin(self, step: Step) -> Plan:
        """Apply a step's differences and lay out its rows.

        Raises: EngineError when the step does not fit what this stage knows: the epoch is broken.
        """
        for handle in step.freed:
            self._drop(handle)
        for new in step.new:
            self._take_up(new)
        plan = Plan(step=step, tokens=step.tokens)
        if not step.rows:
            return plan
        if self._is_recorded(plan):
            self._say(plan)
        else:
            self._lay_out(plan)
        return plan

    def feed(self, handles: Sequence[int], tokens: Tensor | Sequence[int]) -> None:
        """Tokens drawn by the last stage, one for each handle: the inputs of the rows that name none.

        Handles that were freed meanwhile are passed over.
        """
        known = [place for place, handle in enumerate(handles) if handle in self._requests]
        scatter(self._lines.last_tokens, [self._requests[handles[place]].line for place in known], tokens, known)

    def forward(self, plan: Plan, hidden: Tensor | None = None) -> Tensor:
        """Run the stage's layers over a step.

        Args:
            hidden: [tokens, hidden] from the stage before, which is overwritten; the first stage has none.
        Returns: [tokens, hidden] for the next stage; on the last one float32 logits [sampling rows, vocab].
        """
        if plan.said is not None:
            assert self._recorded is not None
            plan.ran = self._recorded(plan.said, self._lines, hidden)
            return plan.ran.output
        return self._forward_laid_out(plan, hidden)

    @torch.inference_mode()
    def _forward_laid_out(self, plan: Plan, hidden: Tensor | None) -> Tensor:
        model, context = self._model, plan.context
        if context is None:
            width = model.config.vocab_size if model.shard.is_last else model.config.hidden_size
            return torch.empty(0, width, dtype=torch.float32 if model.shard.is_last else model.dtype)
        context.group = model.group
        if plan.ids is not None and plan.fed_rows is not None and plan.fed_lines is not None:
            plan.ids.index_copy_(0, plan.fed_rows, self._lines.last_tokens.index_select(0, plan.fed_lines))
        hidden = self._through_layers(plan, hidden, context)
        if model.head is None:
            return hidden
        self._tell_prompts(plan, hidden, context)
        if plan.draw_rows is None:
            return hidden.new_empty(0, model.config.vocab_size, dtype=torch.float32)
        if len(hidden) > len(plan.draw_rows):
            hidden = hidden.index_select(0, plan.draw_rows)
        return model.head(hidden, context)

    def draw(self, plan: Plan, logits: Tensor) -> Drawn:
        """Draw a token for each sampling row, in row order; what the next draws need of it is remembered."""
        if not plan.draws:
            return HostDrawn([])
        asked = []
        for row, request in plan.draws:
            index = row.start + row.count - request.prompt_length
            told: tuple[Logprob, ...] = ()
            if index == 0:
                told, request.prompt_logprobs = tuple(request.prompt_logprobs), []
            asked.append(Asked(row.handle, request.line, index, request.params, told))
        assert self._drawing is not None
        return self._drawing.draw(asked, plan.ran or Ran(logits))

    def sample(self, plan: Plan, logits: Tensor) -> list[Sampled]:
        """`draw`, and wait for the tokens."""
        return self.draw(plan, logits).read()

    def check(self) -> None:
        """Recount the invariants of state and cache."""
        self.cache.check()
        assert len(self._lines.last_tokens) == len(self._lines.prompts) == len(self.cache.tables)
        assert self._lines.prompts.tolist() == self._prompt_lengths.tolist()

    def _through_layers(self, plan: Plan, hidden: Tensor | None, context: StepContext) -> Tensor:
        model = self._model
        with kernels_of(model.device).deferred() if self._only_kernels else nullcontext():
            if model.embed is not None:
                assert plan.ids is not None
                hidden = model.embed(plan.ids, context)
            assert hidden is not None
            assert hidden.shape == (plan.tokens, model.config.hidden_size)
            for layer in model.layers[:-1]:
                hidden = layer(hidden, context)
            if model.shard.is_last and plan.draw_rows is None and plan.told_rows is None:
                model.layers[-1].keep(hidden, context)
                return hidden[:0]
            return model.layers[-1](hidden, context)

    def _tell_prompts(self, plan: Plan, hidden: Tensor, context: StepContext) -> None:
        """Gather the log probabilities of prompt tokens, some rows at a time.

        Every rank of the stage takes part in each product of the head; the one that samples keeps what comes out.
        """
        if plan.told_rows is None:
            return
        assert self._model.head is not None
        for first in range(0, len(plan.told), self._told_rows_max):
            part = slice(first, first + self._told_rows_max)
            logits = self._model.head(hidden.index_select(0, plan.told_rows[part]), context)
            if self._model.shard.rank > 0:
                continue
            told = plan.told[part]
            tops = [request.params.prompt_logprobs or 0 for request, _ in told]
            scores = logprobs(logits, [token for _, token in told], tops)
            for (request, _), logprob in zip(told, scores, strict=True):
                request.prompt_logprobs.append(logprob)

    def _drop(self, handle: int) -> None:
        if self._requests.pop(handle, None) is not None:
            self.cache.free(handle)

    def _take_up(self, new: NewRequest) -> None:
        self._require_known(new)
        line = self.cache.reserve(new.handle, new.max_total_tokens)
        if self._lines.tables is not self.cache.tables:
            self._grow(self._lines)
        self._prompt_lengths[line] = new.prompt_length
        if self._drawing is not None:
            self._drawing.take_up(line, new)
        self._requests[new.handle] = _Request(new.sampling, new.tokens, new.prompt_length, line)

    def _require_known(self, new: NewRequest) -> None:
        """What is looked up in tables without being looked at once more is there.

        Raises: EngineError.
        """
        model = self._model
        if not 0 <= min(new.tokens) <= max(new.tokens) < model.config.vocab_size:
            raise EngineError(f"request {new.handle} has tokens that the model does not know: {max(new.tokens)}")
        if model.positions is not None and new.max_total_tokens > model.positions:
            raise EngineError(f"request {new.handle} has {new.max_total_tokens} tokens, the model {model.positions}")

    def _grow(self, lines: RequestLines) -> None:
        """As many lines as the tables have. A device that draws feeds on what it has drawn, where it is the first stage
        as well."""
        tables = self.cache.tables
        more = len(tables) - len(lines.last_tokens)
        last_tokens, prompts = (torch.cat((each, each.new_zeros(more))) for each in (lines.last_tokens, lines.prompts))
        if self._sampler is not None:
            self._sampler.lines.grow(len(tables))
            last_tokens = self._sampler.lines.last_tokens
        self._lines, self._prompt_lengths = RequestLines(tables, last_tokens, prompts), host_view(prompts)

    def _is_recorded(self, plan: Plan) -> bool:
        if self._recorded is None:
            return False
        rows = plan.step.rows
        if all(row.count == 1 and row.sample for row in rows):
            return True
        if plan.tokens > self._recorded.chunk_tokens_max:
            return False
        known = ((self._requests[row.handle], row) for row in rows if row.handle in self._requests)
        return not (self._model.shard.is_last and any(_prompt_targets(request, row) for request, row in known))

    def _say(self, plan: Plan) -> None:
        """What a recording is told of a step."""
        shard = self._model.shard
        said: list[tuple[int, int, int, int, int, bool]] = []
        chunks: list[tuple[int, Sequence[int]]] = []
        first = 0
        for row in plan.step.rows:
            block = self.cache.extend(row.handle, row.start + row.count)
            request = self._requests[row.handle]
            known = self._known(plan, row, request) if shard.is_first else None
            if known is not None and row.count > 1:
                chunks.append((first, known))
            if shard.is_last and row.sample:
                plan.draws.append((row, request))
            token = -1 if known is None else known[0]
            said.append((request.line, row.start, token, block, row.count, row.sample))
            first += row.count
        wanted = len(plan.draws) if shard.is_last and len(plan.draws) < plan.tokens else None
        self.cache.publish(is_told=len(said) == plan.tokens)
        plan.said = StepDescription(np.array(said, np.int64), plan.tokens, wanted, chunks)

    def _lay_out(self, plan: Plan) -> None:
        """All that the forward pass of any step needs."""
        rows: list[ContextRow] = []
        first = 0
        for row in plan.step.rows:
            self.cache.extend(row.handle, row.start + row.count)
            rows.append(ContextRow(first, row.count, row.start, self._requests[row.handle].line))
            first += row.count
        self.cache.publish()
        plan.context = self._contexts.of_rows(rows, self._lines.prompts)
        if self._model.shard.is_first:
            self._lay_out_ids(plan)
        if self._model.shard.is_last:
            self._lay_out_logits(plan)
            plan.context.wanted = self._wanted(plan, rows)

    def _there(self, numbers: Sequence[int]) -> Tensor:
        """Some whole numbers on the device."""
        return to_device(np.array(numbers, np.int64), self._model.device)

    def _wanted(self, plan: Plan, rows: Sequence[ContextRow]) -> WantedRows | None:
        """What the last layer may confine itself to: the last tokens of rows that sample."""
        if plan.draw_rows is None or plan.told_rows is not None or len(plan.draw_rows) == plan.tokens:
            return None
        sampling = (row for row, each in zip(rows, plan.step.rows, strict=True) if each.sample)
        last = [ContextRow(place, 1, row.end - 1, row.line) for place, row in enumerate(sampling)]
        return WantedRows(plan.draw_rows, self._contexts.attention(last, self._model.windows[-1:]))

    def _lay_out_ids(self, plan: Plan) -> None:
        ids: list[int] = []
        fed_rows: list[int] = []
        fed_lines: list[int] = []
        for row in plan.step.rows:
            request = self._requests[row.handle]
            known = self._known(plan, row, request)
            if known is None:
                fed_rows.append(len(ids))
                fed_lines.append(request.line)
            ids.extend((0,) if known is None else known)
        plan.ids = self._there(ids)
        if fed_rows:
            plan.fed_rows = self._there(fed_rows)
            plan.fed_lines = self._there(fed_lines)

    def _known(self, plan: Plan, row: Row, request: _Request) -> Sequence[int] | None:
        """A row's tokens; None for the one that is fed.

        Raises: EngineError for those that nobody has told.
        """
        if row.token is not None and row.count == 1:
            return (row.token,)
        known = request.tokens[row.start : row.start + row.count]
        if len(known) == row.count:
            return known
        if row.count == 1 and self._feeds_tokens:
            return None
        raise EngineError(
            f"step {plan.step.number}: tokens {row.start}..{row.start + row.count - 1} of request {row.handle} "
            f"are not known: it was brought with {len(request.tokens)}"
        )

    def _lay_out_logits(self, plan: Plan) -> None:
        """Logits are wanted after the last token of sampling rows, and over prompts whose log probabilities are."""
        draw_rows: list[int] = []
        told_rows: list[int] = []
        first = 0
        for row in plan.step.rows:
            request = self._requests[row.handle]
            targets = _prompt_targets(request, row)
            plan.told.extend((request, token) for token in targets)
            told_rows.extend(range(first, first + len(targets)))
            if row.sample:
                plan.draws.append((row, request))
                draw_rows.append(first + row.count - 1)
            first += row.count
        if draw_rows:
            plan.draw_rows = self._there(draw_rows)
        if told_rows:
            plan.told_rows = self._there(told_rows)


def _prompt_targets(request: _Request, row: Row) -> tuple[int, ...]:
    """Prompt tokens whose log probability this row tells: none once token 0, which carries them, is in the log."""
    if request.params.prompt_logprobs is None or len(request.tokens) > request.prompt_length:
        return ()
    return request.tokens[row.start + 1 : min(row.start + row.count + 1, request.prompt_length)]
