"""Steps as a service runs them: random requests through the real policy, in bursts of random sizes.

Each burst has its own batch size, lengths and bound on the tokens of a step. So contexts, batches and chunks are of all
sizes, and none is chosen to be a point of a profile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from orca.core.domain.engine import EngineShape
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Epoch, Step, StepResult
from orca.planner.workload.trace import GREEDY
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, next_batch
from orca.scheduler.policy.state import GroupState

_PROMPT_TOKENS = (8, 900)
_NEW_TOKENS = (2, 16)
_BATCH_SIZE_MAX = 24
_BOUNDS = (None, 96, 128, 256)
_SOME_ID = 40


class StepKind(StrEnum):
    """The rows of a step."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


def kind_of(step: Step) -> StepKind:
    """Return the kind of a step with rows, of a master that sends each token back to the stages (prefetch 0)."""
    decodes = sum(row.token is not None for row in step.rows)
    if decodes == len(step.rows):
        return StepKind.DECODE
    return StepKind.MIXED if decodes else StepKind.PREFILL


@dataclass(slots=True)
class ServiceSteps:
    """One step after another. The caller runs each, and gives its result back before it takes the next one."""

    info: ModelInfo
    shape: EngineShape
    epoch: Epoch
    random: Random
    _state: GroupState = field(default_factory=GroupState)
    _count: int = 0

    def burst(self) -> Iterator[Step]:
        """Yield the steps of one burst of requests, until all have ended."""
        random = self.random
        batch_size = random.randint(1, _BATCH_SIZE_MAX)
        limits = BatchLimits(
            stages=1,
            max_batch_size=batch_size,
            slots=self.shape.slots,
            block_tokens=self.shape.block_tokens,
            max_model_len=self.shape.max_model_len,
            max_batch_tokens=random.choice(_BOUNDS),
            is_encoder_decoder=self.info.encoder_decoder is not None,
        )
        waiting = [self._request() for _ in range(random.randint(1, batch_size + 2))]
        at_once = random.randint(1, len(waiting))
        for request in waiting[:at_once]:
            self._state.add(request, Claim(1, "bench/1"))
        del waiting[:at_once]
        policy = IterationPolicy()
        while True:
            if waiting and random.random() < 0.3:
                self._state.add(waiting.pop(), Claim(1, "bench/1"))
            batch = next_batch(policy, self._state, limits)
            if batch.rows:
                yield self._state.schedule(batch, self.epoch)
            elif waiting:
                self._state.add(waiting.pop(), Claim(1, "bench/1"))
            else:
                return

    def receive(self, result: StepResult) -> None:
        """Take the tokens of the step that was yielded last."""
        drawing = [pick.request for pick in self._state.read().rows if pick.sample]
        for entry, drawn in zip(drawing, result.sampled, strict=True):
            self._state.receive(entry, drawn.token.id)

    def _request(self) -> Request:
        """Return a request of random lengths, short ones as often as those of twice the length."""
        kind, random = self.info.encoder_decoder, self.random
        longest = min(self.info.max_model_len // 2, _PROMPT_TOKENS[1])
        low = min(_PROMPT_TOKENS[0], longest)
        length = min(longest, round(low * (longest / low) ** random.random()))
        self._count += 1
        new_tokens = random.randint(*_NEW_TOKENS)
        low_id = min(_SOME_ID, self.info.vocab_size - 1)
        return Request(
            parent="bench",
            choice=self._count,
            revision="bench",
            prompt=tuple(random.choices(range(low_id, self.info.vocab_size), k=length)),
            max_new_tokens=new_tokens,
            sampling=GREEDY,
            decoder_prefix=() if kind is None else kind.beginning(),
            arrival=self._count,
        )
