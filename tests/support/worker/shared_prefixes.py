"""Requests with common prefixes on a stage, under the real policy and its prefix index."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Step
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, next_batch
from orca.scheduler.policy.prefixes import GroupPrefixes
from orca.scheduler.policy.state import GroupState
from orca.worker.stage.step_runner import PreparedStep, StepOutput
from support.worker.stage_driver import EPOCH, Ask, Chain

SLOTS, BLOCK_TOKENS = 40, 4


def sharing_asks() -> list[Ask]:
    """Choices of a prompt, prompts that end right behind a block of it, a turn that goes on, and others that evict.

    All of their tokens are below 180.
    """
    system = [5, 80, 17, 44, 102, 9, 61, 33, 120]
    return [
        Ask(system, 5),
        Ask(system, 3),
        Ask([*system[:6], 70, 71, 72], 4),
        Ask(system, 4, arrival=3),  # one token behind two blocks: a step of single tokens
        Ask([*range(140, 153)], 6, arrival=4),
        Ask([*system, 8, 3, 90, 40], 4, arrival=7),
        Ask([*system, 8, 3, 90, 41], 3, arrival=8),
        Ask([*range(140, 153)], 3, arrival=12),
        Ask(system, 3, arrival=14),
    ]


def serve_shared(
    chain: Chain, asks: Sequence[Ask], *, shares: bool = True, max_batch_tokens: int | None = None
) -> list[Step]:
    """Run all asks to their length in their order; one joins when as many steps as its arrival have run."""
    limits = BatchLimits(
        stages=1,
        max_batch_size=3,
        slots=SLOTS,
        block_tokens=BLOCK_TOKENS,
        max_model_len=SLOTS,
        max_batch_tokens=max_batch_tokens,
        shares_prefixes=shares,
    )
    state = GroupState(prefixes=GroupPrefixes(SLOTS, BLOCK_TOKENS) if shares else None)
    waiting, steps = list(enumerate(asks)), list[Step]()
    while waiting or state.requests:
        while waiting and (waiting[0][1].arrival <= len(steps) or not state.requests):
            state.add(_request(*waiting.pop(0)), Claim(1, "test/1"))
        step = state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)
        steps.append(step)
        sampled = {each.handle: each for each in chain.run(step)}
        for row in state.read().rows:
            if row.sample:
                entry = row.request
                assert entry.handle is not None
                ask = asks[int(entry.request.parent)]
                ask.sampled.append(sampled[entry.handle])
                state.receive(entry, ask.output[-1])
                if len(ask.output) == ask.max_new_tokens:
                    state.end(entry)
        state.check(BLOCK_TOKENS)
    return steps


def _request(number: int, ask: Ask) -> Request:
    return Request(
        parent=str(number),
        choice=0,
        revision="r1",
        prompt=tuple(ask.prompt),
        max_new_tokens=ask.max_new_tokens,
        sampling=ask.params,
        arrival=number + 1,
    )


def kinds_of(steps: Sequence[Step]) -> set[str]:
    """Return which kinds of steps there are, by what they do with shared blocks."""
    found = set()
    for step in steps:
        if step.kept:
            found.add("keeps")
        if step.evicted:
            found.add("evicts")
        new = {each.handle for each in step.new}
        for each in step.new:
            if each.prefix is not None:
                found.add("shares in the same step" if each.prefix.handle in new else "shares earlier blocks")
                if all(row.count == 1 for row in step.rows):
                    found.add("shares in a step of single tokens")
    return found


ALL_KINDS = {
    "keeps",
    "evicts",
    "shares in the same step",
    "shares earlier blocks",
    "shares in a step of single tokens",
}


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits of each token that was drawn, by the request's id and the position that it was drawn for."""

    rows: dict[tuple[str, int], Tensor]

    @classmethod
    def noted(cls, chain: Chain) -> "Logits":
        """Note what the last stage of a chain computes from now on."""
        noted, last = cls({}), chain.stages[-1][0]
        forward: Callable[..., StepOutput] = last.forward
        names: dict[int, str] = {}

        def noting(prepared: PreparedStep, hidden: Tensor | None = None) -> StepOutput:
            names.update((new.handle, new.request_id) for new in prepared.step.new)
            output = forward(prepared, hidden)
            for place, (row, _) in enumerate(prepared.sampling):
                noted.rows[names[row.handle], row.start + row.count] = output.tensor[place].clone()
            return output

        last.forward = noting  # type: ignore[method-assign]
        return noted

    def equal(self, other: "Logits") -> bool:
        """Return whether all bits are the same."""
        return self.rows.keys() == other.rows.keys() and all(
            torch.equal(row, other.rows[key]) for key, row in self.rows.items()
        )
