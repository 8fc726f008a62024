"""Drives stages in one process for tests: a small scheduler, hidden states passed by hand, ranks as threads."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, Epoch, NewRequest, Part, Row, Sampled, Step
from orca.worker.models.build import load_stage
from orca.worker.parallel.shard import Shard
from orca.worker.stage.stage import Stage
from orca.worker.stage.step_runner import PreparedStep, StepOutput
from orca.worker.weights.linear import Linear

EPOCH = Epoch(1, "test")
GREEDY = SamplingParams(temperature=0.0)
EOS = 1
# A token may differ from the reference only where the reference itself hardly chose (design: numbers are honest).
MARGIN_EXCUSED = 1e-4


@dataclass(slots=True)
class Ask:
    """A request of a test, and what came back for it."""

    prompt: list[int]
    max_new_tokens: int
    params: SamplingParams = GREEDY
    arrival: int = 0  # step before which it is not there
    log: list[int] = field(default_factory=list)  # output of an earlier claim
    decoder_prefix: tuple[int, ...] = ()  # with an encoder-decoder model, whose source is `prompt`
    sampled: list[Sampled] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.log + [one.token.id for one in self.sampled]

    @property
    def known(self) -> int:
        """Tokens that its first row of a decoder may run."""
        return len(self.decoder_prefix or self.prompt) + len(self.log)

    def new(self, handle: int) -> NewRequest:
        return NewRequest(
            handle=handle,
            request_id=str(handle),
            claim=Claim(1, "test/1"),
            tokens=(*self.prompt, *self.log),
            prompt_length=len(self.prompt),
            max_total_tokens=len(self.prompt) + len(self.decoder_prefix) + self.max_new_tokens,
            sampling=self.params,
            decoder_prefix=self.decoder_prefix,
            max_new_tokens=self.max_new_tokens if self.decoder_prefix else None,
        )


class ThreadGroup:
    """A TensorGroup among threads: each brings its tensor, all wait, each takes the sum."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._tensors: list[Tensor] = [torch.empty(0)] * size

    def member(self, rank: int) -> "_Member":
        return _Member(self, rank)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self._tensors[rank] = tensor.clone()
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()
        return tensors


