"""The order of claims: schedulers get it as flags, and an edit of it replaces schedulers and nothing else."""

from typing import Any

import pytest

from orca.operator.domain import names
from orca.operator.domain.actions import Apply
from orca.operator.domain.resource import Json
from orca.pool.order.order_rules import Drop, Order, OrderRules, Utility
from orca.scheduler.settings import SchedulerSettings, parse_settings
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment, schema

ENVIRONMENT = {"ORCA_SCHEDULER_POOL": "redis://a.example:6379/0"}
ORDER_FLAGS = {"--order", "--utility", "--eta-percent", "--patience-s", "--drop"}


def settled(**scheduler: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(scheduler=scheduler))
    cluster.settle()
    return cluster


def arguments(cluster: FakeCluster) -> list[str]:
    """Return the arguments of the cluster's only scheduler, without its subcommand."""
    [name] = cluster.names("StatefulSet", names.SCHEDULER)
    [container] = cluster.objects["StatefulSet", name]["spec"]["template"]["spec"]["containers"]
    words: list[str] = container["args"][1:]
    return words


def settings(cluster: FakeCluster) -> SchedulerSettings:
    """Return the settings with which a scheduler starts. Raises: SettingError if it would not start."""
    return parse_settings(arguments(cluster), ENVIRONMENT)


def rules(**scheduler: Any) -> OrderRules | None:
    return settings(settled(**scheduler)).make_rules()


def choices(*path: str) -> list[str]:
    """Return the choices that the CRD gives for a field of the scheduler."""
    found = schema()["properties"]["spec"]["properties"]["scheduler"]
    for name in path:
        found = found["properties"][name]
    values: list[str] = found["enum"]
    return values


@pytest.mark.parametrize("scheduler", [{}, {"order": "Arrival"}])
def test_arrival_adds_no_flag_so_its_pods_stay_as_they_were(scheduler: Json) -> None:
    cluster = settled(**scheduler)
    assert not ORDER_FLAGS & set(arguments(cluster))
    assert settings(cluster).make_rules() is None


@pytest.mark.parametrize("scheduler", [{"order": "Deadline"}, {"order": "Deadline", "deadline": {}}])
def test_the_defaults_of_the_resource_are_those_of_a_scheduler(scheduler: Json) -> None:
    assert rules(**scheduler) == OrderRules(order=Order.DEADLINE)


def test_every_rule_of_the_resource_reaches_the_schedulers() -> None:
    given = {"utility": "InverseLength", "etaPercent": 99, "patienceSeconds": 7, "drop": "Never"}
    assert rules(order="Deadline", deadline=given) == OrderRules(
        order=Order.DEADLINE, utility=Utility.INVERSE_LENGTH, eta=0.99, patience_ms=7000, drop=Drop.NEVER
    )


def test_every_choice_of_the_resource_is_one_of_the_scheduler() -> None:
    assert {rules(order=each) and Order.DEADLINE for each in choices("order")} == {None, Order.DEADLINE}
    for name, kind in (("utility", Utility), ("drop", Drop)):
        found = [rules(order="Deadline", deadline={name: each}) for each in choices("deadline", name)]
        assert [getattr(each, name) for each in found] == list(kind)


def test_a_variable_of_a_pod_patch_does_not_override_the_rules_of_the_resource() -> None:
    cluster = settled(order="Deadline")
    others = {"ORDER": "edf", "UTILITY": "inverse_length", "ETA_PERCENT": "1", "PATIENCE_S": "1", "DROP": "never"}
    variables = ENVIRONMENT | {f"ORCA_SCHEDULER_{name}": value for name, value in others.items()}
    assert parse_settings(arguments(cluster), variables).make_rules() == OrderRules(order=Order.DEADLINE)


@pytest.mark.parametrize(
    "edit",
    [
        {"order": "Arrival"},
        {"order": "Deadline", "deadline": {"utility": "InverseLength"}},
        {"order": "Deadline", "deadline": {"etaPercent": 1}},
        {"order": "Deadline", "deadline": {"patienceSeconds": 1}},
        {"order": "Deadline", "deadline": {"drop": "Expected"}},
    ],
    ids=str,
)
def test_an_edit_of_the_order_replaces_schedulers_and_nothing_else(edit: Json) -> None:
    cluster = settled(order="Deadline")
    before = rules(order="Deadline")
    cluster.deployment = deployment(generation=2, scheduler=edit)
    applied = [each.manifest for plan in cluster.settle() for each in plan.actions if isinstance(each, Apply)]
    assert [each["metadata"]["name"] for each in applied] == cluster.names("StatefulSet", names.SCHEDULER)
    assert settings(cluster).make_rules() != before


@pytest.mark.parametrize(
    "stated",
    [{}, {"utility": "Equal", "etaPercent": 75, "patienceSeconds": 30, "drop": "Certain"}],
    ids=["empty", "all"],
)
def test_defaults_that_are_stated_restart_nothing(stated: Json) -> None:
    cluster = settled(order="Deadline")
    cluster.deployment = deployment(generation=2, scheduler={"order": "Deadline", "deadline": stated})
    assert cluster.reconcile().actions == ()


def test_an_order_leaves_policy_and_batches_to_their_own_fields() -> None:
    controls = {"encodeBatch": 4, "decodeSteps": 8}
    for fields in ({"policy": "request_level"}, {"policy": "rra", "rra": controls}, {"maxBatchSize": 4}):
        assert rules(order="Deadline", **fields) == OrderRules(order=Order.DEADLINE)
        assert settings(settled(order="Deadline", **fields)).policy == fields.get("policy", "iteration")
