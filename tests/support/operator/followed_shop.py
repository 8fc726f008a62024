"""A simulated deployment with a plan in force, which is checked again and again: its pool has latencies."""

import json
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.resource import Json
from orca.operator.plan.plan import make_plan
from orca.operator.plan.status import make_status
from orca.pool.latency_bins import AnswerLatency, bin_of
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies
from orca.pool.length_bins import PERIOD_MS
from support.operator.clusters import RELEASE, FakeCluster
from support.operator.deployments import deployment

GOAL: Json = {"latencyMs": 8000, "devices": 4, "workload": {"lengths": "32:512/1:128"}}
BEGIN_MS = 10 * PERIOD_MS
"""Awake time of the pool at which it is asked for the first time."""


def latencies(
    awake_ms: int = BEGIN_MS,
    *,
    answers: int = 0,
    latency_s: float = 7.65,
    first_s: float = 0.3,
    token_s: float = 0.01,
    period: int | None = None,
) -> LatencyCounts:
    """Return the latencies of answers that all took the same time.

    Args: period: in which they ended; None: the last whole one.
    """
    number = awake_ms // PERIOD_MS - 1 if period is None else period
    seconds = {
        AnswerLatency.SEQUENCE: latency_s,
        AnswerLatency.REQUEST: 2 * latency_s,
        AnswerLatency.FIRST_TOKEN: first_s,
        AnswerLatency.REQUEST_FIRST_TOKEN: 2 * first_s,
        AnswerLatency.TOKEN: token_s,
    }
    bins = {latency: {bin_of(1e6 * value): answers} for latency, value in seconds.items()}
    periods = (PeriodLatencies(period=number, first_ms=number * PERIOD_MS, bins=bins),) if answers else ()
    return LatencyCounts(awake_ms=awake_ms, periods=periods)


def followed_shop(**spec: Any) -> FakeCluster:
    """Return a shop whose plan is in force and which runs it; its pool has just been asked."""
    cluster = FakeCluster(deployment(**{"slo": GOAL, **spec}))
    cluster.settle()
    assert cluster.observed.plan_in_force is not None
    return cluster


def wait_for_check(cluster: FakeCluster) -> str:
    """Let so much time pass that a check is due, and make its Job. Returns: its name."""
    cluster.now_s += RELEASE.slo_check_s
    cluster.reconcile()
    [job] = cluster.names("Job", names.FOLLOW)
    return job


def finish_check(cluster: FakeCluster, body: bytes | None = None) -> None:
    """The Job of the check does its work. Args: body: its result; None: the plan stays."""
    [job] = cluster.names("Job", names.FOLLOW)
    cluster.end_job(job, "Complete")
    cluster.leave_result(job, body)


def check_again(cluster: FakeCluster, body: bytes | None = None) -> None:
    """Let one check be made, and carry out what follows from it."""
    wait_for_check(cluster)
    finish_check(cluster, body)
    cluster.settle()


def notes(cluster: FakeCluster) -> Json:
    """Return what the operator has noted about the plan."""
    [name] = cluster.names("ConfigMap", names.FOLLOW)
    found: Json = json.loads(cluster.objects["ConfigMap", name]["data"]["following.json"])
    return found


def status(cluster: FakeCluster, before: Json | None = None) -> Json:
    observed = cluster.observed
    return make_status(observed, make_plan(observed), before or {})


def condition_of(cluster: FakeCluster, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition; three empty texts if there is none."""
    found = [each for each in status(cluster)["conditions"] if each["type"] == kind]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")


def bounds_of(cluster: FakeCluster) -> Json:
    """Return the bounds that the wanted schedulers read."""
    texts: dict[str, str] = cluster.objects["ConfigMap", "shop-schedule"]["data"]
    found: Json = json.loads(list(texts.values())[-1])
    return found
