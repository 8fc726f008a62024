"""The tokens that end an output by themselves: EOS and stop token ids. They have no text.

The scheduler ends requests by this rule, gateways leave out the text of such a token, and stages do not draw one that
would end nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orca.core.domain.request import SamplingParams


@dataclass(frozen=True, slots=True)
class EndingTokens:
    """The tokens that end one request's output."""

    eos: frozenset[int]
    stop: frozenset[int]
    min_tokens: int
    has_grammar: bool  # EOS is drawn only where the grammar allows the end

    @classmethod
    def of(cls, sampling: SamplingParams, eos_token_ids: Iterable[int]) -> "EndingTokens":
        """Args: eos_token_ids: of the model."""
        has_grammar = sampling.grammar is not None
        ignores_eos = sampling.ignore_eos and not has_grammar
        eos = frozenset() if ignores_eos else frozenset(eos_token_ids)
        return cls(eos, frozenset(sampling.stop_token_ids), sampling.min_tokens, has_grammar)

    def ends(self, token_id: int, index: int) -> bool:
        """Return whether a token ends the output. Args: index: of the token, from 0."""
        if index < self.min_tokens:
            # A grammar that is complete ends even there: nothing else may follow.
            return self.has_grammar and token_id in self.eos
        return token_id in self.eos or token_id in self.stop
