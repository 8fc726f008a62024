"""One iteration on its way from the scheduler through the stages and back.

Steps carry differences: a stage keeps the state of each request from the step that brings it (`new`) to the step that
frees it. Inside an epoch a handle stands for a (request, claim): a small number that the master never uses twice.

Records that exist for each row of each step (`Row`, `Sampled`) are not frozen: one is made in 0.35 us instead of 0.87.
Nobody changes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from orca.core.domain.request import SamplingParams, Token, reserved_slots


@dataclass(frozen=True, slots=True)
class Claim:
    """A request's present ownership in the pool. Both parts are compared (protocol: claim)."""

    number: int  # rises by one with each claim and each take-back
    call: str  # `<process>/<call number>` of the claim call that won it


@dataclass(frozen=True, slots=True)
class Epoch:
    """A group's life between two re-formings: all its parts have joined under this number for this seat holder."""

    number: int  # from 1; rises with every re-forming
    holder: str  # the scheduler process that holds the seat


class PrefixBlocks(NamedTuple):
    """The first KV blocks in the table of a request, which may have ended (`Step.kept`)."""

    handle: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request's first appearance on the stages under its present claim."""

    handle: int
    request_id: str
    claim: Claim
    tokens: tuple[int, ...]  # prompt (source of an encoder-decoder model), then the tokens of its log so far
    prompt_length: int  # how many of `tokens` are the prompt
    max_total_tokens: int  # slots reserved, before rounding to blocks
    sampling: SamplingParams
    decoder_prefix: tuple[int, ...] = ()  # with an encoder-decoder model: the target before its log, start token first
    max_new_tokens: int | None = None  # tokens of a whole log; None where nobody forces the last one
    # Blocks of another request that begin its own table too: their positions are not computed again. The rows of the
    # other one fill them in earlier steps, or before its own rows in this step.
    prefix: PrefixBlocks | None = None

    @property
    def source_tokens(self) -> int:
        """The length of its source; 0 with a decoder-only model, which has none."""
        return self.prompt_length if self.decoder_prefix else 0

    @property
    def table_tokens(self) -> tuple[int, ...]:
        """Tokens that each of its block tables is reserved for: as `Request.table_tokens`, target before source."""
        if not self.decoder_prefix:
            return (self.max_total_tokens,)
        return self.max_total_tokens - self.prompt_length, self.prompt_length

    @property
    def target(self) -> tuple[int, ...]:
        """The known tokens that the decoder runs: all of them for a decoder-only model, otherwise the target so far."""
        return self.decoder_prefix + self.tokens[self.prompt_length :] if self.decoder_prefix else self.tokens

    @property
    def target_start(self) -> int:
        """Number of the tokens of `target` that are not of its log."""
        return len(self.decoder_prefix) or self.prompt_length

    def slots(self, block_tokens: int) -> int:
        """Return the slots reserved for it: each of its block tables has whole blocks."""
        return reserved_slots(self.max_total_tokens, self.source_tokens, block_tokens)


class Part(Enum):
    """The part of an encoder-decoder model that a row runs."""

    UNSPECIFIED = "unspecified"  # of a decoder-only model
    SOURCE = "source"  # the encoder, once, and the keys and values of all cross attention
    TARGET = "target"  # the decoder


@dataclass(slots=True)
class Row:
    """A request's part of one step: `count` tokens at positions start .. start + count - 1.

    A request in the initiation phase runs its known tokens (all at once, or in chunks); in the increment phase it runs
    one. `token` is its input token if the master knows it (prefetch 0: it came back with the step before). None means
    that the stages have it: part of `NewRequest`, or fed on the device from the last stage to the first one that runs
    tokens of the decoder.

    A request of an encoder-decoder model enters with one step that holds two rows of it: its whole source, which draws
    no token, and the known part of its target. Positions of source and target count from 0 each. Request-level
    scheduling may start a target at its start token alone: the rest of its known part then follows token by token.
    """

    handle: int
    start: int
    count: int
    sample: bool  # draw a token after the last position; False for all chunks of a prompt but the last
    token: int | None = None
    part: Part = Part.UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration. A stage runs it if the epoch is equal and the number is the last one + 1.

    The stage drops the state of `freed`, and that of `kept` but for their block tables. Then it drops the last blocks
    of `evicted`, adds `new` and runs `rows`. A step without rows only frees. `lane` is the number of the chain of steps
    that it belongs to. There is one chain, 0. Source rows come before all target rows.
    """

    epoch: Epoch
    number: int  # from 1 in each epoch
    freed: tuple[int, ...] = ()  # handles
    kept: tuple[int, ...] = ()  # handles that end; other requests may begin with the blocks of their tables
    evicted: tuple[PrefixBlocks, ...] = ()  # kept handles, and how many of their first blocks stay; 0 ends a table
    new: tuple[NewRequest, ...] = ()
    rows: tuple[Row, ...] = ()
    lane: int = 0

    @property
    def tokens(self) -> int:
        """Rows of the flat [tokens, hidden] tensors (selective batching, ORCA section 3, S2), sources included."""
        return sum(row.count for row in self.rows)

    @property
    def source_tokens(self) -> int:
        """Those of `tokens` that belong to sources: the rows of the encoder's flat tensor."""
        if not self.rows or self.rows[0].part is not Part.SOURCE:
            return 0
        return sum(row.count for row in self.rows if row.part is Part.SOURCE)


@dataclass(slots=True)
class Sampled:
    """A token drawn for a request. `index` counts generated tokens from 0, those of earlier claims included."""

    handle: int
    index: int
    token: Token


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that the stages refuse, whatever the state of the group (core.domain.refusal)."""

    handle: int
    reason: str  # for its client


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """Times of a step on one stage: nanoseconds of the machine's monotonic clock, comparable on one machine only."""

    stage: int
    received_ns: int  # the control message reached the stage: its controller, or its only rank
    start_ns: int  # its inputs were there and computation began
    end_ns: int  # computation ended, its output handed to the link


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step from the last stage.

    It has one token for each row with `sample`, in row order, without the rows of refused requests. `refused` has one
    entry for each row of a request that every rank refuses, and one for each row whose token cannot be drawn. So it has
    two of a request that enters with a source, and the request ends once.
    """

    epoch: Epoch
    number: int
    sampled: tuple[Sampled, ...] = ()
    refused: tuple[Refused, ...] = ()
    timing: StageTiming | None = None  # of the last stage

    @classmethod
    def of(
        cls, step: Step, drawn: Sequence[Sampled | Refused], refused: tuple[Refused, ...], timing: StageTiming
    ) -> "StepResult":
        """Return the result of a step that has run.

        Args:
            drawn: one for each row with `sample` that has run, in row order.
            refused: rows that every rank has left out.
        """
        return cls(
            epoch=step.epoch,
            number=step.number,
            sampled=tuple(each for each in drawn if isinstance(each, Sampled)),
            refused=refused + tuple(each for each in drawn if isinstance(each, Refused)),
            timing=timing,
        )