@dataclass(slots=True)
class _Member:
    group: ThreadGroup
    rank: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, tensor)).sum(0)

    def all_gather_last(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        parts = self.group.exchange(self.rank, tensor)
        assert [part.shape[-1] for part in parts] == sizes
        return torch.cat(parts, dim=-1)


class Chain:
    """All stages and ranks of a model, one after the other."""

    def __init__(
        self,
        folder: Path,
        *,
        stages: int = 1,
        tensor: int = 1,
        slots: int = 1024,
        block_tokens: int = 4,
        feeds_tokens: bool = False,
        dtype: str = "float32",
        quantization: str | None = None,
        packs: bool | type[Linear] = False,
        layer_counts: tuple[int, ...] | None = None,
        **stage_options: Any,
    ) -> None:
        self.stages: list[list[Stage]] = []
        self.feeds_tokens = feeds_tokens
        self._pool = ThreadPoolExecutor(tensor)
        for stage in range(stages):
            group = ThreadGroup(tensor)
            ranks = []
            for rank in range(tensor):
                shard = Shard(stage=stage, stages=stages, rank=rank, tensor=tensor, layer_counts=layer_counts)
                member: Any = group.member(rank) if tensor > 1 else None
                model = load_stage(folder, shard, dtype=dtype, quantization=quantization, group=member, packs=packs)
                ranks.append(
                    Stage(
                        model,
                        slots=slots,
                        block_tokens=block_tokens,
                        eos_token_ids=(EOS,),
                        feeds_tokens=feeds_tokens,
                        **stage_options,
                    )
                )
            self.stages.append(ranks)

    def run(self, step: Step) -> list[Sampled]:
        """One step through all stages, as the runtime does it."""
        prepared = [[stage.begin(step) for stage in ranks] for ranks in self.stages]
        if not step.rows:
            return []
        outputs: list[StepOutput | None] = [None] * len(self.stages[0])
        for ranks, ranks_steps in zip(self.stages, prepared, strict=True):
            outputs = list(self._pool.map(_forward, ranks, ranks_steps, outputs))
        assert outputs[0] is not None
        sample = self.stages[-1][0].sample(prepared[-1][0], outputs[0])
        handles = [row.handle for row in step.rows if row.sample]
        if self.feeds_tokens and handles and not (sample.is_on_device and len(self.stages) == 1):
            [fed] = [ranks for ranks in self.stages if ranks[0].begins_targets]
            for stage in fed:
                stage.put_device_tokens(handles, sample.tokens)
        sampled = [each for each in sample.read() if isinstance(each, Sampled)]
        for ranks in self.stages:
            for stage in ranks:
                stage.check()
        return sampled

    def close(self) -> None:
        self._pool.shutdown()


def _forward(stage: Stage, prepared: PreparedStep, before: StepOutput | None) -> StepOutput:
    return stage.forward(prepared, None if before is None else before.tensor)


def serve(
    chain: Chain, asks: Sequence[Ask], *, max_batch_size: int = 4, chunk: int | None = None, seed: int = 0
) -> list[Step]:
    """Run all asks to their length, joining at their arrival; the rows of each step in random order.

    Args:
        chunk: longest part of a prompt in one step; None runs prompts whole.
    Returns: the steps, for what a test wants to know of them.
    """
    order = random.Random(seed)
    done: dict[int, int] = {}  # tokens run, by handle
    waiting, running, freed, steps = list(range(len(asks))), list[int](), list[int](), list[Step]()
    while waiting or running or freed:
        new = []
        while waiting and len(running) < max_batch_size and asks[waiting[0]].arrival <= len(steps):
            handle = waiting.pop(0)
            ask = asks[handle]
            running.append(handle)
            done[handle] = 0
            new.append(ask.new(handle))
        sources, rows = [], []
        for handle in order.sample(running, len(running)):
            ask, start = asks[handle], done[handle]
            part = Part.TARGET if ask.decoder_prefix else Part.UNSPECIFIED
            if ask.decoder_prefix and not start:
                sources.append(Row(handle, 0, len(ask.prompt), sample=False, part=Part.SOURCE))
            count = min(ask.known - start, chunk or ask.known) if start < ask.known else 1
            is_last = start + count >= ask.known
            token = None if start < ask.known or chain.feeds_tokens else ask.output[-1]
            rows.append(Row(handle, start, count, sample=is_last, token=token, part=part))
            done[handle] += count
        rows = [*sources, *rows]
        step = Step(epoch=EPOCH, number=len(steps) + 1, freed=tuple(freed), new=tuple(new), rows=tuple(rows))
        steps.append(step)
        for one in chain.run(step):
            asks[one.handle].sampled.append(one)
        freed = [handle for handle in running if len(asks[handle].output) == asks[handle].max_new_tokens]
        running = [handle for handle in running if handle not in freed]
    return steps


def random_asks(vocab_size: int, count: int, seed: int, *, prompt_max: int = 24, new_max: int = 14) -> list[Ask]:
    """Requests of mixed lengths that arrive one by one at random steps."""
    draw = random.Random(seed)
    arrival, asks = 0, []
    for _ in range(count):
        arrival += draw.choice((0, 0, 1, 2))
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(1, prompt_max))]
        asks.append(Ask(prompt, draw.randint(1, new_max), arrival=arrival))
    return asks


@dataclass(frozen=True, slots=True)
class Expected:
    """The tokens that Hugging Face generates, and the lead of each over the next best one."""

    tokens: list[int]
    margins: list[float]


def generate(model: Any, prompt: Sequence[int], max_new_tokens: int, decoder_prefix: Sequence[int] = ()) -> Expected:
    """Greedy `generate` of one prompt, never stopped by EOS."""
    ids = torch.tensor([list(prompt)])
    options: dict[str, Any] = {}
    if model.config.model_type == "m2m_100":  # its padding has no position, and is not drawn here
        options["suppress_tokens"] = [model.config.pad_token_id]
    if decoder_prefix:
        # transformers' cache fails for a T5 that has more decoder layers than encoder layers.
        options |= {"decoder_input_ids": torch.tensor([list(decoder_prefix)]), "use_cache": False}
    result = model.generate(
        ids,
        **options,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2, dim=-1).values
    return Expected(result.sequences[0, -len(best) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def differences(asks: Sequence[Ask], expected: Sequence[Expected]) -> int:
    """Check all outputs against the reference. Returns how many first differences were excused as near-ties."""
    excused = 0
    for number, (ask, wanted) in enumerate(zip(asks, expected, strict=True)):
        assert len(ask.output) == ask.max_new_tokens
        for place, (token, reference) in enumerate(zip(ask.output, wanted.tokens, strict=True)):
            if token != reference:
                margin = wanted.margins[place]
                assert margin < MARGIN_EXCUSED, f"request {number}, token {place}: {token}, not {reference} ({margin=})"
                excused += 1
                break
    return excused
