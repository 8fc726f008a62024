"""Conversations as a fixed trace, for comparisons in which every system gets the same prompts.

The history of a turn has random tokens where an answer was, since no system's own answers may decide the next prompts.
So a system can find the prompt of the turn before, but not its answer.
"""

from dataclasses import dataclass

from orca.bench.turns.conversations import ConversationSpec, conversations, random_tokens
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceRequest, TraceSpec


@dataclass(frozen=True, slots=True)
class FixedTrace(Trace):
    """A trace whose prompts are given, such as those of conversations."""

    prompts: tuple[tuple[int, ...], ...]

    def prompt(self, index: int, vocab_size: int) -> list[int]:
        """Return a prompt. Args: vocab_size: that with which the trace was made."""
        del vocab_size
        return list(self.prompts[index])


def conversation_trace(spec: ConversationSpec, vocab_size: int) -> FixedTrace:
    """Return a trace whose requests all arrive at 0: the first turns of all conversations, then the second ones."""
    requests: list[TraceRequest] = []
    prompts: list[tuple[int, ...]] = []
    held = conversations(spec)
    for number in range(spec.turns):
        for conversation in held:
            turn = conversation.turns[number]
            prompts.append(tuple(conversation.prompt(turn, vocab_size)))
            requests.append(TraceRequest(len(requests), 0.0, len(prompts[-1]), turn.answer_tokens))
            name = f"{spec.seed}/{turn.conversation}/{turn.number}/answer"
            conversation.hear(random_tokens(name, vocab_size, turn.answer_tokens))
    lengths = [len(prompt) for prompt in prompts]
    trace = TraceSpec(
        requests=len(requests),
        prompt_tokens=Range(min(lengths), max(lengths)),
        new_tokens=Range(spec.answer_tokens.low, spec.answer_tokens.high),
        seed=spec.seed,
    )
    return FixedTrace(trace, tuple(requests), tuple(prompts))
