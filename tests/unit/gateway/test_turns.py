"""The turn of a new request where groups claim by an order: what is ahead of it, and what is refused for that."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.request import SamplingParams
from orca.gateway.errors import ApiError
from orca.gateway.limits.overload import Overload
from orca.gateway.limits.turns import least_run_ms, requests_ahead, wait_by_order
from orca.gateway.settings import GatewaySettings
from orca.pool.order.order_class import DeadlineKind, OrderClass
from orca.pool.order.order_rules import ClaimOrder, Order, OrderRules, RunEstimates, Utility
from orca.pool.order.order_stats import OrderStats
from support.gateway.gateway_rig import Rig, error_of, make_request, rig
from support.gateway.overloads import by_order, observed
from support.gateway.scripted_pool import stats

END, FIRST, NONE = DeadlineKind.END, DeadlineKind.FIRST_TOKEN, DeadlineKind.NONE
SHORT, LONG = OrderClass(0, 4, 4, END), OrderClass(0, 4, 16, END)
NEVER_MS = 10**9
PATIENCE_MS = OrderRules().patience_ms

CLASSES = st.builds(
    OrderClass,
    st.integers(-8, 8),
    st.integers(0, 34),
    st.integers(0, 34),
    st.sampled_from(DeadlineKind),
    st.integers(0, 34),
    st.integers(0, 62),
)
COUNTS = st.dictionaries(CLASSES, st.integers(1, 10**6), max_size=8)


def ahead(of: OrderClass, classes: dict[OrderClass, int], *due: int, deadline_ms: int = NEVER_MS, **counts: int) -> int:
    """Return the requests ahead of one. Args: due: of `by_order`; without any, all waiting requests are due soon."""
    queued = sum(classes.values())
    told = stats(queued=queued, by_order=by_order(classes, *(due or (queued,))), **counts)
    return requests_ahead(of, deadline_ms, told)


@pytest.mark.parametrize(
    ("of", "classes", "expected"),
    [
        (SHORT, {LONG: 1000}, 0),
        (SHORT, {LONG: 1000, SHORT: 12}, 16),
        (LONG, {LONG: 10, SHORT: 10}, 20),
        (LONG, {LONG: 10, SHORT: 1000}, 1010),
        (LONG._replace(priority=-6), {LONG: 10, SHORT: 1000}, 0),
        (SHORT._replace(priority=4), {LONG: 10, SHORT: 1000}, 1010),
        (SHORT, {SHORT._replace(kind=NONE): 3, SHORT._replace(kind=FIRST): 2, LONG: 50}, 7),
    ],
    ids=["short", "equals too", "long", "never more than all", "urgent", "not urgent", "of any kind"],
)
def test_those_with_as_much_utility_per_token_are_ahead_and_others_take_a_quarter(
    of: OrderClass, classes: dict[OrderClass, int], expected: int
) -> None:
    assert ahead(of, classes) == expected


@pytest.mark.parametrize(
    ("deadline_ms", "expected"), [(499, 0), (500, 40), (999, 40), (1_000, 120), (60_000, 120), (NEVER_MS, 120)]
)
def test_a_sooner_deadline_is_another_way_to_the_turn(deadline_ms: int, expected: int) -> None:
    assert ahead(LONG, {SHORT: 1000}, 10, 30, deadline_ms=deadline_ms) == expected


def test_running_requests_with_a_deadline_are_not_ahead() -> None:
    assert ahead(LONG, {SHORT: 1000}, 30, deadline_ms=500, owned=20) == 40
    assert ahead(LONG, {SHORT: 1000}, 30, deadline_ms=500, owned=40) == 0


@pytest.mark.parametrize(("oldest_wait_ms", "expected"), [(0, 0), (PATIENCE_MS - 501, 0), (PATIENCE_MS - 500, 400)])
def test_requests_without_a_deadline_are_ahead_if_their_patience_ends_first(oldest_wait_ms: int, expected: int) -> None:
    classes = {SHORT: 1000, SHORT._replace(kind=NONE): 100}
    assert ahead(LONG, classes, 0, deadline_ms=500, oldest_wait_ms=oldest_wait_ms) == expected


def test_goals_for_first_tokens_change_nothing_for_a_deadline() -> None:
    with_goals = {SHORT._replace(kind=NONE, goal=goal): 50 for goal in (1, 62)}
    assert ahead(LONG, {SHORT: 1000, **with_goals}, 0, deadline_ms=500) == 0
    assert ahead(LONG, {SHORT: 1000, **with_goals}, 0, deadline_ms=500, oldest_wait_ms=PATIENCE_MS) == 400
    assert ahead(SHORT, {LONG: 50, **with_goals}) == 133, "those with as much utility per token"


@pytest.mark.parametrize(("priority", "expected"), [(0, 0), (2, 0), (3, 1000)])
def test_a_call_with_little_weight_does_not_go_by_its_deadline(priority: int, expected: int) -> None:
    assert ahead(LONG._replace(priority=priority), {SHORT: 1000}, 0, deadline_ms=500) == expected


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (OrderRules(), 40),
        (OrderRules(eta=0.5), 20),
        (OrderRules(eta=0.02), 10),
        (OrderRules(order=Order.EDF), 10),
        (OrderRules(order=Order.SJF), 1000),
        (OrderRules(utility=Utility.INVERSE_LENGTH), 1000),  # it is worth too little for its deadline to count
    ],
)
def test_the_rules_of_the_groups_decide_the_way_to_a_turn(rules: OrderRules, expected: int) -> None:
    order = ClaimOrder(rules=rules, free_prompt_tokens=1, total_prompt_tokens=1)
    told = stats(queued=1000, by_order=by_order({SHORT: 1000}, 10, order=order))
    assert requests_ahead(LONG, 500, told) == expected


def test_the_expected_lengths_of_the_groups_count() -> None:
    short_answers = RunEstimates(outputs=((LONG.prompt, 2.0),))
    order = ClaimOrder(rules=OrderRules(), estimates=short_answers, free_prompt_tokens=1, total_prompt_tokens=1)
    classes = {SHORT._replace(prompt=8): 100}
    assert requests_ahead(LONG, NEVER_MS, stats(queued=100, by_order=by_order(classes, 100))) == 100
    told = stats(queued=100, by_order=by_order(classes, 100, order=order))
    assert requests_ahead(LONG, NEVER_MS, told) == 0, "its answer will be short, so it goes first"


@given(CLASSES, COUNTS, st.integers(1, 10**7), st.integers(0, 10**6))
def test_never_more_is_ahead_than_in_the_order_of_arrival(
    of: OrderClass, classes: dict[OrderClass, int], deadline_ms: int, due: int
) -> None:
    found = ahead(of, classes, due, deadline_ms=deadline_ms)
    assert 0 <= found <= sum(classes.values())
    # A longer deadline, and one more request ahead, never make the turn come sooner.
    assert found <= ahead(of, classes, due, due + 1, deadline_ms=10 * deadline_ms)
    assert found <= ahead(of, classes | {of: classes.get(of, 0) + 1}, due, deadline_ms=deadline_ms)


@given(CLASSES, st.integers(0, 10**6), st.integers(1, 10**7))
def test_in_the_order_of_arrival_all_are_ahead(of: OrderClass, queued: int, deadline_ms: int) -> None:
    assert requests_ahead(of, deadline_ms, stats(queued=queued)) == queued


def test_nobody_is_known_to_be_ahead_while_the_index_is_built() -> None:
    assert requests_ahead(LONG, 1, stats(queued=1000, by_order=by_order(None, 1000))) == 0


ENDLESS = SamplingParams(ignore_eos=True)


@pytest.mark.parametrize(
    ("sampling", "kind", "expected_ms"),
    [
        (SamplingParams(), END, 2.0),
        (SamplingParams(min_tokens=7), END, 14.0),
        (ENDLESS, END, 22.0),
        (ENDLESS, FIRST, 2.0),
    ],
)
def test_an_idle_engine_needs_a_step_for_each_token_that_must_come(
    sampling: SamplingParams, kind: DeadlineKind, expected_ms: float
) -> None:
    request = replace(make_request(max_new_tokens=11), sampling=sampling)
    assert least_run_ms(request, kind, 2.0) == expected_ms


QUEUED = 100
SLOW = {"seconds": 10, "queued": QUEUED, "ends_per_second": 10}
"""All that waits is served in ten seconds, so a deadline below five is refused in the order of arrival."""


def by_length(classes: dict[OrderClass, int]) -> OrderStats:
    """Return counts of requests whose deadlines are far away, where claims go by utility per cost alone."""
    order = ClaimOrder(rules=OrderRules(order=Order.SJF), free_prompt_tokens=1, total_prompt_tokens=1)
    return by_order(classes, *[0] * 8, sum(classes.values()), order=order)


async def asked(overload: Overload, **fields: Any) -> tuple[int, str | None]:
    """Make a call. Returns: status, and the code of the error."""
    async with rig(schedules=False) as one:
        return await asked_of(one, overload, **fields)


async def asked_of(one: Rig, overload: Overload, **fields: Any) -> tuple[int, str | None]:
    one.app.state.gateway.overload = overload
    response = await one.client.post("/v1/completions", json={"prompt": "the fox", "background": True} | fields)
    if response.status_code == 202:
        assert len(one.pool.state.records) == 1
        return 202, None
    status, error = error_of(response)
    assert one.pool.state.records == {}
    return status, error["code"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_tokens": 1, "deadline_ms": 1_000}, 202),
        ({"max_tokens": 30, "deadline_ms": 1_000}, 429),
        ({"max_tokens": 30, "deadline_ms": 6_000}, 202),
        ({"max_tokens": 30, "deadline_ms": 1_000, "priority": -8}, 202),
        ({"max_tokens": 1, "deadline_ms": 1_000, "priority": 8}, 429),
        ({"max_tokens": 30}, 202),
    ],
    ids=["short", "long", "long with time", "urgent", "not urgent", "no deadline"],
)
async def test_a_call_is_refused_by_the_wait_of_its_class(fields: dict[str, Any], status: int) -> None:
    found = await asked(await observed(**SLOW, by_order=by_length({OrderClass(0, 2, 6, END): QUEUED})), **fields)
    assert found == (status, "deadline_unreachable" if status == 429 else None)


async def test_while_the_index_is_built_only_an_idle_engine_refuses_a_call() -> None:
    overload = await observed(**SLOW, by_order=by_order(None, QUEUED, least_step_ms=100.0))
    assert await asked(overload, deadline_ms=1_000) == (202, None)
    assert await asked(overload, deadline_ms=99) == (429, "deadline_unreachable")


async def test_a_call_is_refused_before_it_is_encoded_if_the_shortest_one_would_be() -> None:
    waiting = by_length({OrderClass(-8, 0, 0, END): QUEUED})
    async with rig(schedules=False) as one:
        one.app.state.gateway.overload = await observed(**SLOW, by_order=waiting)
        # Of the wrong kind: it would be refused when it came to be encoded.
        status, error = await one.error("/v1/completions", prompt=[[-1]], deadline_ms=1_000)
        assert (status, error["code"], error["param"]) == (429, "deadline_unreachable", "deadline_ms")


@pytest.mark.parametrize(("is_by_order", "status"), [(False, 202), (True, 429)], ids=["by arrival", "by an order"])
async def test_late_requests_that_an_order_passes_over_are_not_served(is_by_order: bool, status: int) -> None:
    waiting = by_length({OrderClass(0, 2, 2, END): QUEUED}) if is_by_order else None
    overload = await observed(**{**SLOW, "ends_per_second": 40}, late_share=0.75, by_order=waiting)
    assert (await asked(overload, max_tokens=30, deadline_ms=3_000))[0] == status


@pytest.mark.parametrize(
    ("due", "owned", "wait_s"),
    [
        ((), 0, 10.0),
        ((0, 0, 0, 0, 0, 100), 0, 10.0),
        ((100,), 0, 0.5),
        ((0, 60), 0, 5.0),
        ((0, 60), 60, 10.0),
        ((40, 40, 90), 0, 3.0),
    ],
    ids=["no deadlines", "far ones", "all go soon", "most go soon", "those run", "by steps"],
)
def test_those_whose_deadlines_come_first_make_the_wait_shorter(
    due: tuple[int, ...], owned: int, wait_s: float
) -> None:
    told = stats(queued=QUEUED, owned=owned, by_order=by_order({SHORT: QUEUED}, *(due or (0,))))
    assert wait_by_order(QUEUED, 10.0, told) == wait_s


async def test_each_prompt_of_a_call_must_have_its_turn_in_time() -> None:
    waiting = by_length({OrderClass(0, 4, 6, END): QUEUED})
    overload = await observed(**SLOW, by_order=waiting)
    fields = {"max_tokens": 4, "deadline_ms": 1_000}
    async with rig(schedules=False) as one:
        assert (await asked_of(one, overload, prompt=["a", "the fox " * 20], **fields))[0] == 429
        assert (await asked_of(one, overload, prompt="a", **fields))[0] == 202


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_tokens": 30, "ignore_eos": True, "deadline_ms": 2_999}, 429),
        ({"max_tokens": 30, "ignore_eos": True, "deadline_ms": 3_000}, 202),
        ({"max_tokens": 30, "deadline_ms": 2_999}, 202),
        ({"max_tokens": 30, "deadline_ms": 99}, 429),
    ],
)
async def test_a_deadline_that_an_idle_engine_could_not_meet_is_refused(fields: dict[str, Any], status: int) -> None:
    idle = await observed(seconds=1, queued=0, ends_per_second=1, by_order=by_order({}, least_step_ms=100.0))
    assert await asked(idle, **fields) == (status, "deadline_unreachable" if status == 429 else None)


async def test_a_refusal_by_an_idle_engine_says_that_another_try_is_useless() -> None:
    idle = await observed(seconds=1, queued=0, ends_per_second=1, by_order=by_order({}, least_step_ms=100.0))
    request = replace(make_request(max_new_tokens=11), sampling=ENDLESS)
    with pytest.raises(ApiError) as refused:
        idle.check_run_time(request, END, 1_000, "deadline_ms")
    error = refused.value
    assert error.message == "an idle engine needs at least 1100 ms for this call, and deadline_ms allows 1000 ms"
    assert (error.status, error.is_final, error.retry_after_s) == (429, True, None)


@pytest.mark.parametrize(
    ("goals", "param"),
    [
        ({"x-slo-ttft-ms": "99"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "150", "x-slo-tpot-ms": "50"}, "x-slo-tpot-ms"),
        ({"x-llm-d-slo-ttft-ms": "150", "x-slo-tpot-ms": "1000"}, None),
    ],
)
async def test_enforced_goals_that_an_idle_engine_could_not_meet_are_refused(
    goals: dict[str, str], param: str | None
) -> None:
    idle = await observed(seconds=1, queued=0, ends_per_second=1, by_order=by_order({}, least_step_ms=100.0))
    async with rig(schedules=False, settings=GatewaySettings(model="tiny", slo_enforce=True)) as one:
        one.app.state.gateway.overload = idle
        body = {"prompt": "the fox", "max_tokens": 30, "ignore_eos": True, "background": True}
        response = await one.client.post("/v1/completions", json=body, headers=goals)
        found = None if response.status_code == 202 else error_of(response)[1]["param"]
        assert found == param


async def test_a_repeated_call_is_answered_although_a_new_one_would_be_refused() -> None:
    waiting = by_order({OrderClass(0, 0, 0, END): QUEUED}, QUEUED)
    async with rig(schedules=False) as one:
        body = {"prompt": "the fox", "max_tokens": 30, "deadline_ms": 60_000, "background": True}
        first, again = [
            await _keyed(one, body, overload)
            for overload in (one.app.state.gateway.overload, await observed(**SLOW, by_order=waiting))
        ]
        assert (first, again) == (202, 202)


async def _keyed(one: Rig, body: dict[str, Any], overload: Overload) -> int:
    one.app.state.gateway.overload = overload
    response = await one.client.post("/v1/completions", json=body, headers={"idempotency-key": "k"})
    return response.status_code
