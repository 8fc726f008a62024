"""Plain records of the pool's contract (api.py): what its callers pass in, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from orca.core.domain.request import End, Request, Token
from orca.core.domain.step import Claim, Epoch


class OnDisconnect(StrEnum):
    """What happens to a request that nobody reads any more."""

    CANCEL = "cancel"  # ended by the sweep once no reader entry has lived for the grace
    KEEP = "keep"


NOBODY: Mapping[str, Claim] = {}
"""Who is blamed for a death from outside."""


class RequestState(StrEnum):
    QUEUED = "queued"
    OWNED = "owned"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A parent with all its requests, accepted or refused as one."""

    parent: str
    requests: tuple[Request, ...]  # choices 0..n-1 of `parent`, of one revision
    reader: str  # the entry of the connection that submits
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    render: str = "{}"  # JSON: all else that a gateway needs to write the answer's bytes; opaque to the pool
    owner: str = ""  # a word for who submits: nobody else is shown the parent (gateway: auth.py)
    digest: str = ""  # of what was asked for; the same parent with another one is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What a gateway reads back to render a parent it did not submit."""

    parent: str
    requests: tuple[Request, ...]
    on_disconnect: OnDisconnect
    render: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A scheduler process. `process` is a word drawn at its start; a restarted scheduler is another process."""

    group: str
    process: str
    revision: str


@dataclass(frozen=True, slots=True)
class Entered:
    epoch: Epoch
    failed: tuple[str, ...] = ()  # requests that the caller blamed and that were still on trial: queued again
    poisoned: tuple[str, ...] = ()  # those of them that have failed too often: ended with reason `error`


@dataclass(frozen=True, slots=True)
class Wait:
    """Another process holds the seat; its lease has at most `lease_ms` of awake time left."""

    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A request now owned by the caller: it starts from `request.prompt + log`."""

    request: Request
    claim: Claim
    log: tuple[Token, ...]
    is_alone: bool = False  # it failed before: until its first commit nothing else may run in a step with it


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    claimed: tuple[Claimed, ...]  # in arrival order; empty when nothing fits or waits
    waiting: int  # requests of the revision still queued after this call
    is_blocked: bool  # the head of the queue is marked for this group: admit nothing younger until it fits


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEntry:
    """What one step gives to one request: tokens `index ..`, in one write with the end where it ends.

    A step appends one token. The end goes with the last token or, where it is decided without one, alone.
    """

    request_id: str
    claim: Claim
    index: int  # of tokens[0] in the log
    tokens: tuple[Token, ...] = ()
    end: End | None = None  # end.count == index + len(tokens)


class CommitAnswer(StrEnum):
    APPLIED = "applied"
    ALREADY_THERE = "already there"  # the same call came twice
    ENDED = "ended"  # by cancel, deadline or an earlier end: drop it and free its slots
    NOT_YOURS = "not yours"  # the claim is over: drop it and free its slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What the pool believes the caller owns, and what happened to it since."""

    owned: Mapping[str, Claim]  # request id -> claim: listed but not known to the caller -> give back


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    request: Request
    state: RequestState
    owner: str | None
    claim: Claim | None
    tokens: int  # length of the log
    end: End | None
    first_claimed_ms: int | None  # wall clock of its first claim, None while it never ran
    first_token_ms: int | None  # wall clock at which token 0 was committed, None while there is none
    # Wall clock of the end, None while there is none; that of the last token where both came in one.
    ended_ms: int | None

    @classmethod
    def queued(cls, request: Request) -> "RequestStatus":
        """Of one that nobody has claimed yet."""
        return cls(
            request=request,
            state=RequestState.QUEUED,
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
    is_cut: bool = False  # there is more behind the slice, for which this call had no room: read on from there


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts for metrics, status and admission. Of all revisions, unless a field says otherwise."""

    queued: int
    owned: int
    ended: int  # records kept for their retention
    queued_prompt_tokens: int
    queued_max: int  # the door's bounds of the two
    queued_prompt_tokens_max: int
    ended_ever: int  # all that have ended, records forgotten since included: only ever rises
    oldest_wait_ms: int  # 0 when nothing waits
    bytes_reserved: int
    bytes_max: int
    revision: str | None  # the current one: what submit accepts
    generation: int | None  # of the current one
    replaced_revisions: tuple[str, ...]  # others that may still have records; none is left out, one may stay too long
    replaced_unfinished: int  # requests of those, queued or owned
    promised_slots: int | None  # of the current revision: total slots a request may need; None until a group formed
    # The least that a formed group of the current revision has for one request, now and whenever it forms again. None
    # while none is formed, and while one does not say it: free memory decides, or it is of the release before.
    offered_slots: int | None
    groups: tuple[str, ...]  # groups with a living seat
    groups_formed: tuple[str, ...]  # those of them whose holder says that they serve
    groups_in_force: tuple[str, ...]  # those of `groups` that are of the current revision, formed or not
    schema: int  # number in force
    newer_records: int  # requests whose records are of a newer one: a rollback waits until none is left


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerRequests:
    """Which requests of a revision need more than so many slots, and what the door promises, at one moment."""

    promised_slots: int | None  # None until a group formed
    unfinished: int  # of them, queued or owned
    smallest: int  # `max_total_tokens` of the smallest of them, 0 when there is none
    largest: int  # and of the largest
