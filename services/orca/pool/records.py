"""Plain records of the pool's contract (api.py): what its callers pass in, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from orca.core.domain.request import End, Request, Token
from orca.core.domain.step import Claim, Epoch
from orca.pool.order.order_stats import OrderStats


class OnDisconnect(StrEnum):
    """The fate of a request that has no reader any more."""

    CANCEL = "cancel"  # the sweep ends it once no reader entry has lived for the grace
    KEEP = "keep"


class OwnershipState(StrEnum):
    QUEUED = "queued"
    OWNED = "owned"
    ENDED = "ended"


Cell = tuple[int, int]
"""Two bins of lengths (length_bins.py): that of the prompt, then that of the output."""

NOBODY_BLAMED: Mapping[str, Claim] = {}
"""Blame for a death from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A parent with all its requests, accepted or refused as one."""

    parent: str
    requests: tuple[Request, ...]  # choices 0..n-1 of `parent`, of one revision
    reader: str  # the entry of the connection that submits
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    render: str = "{}"  # JSON: everything else that a gateway needs to write the answer's bytes; opaque to the pool
    render_names: tuple[str, ...] = ()  # fields of the call that make `render` a record of schema 3
    conversation: str | None = None  # JSON: what a later call may go on from; opaque to the pool, and read on demand
    owner: str = ""  # opaque name of the submitter: the parent is shown to nobody else (gateway: auth.py)
    digest: str = ""  # of the call's content; the same parent with another digest is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """Everything that a gateway needs to render a parent that it did not submit."""

    parent: str
    requests: tuple[Request, ...]
    on_disconnect: OnDisconnect
    render: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A scheduler process. `process` is drawn at its start, so a restarted scheduler is another process."""

    group: str
    process: str
    revision: str


@dataclass(frozen=True, slots=True)
class SeatEntered:
    """The caller holds the seat, under a new epoch."""

    epoch: Epoch
    failed: tuple[str, ...] = ()  # requests that the caller blamed and that were still on trial: queued again
    poisoned: tuple[str, ...] = ()  # blamed requests that have failed too often: ended with reason `error`


@dataclass(frozen=True, slots=True)
class SeatHeld:
    """Another process holds the seat. Its lease has at most `lease_ms` of awake time left."""

    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A request that the caller owns now: it starts from `request.prompt + log`."""

    request: Request
    claim: Claim
    log: tuple[Token, ...]
    is_alone: bool = False  # it failed before: until its first commit no other request may share a step with it
    # From this claim to the end of the start window; None unless it is the first claim, and by another order.
    slack_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    claimed: tuple[Claimed, ...]  # in the order of the claim; empty when nothing fits or nothing is queued
    waiting: int  # requests of the revision still queued after this call
    is_blocked: bool  # a request is marked for this group: nothing that comes after it is claimed until it fits
    is_by_order: bool = False  # by another order than arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEntry:
    """One request's part of a step: tokens `index ..`, in one write with its end if it ends.

    A step appends one token. The end goes with the last token, or alone if it is decided without one.
    """

    request_id: str
    claim: Claim
    index: int  # of tokens[0] in the log
    tokens: tuple[Token, ...] = ()
    end: End | None = None  # end.count == index + len(tokens)
    # From this claim to its first step; only with the first token of the log. It is no age, so that a commit may be
    # sent again later.
    waited_ms: int | None = None

    def without_cached_tokens(self) -> "CommitEntry":
        """Return the same for a record that cannot have the number of cached prompt tokens (schemas.py)."""
        return replace(self, tokens=tuple(token._replace(cached_prompt_tokens=None) for token in self.tokens))


class CommitAnswer(StrEnum):
    APPLIED = "applied"
    ALREADY_THERE = "already there"  # the same call came twice
    ENDED = "ended"  # by cancel, deadline or an earlier end: drop the request and free its slots
    NOT_YOURS = "not yours"  # the claim is over: drop the request and free its slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The requests that the caller owns according to the pool."""

    owned: Mapping[str, Claim]  # request id -> claim; the caller gives back a request that it does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    request: Request
    state: OwnershipState
    owner: str | None
    claim: Claim | None
    tokens: int  # length of the log
    end: End | None
    first_claimed_ms: int | None  # wall clock of its first claim, None while it never ran
    first_token_ms: int | None  # wall clock of the commit of token 0, None before
    # Wall clock of the end, None before. An end that came with the last token has the time of that commit.
    ended_ms: int | None
    # Wall clock of the end of its start window, or of its patience, as its first claim saw it. None before that claim,
    # and if that was by arrival.
    starts_by_ms: int | None = None
    older_waiting: int | None = None  # requests in its queue that came before it; None unless it waits

    @classmethod
    def queued(cls, request: Request) -> "RequestStatus":
        """Return the status of a request that nobody has claimed yet."""
        return cls(
            request=request,
            state=OwnershipState.QUEUED,
            owner=None,
            claim=None,
            tokens=0,
            end=None,
            first_claimed_ms=None,
            first_token_ms=None,
            ended_ms=None,
        )


