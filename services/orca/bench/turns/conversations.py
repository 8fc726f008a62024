"""Conversations with a common system prompt: each turn sends the whole history again, as clients of chats do.

Pure and seeded, but for the answers: a turn's history contains the tokens that the server gave.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from orca.planner.workload.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSpec:
    """The settings that determine conversations."""

    conversations: int
    turns: int  # of each
    system_tokens: int  # of the prompt that all of them begin with
    question_tokens: Lengths
    answer_tokens: Lengths
    seed: int = 0
    # False: prompts have the same lengths, and no two of them begin alike.
    is_shared: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest last turn, with its answer."""
        return self.system_tokens + self.turns * (self.question_tokens.high + self.answer_tokens.high)


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of a conversation."""

    conversation: int  # from 0
    number: int  # from 1
    question_tokens: int
    answer_tokens: int


@dataclass(slots=True)
class Conversation:
    """The turns of one conversation, and what has been said so far."""

    spec: ConversationSpec
    turns: Sequence[Turn]
    history: list[int] = field(default_factory=list)

    def prompt(self, turn: Turn, vocab_size: int) -> list[int]:
        """Return the prompt of the next turn: the history and a question of random tokens."""
        spec = self.spec
        if not self.history:
            self.history += random_tokens(f"{spec.seed}/system", vocab_size, spec.system_tokens)
        name = f"{spec.seed}/{turn.conversation}/{turn.number}"
        self.history += random_tokens(f"{name}/question", vocab_size, turn.question_tokens)
        return list(self.history) if spec.is_shared else random_tokens(f"{name}/prompt", vocab_size, len(self.history))

    def hear(self, answer: Sequence[int]) -> None:
        """Add the answer of the turn to the history."""
        self.history += answer


def conversations(spec: ConversationSpec) -> list[Conversation]:
    """Draw the lengths of all turns."""
    numbers = Random(f"{spec.seed}/lengths")
    return [
        Conversation(
            spec,
            [
                Turn(place, number, spec.question_tokens.draw(numbers), spec.answer_tokens.draw(numbers))
                for number in range(1, spec.turns + 1)
            ],
        )
        for place in range(spec.conversations)
    ]


def random_tokens(seed: str, vocab_size: int, count: int) -> list[int]:
    """Return token ids below `vocab_size`, the same ones for the same seed."""
    return Random(seed).choices(range(vocab_size), k=count)
