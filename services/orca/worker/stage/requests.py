"""The requests of a stage: a rank's state of each one, from its first step to the step that frees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orca.core.domain.errors import EngineError
from orca.core.domain.request import Logprob, SamplingParams
from orca.core.domain.step import NewRequest, Row, Step
from orca.kernels.contract.recording import RequestLines
from orca.kernels.contract.transfer import host_view, scatter
from orca.kernels.device import Sampler
from orca.worker.models.build import StageModel
from orca.worker.stage.kv_cache import KVCache


@dataclass(slots=True)
class StageRequest:
    """One request on a stage."""

    params: SamplingParams
    tokens: tuple[int, ...]  # known at its first step: the prompt, then the log; the target of an encoder-decoder model
    prompt_length: int  # those of `tokens` that are not of the log
    source: tuple[int, ...]  # of an encoder-decoder model; otherwise empty
    last_index: int | None  # of the last token of a whole log, which some models force; None: nobody needs it
    line: int  # its line in the device's tables (kernels/contract/recording.py)
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # gathered chunk by chunk

    def prompt_targets(self, row: Row) -> tuple[int, ...]:
        """Return the prompt tokens whose log probability this row gives.

        There are none after a restart with token 0 in the log: that token has carried them.
        """
        if self.params.prompt_logprobs is None or len(self.tokens) > self.prompt_length:
            return ()
        return self.tokens[row.start + 1 : min(row.start + row.count + 1, self.prompt_length)]


class StageRequests:
    """The requests by handle, and a line of the device's tables for each.

    Args:
        device_sampler: set on the last stage if its device samples; its lines grow with those of the requests.
        feeds_tokens: rows may leave their input token to `put_device_tokens`.
    """

    def __init__(
        self, model: StageModel, cache: KVCache, device_sampler: Sampler | None, *, feeds_tokens: bool
    ) -> None:
        self.by_handle: dict[int, StageRequest] = {}
        self._model = model
        self._cache = cache
        self._device_sampler = device_sampler
        self._feeds_tokens = feeds_tokens
        empty = torch.zeros(0, dtype=torch.int64, device=model.device)
        sources = None if cache.source_tables is None else empty
        self._grow(RequestLines(cache.tables, last_tokens=empty, prompts=empty, sources=sources))

    def add(self, new: NewRequest) -> StageRequest:
        """Reserve the request's KV slots and a line, and begin its table with those blocks that it shares.

        The request fits the model (screen.py): kernels look up its tokens and positions without a bounds check.

        Raises: EngineError if the slots are not there.
        """
        line = self._cache.reserve(new.handle, *new.table_tokens)
        if self.lines.tables is not self._cache.tables:
            self._grow(self.lines)
        if new.prefix is not None:
            self._cache.share(new.handle, new.prefix)
        has_source = bool(new.decoder_prefix)
        self._prompt_lengths[line] = new.target_start
        if self._source_lengths is not None:
            self._source_lengths[line] = new.prompt_length
        request = self.by_handle[new.handle] = StageRequest(
            params=new.sampling,
            tokens=new.target,
            prompt_length=new.target_start,
            source=new.tokens[: new.prompt_length] if has_source else (),
            last_index=None if new.max_new_tokens is None else new.max_new_tokens - 1,
            line=line,
        )
        return request

    def remove(self, handle: int) -> None:
        """Free the request's KV slots and line. A handle that is not known is ignored."""
        if self.by_handle.pop(handle, None) is not None:
            self._cache.free(handle)

    def keep(self, handle: int) -> None:
        """Free the request's line and reservation, and keep its KV blocks. Raises: EngineError if it is not known."""
        self.by_handle.pop(handle, None)
        self._cache.keep(handle)

    def put_device_tokens(self, handles: Sequence[int], tokens: Tensor | Sequence[int]) -> None:
        """Write the latest token of each request to the device, and ignore handles that were freed meanwhile."""
        requests = self.by_handle
        known = [place for place, handle in enumerate(handles) if handle in requests]
        scatter(self.lines.last_tokens, [requests[handles[place]].line for place in known], tokens, known)

    def input_tokens(self, step: Step, row: Row, request: StageRequest) -> Sequence[int] | None:
        """Return a row's input tokens; None if its only token is a device token.

        Raises: EngineError for tokens that neither the master nor the request's first step has given.
        """
        if row.token is not None and row.count == 1:
            return (row.token,)
        known = request.tokens[row.start : row.start + row.count]
        if len(known) == row.count:
            return known
        if row.count == 1 and self._feeds_tokens:
            return None
        raise EngineError(
            f"step {step.number}: tokens {row.start}..{row.start + row.count - 1} of request {row.handle} "
            f"are not known: its first step brought {len(request.tokens)}"
        )

    def check(self) -> None:
        """Check that the device's tables agree with each other and with the requests."""
        assert len(self.lines.last_tokens) == len(self.lines.prompts) == len(self._cache.tables)
        assert self.lines.prompts.tolist() == self._prompt_lengths.tolist()
        if self.lines.sources is not None and self._source_lengths is not None:
            assert self.lines.sources.tolist() == self._source_lengths.tolist()

    def _grow(self, lines: RequestLines) -> None:
        """Make as many lines as the block tables have.

        If the device samples, its sampler owns the device tokens: on a stage that is also the first, they are the
        inputs of the next step.
        """
        tables = self._cache.tables
        fed, prompts = (_longer(each, len(tables)) for each in (lines.last_tokens, lines.prompts))
        sources = None if lines.sources is None else _longer(lines.sources, len(tables))
        if self._device_sampler is not None:
            self._device_sampler.lines.grow(len(tables))
            fed = self._device_sampler.lines.last_tokens
        self.lines = RequestLines(tables, fed, prompts, self._cache.source_tables, sources)
        self._prompt_lengths = host_view(prompts)
        self._source_lengths = None if sources is None else host_view(sources)


def _longer(numbers: Tensor, lines: int) -> Tensor:
    """Return a copy with as many lines; the new ones are 0."""
    return torch.cat((numbers, numbers.new_zeros(lines - len(numbers))))
