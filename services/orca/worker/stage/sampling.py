"""Sampling on the last stage: on the host (CPUs), or on the device, without a wait of the host.

A device that samples uses the tokens as inputs of its next step by itself, and copies them to the host after the step.
So the next step may be launched before the host has read them (`StepSample`).

The host refuses a request whose token cannot be drawn (core.domain.refusal), and the other rows have their tokens. A
device does not refuse: it does not look for NaN and infinity yet, and such a request gets tokens that mean nothing.

Only this rank knows of its refusal at once, so the refused row keeps a token for the stages. Its next step, if there is
one on its way, computes with that token. The master ignores the result.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from orca.core.domain.request import Logprob, SamplingParams, Token
from orca.core.domain.step import NewRequest, Refused, Sampled
from orca.kernels.contract.sampling_lines import LineSettings
from orca.kernels.contract.transfer import HostCopy, to_device
from orca.kernels.device import Sampler, kernels_of
from orca.worker.machine import available_processors
from orca.worker.masks.request_mask import ModelMasks, RequestMask, TokenMask
from orca.worker.masks.token_masks import TokenMasks, mask_threads, vocabulary_reader
from orca.worker.models.build import StageModel
from orca.worker.stage.host_sampler import (
    Draw,
    SamplingState,
    Scores,
    apply_token_masks,
    logprobs,
    sample,
    scores_of,
)
from orca.worker.stage.step_runner import StepOutput

_NO_NUMBER = (
    "the model computed no finite number for token {index} of the output: its dtype may be too narrow for the input"
)


@dataclass(slots=True)
class SamplingRow:
    """A request that samples a token in a step."""

    handle: int
    line: int
    index: int  # of the token among the request's generated tokens
    params: SamplingParams
    prompt_logprobs: tuple[Logprob, ...] = ()  # reported with token 0
    forced: int | None = None  # the token, whatever the logits say (`forced_eos_token_id`)


class StepSample(Protocol):
    """The tokens that a step samples, one for each sampling row, in row order."""

    @property
    def tokens(self) -> Sequence[int] | Tensor:
        """[rows], also of refused ones; a tensor [rows] int64 on the device if that samples them."""
        ...

    @property
    def is_on_device(self) -> bool:
        """Return whether the device uses the tokens as inputs of its next steps by itself."""
        ...

    @property
    def is_ready(self) -> bool:
        """Return whether `read` returns without waiting."""
        ...

    def read(self) -> Sequence[Sampled | Refused]:
        """Return the tokens with their log probabilities, or the host's refusals. Waits for a device that samples."""
        ...


class TokenSampler(Protocol):
    """Samples for one rank, whose requests have a line each."""

    def start(self, line: int, new: NewRequest) -> None:
        """Set a line up for a request that starts, or starts again. The line's earlier request has ended."""
        ...

    def sample(self, rows: Sequence[SamplingRow], output: StepOutput) -> StepSample:
        """Sample one token for each row. Args: output: with the logits of these rows."""
        ...


def sampler_for(model: StageModel, eos_token_ids: Sequence[int]) -> "HostSampler | DeviceSampler":
    """Return a sampler on the model's device if that has a kernel for it, otherwise on the host."""
    kernel = kernels_of(model.device).sampler(model.config.vocab_size, model.device)
    never, vocab_size = model.info.never_drawn_ids, model.config.vocab_size
    read_vocabulary = vocabulary_reader(model.info.folder, vocab_size, eos_token_ids)
    shared = ModelMasks(vocab_size, eos_token_ids, never, read_vocabulary)
    masks = TokenMasks(shared, threads=mask_threads(available_processors()))
    if kernel is None:
        return HostSampler(eos_token_ids, never, masks)
    return DeviceSampler(kernel, eos_token_ids, never, masks)


@dataclass(frozen=True, slots=True)
class HostSample:
    """Tokens that the host has sampled."""

    drawn: Sequence[Sampled | Refused] = ()
    tokens: Sequence[int] = ()
    is_on_device = False
    is_ready = True

    def read(self) -> Sequence[Sampled | Refused]:
        return self.drawn


