"""A request: its prompt, its sampling parameters, its tokens, and its end.

Everything here is plain frozen data. The pool stores it, the scheduler and the stages read it, and none of them
changes it. State, owner, claim and log, which change during a request's life, belong to the pool.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

SCHEMA = 3
"""Number of the record layout that this release writes (protocol: schema number)."""

DEFAULT_BLOCK_TOKENS = 16
"""Tokens in one block of the paged KV cache. A request's reservation is rounded up to whole blocks."""


class FinishReason(StrEnum):
    """The reason why a request ended. The first two are a generation's own end, the others come from outside."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # it has max_new_tokens
    CANCELLED = "cancelled"  # by the client, or by the pool because nobody read it any more
    DEADLINE_EXCEEDED = "deadline_exceeded"
    MODEL_REPLACED = "model_replaced"  # its revision was retired before it could finish
    REFUSED = "refused"  # no group of its revision can run it, and `End.detail` says why (core.domain.refusal)
    ERROR = "error"  # proven to break every group that runs it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters by which the next token is drawn from the logits. Defaults leave the distribution untouched.

    The order of effects is: logit_bias, min_tokens mask, repetition, presence and frequency penalty, token masks
    (grammar, allowed and forbidden tokens), temperature, top_k, top_p, min_p. Temperature 0 takes the largest logit
    after the masks.

    A grammar decides when its output ends: it allows EOS only where the text is whole, and nothing else once no text
    may follow. There EOS ends the output whatever `ignore_eos` and `min_tokens` say.
    """

    temperature: float = 1.0  # >= 0; 0 is greedy
    top_k: int | None = None  # >= 1 tokens kept; None keeps all
    top_p: float = 1.0  # (0, 1]: smallest set of tokens whose probability reaches it
    min_p: float = 0.0  # [0, 1]: tokens under min_p x the largest probability are dropped
    repetition_penalty: float = 1.0  # [0.01, 10]; divides positive, multiplies negative logits of known tokens
    presence_penalty: float = 0.0  # [-2, 2], subtracted once for tokens in the output
    frequency_penalty: float = 0.0  # [-2, 2], subtracted per occurrence in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), ids rising
    seed: int = 0  # [0, 2^63); with the token's index it fixes the random number, whatever the batch
    logprobs: int | None = None  # top alternatives to report besides the chosen one, [0, 20]; None reports nothing
    prompt_logprobs: int | None = None  # the same for prompt tokens 1.. ; committed with token 0
    min_tokens: int = 0  # EOS, stop ids and stop strings are not allowed before this many tokens
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # stop strings, none empty; matched on the text of the output only
    grammar: str | None = None  # the output matches it: llguidance's dialect of Lark (core.grammars)
    allowed_token_ids: tuple[int, ...] = ()  # no other token is drawn; empty allows all
    forbidden_token_ids: tuple[int, ...] = ()
    # At least two token ids each: the last one is not drawn where the output ends with those before it.
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def has_token_mask(self) -> bool:
        """Return whether the next token is one of a set that may change from token to token."""
        return self.grammar is not None or bool(
            self.allowed_token_ids or self.forbidden_token_ids or self.forbidden_sequences
        )


