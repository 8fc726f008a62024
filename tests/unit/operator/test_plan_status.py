"""The status, Events and metrics of a plan in force: predicted beside measured figures."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from orca.operator.cluster.known_latencies import KnownLatencies
from orca.operator.domain import names
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.plan.slo.plan_events import PlanEvent, plan_events
from orca.operator.plan.slo.plan_status import REFRESH_S, read_plan_status
from orca.operator.plan_metrics import PlanMetrics
from orca.pool.length_bins import PERIOD_MS
from support.operator.clusters import RELEASE, FakeCluster
from support.operator.followed_shop import (
    BEGIN_MS,
    GOAL,
    check_again,
    condition_of,
    followed_shop,
    latencies,
    status,
)
from support.operator.planned_files import RRA, SUMMARY, check_body, plan_body, report, schedule

MEASURED_MS = BEGIN_MS + 2 * PERIOD_MS
"""Awake time at which a whole period has passed since the plan runs."""


def measured_shop(body: bytes | None = None, *, goal: Json | None = None, **of: Any) -> FakeCluster:
    """Return a shop whose plan runs and was checked, and which has given answers since. Args: of: as of latencies."""
    cluster = followed_shop(slo=goal or GOAL)
    cluster.pool = replace(cluster.pool, latencies=latencies())
    check_again(cluster, body)
    # Answers of another plan are over.
    cluster.pool = replace(cluster.pool, latencies=latencies(BEGIN_MS + 8000))
    cluster.settle()
    cluster.pool = replace(cluster.pool, latencies=latencies(MEASURED_MS, **of))
    return cluster


def plan_of(cluster: FakeCluster) -> Json:
    return read_plan_status(status(cluster))


def test_the_status_has_predicted_beside_measured_figures_error_and_drift() -> None:
    cluster = measured_shop(check_body(report_text=report(output_mean=96.0)), answers=12_000)
    shown = plan_of(cluster)
    summary = shown.pop("summary")
    head, _, tail = SUMMARY.rpartition("; planned")
    assert summary == f"{head}, measured 7.67 s at 20; planned{tail}"
    assert shown == {
        "controls": {
            "policy": "iteration",
            "stages": 2,
            "tensor": 1,
            "stageLayers": [3, 3],
            "threads": 2,
            "maxBatchSize": 9,
            "maxBatchTokens": 57,
        },
        "predicted": {"latencyMs": 7400, "ttftMs": 310, "tpotMs": 14, "requestsPerMinute": 366},
        "measured": {
            "answers": 12_000,
            "latencyMs": 7670,
            "ttftMs": 299,
            "tpotMs": 10,
            "requestsPerMinute": 1200,
        },
        "errorPercent": 4,
        "workload": {
            "answers": 12_000,
            "promptMeanTokens": 272,
            "outputMeanTokens": 96,
            "outputP99Tokens": 127,
        },
        "drift": {"promptMeanPercent": 0, "outputMeanPercent": 50, "outputP99Percent": 0},
        "reason": "the plan meets the goal on the lengths of now",
        "checks": 1,
        "checkedAt": "2026-01-01T00:10:01Z",
        "measuredAt": "2026-01-01T00:10:01Z",
    }


def test_a_plan_of_an_earlier_release_has_its_line_and_its_controls() -> None:
    cluster = FakeCluster(followed_shop().deployment)
    cluster.plan = plan_body(RRA)
    cluster.settle()
    shown = plan_of(cluster)
    assert shown.keys() == {"summary", "controls"}
    assert shown["controls"] == {
        "policy": "rra",
        "stages": 2,
        "tensor": 2,
        "stageLayers": [3, 3],
        "threads": 2,
        "maxBatchSize": 32,
        "encodeBatch": 12,
        "decodeSteps": 9,
        "decodeBatch": 40,
        "thresholdPercent": 20,
    }


@pytest.mark.parametrize(
    ("goal", "of", "found"),
    [
        ({}, {"answers": 200}, ("True", "Met")),
        ({}, {"answers": 199}, ("Unknown", "Measuring")),
        ({}, {"answers": 0}, ("Unknown", "Measuring")),
        ({}, {"answers": 200, "latency_s": 8.2}, ("False", "Missed")),
        # The margin is for plans.
        ({"marginPercent": 20}, {"answers": 200}, ("True", "Met")),
        ({"ttftMs": 305}, {"answers": 200}, ("True", "Met")),
        ({"ttftMs": 290}, {"answers": 200}, ("False", "Missed")),
        ({"tpotMs": 11}, {"answers": 200}, ("True", "Met")),
        ({"tpotMs": 9}, {"answers": 200}, ("False", "Missed")),
        (
            {"kind": "requests", "workload": {"lengths": "8/8", "requestsPerMinute": 60}},
            {"answers": 200},
            ("False", "Missed"),
        ),
    ],
)
def test_the_goal_is_met_as_the_answers_under_the_plan_are_measured(
    goal: Json, of: Json, found: tuple[str, str]
) -> None:
    cluster = measured_shop(goal={**GOAL, **goal}, **of)
    assert condition_of(cluster, "SloMet")[:2] == found


def test_the_condition_names_measured_values_bounds_and_answers() -> None:
    cluster = measured_shop(goal={**GOAL, "ttftMs": 290}, answers=12_000)
    expected = (
        "measured 99 % in 7.67 s at 20 requests/s, bound 8 s; first token in 299 ms, bound 290 ms; from 12,000 answers"
    )
    assert condition_of(cluster, "SloMet")[2] == expected
    cluster = measured_shop(answers=12)
    assert "12 of at least 200 answers were measured" in condition_of(cluster, "SloMet")[2]


def test_answers_of_the_plan_before_are_not_measured() -> None:
    cluster = measured_shop(answers=500)
    check_again(cluster, check_body(schedule(max_batch_size=5, max_batch_tokens=21)))
    assert condition_of(cluster, "SloMet")[:2] == ("Unknown", "Measuring")
    assert "measured" not in plan_of(cluster)
    over_ms = MEASURED_MS + GOAL["latencyMs"]
    cluster.pool = replace(cluster.pool, latencies=latencies(over_ms, answers=499, period=over_ms // PERIOD_MS))
    cluster.settle()
    assert condition_of(cluster, "SloMet")[:2] == ("Unknown", "Measuring")
    running = latencies(over_ms + 20_000, answers=799, period=over_ms // PERIOD_MS)
    cluster.pool = replace(cluster.pool, latencies=running)
    assert condition_of(cluster, "SloMet")[:2] == ("True", "Met"), "of the same period"
    assert plan_of(cluster)["measured"]["answers"] == 300
    cluster.pool = replace(cluster.pool, latencies=latencies(MEASURED_MS + 2 * PERIOD_MS, answers=500))
    assert condition_of(cluster, "SloMet")[:2] == ("True", "Met")


def test_before_all_groups_run_the_plan_nothing_is_known() -> None:
    cluster = followed_shop()
    assert condition_of(cluster, "SloMet")[:2] == ("Unknown", "Measuring")
    cluster.pool = PoolStatus(problem="no answer")
    assert condition_of(cluster, "SloMet") == ("Unknown", "PoolUnreachable", "the pool does not answer: no answer")


def test_a_goal_that_no_plan_meets_by_simulation_stays_infeasible_whatever_is_measured() -> None:
    cluster = measured_shop(check_body(shortfall="no schedule meets the goal"), answers=500)
    assert condition_of(cluster, "SloMet")[:2] == ("False", "Infeasible")


def test_measured_figures_are_refreshed_once_a_minute() -> None:
    cluster = measured_shop(answers=500)
    first = status(cluster)
    cluster.now_s += REFRESH_S - 1
    cluster.pool = replace(cluster.pool, latencies=latencies(MEASURED_MS, answers=600, latency_s=7.0))
    assert status(cluster, first) == first
    cluster.now_s += 1
    second = status(cluster, first)
    assert second["plan"]["measured"]["answers"] == 600
    assert "from 600 answers" in str(second["conditions"])


def test_the_verdict_on_the_measured_figures_changes_with_them_once_a_minute() -> None:
    cluster = measured_shop(answers=500)
    first = status(cluster)
    cluster.pool = replace(cluster.pool, latencies=latencies(MEASURED_MS, answers=600, latency_s=9.0))
    assert status(cluster, first) == first
    cluster.now_s += REFRESH_S
    missed = status(cluster, first)
    assert (missed["plan"]["measured"]["answers"], "Missed" in str(missed["conditions"])) == (600, True)


def test_another_verdict_or_another_plan_is_written_at_once() -> None:
    cluster = measured_shop(answers=500)
    first = status(cluster)
    cluster.pool = replace(cluster.pool, latencies=latencies(MEASURED_MS, answers=100))
    assert "Measuring" in str(status(cluster, first)["conditions"])
    cluster = measured_shop(answers=500)
    first = status(cluster)
    before = cluster.pool
    check_again(cluster, check_body(report_text=report(latency_s=7.5)))
    cluster.pool = replace(before, latencies=latencies(MEASURED_MS, answers=600))
    cluster.now_s -= RELEASE.slo_check_s
    assert status(cluster, first)["plan"]["predicted"]["latencyMs"] == 7500


def test_a_status_of_an_earlier_release_is_no_obstacle() -> None:
    cluster = measured_shop(answers=500)
    assert status(cluster, {"plan": SUMMARY, "conditions": []})["plan"]["measured"]["answers"] == 500
    assert read_plan_status({"plan": SUMMARY}) == {}


SHOWN: Json = {"summary": "A; predicted 1 s", "controls": {"maxBatchSize": 9}, "reason": "a miss"}


@pytest.mark.parametrize(
    ("before", "now", "events"),
    [
        ({}, SHOWN, [PlanEvent("PlanChanged", "A; predicted 1 s; a miss")]),
        ({}, {"summary": "A", "controls": {}}, [PlanEvent("PlanChanged", "A")]),
        (SHOWN, {**SHOWN, "summary": "A; predicted 2 s"}, []),
        (SHOWN, {**SHOWN, "controls": {"maxBatchSize": 5}}, [PlanEvent("PlanChanged", "A; predicted 1 s; a miss")]),
        (SHOWN, {}, [PlanEvent("PlanChanged", "the defaults serve: no plan is in force any more", is_warning=True)]),
        ({}, {}, []),
        (
            SHOWN,
            {**SHOWN, "recommended": "B; predicted 3 s"},
            [PlanEvent("PlanRecommended", "B; predicted 3 s; a miss")],
        ),
        ({**SHOWN, "recommended": "B; predicted 3 s"}, {**SHOWN, "recommended": "B; predicted 4 s"}, []),
        ({**SHOWN, "recommended": "B; predicted 3 s"}, SHOWN, []),
        (SHOWN, {**SHOWN, "problem": "it failed"}, [PlanEvent("PlanNotChecked", "it failed", is_warning=True)]),
        ({**SHOWN, "problem": "it failed"}, {**SHOWN, "problem": "it failed again"}, []),
    ],
)
def test_events_are_about_what_runs_and_what_would_be_better(before: Json, now: Json, events: list[PlanEvent]) -> None:
    assert list(plan_events(before, now)) == events


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Return all values, by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_metrics_are_the_values_of_the_status_and_go_with_the_resource() -> None:
    cluster = measured_shop(check_body(report_text=report(output_mean=96.0)), answers=12_000)
    registry = CollectorRegistry()
    metrics = PlanMetrics(registry)
    metrics.note("ns", "shop", status(cluster))
    metrics.note("ns", "other", status(cluster))
    assert samples(registry) == {
        (*series, "ns", name, *label): value
        for name in ("shop", "other")
        for series, label, value in [
            (("orca_plan_latency_seconds",), ("predicted",), 7.4),
            (("orca_plan_latency_seconds",), ("measured",), 7.67),
            (("orca_plan_requests_per_second",), ("predicted",), 6.1),
            (("orca_plan_requests_per_second",), ("measured",), 20.0),
            (("orca_plan_length_drift_ratio",), ("prompt_mean",), 1.0),
            (("orca_plan_length_drift_ratio",), ("output_mean",), 1.5),
            (("orca_plan_length_drift_ratio",), ("output_p99",), 1.0),
            (("orca_plan_slo_met",), (), 1.0),
        ]
    }
    cluster.pool = PoolStatus(problem="no answer")
    metrics.note("ns", "shop", status(cluster))
    assert ("orca_plan_slo_met", "ns", "shop") not in samples(registry)
    assert ("orca_plan_latency_seconds", "ns", "shop", "measured") not in samples(registry)
    metrics.keep({("ns", "shop")})
    assert {key[2] for key in samples(registry)} == {"shop"}
    metrics.note("ns", "shop", {})
    metrics.forget("ns", "unknown")
    assert samples(registry) == {}


def test_latencies_are_read_again_when_they_are_old_or_of_another_model() -> None:
    now_s = 0.0
    known = KnownLatencies(lambda: now_s)
    assert not known.is_fresh("a", 15.0)
    counts = latencies()
    known.note("a", "r1", counts)
    now_s = 14.0
    assert (known.is_fresh("a", 15.0), known.is_fresh("a", 0.0), known.is_fresh("b", 15.0)) == (True, False, False)
    assert (known.find("a", "r1"), known.find("a", "r2"), known.find("b", "r1")) == (counts, None, None)
    now_s = 15.0
    assert not known.is_fresh("a", 15.0)
    known.keep(frozenset())
    assert known.find("a", "r1") is None


def test_a_check_has_the_rights_of_no_other_pod() -> None:
    cluster = followed_shop()
    cluster.reconcile(replace(RELEASE, has_network_policies=True))
    policy = cluster.objects["NetworkPolicy", f"shop-{names.FOLLOW}"]["spec"]
    assert policy["ingress"] == []
    [to_pool, dns] = policy["egress"]
    assert "to" in to_pool
    assert "to" not in dns
