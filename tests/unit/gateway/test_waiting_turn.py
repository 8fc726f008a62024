"""The turn of a waiting request, from a status and counts of the pool."""

from dataclasses import replace
from typing import Any

import pytest

from orca.core.domain.request import Request
from orca.gateway.routes.waiting_turn import WaitingTurn, WaitReason, waiting_turn
from orca.pool.order.order_class import DeadlineKind, OrderClass, length_class
from orca.pool.order.order_rules import ClaimOrder, Order, OrderRules, RunEstimates
from orca.pool.order.order_stats import DUE_MS, OrderStats
from orca.pool.order.start_window import starts_by_ms, waiting_class
from orca.pool.records import PoolStats, RequestStatus
from support.gateway.gateway_rig import MODEL, make_request
from support.gateway.scripted_pool import stats

NOW_MS = 1_700_000_000_000
PATIENCE_MS = 30_000
ORDER = ClaimOrder(
    rules=OrderRules(order=Order.DEADLINE, patience_ms=PATIENCE_MS),
    estimates=RunEstimates(step_ms=10.0),
    free_prompt_tokens=1,
    total_prompt_tokens=1,
)
END, NONE = DeadlineKind.END, DeadlineKind.NONE
OWN = OrderClass(0, length_class(1), length_class(50), END)  # of the requests here
OWN_MS = ORDER.estimates.own_ms(OWN)
SHORT, LONG = OrderClass(0, 0, 0, END), OrderClass(0, 0, length_class(1000), END)


def a_request(age_ms: int = 0, **changes: Any) -> Request:
    return replace(make_request(), submitted_ms=NOW_MS - age_ms, **changes)


def counts(
    order: ClaimOrder | None = ORDER,
    *,
    queued: int = 10,
    classes: dict[OrderClass, int] | None = None,
    is_index_whole: bool = True,
    **fields: Any,
) -> PoolStats:
    """Return counts with a formed group, at NOW_MS. All deadlines are due soon.

    Args: order: None where claims go by arrival; classes: without any, all that waits is short.
    """
    classes = {SHORT: queued} if classes is None else classes
    queued = sum(classes.values())
    counted = classes if is_index_whole else None
    told = None
    if order is not None:
        told = OrderStats(classes=counted, due=(queued,) * len(DUE_MS), least_step_ms=0.0, order=order)
    known = {"groups_formed": ("g",), "groups_in_force": ("g",), "revision": MODEL.revision, "wall_ms": NOW_MS}
    return stats(queued=queued, by_order=told, **{**known, **fields})


def turn(request: Request, told: PoolStats | None, *, older: int | None = 4, tokens: int = 0) -> WaitingTurn | None:
    status = replace(RequestStatus.queued(request), older_waiting=older, tokens=tokens)
    return waiting_turn(status, told)


@pytest.mark.parametrize(
    ("request_", "reason", "ahead"),
    [
        (a_request(deadline_ms=60_000), WaitReason.IN_WINDOW, 9),
        (a_request(deadline_ms=60_000, weight=2.0**8), WaitReason.IN_WINDOW, 0),
        (a_request(deadline_ms=int(OWN_MS) - 1), WaitReason.WINDOW_OVER, 9),
        (a_request(), WaitReason.NO_DEADLINE, 9),
        (a_request(PATIENCE_MS - 1), WaitReason.NO_DEADLINE, 0),
        (a_request(PATIENCE_MS), WaitReason.PATIENCE_PASSED, 0),
    ],
    ids=["in window", "urgent", "window over", "no deadline", "patience lasts", "patience passed"],
)
def test_the_reason_follows_from_window_and_patience(request_: Request, reason: WaitReason, ahead: int) -> None:
    found = turn(request_, counts())
    assert found is not None
    assert (found.order, found.reason, found.ahead) == (Order.DEADLINE, reason, ahead)
    assert found.starts_by_ms == int(starts_by_ms(request_, 0, ORDER, NOW_MS))


@pytest.mark.parametrize(
    ("without", "older", "expected"), [(1, 9, 0), (3, 9, 2), (10, 4, 4), (10, 9, 9)], ids=["alone", "few", "old", "all"]
)
def test_older_requests_with_a_deadline_do_not_go_before_patience(without: int, older: int, expected: int) -> None:
    request = a_request(PATIENCE_MS)
    found = turn(request, counts(classes={waiting_class(request, 0): without, OWN: 10 - without}), older=older)
    assert found is not None
    assert (found.reason, found.ahead) == (WaitReason.PATIENCE_PASSED, expected)


@pytest.mark.parametrize(
    ("others", "fields", "expected"),
    [
        ({LONG: 7}, {}, 2),
        ({LONG: 7}, {"owned": 2}, 4),
        ({LONG: 7}, {"replaced_unfinished": 3}, 5),
        ({LONG: 7}, {"owned": 100}, 9),
        ({SHORT: 7}, {}, 9),
        ({LONG: 3, SHORT._replace(priority=8): 4}, {}, 9),
        ({LONG: 3, LONG._replace(kind=NONE): 4}, {}, 6),
    ],
    ids=["long", "some run", "some are old", "all run", "dense", "one may be in time", "no deadline"],
)
def test_late_requests_of_less_utility_per_cost_come_after_a_late_one(
    others: dict[OrderClass, int], fields: dict[str, int], expected: int
) -> None:
    found = turn(a_request(deadline_ms=int(OWN_MS) - 1), counts(classes={OWN: 3, **others}, **fields))
    assert found is not None
    assert (found.reason, found.ahead) == (WaitReason.WINDOW_OVER, expected)


