"""How the last stage comes from logits to tokens: on the host (CPUs), or on the device, and the host does not wait.

A device that draws feeds the tokens on by itself and sends them to the host behind the step, so the next one may be
ordered before they are read (`Drawn`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from orca.core.domain.request import Logprob, SamplingParams, Token
from orca.core.domain.step import NewRequest, Sampled
from orca.kernels.contract.sampling_lines import LineSettings
from orca.kernels.contract.transfer import HostCopy, to_device
from orca.kernels.device import Sampler, kernels_of
from orca.worker.models.build import StageModel
from orca.worker.stage.host_sampler import Draw, SamplingState, Scores, logprobs, sample, scores_of
from orca.worker.stage.recorded_steps import Ran


@dataclass(slots=True)
class Asked:
    """A request that draws a token in a step."""

    handle: int
    line: int
    index: int  # of the token among those that are generated
    params: SamplingParams
    told: tuple[Logprob, ...] = ()  # log probabilities of the prompt, which go with token 0


class Drawn(Protocol):
    """The tokens of a step, one for each request that draws, in row order."""

    @property
    def tokens(self) -> Sequence[int] | Tensor:
        """[rows]; a tensor [rows] int64 on the device that drew them."""
        ...

    @property
    def is_fed(self) -> bool:
        """Whether the device that drew them feeds them to its next steps by itself."""
        ...

    @property
    def is_there(self) -> bool:
        """Whether `read` waits for nothing."""
        ...

    def read(self) -> list[Sampled]:
        """All that is told of them. Waits for a device that draws."""
        ...


class Drawing(Protocol):
    def take_up(self, line: int, new: NewRequest) -> None:
        """A request begins, or begins again, on a line; whose it was before has ended."""
        ...

    def draw(self, asked: Sequence[Asked], ran: Ran) -> Drawn:
        """Args: ran: the logits of these requests, and what a recording has made of them."""
        ...


def drawing_of(model: StageModel, eos_token_ids: Sequence[int]) -> "HostDrawing | DeviceDrawing":
    """The way of a model's device."""
    sampler = kernels_of(model.device).sampler(model.config.vocab_size, model.device)
    return HostDrawing(eos_token_ids) if sampler is None else DeviceDrawing(sampler, eos_token_ids)


@dataclass(frozen=True, slots=True)
class HostDrawn:
    """Tokens that are there."""

    sampled: list[Sampled]
    is_fed = False
    is_there = True

    @property
    def tokens(self) -> Sequence[int]:
        return [each.token.id for each in self.sampled]

    def read(self) -> list[Sampled]:
        return self.sampled


class HostDrawing:
    """By PyTorch's operations (host_sampler.py), with what is known of a request in the host's memory."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._states: dict[int, SamplingState] = {}  # by line

    def take_up(self, line: int, new: NewRequest) -> None:
        self._states[line] = SamplingState.start(new.sampling, new.tokens, new.prompt_length, self._eos_token_ids)

    def draw(self, asked: Sequence[Asked], ran: Ran) -> HostDrawn:
        draws = [Draw(self._states[each.line], each.index) for each in asked]
        tokens = sample(ran.output, draws, ran.largest)
        asking = _asking(asked)
        told = _scored(ran.output, tokens, asked, asking) if asking else ()
        for draw, token in zip(draws, tokens, strict=True):
            if draw.state.counts is not None:
                draw.state.counts.add(token)
        return HostDrawn(_sampled(asked, tokens, asking, told))


class DeviceDrawn:
    """Tokens on their way to the host, in memory of their own: the next step overwrites what they were drawn to."""

    is_fed = True

    def __init__(self, asked: Sequence[Asked], logits: Tensor, tokens: Tensor) -> None:
        self._asked = asked
        self.tokens = tokens.clone()
        self._asking = _asking(asked)
        scores: Sequence[Tensor] = ()
        if self._asking:
            rows = to_device(np.array(self._asking), logits.device)
            scores = scores_of(logits[rows], self.tokens[rows], max(_tops(asked, self._asking)))
        self._on_the_way = HostCopy((self.tokens, *scores))

    @property
    def is_there(self) -> bool:
        return self._on_the_way.is_ready

    def read(self) -> list[Sampled]:
        tokens, *scores = self._on_the_way.read()
        told = Scores(*scores).read(_tops(self._asked, self._asking)) if self._asking else ()
        return _sampled(self._asked, tokens.tolist(), self._asking, told)


class DeviceDrawing:
    """By kernels, with what is known of a request on the device (kernels/contract/sampling_lines.py)."""

    def __init__(self, sampler: Sampler, eos_token_ids: Sequence[int]) -> None:
        self.sampler = sampler
        self._eos_token_ids = eos_token_ids

    def take_up(self, line: int, new: NewRequest) -> None:
        settings = settings_of(new.sampling, self._eos_token_ids)
        self.sampler.lines.put(line, settings, new.tokens[: new.prompt_length], new.tokens[new.prompt_length :])

    def draw(self, asked: Sequence[Asked], ran: Ran) -> DeviceDrawn:
        tokens = ran.drawn
        if tokens is None:
            device = ran.output.device
            lines = to_device(np.array([each.line for each in asked], np.int32), device)
            indices = to_device(np.array([each.index for each in asked], np.int64), device)
            tokens = self.sampler.sample(ran.output, lines, indices)
        return DeviceDrawn(asked, ran.output, tokens)


def settings_of(params: SamplingParams, eos_token_ids: Sequence[int]) -> LineSettings:
    """What a line is told of a request."""
    return LineSettings(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        min_tokens=params.min_tokens,
        masked=sorted({*eos_token_ids, *params.stop_token_ids}),
    )


def _sampled(
    asked: Sequence[Asked], tokens: Sequence[int], asking: Sequence[int], told: Sequence[Logprob]
) -> list[Sampled]:
    """Args: told: the log probabilities of the rows `asking`."""
    scores = dict(zip(asking, told, strict=True))
    return [
        Sampled(each.handle, each.index, Token(token, scores.get(row), each.told))
        for row, (each, token) in enumerate(zip(asked, tokens, strict=True))
    ]


def _asking(asked: Sequence[Asked]) -> list[int]:
    """The rows whose log probabilities are told."""
    return [row for row, each in enumerate(asked) if each.params.logprobs is not None]


def _tops(asked: Sequence[Asked], rows: Sequence[int]) -> list[int]:
    return [asked[row].params.logprobs or 0 for row in rows]


def _scored(logits: Tensor, tokens: Sequence[int], asked: Sequence[Asked], asking: Sequence[int]) -> list[Logprob]:
    """The log probabilities of the rows `asking`."""
    rows = logits if len(asking) == len(asked) else logits[torch.tensor(asking, device=logits.device)]
    return logprobs(rows, [tokens[row] for row in asking], _tops(asked, asking))
