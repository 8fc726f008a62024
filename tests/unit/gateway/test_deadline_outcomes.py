"""Outcomes of deadlines: what a gateway counts, and what the state of a request says about them."""

from functools import partial
from typing import Any

import pytest

from orca.core.domain.request import FinishReason
from orca.gateway.metrics import GatewayMetrics
from orca.gateway.settings import GatewaySettings
from orca.pool.order.order_rules import LATE, ClaimOrder, Drop, Order, OrderRules, RunEstimates
from support.gateway.gateway_rig import FakeScheduler, Rig, error_of, rig, until
from support.gateway.overloads import observed

BODY = {"prompt": "the fox", "max_tokens": 50}
LONG_MS = 600_000
SETTINGS = GatewaySettings(model="tiny", round_seconds=0.05)
ENFORCING = GatewaySettings(model="tiny", round_seconds=0.05, slo_enforce=True)


def by(order: Order = Order.DEADLINE, *, step_ms: float = 1.0, **rules: Any) -> ClaimOrder:
    estimates = RunEstimates(step_ms=step_ms)
    rules = {"order": order, "drop": Drop.NEVER} | rules
    return ClaimOrder(rules=OrderRules(**rules), estimates=estimates, free_prompt_tokens=512, total_prompt_tokens=512)


def counted(one: Rig) -> dict[str, float]:
    """Return the outcomes that were counted, and the utility."""
    metrics: GatewayMetrics = one.app.state.gateway.metrics
    found = {
        sample.labels.get("outcome", "utility"): sample.value
        for family in metrics.registry.collect()
        if family.name in ("orca_request_deadlines", "orca_request_utility")
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert found.keys() == {"in_time", "refused", "dropped", "started_late", "ran_slow", "utility"}
    return {name: value for name, value in found.items() if value}


async def post(one: Rig, headers: dict[str, str] | None = None, **body: Any) -> Any:
    return await one.client.post("/v1/completions", json=BODY | body, headers=headers)


async def choices(one: Rig, request_id: str) -> list[dict[str, Any]]:
    document: dict[str, Any] = (await one.client.get(f"/v1/requests/{request_id}")).json()
    found: list[dict[str, Any]] = document["choices"]
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_in_time_count_with_their_weights(stream: bool) -> None:
    async with rig(settings=SETTINGS, make_scheduler=partial(FakeScheduler, order=by())) as one:
        await post(one, deadline_ms=LONG_MS, n=2, stream=stream, priority=-1)
        await until(lambda: counted(one) == {"in_time": 2, "utility": 4})
        await post(one, deadline_ms=LONG_MS, stream=stream)
        await until(lambda: counted(one) == {"in_time": 3, "utility": 5})


async def test_requests_without_a_deadline_count_nothing() -> None:
    async with rig(settings=SETTINGS) as one:
        await post(one)
        assert not one.app.state.gateway.finishing
        assert counted(one) == {}


async def test_an_enforced_goal_is_a_deadline() -> None:
    async with rig(settings=ENFORCING) as one:
        await post(one, {"x-slo-ttft-ms": str(LONG_MS)})
        await until(lambda: counted(one) == {"in_time": 1, "utility": 1})


@pytest.mark.parametrize("outcome", ["dropped", "started_late", "ran_slow"])
async def test_misses_count_by_their_cause(outcome: str) -> None:
    late = by(step_ms=10**6, drop=Drop.EXPECTED) if outcome == "dropped" else by(Order.EDF)
    # Without a place nothing is claimed; without a turn, what is claimed gets no token.
    places = 0 if outcome == "started_late" else 1
    async with rig(settings=SETTINGS, make_scheduler=partial(FakeScheduler, order=late, batch_size_max=places)) as one:
        if outcome == "ran_slow":
            one.scheduler.turns_left = 1
        deadline_ms = LONG_MS if outcome == "dropped" else 200
        code, error = error_of(await post(one, deadline_ms=deadline_ms))
        assert (code, error["code"]) == (504, "deadline_exceeded")
        await until(lambda: counted(one) == {outcome: 1})
        [request_id] = one.pool.state.parents
        [choice] = await choices(one, request_id)
        assert (choice["deadline_outcome"], choice["waiting"]) == (outcome, None)
        assert choice["error"] == error
        assert f"(deadline_ms allowed {deadline_ms} ms until the end)" in error["message"]
        assert (LATE in error["message"]) == (outcome == "dropped")
        is_claimed = outcome == "ran_slow"
        assert (choice["first_claimed_unix_ms"] is not None) == is_claimed
        assert (choice["start_window_ends_unix_ms"] is not None) == is_claimed


async def test_cancelled_and_failed_requests_count_nothing() -> None:
    async with rig(settings=SETTINGS) as one:
        one.scheduler.reason = FinishReason.ERROR
        await post(one, deadline_ms=LONG_MS)
        await until(lambda: not one.app.state.gateway.finishing)
        assert counted(one) == {}
        [request_id] = one.pool.state.parents
        assert (await choices(one, request_id))[0]["deadline_outcome"] is None


async def test_a_refused_call_counts_once() -> None:
    async with rig(settings=SETTINGS, schedules=False) as one:
        one.app.state.gateway.overload = await observed(seconds=10, queued=100, ends_per_second=10)
        code, error = error_of(await post(one, deadline_ms=1000, n=3))
        assert (code, error["code"]) == (429, "deadline_unreachable")
        assert counted(one) == {"refused": 1}
        code, _ = error_of(await post(one, deadline_ms=1000, n=-1))
        assert (code, counted(one)) == (400, {"refused": 1})


async def test_a_stream_that_is_read_again_counts_once_over_all_gateways() -> None:
    async with rig(settings=SETTINGS) as one, rig(pool=one.pool, settings=SETTINGS, schedules=False) as two:
        answer = await post(one, deadline_ms=LONG_MS, stream=True)
        await until(lambda: counted(one) == {"in_time": 1, "utility": 1})
        await two.client.get(f"/v1/requests/{answer.headers['x-request-id']}/events")
        await until(lambda: not two.app.state.gateway.finishing)
        assert counted(two) == {}


async def waiting(one: Rig, **body: Any) -> dict[str, Any]:
    """Return the choice of a new call that nobody claims, once the gateway knows of it."""
    request_id = (await post(one, background=True, **body)).json()["id"]

    async def is_told() -> bool:
        return (await choices(one, request_id))[0]["waiting"] is not None

    await until(is_told)
    [choice] = await choices(one, request_id)
    assert (choice["status"], choice["first_claimed_unix_ms"], choice["deadline_outcome"]) == ("queued", None, None)
    return choice


async def test_a_waiting_request_shows_its_turn_by_arrival() -> None:
    async with rig(settings=SETTINGS, make_scheduler=partial(FakeScheduler, batch_size_max=0)) as one:
        for ahead in range(3):
            choice = await waiting(one, deadline_ms=LONG_MS)
            assert choice["waiting"] == {"order": "arrival", "reason": "by_arrival", "ahead": ahead}
            assert choice["start_window_ends_unix_ms"] is None


@pytest.mark.parametrize(
    ("order", "body", "reason", "window_ms"),
    [
        (by(Order.EDF), {"deadline_ms": LONG_MS}, "in_window", LONG_MS - 55.5),
        (by(step_ms=LONG_MS), {"deadline_ms": LONG_MS}, "window_over", None),
        (by(Order.SJF, patience_ms=LONG_MS), {}, "no_deadline", LONG_MS),
    ],
    ids=["in window", "window over", "no deadline"],
)
async def test_a_waiting_request_shows_its_start_window(
    order: ClaimOrder, body: dict[str, Any], reason: str, window_ms: float | None
) -> None:
    make = partial(FakeScheduler, order=order, batch_size_max=0)
    async with rig(settings=SETTINGS, make_scheduler=make) as one:
        choice = await waiting(one, **body)
        assert (choice["waiting"]["order"], choice["waiting"]["reason"]) == (order.rules.order, reason)
        assert choice["waiting"]["ahead"] == 0
        [record] = one.pool.state.records.values()
        if window_ms is not None:
            assert choice["start_window_ends_unix_ms"] == int(record.request.submitted_ms + window_ms)


async def test_the_start_window_of_a_request_that_waits_again_is_that_of_its_first_claim() -> None:
    make = partial(FakeScheduler, order=by(Order.EDF))
    async with rig(settings=SETTINGS, make_scheduler=make) as one:
        one.scheduler.turns_left = 1
        request_id = (await post(one, background=True, deadline_ms=LONG_MS)).json()["id"]
        await until(lambda: one.scheduler.turns_left == 0 and not one.scheduler.may_run.is_set())
        [running] = await choices(one, request_id)
        # The group is slower by now, and gives the request back.
        [(claimed, _, _)] = one.scheduler.running.values()
        await one.pool.give_back({claimed.request.id: claimed.claim})
        one.scheduler.running.clear()
        one.scheduler.batch_size_max, one.scheduler.turns_left = 0, None
        one.scheduler.order = by(Order.EDF, step_ms=100.0)
        one.scheduler.may_run.set()

        async def waits_by_the_new_order() -> bool:
            stats = await one.app.state.gateway.overload.backlog.counts(1)
            told = None if stats is None else stats.by_order
            return told is not None and told.order == one.scheduler.order

        await until(waits_by_the_new_order)
        [choice] = await choices(one, request_id)
        assert (choice["status"], choice["waiting"]["reason"]) == ("queued", "in_window")
        [record] = one.pool.state.records.values()
        assert choice["start_window_ends_unix_ms"] == running["start_window_ends_unix_ms"] == record.starts_by_ms


async def test_a_waiting_request_shows_its_turn_by_the_clock_of_the_pool() -> None:
    make = partial(FakeScheduler, order=by(Order.EDF), batch_size_max=0)
    async with rig(settings=SETTINGS, make_scheduler=make) as one:
        one.app.state.gateway.clock_ms = lambda: 10**15
        assert (await waiting(one, deadline_ms=LONG_MS))["waiting"]["reason"] == "in_window"


async def test_a_request_waits_for_a_group() -> None:
    async with rig(settings=SETTINGS, schedules=False) as one:
        choice = await waiting(one)
        assert choice["waiting"] == {"order": None, "reason": "no_group", "ahead": 0}
