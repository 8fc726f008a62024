"""A goal for the latency in place of a shape: the way to a plan, other goals, and goals out of reach.

Streams are open all the time. Nothing fails and no answer is wrong, whatever the plan changes and whenever the operator
dies.
"""

import time
from collections.abc import Callable, Iterator

import pytest

from cluster.kubernetes.kubectl import Kubectl
from figures import record_figures
from installation import SPEC, Json, Service, install_chart, kill_operator, make_namespace, uids, wait_until
from load import Load, is_answering
from planned import PLAN_S, WORKER, of_role, plan_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

GOAL: Json = {"latencyMs": 120_000, "devices": 2, "workload": {"lengths": "8:32/60:120"}}
"""A goal that any schedule meets on a slow machine."""


@pytest.fixture(scope="module")
def goal(kubectl: Kubectl) -> Iterator[Service]:
    """Return a service that has a goal and no shape, right after its creation."""
    namespace = make_namespace(kubectl, "slo")
    install_chart()
    service = Service(kubectl, namespace, "goal")
    ingress = {**SPEC["gateway"], "ingress": service.ingress}
    service.create({**SPEC, "worker": WORKER, "gateway": ingress, "slo": GOAL})
    yield service
    kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_goal_becomes_a_plan_while_the_defaults_serve(goal: Service) -> None:
    """The operator is killed at each step of the way."""
    began = time.monotonic()
    goal.wait_until_settled()
    serves_s = time.monotonic() - began
    load = Load(goal)
    wait_until(lambda: is_answering(load), goal.describe)
    steps: tuple[Callable[[], bool], ...] = (
        lambda: bool(of_role(goal, "jobs", "profile")) or bool(of_role(goal, "configmaps", "profile")),
        lambda: bool(of_role(goal, "configmaps", "profile")),
        lambda: bool(of_role(goal, "jobs", "plan")) or bool(of_role(goal, "configmaps", "plan")),
        lambda: bool(of_role(goal, "configmaps", "plan")),
    )
    with load.running():
        for is_reached in steps:
            wait_until(is_reached, goal.describe, within_s=PLAN_S)
            kill_operator(goal.kubectl)
        goal.wait_for("PlanReady", "True", within_s=PLAN_S)
        plan_s = time.monotonic() - began
        goal.wait_until_settled()
    record_figures(
        "slo: a goal becomes a plan, operator killed at each step",
        {
            "serves_s": round(serves_s, 1),
            "plan_ready_s": round(plan_s, 1),
            "plan": plan_of(goal)["summary"],
            "operators_killed": len(steps),
            **load.summary(),
        },
    )
    load.check()
    assert "predicted 99 % in" in plan_of(goal)["summary"]
    assert goal.condition("SloMet")[:2] != ("False", "Infeasible")


def test_a_tighter_limit_of_batches_is_in_force_without_a_restart(goal: Service) -> None:
    goal.wait_for("PlanReady", "True", within_s=PLAN_S)
    fixed = {"stages": 1, "tensor": 1}
    goal.edit(parallelism=fixed, scheduler={"policy": "iteration"})
    goal.wait_for("PlanReady", "True", within_s=PLAN_S)
    goal.wait_until_settled()
    before = uids([*goal.pods("scheduler"), *goal.pods("stage")])
    load = Load(goal)
    wait_until(lambda: is_answering(load), goal.describe)
    with load.running():
        goal.edit(scheduler={"maxBatchSize": 3})
        goal.wait_for("PlanReady", "True", within_s=PLAN_S)
        [pod] = goal.pods("scheduler")
        logs = ("logs", pod["metadata"]["name"], f"--namespace={goal.namespace}")
        wait_until(
            lambda: any(f'"max_batch_size":{size}' in goal.kubectl(*logs).replace(" ", "") for size in (1, 2, 3)),
            goal.describe,
        )
    load.check()
    assert uids([*goal.pods("scheduler"), *goal.pods("stage")]) == before


def test_a_goal_out_of_reach_is_reported_and_the_closest_plan_serves(goal: Service) -> None:
    load = Load(goal, plain=1, resuming=1)
    wait_until(lambda: is_answering(load), goal.describe)
    with load.running():
        goal.edit(slo={"latencyMs": 1})
        goal.wait_for("SloMet", "False", "Infeasible", within_s=PLAN_S)
        goal.wait_until_settled()
    load.check()
    message = goal.condition("SloMet")[2]
    assert "99 % within 0.001 s" in message
    assert "Best achievable: 99 % within" in message
    # Its batches are of one request, and the next load wants two at a time.
    goal.edit(slo={"latencyMs": GOAL["latencyMs"]})
    goal.wait_for("PlanReady", "True", within_s=PLAN_S)
    goal.wait_until_settled()


def test_without_a_goal_the_service_is_as_it_was(goal: Service) -> None:
    load = Load(goal, plain=1, resuming=1)
    wait_until(lambda: is_answering(load), goal.describe)
    with load.running():
        goal.edit(slo=None, parallelism=None, scheduler={"policy": None, "maxBatchSize": None})
        goal.wait_until_settled()
        wait_until(lambda: goal.condition("PlanReady")[0] == "Unknown", goal.describe)
    load.check()
    assert plan_of(goal) == {}
    roles = ("profile", "plan", "follow")
    wait_until(lambda: not any(of_role(goal, "configmaps", role) for role in roles), goal.describe)