class HostSampler:
    """Samples with PyTorch's operations (host_sampler.py). The state of each request is in the host's memory.

    Args: never: tokens that no request draws.
    """

    def __init__(self, eos_token_ids: Sequence[int], never: Sequence[int], masks: TokenMasks) -> None:
        self._eos_token_ids = eos_token_ids
        self._never = never
        self._masks = masks
        self._states: dict[int, SamplingState] = {}  # by line

    def start(self, line: int, new: NewRequest) -> None:
        self._states[line] = SamplingState.start(
            new.sampling, new.target, new.target_start, self._eos_token_ids, self._never
        )
        self._masks.start(line, new)

    def sample(self, rows: Sequence[SamplingRow], output: StepOutput) -> HostSample:
        masks = self._masks.of_lines(row.line for row in rows)
        failures, usable = _failures(rows, masks), _usable(masks)
        draws = [Draw(self._states[row.line], row.index, usable.get(row.line)) for row in rows]
        tokens, no_number = sample(output.tensor, draws, output.argmax, output.logits)
        _force(rows, tokens)
        scored = _rows_with_logprobs(rows)
        scores = _host_logprobs(output.tensor, tokens, rows, scored) if scored else ()
        for draw, token in zip(draws, tokens, strict=True):
            if draw.state.counts is not None:
                draw.state.counts.add(token)
        if masks:
            self._masks.take({row.line: token for row, token in zip(rows, tokens, strict=True) if row.line in masks})
        drawn: list[Sampled | Refused] = list(_sampled(rows, tokens, scored, scores))
        # A masked token's NaN or +inf spoils no choice, but every log probability: those are taken before the mask.
        spoilt = (place for place, score in zip(scored, scores, strict=True) if not math.isfinite(score.logprob))
        for place in {*no_number, *spoilt}:
            drawn[place] = Refused(rows[place].handle, _NO_NUMBER.format(index=rows[place].index))
        for place, refused in failures.items():
            drawn[place] = refused
        return HostSample(drawn, tokens)


