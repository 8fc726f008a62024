"""One rank's share of a stage: the state of its requests, and what it computes for a step.

The runtime drives it, on each rank, in step order:

    plan = stage.begin(step)                 frees, takes up, lays out; needs neither activations nor fed tokens
    stage.feed(handles, tokens)              first stage, prefetch: tokens that the last stage drew earlier
    out = stage.forward(plan, hidden)        [tokens, hidden] for the next stage; on the last one, logits
    sampled = stage.sample(plan, out)        rank 0 of the last stage

`begin` of a later step may run before `forward` of an earlier one (that is how the control message overtakes the
computation): the plan of each step holds all that its forward pass needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orca.core.errors import EngineError
from orca.core.request import Logprob, SamplingParams, Token
from orca.core.step import NewRequest, Row, Sampled, Step
from orca.kernels.attention import RaggedAttention
from orca.kernels.reference import ContextRow
from orca.worker.kv_cache import KVCache
from orca.worker.models.blocks import StepContext
from orca.worker.models.build import StageModel
from orca.worker.sampler import Draw, SamplingState, logprobs, sample


@dataclass(slots=True)
class _Request:
    """What a stage remembers of a request between its first step and the one that frees it."""

    params: SamplingParams
    tokens: tuple[int, ...]  # known when it was brought: prompt, then the log
    prompt_length: int
    line: int  # its place in the buffer of fed tokens
    sampling: SamplingState | None = None  # where tokens are drawn
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # gathered chunk by chunk


@dataclass(frozen=True, slots=True)
class _PromptRows:
    """Rows of the logits that tell prompt tokens: row first + i is for prompt token `targets[i]`."""

    request: _Request
    first: int
    targets: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Plan:
    """A step laid out for this rank."""

    step: Step
    tokens: int  # rows of the flat tensor
    context: StepContext | None = None  # None when the step runs no rows
    ids: Tensor | None = None  # [tokens], first stage; fed tokens still to be filled in
    fed_rows: Tensor | None = None  # flat rows whose token is fed, and where the buffer has it
    fed_lines: Tensor | None = None
    logit_rows: Tensor | None = None  # last stage: flat rows whose logits are wanted; None wants none
    draws: list[tuple[Row, _Request, int]] = field(default_factory=list)  # sampling rows, and their row of the logits
    prompt_rows: list[_PromptRows] = field(default_factory=list)


class Stage:
    """One rank of one stage, in one epoch.

    Args:
        slots: KV slots, a whole number of blocks.
        eos_token_ids: what min_tokens keeps from being drawn, besides a request's own stop ids.
        feeds_tokens: whether rows may leave their input token to `feed`.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        slots: int,
        block_tokens: int,
        eos_token_ids: Sequence[int],
        feeds_tokens: bool,
    ) -> None:
        self._model = model
        self._eos_token_ids = tuple(eos_token_ids)
        self._feeds_tokens = feeds_tokens
        self._requests: dict[int, _Request] = {}
        self._fed = torch.zeros(0, dtype=torch.int64, device=model.device)
        self._free_lines: list[int] = []
        self.cache = KVCache(
            num_layers=len(model.layers),
            slots=slots,
            block_tokens=block_tokens,
            kv_heads=model.heads.num_kv,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            device=model.device,
        )

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
        rows: list[ContextRow] = []
        first = 0
        for row in step.rows:
            slots = self.cache.extend(row.handle, row.start + row.count)
            rows.append(ContextRow(first, row.count, torch.from_numpy(slots)))
            first += row.count
        plan.context = self._context(step, rows)
        if self._model.shard.is_first:
            self._lay_out_ids(plan)
        if self._model.shard.is_last:
            self._lay_out_logits(plan)
        return plan

    def feed(self, handles: Sequence[int], tokens: Tensor | Sequence[int]) -> None:
        """Tokens drawn by the last stage, one for each handle: the inputs of the rows that name none.

        Handles that were freed meanwhile are passed over.
        """
        known = [place for place, handle in enumerate(handles) if handle in self._requests]
        if not known:
            return
        values = torch.as_tensor(tokens, dtype=torch.int64, device=self._model.device)
        lines = torch.tensor([self._requests[handles[place]].line for place in known], device=self._model.device)
        if len(known) < len(handles):
            values = values[torch.tensor(known, device=self._model.device)]
        self._fed.index_copy_(0, lines, values)

    @torch.inference_mode()
    def forward(self, plan: Plan, hidden: Tensor | None = None) -> Tensor:
        """Run the stage's layers over a step.

        Args:
            hidden: [tokens, hidden] from the stage before; the first stage has none.
        Returns: [tokens, hidden] for the next stage; on the last one float32 logits [wanted rows, vocab] (no rows
            where nothing is wanted).
        """
        model, context = self._model, plan.context
        if context is None:
            width = model.config.vocab_size if model.shard.is_last else model.config.hidden_size
            return torch.empty(0, width, dtype=torch.float32 if model.shard.is_last else model.dtype)
        context.group = model.group
        if model.embed is not None:
            assert plan.ids is not None
            if plan.fed_rows is not None and plan.fed_lines is not None:
                plan.ids.index_copy_(0, plan.fed_rows, self._fed.index_select(0, plan.fed_lines))
            hidden = model.embed(plan.ids, context)
        assert hidden is not None
        assert hidden.shape == (plan.tokens, model.config.hidden_size)
        for layer in model.layers:
            hidden = layer(hidden, context)
        if model.head is None:
            return hidden
        if plan.logit_rows is None:
            return hidden.new_empty(0, model.config.vocab_size, dtype=torch.float32)
        return model.head(hidden.index_select(0, plan.logit_rows), context)

    @torch.inference_mode()
    def sample(self, plan: Plan, logits: Tensor) -> list[Sampled]:
        """Draw a token for each sampling row, in row order, and remember what the next draws need of it."""
        for part in plan.prompt_rows:
            rows = logits[part.first : part.first + len(part.targets)]
            top = part.request.params.prompt_logprobs or 0
            part.request.prompt_logprobs += logprobs(rows, part.targets, [top] * len(part.targets))
        if not plan.draws:
            return []
        chosen = [row for _, _, row in plan.draws]
        if len(chosen) < logits.shape[0]:
            logits = logits.index_select(0, torch.tensor(chosen, device=logits.device))
        draws = []
        for row, request, _ in plan.draws:
            assert request.sampling is not None
            draws.append(Draw(request.sampling, row.start + row.count - request.prompt_length))
        tokens = sample(logits, draws)
        reported = _reported(logits, tokens, draws)
        sampled = []
        for (row, request, _), draw, token, logprob in zip(plan.draws, draws, tokens, reported, strict=True):
            if draw.state.counts is not None:
                draw.state.counts.add(token)
            told = tuple(request.prompt_logprobs) if draw.index == 0 else ()
            sampled.append(Sampled(row.handle, draw.index, Token(token, logprob, told)))
            request.prompt_logprobs = []
        return sampled

    def check(self) -> None:
        """Recount the invariants of state and cache."""
        self.cache.check()
        lines = [request.line for request in self._requests.values()]
        assert sorted(lines + self._free_lines) == list(range(len(self._fed))), "a line is lost or held twice"

    def _drop(self, handle: int) -> None:
        request = self._requests.pop(handle, None)
        if request is not None:
            self._free_lines.append(request.line)
            self.cache.free(handle)

    def _take_up(self, new: NewRequest) -> None:
        self.cache.reserve(new.handle, new.max_total_tokens)
        if not self._free_lines:
            lines = len(self._fed)
            grown = max(16, 2 * lines)
            self._free_lines = list(range(grown - 1, lines - 1, -1))
            self._fed = torch.cat((self._fed, self._fed.new_zeros(grown - lines)))
        sampling = None
        if self._model.shard.is_last and self._model.shard.rank == 0:
            sampling = SamplingState.start(new.sampling, new.tokens, new.prompt_length, self._eos_token_ids)
        line = self._free_lines.pop()
        self._requests[new.handle] = _Request(new.sampling, new.tokens, new.prompt_length, line, sampling)

    def _context(self, step: Step, rows: list[ContextRow]) -> StepContext:
        model = self._model
        positions = torch.cat([torch.arange(row.start, row.start + row.count) for row in step.rows]).to(model.device)
        own = torch.cat([row.slots[-row.count :] for row in rows]).to(model.device)
        longest = max(len(row.slots) for row in rows)
        attention: dict[int | None, RaggedAttention] = {}
        for window in set(model.windows):
            # A window that no context exceeds hides nothing: such layers share the geometry of those without one.
            effective = None if window is None or window >= longest else window
            if effective not in attention:
                attention[effective] = RaggedAttention(
                    rows,
                    model.heads.kv_of_query,
                    kv_heads=model.heads.num_kv,
                    cache_slots=self.cache.slots,
                    window=effective,
                    dtype=model.dtype,
                    device=model.device,
                )
            attention[window] = attention[effective]
        rotation = None
        if model.rotary is not None:
            lengths = None
            if model.rotary.needs_lengths:
                prompts = torch.tensor([self._requests[row.handle].prompt_length for row in step.rows])
                counts = torch.tensor([row.count for row in step.rows])
                lengths = torch.repeat_interleave(prompts, counts).to(model.device)
            rotation = model.rotary.rows(positions, lengths)
        return StepContext(
            group=model.group,
            caches=self.cache.layers,
            slots=own,
            positions=positions,
            attention=attention,
            rotation=rotation,
        )

    def _lay_out_ids(self, plan: Plan) -> None:
        ids: list[int] = []
        fed_rows: list[int] = []
        fed_lines: list[int] = []
        for row in plan.step.rows:
            request = self._requests[row.handle]
            known = request.tokens[row.start : row.start + row.count]
            if row.token is not None and row.count == 1:
                ids.append(row.token)
            elif len(known) == row.count:
                ids.extend(known)
            elif row.count == 1 and self._feeds_tokens:
                fed_rows.append(len(ids))
                fed_lines.append(request.line)
                ids.append(0)
            else:
                raise EngineError(
                    f"step {plan.step.number}: tokens {row.start}..{row.start + row.count - 1} of request {row.handle} "
                    f"are not known: it was brought with {len(request.tokens)}"
                )
        device = self._model.device
        plan.ids = torch.tensor(ids, device=device)
        if fed_rows:
            plan.fed_rows = torch.tensor(fed_rows, device=device)
            plan.fed_lines = torch.tensor(fed_lines, device=device)

    def _lay_out_logits(self, plan: Plan) -> None:
        """Logits are wanted after the last token of sampling rows, and over prompts whose log probabilities are."""
        wanted: list[int] = []
        first = 0
        for row in plan.step.rows:
            request = self._requests[row.handle]
            told = _prompt_targets(request, row)
            if told:
                plan.prompt_rows.append(_PromptRows(request, len(wanted), told))
                wanted.extend(range(first, first + len(told)))
            if row.sample:
                plan.draws.append((row, request, len(wanted)))
                wanted.append(first + row.count - 1)
            first += row.count
        if wanted:
            plan.logit_rows = torch.tensor(wanted, device=self._model.device)


def _prompt_targets(request: _Request, row: Row) -> tuple[int, ...]:
    """Prompt tokens whose log probability this row tells: none once token 0, which carries them, is in the log."""
    if request.params.prompt_logprobs is None or len(request.tokens) > request.prompt_length:
        return ()
    return request.tokens[row.start + 1 : min(row.start + row.count + 1, request.prompt_length)]


def _reported(logits: Tensor, tokens: Sequence[int], draws: Sequence[Draw]) -> list[Logprob | None]:
    """Log probabilities where a request asks for them."""
    asking = [row for row, draw in enumerate(draws) if draw.state.params.logprobs is not None]
    reported: list[Logprob | None] = [None] * len(draws)
    if asking:
        rows = logits if len(asking) == len(draws) else logits[torch.tensor(asking, device=logits.device)]
        tops = [draws[row].state.params.logprobs or 0 for row in asking]
        for row, logprob in zip(asking, logprobs(rows, [tokens[row] for row in asking], tops), strict=True):
            reported[row] = logprob
    return reported
