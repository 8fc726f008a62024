"""The outcome of a request that had a deadline: whether it was in time, and why not.

A request has a deadline for its end, for its first token, or for both. It is in time if its answer ended by itself, and
no deadline had passed. Ends from outside (`cancel`, refusals, errors, another model) say nothing about deadlines.
"""

from enum import StrEnum

from orca.core.domain.request import End, FinishReason, Request
from orca.pool.length_bins import OWN_ENDS
from orca.pool.order.order_rules import LATE
from orca.pool.records import RequestStatus


class DeadlineOutcome(StrEnum):
    """The fate of a request with a deadline."""

    IN_TIME = "in_time"
    DROPPED = "dropped"  # it was too late, so a claim ended it before its deadline
    STARTED_LATE = "started_late"  # it was never claimed, or after its start window
    RAN_SLOW = "ran_slow"  # it was claimed within its start window, or its window is not known


def deadline_outcome(status: RequestStatus) -> DeadlineOutcome | None:
    """Return the outcome of a request; None without a deadline, before the end, and for ends from outside.

    The start window is that of the first claim. Where claims go by arrival there is none.
    """
    end, first_token_ms, ended_ms = status.end, status.first_token_ms, status.ended_ms
    if end is None or ended_ms is None:
        return None
    in_time = is_in_time(status.request, end, first_token_ms=first_token_ms, ended_ms=ended_ms)
    if in_time is None:
        return None
    if in_time:
        return DeadlineOutcome.IN_TIME
    if end.detail == LATE:
        return DeadlineOutcome.DROPPED
    claimed_ms, starts_by_ms = status.first_claimed_ms, status.starts_by_ms
    if claimed_ms is None or (starts_by_ms is not None and claimed_ms > starts_by_ms):
        return DeadlineOutcome.STARTED_LATE
    return DeadlineOutcome.RAN_SLOW


def is_in_time(request: Request, end: End, *, first_token_ms: int | None, ended_ms: int) -> bool | None:
    """Return whether a request met its deadlines; None without a deadline, and for ends from outside.

    Args: first_token_ms, ended_ms: on the wall clock of the pool. A time that equals the deadline meets it.
    """
    if request.first_deadline_wall_ms is None:
        return None
    if end.reason not in OWN_ENDS:
        return False if end.reason is FinishReason.DEADLINE_EXCEEDED else None
    if request.deadline_wall_ms is not None and ended_ms > request.deadline_wall_ms:
        return False
    if request.first_token_deadline_ms is None:
        return True
    # An answer without a token ends where its first token would have been.
    first_ms = ended_ms if first_token_ms is None else first_token_ms
    return first_ms <= request.submitted_ms + request.first_token_deadline_ms
