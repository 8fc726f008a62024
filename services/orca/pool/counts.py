"""What the pool counts of itself, and what its door promises: the answers to `stats` and `larger_requests` (api.py)."""

from dataclasses import dataclass


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
