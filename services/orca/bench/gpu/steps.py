"""Drives a stage through the decode steps of one batch, in the order of the executor: begin, feed, forward, draw, and
only then read the tokens of the step before.

As behind a scheduler that prefetches: no step but the first is told its tokens, the stage is fed those that it drew.
The steps themselves are made before, as a scheduler makes them while another one runs: they take no time here.
"""

from collections.abc import Callable, Sequence

import torch

from orca.bench.trace import GREEDY
from orca.core.domain.request import slots_needed
from orca.core.domain.step import Claim, Epoch, NewRequest, Row, Sampled, Step
from orca.worker.models.build import StageModel
from orca.worker.stage.sampling import StepSample
from orca.worker.stage.stage import Stage

BLOCK_TOKENS = 16
_EPOCH = Epoch(1, "bench")


def _nothing() -> None:
    pass


class BatchSteps:
    """Requests with prompts of one length, which all begin in the first step.

    Only the first `whole` prompts are run as prompts are. The others find random keys and values in the cache instead
    of their own, and run their last token: their work in later steps is the same, and the first step takes no minutes.

    Args:
        new_tokens: steps, at most.
        kv_deviation: of the random keys and values.
        on_streams: as of Stage.
    """

    def __init__(
        self,
        model: StageModel,
        prompts: Sequence[list[int]],
        *,
        whole: int,
        new_tokens: int,
        kv_deviation: float,
        on_streams: bool = False,
    ) -> None:
        self.taken = 0  # steps
        self._prompts = prompts
        self._whole = whole
        self._longest = len(prompts[0]) + new_tokens
        self._steps = [self._step(number) for number in range(1, new_tokens + 1)]
        self._read: list[list[Sampled]] = []  # of each step
        self._sample: StepSample | None = None  # of the last one, not read yet
        slots = len(prompts) * slots_needed(self._longest, BLOCK_TOKENS)
        self.stage = Stage(
            model,
            slots=slots,
            block_tokens=BLOCK_TOKENS,
            eos_token_ids=(),
            feeds_tokens=True,
            on_streams=on_streams,
        )
        numbers = torch.Generator(model.device).manual_seed(1)
        for layer in self.stage.cache.layers:
            layer.normal_(0.0, kv_deviation, generator=numbers)

    @property
    def context(self) -> int:
        """Positions that the next step's tokens see, their own included."""
        return len(self._prompts[0]) + self.taken

    @property
    def answers(self) -> list[list[int]]:
        """Of each prompt, the tokens so far."""
        self._read_last()
        return [[step[place].token.id for step in self._read] for place in range(len(self._prompts))]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self, begins: Callable[[], None] = _nothing, ends: Callable[[], None] = _nothing) -> None:
        """The next step.

        Args:
            begins, ends: called before its computation is ordered, and when the last of it has been.
        Raises: IndexError behind the last one.
        """
        prepared = self.stage.begin(self._steps[self.taken])
        self.taken += 1
        if self._sample is not None and not self._sample.is_on_device:
            self.stage.put_device_tokens(self._handles, self._sample.tokens)
        begins()
        sample = self.stage.sample(prepared, self.stage.forward(prepared))
        ends()
        self._read_last()
        self._sample = sample

    def _read_last(self) -> None:
        if self._sample is not None:
            self._read.append([drawn for drawn in self._sample.read() if isinstance(drawn, Sampled)])
        self._sample = None

    @property
    def _handles(self) -> range:
        return range(1, len(self._prompts) + 1)

    def _step(self, number: int) -> Step:
        if number == 1:
            return Step(epoch=_EPOCH, number=1, new=tuple(map(self._new, self._handles)), rows=self._first_rows())
        start = len(self._prompts[0]) + number - 2
        rows = tuple(Row(handle=handle, start=start, count=1, sample=True) for handle in self._handles)
        return Step(epoch=_EPOCH, number=number, rows=rows)

    def _new(self, handle: int) -> NewRequest:
        prompt = self._prompts[handle - 1]
        return NewRequest(
            handle=handle,
            request_id=f"bench-{handle}",
            claim=Claim(1, "bench/1"),
            tokens=tuple(prompt),
            prompt_length=len(prompt),
            max_total_tokens=self._longest,
            sampling=GREEDY,
        )

    def _first_rows(self) -> tuple[Row, ...]:
        length = len(self._prompts[0])
        starts = [0 if handle <= self._whole else length - 1 for handle in self._handles]
        return tuple(
            Row(handle=handle, start=start, count=length - start, sample=True)
            for handle, start in zip(self._handles, starts, strict=True)
        )
