"""Outcomes of deadlines: a pure function of a status, and the counts as readers get them."""

import pytest

from orca.core.domain.request import End, FinishReason
from orca.pool.length_bins import PERIOD_MS
from orca.pool.order.deadline_counts import DeadlineCounts, PeriodDeadlines
from orca.pool.order.deadline_outcome import DeadlineOutcome, deadline_outcome
from orca.pool.order.order_rules import LATE
from orca.pool.records import OwnershipState, RequestStatus
from support.pool.beds import request

SUBMITTED_MS = 1_700_000_000_000
IN_TIME, DROPPED = DeadlineOutcome.IN_TIME, DeadlineOutcome.DROPPED
STARTED_LATE, RAN_SLOW = DeadlineOutcome.STARTED_LATE, DeadlineOutcome.RAN_SLOW
TO_END, TO_BOTH = {"deadline_ms": 1000}, {"deadline_ms": 1000, "first_token_deadline_ms": 200}
TO_FIRST = {"first_token_deadline_ms": 200}


def status(
    deadlines: dict[str, int],
    *,
    ended: int | None,
    reason: FinishReason = FinishReason.STOP,
    detail: str | None = None,
    claimed: int | None = None,
    starts_by: int | None = None,
    first: int | None = None,
) -> RequestStatus:
    """Return a status; times in milliseconds from the submission."""

    def at(ms: int | None) -> int | None:
        return None if ms is None else SUBMITTED_MS + ms

    return RequestStatus(
        request=request(submitted_ms=SUBMITTED_MS, **deadlines),
        state=OwnershipState.QUEUED if ended is None else OwnershipState.ENDED,
        owner=None,
        claim=None,
        tokens=0,
        end=None if ended is None else End(reason, 0, detail=detail),
        first_claimed_ms=at(claimed),
        first_token_ms=at(first),
        ended_ms=at(ended),
        starts_by_ms=at(starts_by),
    )


EXCEEDED = FinishReason.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (status(TO_END, ended=1000, claimed=0, first=5), IN_TIME),
        (status(TO_END, ended=1001, claimed=0, first=5), RAN_SLOW),
        (status(TO_END, ended=1001, claimed=500, starts_by=499, first=505), STARTED_LATE),
        (status(TO_END, ended=1001, claimed=500, starts_by=500, first=505), RAN_SLOW),
        (status(TO_END, ended=990, claimed=500, starts_by=499, first=505), IN_TIME),
        (status(TO_END, ended=1000, reason=EXCEEDED), STARTED_LATE),
        (status(TO_END, ended=1000, reason=EXCEEDED, claimed=3), RAN_SLOW),
        (status(TO_END, ended=700, reason=EXCEEDED, detail=LATE), DROPPED),
        (status(TO_END, ended=700, reason=EXCEEDED, detail=LATE, claimed=3), DROPPED),
        (status(TO_BOTH, ended=1000, claimed=0, first=200), IN_TIME),
        (status(TO_BOTH, ended=1000, claimed=0, first=201), RAN_SLOW),
        (status(TO_FIRST, ended=9000, claimed=0, first=200), IN_TIME),
        (status(TO_FIRST, ended=9000, claimed=0, first=201), RAN_SLOW),
        (status(TO_FIRST, ended=200, claimed=0), IN_TIME),
        (status(TO_FIRST, ended=201, claimed=0), RAN_SLOW),
        (status(TO_FIRST, ended=201, reason=EXCEEDED), STARTED_LATE),
        (status({}, ended=9000, claimed=0, first=5), None),
        (status(TO_END, ended=None), None),
        (status(TO_END, ended=5, reason=FinishReason.CANCELLED), None),
        (status(TO_END, ended=2000, reason=FinishReason.ERROR, claimed=3), None),
        (status(TO_END, ended=5, reason=FinishReason.REFUSED, claimed=3), None),
        (status(TO_END, ended=5, reason=FinishReason.MODEL_REPLACED), None),
    ],
    ids=[
        "at its deadline",
        "after it, and no window is known",
        "claimed after its window",
        "claimed at the end of its window",
        "claimed after its window and in time all the same",
        "never claimed",
        "cut off",
        "ended by a claim",
        "ended by a claim after its first owner died",
        "both met",
        "only the end met",
        "first token met",
        "first token missed",
        "no token, but an end in time",
        "no token and a late end",
        "no token at the deadline",
        "no deadline",
        "not ended",
        "cancelled",
        "failed",
        "refused",
        "model replaced",
    ],
)
def test_an_outcome_says_what_went_wrong(seen: RequestStatus, outcome: DeadlineOutcome | None) -> None:
    assert deadline_outcome(seen) is outcome


def counts(*periods: tuple[int, int, int], awake_ms: int = 5 * PERIOD_MS + 1) -> DeadlineCounts:
    found = (PeriodDeadlines(period=number, in_time=in_time, late=late) for number, in_time, late in periods)
    return DeadlineCounts(awake_ms=awake_ms, periods=tuple(found))


def test_a_share_is_rounded_down() -> None:
    assert counts((5, 199, 1)).in_time_percent == 99
    assert counts((5, 1, 0), (3, 0, 2)).in_time_percent == 33
    assert (counts().in_time_percent, counts((5, 0, 7)).in_time_percent) == (None, 0)


def test_the_newest_counts_are_those_of_whole_periods() -> None:
    found = counts((5, 1, 0), (4, 2, 0), (2, 4, 0))
    assert [found.newest(ms).requests for ms in (1, PERIOD_MS, PERIOD_MS + 1, 4 * PERIOD_MS)] == [1, 1, 3, 7]