@pytest.mark.parametrize(("oldest_wait_ms", "patient"), [(PATIENCE_MS - 1, 0), (PATIENCE_MS, 4)])
def test_all_without_a_deadline_are_ahead_once_patience_may_have_passed(oldest_wait_ms: int, patient: int) -> None:
    urgent = a_request(deadline_ms=60_000, weight=2.0**8)
    for request in (urgent, replace(urgent, deadline_ms=None)):
        own = {waiting_class(request, 0): 1}
        found = turn(
            request, counts(classes={SHORT._replace(kind=NONE): 4, SHORT: 6, **own}, oldest_wait_ms=oldest_wait_ms)
        )
        assert found is not None
        assert found.ahead == patient


@pytest.mark.parametrize("deadline_ms", [60_000, None])
@pytest.mark.parametrize(("others", "ahead"), [({LONG: 1}, 0), ({SHORT: 1}, 1)], ids=["long", "short"])
def test_a_request_is_not_ahead_of_itself(deadline_ms: int | None, others: dict[OrderClass, int], ahead: int) -> None:
    request = a_request(deadline_ms=deadline_ms)
    found = turn(request, counts(classes={waiting_class(request, 0): 1, **others}))
    assert found is not None
    assert found.ahead == ahead


def test_those_without_a_deadline_count_once() -> None:
    told = counts(classes={SHORT._replace(kind=NONE): 40, LONG: 60}, oldest_wait_ms=PATIENCE_MS, owned=100)
    found = turn(a_request(deadline_ms=60_000), told)
    assert found is not None
    assert found.ahead == 40


@pytest.mark.parametrize("request_", [a_request(deadline_ms=60_000), a_request(), a_request(PATIENCE_MS)])
def test_while_the_index_is_built_the_order_is_told_and_older_ones_are_ahead(request_: Request) -> None:
    whole, built = turn(request_, counts()), turn(request_, counts(is_index_whole=False))
    assert whole is not None
    assert built == replace(whole, ahead=4)
    assert built.order is Order.DEADLINE


@pytest.mark.parametrize(
    ("request_", "before", "after"),
    [
        (a_request(deadline_ms=60_000), WaitReason.IN_WINDOW, WaitReason.WINDOW_OVER),
        (a_request(), WaitReason.NO_DEADLINE, WaitReason.PATIENCE_PASSED),
    ],
)
def test_windows_end_by_the_clock_of_the_pool(request_: Request, before: WaitReason, after: WaitReason) -> None:
    for wall_ms, reason in ((NOW_MS, before), (NOW_MS + 60_000, after)):
        found = turn(request_, counts(wall_ms=wall_ms))
        assert found is not None
        assert found.reason is reason


def test_counts_that_are_older_than_the_request_put_nobody_ahead() -> None:
    for request in (a_request(deadline_ms=60_000), a_request(deadline_ms=1), a_request(PATIENCE_MS)):
        found = turn(request, counts(queued=0))
        assert found is not None
        assert found.ahead == 0


def test_by_arrival_the_older_ones_are_ahead() -> None:
    found = turn(a_request(deadline_ms=60_000), counts(None))
    assert found == WaitingTurn(Order.ARRIVAL, WaitReason.BY_ARRIVAL, 4, None)


def test_without_a_formed_group_that_is_the_reason() -> None:
    assert turn(a_request(), counts(None, groups_formed=())) == WaitingTurn(None, WaitReason.NO_GROUP, 4, None)
    found = turn(a_request(), counts(groups_formed=("old",)))
    assert found is not None
    assert (found.order, found.reason) == (Order.DEADLINE, WaitReason.NO_GROUP)


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert turn(a_request(), counts(), older=None) is None, "it does not wait"
    assert turn(a_request(), None) is None
    assert turn(a_request(), counts(revision="newer")) is None
    by_order = counts().by_order
    assert by_order is not None
    assert turn(a_request(), replace(counts(), by_order=replace(by_order, order=None))) is None


def test_nobody_is_ahead_of_the_only_one_that_waits() -> None:
    for request in (a_request(deadline_ms=60_000), a_request(deadline_ms=1), a_request(), a_request(PATIENCE_MS)):
        found = turn(request, counts(queued=1), older=0)
        assert found is not None
        assert found.ahead == 0


def test_a_request_with_tokens_has_the_deadline_of_its_end() -> None:
    request = a_request(deadline_ms=60_000, first_token_deadline_ms=1_000)
    assert waiting_class(request, 0).kind is DeadlineKind.FIRST_TOKEN
    assert starts_by_ms(request, 0, ORDER, NOW_MS) == NOW_MS + 1_000 - 10.0
    left = waiting_class(request, 20)
    assert (left.kind, left.output) == (DeadlineKind.END, length_class(30))
    assert starts_by_ms(request, 20, ORDER, NOW_MS) == NOW_MS + 60_000 - ORDER.estimates.own_ms(left)
    assert waiting_class(replace(request, deadline_ms=None), 20).kind is DeadlineKind.NONE


@pytest.mark.parametrize(
    ("age_ms", "goal_ms", "window_ms"),
    [
        (0, 4_096, 4_086),
        (4_086, 4_096, 4_086),
        (4_087, 4_096, PATIENCE_MS),
        (0, 65_536, PATIENCE_MS),
        (0, 9, PATIENCE_MS),
    ],
    ids=["open", "its last moment", "over", "beyond patience", "shorter than a step"],
)
def test_a_soft_goal_is_the_window_while_it_can_be_met(age_ms: int, goal_ms: int, window_ms: int) -> None:
    request = a_request(age_ms, first_token_goal_ms=goal_ms)
    assert starts_by_ms(request, 0, ORDER, NOW_MS) == NOW_MS - age_ms + window_ms
    found = turn(request, counts())
    assert found is not None
    assert found.reason is WaitReason.NO_DEADLINE
