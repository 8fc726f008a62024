"""The requests that a group has claimed, and the batches that policies make of them: plain data.

A request goes through

    INITIATION  not all of its known tokens (prompt, and its log if it starts again) have been scheduled;
                with an encoder-decoder model, its source and the known tokens of its target
    RUNNING     in a scheduled batch that has not returned
    INCREMENT   returned, and ready for its next token

and gives its slots back when it is over and no step in flight holds it any more.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Part
from orca.scheduler.policy.cycle import CyclePosition
from orca.scheduler.policy.prefix_index import BlockTable, Node


class Phase(StrEnum):
    """The states of a request in Algorithm 1 (ORCA, section 4.2)."""

    INITIATION = "initiation"
    RUNNING = "running"
    INCREMENT = "increment"


@dataclass(slots=True, eq=False)
class GroupRequest:
    """A claimed request and how far it has been scheduled. Counts of tokens include those of its log."""

    request: Request
    claim: Claim
    # The tokens of the initiation phase: the prompt, or the beginning of a target, then the log as it was claimed. The
    # source of an encoder-decoder model is not part of it.
    known: tuple[int, ...]
    sampled: int  # tokens that scheduled rows draw or drew
    received: int  # those of the sampled tokens that came back
    last_token: int  # the newest one received; meaningless while received is the length of the log it was claimed with
    handle: int | None = None  # its number on the stages, from its admission on
    slots: int = 0  # reserved for it, in whole blocks, from its admission on
    batch: int = 0  # request-level policy: the batch in which it stays from its admission on
    # Request-level policy: its part of that batch. Round-robin allocation: the micro-batch in which it stays.
    microbatch: int = 0
    computed: int = 0  # positions scheduled, from 0; not those of its source
    in_flight: int = 0  # steps that hold it
    iterations: int = 0  # rows scheduled under this claim
    is_ended: bool = False  # by its tokens, by the pool, or because the claim is over
    is_alone: bool = False  # it broke engines before: no other request may run until its first commit (pool/poison.py)
    tokens: int = 0  # tokens for which `slots` are reserved; slots that it holds only to be alone are not counted
    part: Part = Part.UNSPECIFIED  # of its rows; TARGET with an encoder-decoder model
    source_tokens: int = 0  # length of its source; 0 with a decoder-only model, which has none
    sources_run: int = 0  # rows scheduled with its source: one from its first row on, if it has a source
    # Its KV blocks, the tokens that came back under this claim, and the number of positions from which on its next row
    # changes something in the index of prefixes (prefixes.py).
    table: BlockTable | None = None
    drawn: list[int] = field(default_factory=list)
    watch: int = 0
    prefix_tokens: int = 0  # known tokens that were not computed, from its admission on
    was_alone: bool = False  # it was admitted while it had to run alone
    is_refused: bool = False  # by the stages
    claimed_ns: int = 0  # of the loop's clock
    waited_ns: int | None = None  # from this claim to the submit of its first step, once that is there

    @property
    def is_admitted(self) -> bool:
        return self.handle is not None

    @property
    def is_over(self) -> bool:
        """True if it needs no further row: it has ended, or a row already scheduled draws its last token."""
        return self.is_ended or self.sampled == self.request.max_new_tokens

    @property
    def phase(self) -> Phase:
        if self.in_flight:
            return Phase.RUNNING
        return Phase.INITIATION if self.computed < len(self.known) else Phase.INCREMENT


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The blocks of other requests with which a request begins, found at its first pick (prefixes.py).

    Either earlier steps have filled them all, or an older request fills the last ones in the same step.
    """

    tokens: int  # of whole blocks
    blocks: int = 0
    node: Node | None = None  # of the last block, if earlier steps have filled them all
    filler: GroupRequest | None = None  # the older request, if they have not


NO_HIT = PrefixHit(0)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request's first scheduling, and the slots reserved for it."""

    request: GroupRequest
    slots: int  # in whole blocks; under the request-level policy the whole group's for a request that must be alone
    tokens: int  # of the request itself, before rounding
    batch: int = 0  # request-level policy only
    microbatch: int = 0  # request-level policy and round-robin allocation
    prefix: PrefixHit = NO_HIT

    @property
    def prefix_tokens(self) -> int:
        """Known tokens that need not be computed."""
        return self.prefix.tokens


@dataclass(slots=True)
class BatchRow:
    """A request's part of a batch: `count` tokens from position `start`; see `core.domain.step.Row`.

    With an encoder-decoder model it is a row of the target.
    """

    request: GroupRequest
    start: int
    count: int
    sample: bool

    @property
    def is_of_prompt(self) -> bool:
        """True if it runs tokens of the initiation phase, which may include an earlier claim's log."""
        return self.start < len(self.request.known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The decision of a policy, in the order in which the stages carry it out."""

    freed: tuple[GroupRequest, ...] = ()
    admitted: tuple[Admission, ...] = ()
    sources: tuple[GroupRequest, ...] = ()  # those whose whole source runs too; `rows` has their first target rows
    rows: tuple[BatchRow, ...] = ()  # one per request
    position: CyclePosition | None = None  # of round-robin allocation after this batch; None leaves it as it is

    @property
    def source_tokens(self) -> int:
        return sum(entry.source_tokens for entry in self.sources) if self.sources else 0


NOTHING = Batch()