class DeviceSample:
    """Tokens on their way to the host. They have memory of their own, because the next step overwrites the kernel's."""

    is_on_device = True

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        logits: Tensor,
        tokens: Tensor,
        failures: Mapping[int, Refused] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            logits: as the model computed them.
            failures: of rows, by place, whose token means nothing.
        """
        self._rows = rows
        self._failures = failures
        self.tokens = tokens.clone()
        self._scored = _rows_with_logprobs(rows)
        forced = [place for place in self._scored if rows[place].forced is not None]
        if forced:  # their log probability is that of the forced token
            values = to_device(np.array([rows[place].forced for place in forced]), logits.device)
            self.tokens[to_device(np.array(forced), logits.device)] = values
        scores: Sequence[Tensor] = ()
        if self._scored:
            scored = to_device(np.array(self._scored), logits.device)
            scores = scores_of(logits[scored], self.tokens[scored], max(_top_counts(rows, self._scored)))
        self._transfer = HostCopy((self.tokens, *scores))

    @property
    def is_ready(self) -> bool:
        return self._transfer.is_ready

    def read_tokens(self) -> list[int]:
        """Return the tokens alone. Waits for the device."""
        tokens: list[int] = self._transfer.read()[0].tolist()
        _force(self._rows, tokens)
        return tokens

    def read(self) -> list[Sampled | Refused]:
        drawn = self.read_tokens()
        scores = self._transfer.read()[1:]
        read = Scores(*scores).read(_top_counts(self._rows, self._scored)) if self._scored else ()
        sampled = _sampled(self._rows, drawn, self._scored, read)
        return [self._failures.get(place, each) for place, each in enumerate(sampled)]


class DeviceSampler:
    """Samples with a kernel. The state of each request is on the device (kernels/contract/sampling_lines.py).

    A token mask follows the token before, which the device has and the host must read first. So a step with masks waits
    for the tokens of the step before, while the device already runs its layers. Its tokens are drawn outside a recorded
    step.

    Args: never: tokens that no request draws.
    """

    def __init__(self, kernel: Sampler, eos_token_ids: Sequence[int], never: Sequence[int], masks: TokenMasks) -> None:
        self.kernel = kernel
        self._eos_token_ids = eos_token_ids
        self._never = never
        self._masks = masks
        self._unread: dict[int, tuple[DeviceSample, int]] = {}  # line with a mask -> its last sample, and its place

    def start(self, line: int, new: NewRequest) -> None:
        settings = line_settings(new.sampling, self._eos_token_ids, self._never)
        self.kernel.lines.put(line, settings, new.target[: new.target_start], new.target[new.target_start :])
        self._unread.pop(line, None)
        self._masks.start(line, new)

    def sample(self, rows: Sequence[SamplingRow], output: StepOutput) -> DeviceSample:
        if output.tokens is not None:
            return DeviceSample(rows, output.tensor, output.tokens)
        logits, device = output.tensor, output.tensor.device
        masks = self._read_masks(rows)
        failures, usable = _failures(rows, masks), _usable(masks)
        if usable:
            logits = logits.clone()  # log probabilities are those of the raw ones
            apply_token_masks(logits, {place: usable[row.line] for place, row in enumerate(rows) if row.line in usable})
        lines = to_device(np.array([row.line for row in rows], np.int32), device)
        indices = to_device(np.array([row.index for row in rows], np.int64), device)
        sample = DeviceSample(rows, output.tensor, self.kernel.sample(logits, lines, indices), failures)
        self._unread |= {row.line: (sample, place) for place, row in enumerate(rows) if row.line in masks}
        return sample

    def _read_masks(self, rows: Sequence[SamplingRow]) -> dict[int, RequestMask]:
        """Return the masks of these rows, by line. Waits for the tokens that they follow."""
        unread = {row.line: self._unread.pop(row.line) for row in rows if row.line in self._unread}
        if unread:
            tokens = {id(sample): sample.read_tokens() for sample, _ in unread.values()}
            self._masks.take({line: tokens[id(sample)][place] for line, (sample, place) in unread.items()})
        return self._masks.of_lines(row.line for row in rows)


def line_settings(params: SamplingParams, eos_token_ids: Sequence[int], never: Sequence[int] = ()) -> LineSettings:
    """Return the settings that the device needs to sample for a request.

    Args: never: tokens that must not be drawn: a bias takes their chance.
    """
    biases = params.logit_bias
    if never:
        biases = tuple(sorted((dict(biases) | dict.fromkeys(never, float("-inf"))).items()))
    return LineSettings(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=biases,
        seed=params.seed,
        # A token mask has EOS and stop ids wherever they may be drawn.
        min_tokens=0 if params.has_token_mask else params.min_tokens,
        masked=() if params.has_token_mask else sorted({*eos_token_ids, *params.stop_token_ids}),
    )


def _failures(rows: Sequence[SamplingRow], masks: Mapping[int, RequestMask]) -> dict[int, Refused]:
    """Return the refusals of rows whose mask leaves no token, by place."""
    if not masks:
        return {}
    return {
        place: Refused(row.handle, mask.failure)
        for place, row in enumerate(rows)
        if (mask := masks.get(row.line)) is not None and mask.failure is not None
    }


def _usable(masks: Mapping[int, RequestMask]) -> dict[int, TokenMask]:
    """Return the masks that leave a token, by line."""
    return {line: mask.mask for line, mask in masks.items() if mask.failure is None}


def _sampled(
    rows: Sequence[SamplingRow], tokens: Sequence[int], scored: Sequence[int], scores: Sequence[Logprob]
) -> list[Sampled]:
    """Join tokens and log probabilities. Args: scores: those of the rows `scored`."""
    by_row = dict(zip(scored, scores, strict=True))
    return [
        Sampled(row.handle, row.index, Token(token, by_row.get(place), row.prompt_logprobs))
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True))
    ]


def _force(rows: Sequence[SamplingRow], tokens: list[int]) -> None:
    """Replace drawn tokens by those that the model forces."""
    for place, row in enumerate(rows):
        if row.forced is not None:
            tokens[place] = row.forced


def _rows_with_logprobs(rows: Sequence[SamplingRow]) -> list[int]:
    """Return the places of the rows whose request asks for log probabilities."""
    return [place for place, row in enumerate(rows) if row.params.logprobs is not None]


def _top_counts(rows: Sequence[SamplingRow], places: Sequence[int]) -> list[int]:
    """Return how many alternatives each of these rows asks for."""
    return [rows[place].params.logprobs or 0 for place in places]


def _host_logprobs(
    logits: Tensor, tokens: Sequence[int], rows: Sequence[SamplingRow], scored: Sequence[int]
) -> list[Logprob]:
    """Return the log probabilities of the rows `scored`."""
    part = logits if len(scored) == len(rows) else logits[torch.tensor(scored, device=logits.device)]
    return logprobs(part, [tokens[place] for place in scored], _top_counts(rows, scored))