@dataclass(frozen=True, slots=True)
class LogSlice:
    """A request's log from an index on."""

    start: int
    tokens: tuple[Token, ...]
    end: End | None  # present only when all its tokens are in the slice or before it
    is_cut: bool = False  # the log goes on after the slice, beyond the bounds of this call: read on from there


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts for metrics, status and admission, over all revisions unless a field says otherwise."""

    queued: int
    owned: int
    ended: int  # records kept for their retention
    queued_prompt_tokens: int
    queued_max: int  # bound of `queued` for new submissions
    queued_prompt_tokens_max: int  # bound of `queued_prompt_tokens` for new submissions
    ended_ever: int  # all requests that have ended, forgotten ones included: never falls
    unserved_ever: int  # those of them that ended while they waited
    wall_ms: int  # the pool's wall clock at this moment, Unix milliseconds
    oldest_wait_ms: int  # 0 when nothing waits
    bytes_reserved: int
    bytes_max: int
    revision: str | None  # the current revision, which submit accepts
    generation: int | None  # of the current revision
    replaced_revisions: tuple[str, ...]  # others that may still have records: none is missing, one may stay too long
    replaced_unfinished: int  # requests of the replaced revisions, queued or owned
    promised_slots: int | None  # of the current revision: slots a request may need; None until a group formed
    block_tokens: int | None  # of the current revision: tokens of a KV block of its groups; None until one states it
    # The fewest slots that a formed group of the current revision has for one request, now and whenever it forms again.
    # None while no group is formed. Also None while one group does not report it: its free memory decides, or the group
    # runs the release before this one.
    offered_slots: int | None
    groups: tuple[str, ...]  # groups with a living seat
    groups_formed: tuple[str, ...]  # those of `groups` whose holder reports that they serve
    groups_in_force: tuple[str, ...]  # those of `groups` that are of the current revision, formed or not
    schema: int  # number in force
    newer_records: int  # requests whose records have a newer number: a rollback waits until none is left
    by_order: OrderStats | None  # None unless a group of the current revision claims by another order than arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodLengths:
    """The answers of one period that ended by `stop` or `length`, by the bins of their lengths (length_bins.py)."""

    age_ms: int  # awake time since the middle of the period, 0 before it
    cells: Mapping[Cell, int]  # number of answers
    cut: int  # answers among them that ended by `length`: max_tokens has cut them


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts:
    """The lengths of a revision's answers in the last hours. Each choice is an answer of its own.

    A prompt's length is that of the source where the model has an encoder; a decoder prefix does not count. An
    answer's length is that of its whole log, tokens of earlier claims included.
    """

    periods: tuple[PeriodLengths, ...]  # the newest first; those without an answer are left out

    @property
    def answers(self) -> int:
        return sum(sum(period.cells.values()) for period in self.periods)

    @property
    def cut_share(self) -> float:
        """Share of the answers that `max_tokens` has cut, 0 if there is none. Without the cut they would be longer."""
        return sum(period.cut for period in self.periods) / max(1, self.answers)

    def weighed(self, half_life_s: float) -> dict[Cell, float]:
        """Return the sum of the weights of each cell's answers. An answer of now has weight 1.

        Args: half_life_s: awake seconds after which an answer has half its weight, more than 0.
        """
        weights: dict[Cell, float] = {}
        for period in self.periods:
            weight = 0.5 ** (period.age_ms / 1000 / half_life_s)
            for cell, count in period.cells.items():
                weights[cell] = weights.get(cell, 0.0) + weight * count
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerRequests:
    """Requests of a revision that need more than a number of slots, and the promise in force at that moment."""

    promised_slots: int | None  # None until a group formed
    unfinished: int  # number of these requests, queued or owned
    smallest: int  # `max_total_tokens` of the smallest of them, 0 when there is none
    largest: int  # `max_total_tokens` of the largest of them, 0 when there is none
