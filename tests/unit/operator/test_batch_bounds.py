"""Bounds of batches: what the spec says reaches schedulers through one ConfigMap, while they run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orca.operator.domain import names
from orca.operator.domain.actions import Annotate, Apply
from orca.operator.domain.resource import Json
from orca.operator.render import group
from orca.scheduler.bounds_file import BoundsFile
from orca.scheduler.policy.cycle import DEFAULT_THRESHOLD_PERCENT, CycleControls
from orca.scheduler.policy.policy import BatchBounds
from orca.scheduler.settings import SchedulerSettings, parse_settings
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

CONTROLS = {"encodeBatch": 8, "decodeSteps": 16, "decodeBatch": 20, "encodeTokens": 900, "thresholdPercent": 5}
ENVIRONMENT = {"ORCA_SCHEDULER_POOL": "redis://a.example:6379/0"}


def alternating(*, stages: int = 2, size: int = 16, **controls: int | None) -> Json:
    """Return a spec with the policy rra. Args: controls: those that differ from CONTROLS; None leaves one out."""
    chosen = {name: value for name, value in (CONTROLS | controls).items() if value is not None}
    scheduler = {"policy": "rra", "maxBatchSize": size, "rra": chosen}
    return {"parallelism": {"stages": stages}, "scheduler": scheduler}


def settled(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return cluster


def bounds(cluster: FakeCluster, folder: Path, scheduler: Json) -> BatchBounds:
    """Return the bounds with which a scheduler would start now. Args: scheduler: its StatefulSet.

    Raises: SettingError if it would not start.
    """
    pod = scheduler["spec"]["template"]["spec"]
    settings = settings_of(pod)
    # The kubelet writes the key as the file that the volume names.
    assert settings.bounds_file == "/etc/orca/schedule/bounds.json"
    file = folder / "bounds.json"
    file.write_text(schedule(cluster)[group.bounds_key(pod)])
    return BoundsFile(file, settings, stages=len(settings.stages)).bounds


def settings_of(pod: Json) -> SchedulerSettings:
    [container] = pod["containers"]
    return parse_settings(container["args"][1:], ENVIRONMENT)


def schedule(cluster: FakeCluster) -> Mapping[str, str]:
    data: Mapping[str, str] = cluster.objects["ConfigMap", "shop-schedule"]["data"]
    return data


def schedulers(cluster: FakeCluster) -> list[Json]:
    return [cluster.objects["StatefulSet", name] for name in cluster.names("StatefulSet", names.SCHEDULER)]


def templates(cluster: FakeCluster) -> dict[str, str]:
    """Return the pod templates of all workloads, as text, by kind and name."""
    found = {key: each for key, each in cluster.objects.items() if "template" in each.get("spec", {})}
    return {f"{kind} {name}": json.dumps(each["spec"]["template"]) for (kind, name), each in sorted(found.items())}


def test_a_scheduler_starts_with_its_policy_and_finds_the_controls_in_its_file(tmp_path: Path) -> None:
    cluster = settled(**alternating())
    [scheduler] = schedulers(cluster)
    settings = settings_of(scheduler["spec"]["template"]["spec"])
    assert settings.policy == "rra"
    assert settings.make_bounds().cycle is None  # no flag has a control
    assert bounds(cluster, tmp_path, scheduler) == BatchBounds(
        max_batch_size=16,
        cycle=CycleControls(encode_batch=8, decode_steps=16, decode_batch=20, encode_tokens=900, threshold_percent=5),
    )


def test_controls_that_are_left_out_are_as_a_scheduler_has_them_by_default(tmp_path: Path) -> None:
    spec = alternating(decodeBatch=None, encodeTokens=None, thresholdPercent=None)
    cluster = settled(**spec)
    [scheduler] = schedulers(cluster)
    found = bounds(cluster, tmp_path, scheduler).cycle
    assert found == CycleControls(encode_batch=8, decode_steps=16)
    assert found.threshold_percent == DEFAULT_THRESHOLD_PERCENT


@pytest.mark.parametrize(
    "edit",
    [
        {"encodeBatch": 4},
        {"decodeSteps": 99},
        {"decodeBatch": 32},
        {"decodeBatch": None},
        {"encodeTokens": 1},
        {"encodeTokens": None},
        {"thresholdPercent": 0},
        {"size": 64},
    ],
    ids=str,
)
def test_an_edit_of_a_control_changes_the_config_map_alone(edit: dict[str, int | None], tmp_path: Path) -> None:
    cluster = settled(replicas=2, **alternating())
    before, old = templates(cluster), dict(schedule(cluster))
    cluster.deployment = deployment(generation=2, replicas=2, **alternating(**edit))  # type: ignore[arg-type]
    decided = cluster.reconcile()
    assert [each.manifest["kind"] for each in decided.actions if isinstance(each, Apply)] == ["ConfigMap"]
    # The kubelets of all schedulers are told at once.
    nudged = [each.name for each in decided.actions if isinstance(each, Annotate)]
    assert nudged == cluster.names("Pod", names.SCHEDULER)
    assert cluster.reconcile().actions == ()
    assert templates(cluster) == before
    assert schedule(cluster) != old
    # What was given before is not in force any more.
    found = bounds(cluster, tmp_path, schedulers(cluster)[0])
    assert found.cycle is not None
    asked = CONTROLS | {key: value for key, value in edit.items() if key != "size"}
    assert (found.max_batch_size, found.cycle.encode_batch) == (edit.get("size", 16), asked["encodeBatch"])
    assert (found.cycle.decode_steps, found.cycle.decode_batch) == (asked["decodeSteps"], asked["decodeBatch"])
    assert (found.cycle.encode_tokens, found.cycle.threshold_percent) == (
        asked["encodeTokens"],
        asked["thresholdPercent"],
    )


def test_a_change_of_the_policy_replaces_schedulers_alone() -> None:
    cluster = settled(parallelism={"stages": 2})
    before = templates(cluster)
    cluster.deployment = deployment(generation=2, **alternating())
    cluster.settle()
    after = templates(cluster)
    assert after.keys() == before.keys()
    assert [key for key in before if before[key] != after[key]] == [
        f"StatefulSet {each['metadata']['name']}" for each in schedulers(cluster)
    ]


ITERATION: Json = {"parallelism": {"stages": 2}, "scheduler": {"maxBatchSize": 8}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ITERATION, alternating(stages=2)),
        (ITERATION, alternating(stages=4, encodeBatch=60, decodeBatch=64)),
        (alternating(stages=4, encodeBatch=60, decodeBatch=64), ITERATION),
        (alternating(stages=2), alternating(stages=4, encodeBatch=60, decodeBatch=64)),
        (alternating(stages=4, encodeBatch=60, decodeBatch=64), alternating(stages=2)),
    ],
)
def test_schedulers_find_bounds_that_fit_them_on_each_step_of_a_rollout(
    before: Json, after: Json, tmp_path: Path
) -> None:
    cluster = settled(replicas=3, **before)
    old = {name: bounds(cluster, tmp_path, each) for each in schedulers(cluster) if (name := name_of(each))}
    cluster.deployment = deployment(generation=2, replicas=3, **after)
    for _ in range(50):
        actions = cluster.reconcile().actions
        for each in schedulers(cluster):
            found = bounds(cluster, tmp_path, each)
            policy = settings_of(each["spec"]["template"]["spec"]).policy
            assert (found.cycle is not None) == (policy == "rra")
            if name_of(each) in old and policy == before["scheduler"].get("policy", "iteration"):
                assert found == old[name_of(each)]
        if not actions:
            break
        cluster.start()
    else:
        raise AssertionError(f"still at it: {actions}")
    # Nobody reads the old ones any more.
    [only] = {group.bounds_key(each["spec"]["template"]["spec"]) for each in schedulers(cluster)}
    assert schedule(cluster).keys() == {only}


def name_of(manifest: Json) -> str:
    return str(manifest["metadata"]["name"])


def test_bounds_of_a_pod_that_still_ends_stay() -> None:
    cluster = settled(**ITERATION)
    [pod] = cluster.names("Pod", names.SCHEDULER)
    ending = cluster.objects["Pod", pod]
    cluster.deployment = deployment(generation=2, **alternating(stages=4))
    cluster.settle()
    cluster.objects["Pod", "ending"] = {**ending, "metadata": {**ending["metadata"], "name": "ending"}}
    assert schedule(cluster).keys() == {"bounds-rra-4.json"}
    cluster.objects["ConfigMap", "shop-schedule"]["data"] |= {"bounds.json": "{}", "of-nobody.json": "{}"}
    cluster.deployment = deployment(generation=3, **alternating(stages=4, decodeSteps=3))
    cluster.reconcile()
    assert schedule(cluster).keys() == {"bounds-rra-4.json", "bounds.json"}


@pytest.mark.parametrize(
    ("pod", "key"),
    [
        ({}, "bounds.json"),
        ({"volumes": None}, "bounds.json"),
        ({"volumes": [{"name": "schedule"}]}, "bounds.json"),
        ({"volumes": [{"name": "schedule", "configMap": {"items": [{"key": "a", "path": "b"}]}}]}, "bounds.json"),
        ({"volumes": [{"name": "schedule", "configMap": {"items": [{"key": "a", "path": "bounds.json"}]}}]}, "a"),
    ],
)
def test_the_bounds_of_a_pod_are_those_that_its_volume_names(pod: Json, key: str) -> None:
    assert group.bounds_key(pod) == key
