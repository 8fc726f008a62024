"""Run the decode steps of one batch on a stage, in the order of the executor: begin, feed, forward, draw. Only then are
the tokens of the previous step read.

This is how a stage runs under a scheduler that prefetches. Only the first step brings tokens; later steps use those
that the stage drew itself. The messages of all steps are built before the run, because a scheduler builds them while
another step runs.
"""

from collections.abc import Callable, Sequence

import torch

from orca.core.domain.request import slots_needed
from orca.core.domain.step import Claim, Epoch, NewRequest, Row, Sampled, Step
from orca.planner.workload.trace import GREEDY
from orca.worker.models.build import StageModel
from orca.worker.stage.sampling import StepSample
from orca.worker.stage.stage import Stage

BLOCK_TOKENS = 16
_EPOCH = Epoch(1, "bench")


def _nothing() -> None:
    pass


class BatchSteps:
    """Requests with prompts of one length, which all begin in the first step.

    Only the first `whole` prompts run as a whole. The others find random keys and values in the cache instead of their
    own, and run only their last token. Their work in later steps is the same, and the first step does not take minutes.

    Args:
        new_tokens: largest number of steps.
        kv_deviation: standard deviation of the random keys and values.
        on_streams: as in Stage.
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
        self.taken = 0  # number of steps so far
        self._prompts = prompts
        self._whole = whole
        self._longest = len(prompts[0]) + new_tokens
        self._steps = [self._step(number) for number in range(1, new_tokens + 1)]
        self._read: list[list[Sampled]] = []  # for each step, its sampled tokens
        self._sample: StepSample | None = None  # of the last step, not read yet
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
        """Number of positions that the next step's tokens see, their own included."""
        return len(self._prompts[0]) + self.taken

    @property
    def answers(self) -> list[list[int]]:
        """The tokens so far, for each prompt."""
        self._read_last()
        return [[step[place].token.id for step in self._read] for place in range(len(self._prompts))]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self, begins: Callable[[], None] = _nothing, ends: Callable[[], None] = _nothing) -> None:
        """Run the next step.

        Args:
            begins, ends: called before the step's computation is launched, and after all of it is launched.
        Raises: IndexError after the last step.
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