@dataclass(frozen=True, slots=True)
class EndingTokens:
    """The tokens that end one request's output by themselves: EOS and stop token ids. They have no text.

    The scheduler ends requests by this rule, gateways leave out the text of such a token, and stages do not draw one
    that would end nothing.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. A call with n = 3 is one parent with three of these.

    `id` is `<parent>.<choice>`. The pool assigns `arrival` at submit (0 before) and keeps it for ever: it orders the
    queue, so a request that is taken back returns to its old place.
    """

    parent: str
    choice: int
    revision: str  # of the model (see core.domain.model)
    prompt: tuple[int, ...]  # at least one token id; an encoder-decoder model's source
    max_new_tokens: int  # >= 1
    sampling: SamplingParams
    deadline_ms: int | None = None  # from `submitted_ms`; the request ends then, finished or not; None: never
    first_token_deadline_ms: int | None = None  # from `submitted_ms`; the request ends then if it has no token
    traceparent: str | None = None  # W3C trace context of the call that made it
    # Tokens with which the target of an encoder-decoder model begins, its start token first. Empty for other models.
    decoder_prefix: tuple[int, ...] = ()
    weight: float | None = None  # of the request's utility, > 0: 2^-priority (core.priority); None is 1
    # From `submitted_ms`; the first token should come by then. It orders claims and ends nothing; None: no goal.
    first_token_goal_ms: int | None = None

    cache_salt: str | None = None  # requests share blocks of a common prefix only if their salts are equal

    # Reserved: the pool stores these fields, and nothing reads or writes them yet.
    key_hash: str | None = None  # salted hash of the API key, for length prediction
    head_hash: str | None = None  # salted hash of the prompt's first tokens, for length prediction

    arrival: int = 0
    submitted_ms: int = 0  # wall clock of the pool at submit, Unix milliseconds

    @property
    def id(self) -> str:
        return f"{self.parent}.{self.choice}"

    @property
    def deadline_wall_ms(self) -> int | None:
        """The deadline by the pool's wall clock, Unix milliseconds; known once the request is stored."""
        return None if self.deadline_ms is None else self.submitted_ms + self.deadline_ms

    @property
    def first_deadline_wall_ms(self) -> int | None:
        """The deadline while the request has no token: whichever of its two deadlines comes first."""
        deadlines = [ms for ms in (self.deadline_ms, self.first_token_deadline_ms) if ms is not None]
        return self.submitted_ms + min(deadlines) if deadlines else None

    @property
    def max_total_tokens(self) -> int:
        """Tokens that slots are reserved for: the paper's max_tokens (ORCA, section 4.2, footnote 6)."""
        return len(self.prompt) + len(self.decoder_prefix) + self.max_new_tokens

    @property
    def table_tokens(self) -> tuple[int, ...]:
        """Tokens of each block table. A decoder-only model has one table; with a decoder prefix: target, source."""
        if not self.decoder_prefix:
            return (self.max_total_tokens,)
        return len(self.decoder_prefix) + self.max_new_tokens, len(self.prompt)

    def slots(self, block_tokens: int) -> int:
        """Return the slots reserved for the request: each of its block tables has whole blocks."""
        return sum(slots_needed(tokens, block_tokens) for tokens in self.table_tokens)


def slots_needed(max_total_tokens: int, block_tokens: int) -> int:
    """Return the slots reserved for one block table: its tokens rounded up to whole KV blocks."""
    return -(-max_total_tokens // block_tokens) * block_tokens


def reserved_slots(max_total_tokens: int, source_tokens: int, block_tokens: int) -> int:
    """Return the slots reserved for a request: each of its block tables has whole blocks.

    Args:
        max_total_tokens: of all its tables.
        source_tokens: those of its source; 0 with a decoder-only model, whose requests have one table.
    """
    if not source_tokens:
        return slots_needed(max_total_tokens, block_tokens)
    target_tokens = max_total_tokens - source_tokens
    return slots_needed(target_tokens, block_tokens) + slots_needed(source_tokens, block_tokens)


def least_slots(block_tokens: int, *, has_source: bool) -> int:
    """Return the slots of the smallest request. Args: has_source: its model is an encoder-decoder model."""
    # A source has a token; a target has its start token and one of its output.
    return reserved_slots(3, 1, block_tokens) if has_source else slots_needed(2, block_tokens)


def slots_of_any_split(max_total_tokens: int, block_tokens: int) -> int:
    """Return the most slots that a request of an encoder-decoder model needs, however source and target share its
    tokens.

    The most expensive split has one token more than whole blocks in one table, so that one of its blocks has one token.
    """
    return slots_needed(max_total_tokens - 1, block_tokens) + block_tokens


def tokens_of_any_split(slots: int, block_tokens: int) -> int:
    """Return the most tokens, source and target together, that fit into so many slots in any split; 0 if none do.

    It is the inverse of `slots_of_any_split`. Requests of more tokens fit too if their split suits the blocks.
    """
    return max(0, (slots // block_tokens - 1) * block_tokens + 1)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability, and the most likely alternatives, largest first; it may be one of them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Token(NamedTuple):
    """An entry of a request's log: the token with index i is the i-th generated one, from 0."""

    id: int
    logprob: Logprob | None = None  # if `sampling.logprobs` asks for it
    prompt_logprobs: tuple[Logprob, ...] = ()  # with token 0 only: prompt tokens 1.., if asked for
    # With token 0 only: tokens of the prompt that were not computed. None where nobody counts them.
    cached_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The last entry of a log, after `count` tokens."""

    reason: FinishReason
    count: int
    stop: str | int | None = None  # the stop string or stop token id that ended it; None for EOS and other reasons
    # Why the request was refused, or ended before its deadline, for its client; with these reasons only.
    detail: str | None = None
