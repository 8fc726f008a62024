"""Calls of the completions API whose cached tokens count: turns of conversations, and choices of one prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from orca.bench.client import EventStream, LoadTarget, post_bytes, read_stream
from orca.bench.turns.conversations import Conversation, ConversationSpec, conversations
from orca.core.domain.errors import OrcaError


class CallFailed(OrcaError):
    """A call did not get exactly its tokens; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """A turn as its client saw it. Times are seconds."""

    conversation: int
    turn: int  # from 1
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not say
    first_s: float  # from the call to the first token
    last_s: float  # from the call to the last one
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRun:
    """All turns of a run, in the order of conversations."""

    seconds: float  # from the first call to the last token
    turns: Sequence[TurnOutcome]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(turn.tokens) for turn in self.turns) / self.seconds

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that the server found in its cache."""
        return sum(turn.cached_tokens or 0 for turn in self.turns) / sum(turn.prompt_tokens for turn in self.turns)


async def converse(target: LoadTarget, spec: ConversationSpec) -> ConversationRun:
    """Hold all conversations side by side; in each of them a turn is sent when the one before has ended.

    Raises: CallFailed.
    """
    start_s = perf_counter()
    held = await asyncio.gather(*(_hold(target, each) for each in conversations(spec)))
    return ConversationRun(seconds=perf_counter() - start_s, turns=[turn for each in held for turn in each])


async def _hold(target: LoadTarget, conversation: Conversation) -> list[TurnOutcome]:
    outcomes = []
    for turn in conversation.turns:
        prompt = conversation.prompt(turn, target.vocab_size)
        start_s = perf_counter()
        stream = await complete(target, prompt, turn.answer_tokens)
        outcomes.append(
            TurnOutcome(
                conversation=turn.conversation,
                turn=turn.number,
                prompt_tokens=len(prompt),
                cached_tokens=stream.cached_tokens,
                first_s=stream.token_s[0] - start_s,
                last_s=stream.token_s[-1] - start_s,
                tokens=tuple(stream.token_ids),
            )
        )
        conversation.hear(stream.token_ids)
    return outcomes


async def complete(target: LoadTarget, prompt: Sequence[int], new_tokens: int, *, choices: int = 1) -> EventStream:
    """Make one call with greedy sampling. Returns: its stream, which got all tokens. Raises: CallFailed."""
    stream = EventStream(greedy_call(target, prompt, new_tokens, choices=choices))
    await read_whole(target, stream, choices * new_tokens)
    return stream


async def read_whole(target: LoadTarget, stream: EventStream, new_tokens: int) -> None:
    """Make the call of a stream. Args: new_tokens: of all choices. Raises: CallFailed unless it got exactly these."""
    error = await read_stream(target, stream, new_tokens)
    if error is not None:
        raise CallFailed(f"a call for {new_tokens} tokens failed: {error}")


def greedy_call(target: LoadTarget, prompt: Sequence[int], new_tokens: int, *, choices: int = 1) -> bytes:
    """Return the bytes of a call that streams exactly so many tokens of each choice."""
    return post_bytes(
        target,
        {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": new_tokens,
            "n": choices,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        },
    )
