"""A resource with spec.slo: from the profile and the plan to what runs, and what the status says on the way."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from orca.core.job_files import BODY_BYTES_MAX, PLAN_FILE, SUMMARY_FILE, to_body
from orca.operator.domain import names
from orca.operator.domain.actions import Delete
from orca.operator.domain.api_refusals import Refusal
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.quantity import times
from orca.operator.domain.resource import BadSpec, Json
from orca.operator.domain.slo import planned as planned_of_domain
from orca.operator.plan.plan import make_plan
from orca.operator.plan.slo.making import LOST_S, RETRY_S, needs_counts, results_to_read
from orca.operator.plan.status import make_status
from orca.planner.follow.follow import CHECK_EVERY_MS
from orca.planner.follow.state import Replan
from orca.planner.search.strategies import STRATEGIES
from orca.planner.workload.workload import parse_workload
from orca.scheduler.policy import cycle
from support.effort import tries
from support.operator.clusters import BORN, BORN_S, RELEASE, FakeCluster
from support.operator.deployments import deployment, schema
from support.operator.planned_files import ITERATION, RRA, SUMMARY, plan_body, schedule

STATED = {"latencyMs": 8000, "devices": 4, "workload": {"lengths": "32:512/1:128"}}
COUNTED = {"latencyMs": 8000, "devices": 4}


def shop(**spec: Any) -> FakeCluster:
    return FakeCluster(deployment(**{"slo": STATED, **spec}))


def change(cluster: FakeCluster, **spec: Any) -> FakeCluster:
    generation = cluster.deployment.generation + 1
    cluster.deployment = deployment(generation=generation, **{"slo": STATED, **spec})
    return cluster


def jobs(cluster: FakeCluster) -> list[str]:
    """Roles of the Jobs that exist."""
    return [cluster.objects["Job", name]["metadata"]["labels"][names.ROLE_LABEL] for name in cluster.names("Job")]


def finish(cluster: FakeCluster, body: bytes | None = None) -> str:
    """The only Job does its work. Returns: its name."""
    [job] = cluster.names("Job")
    cluster.end_job(job, "Complete")
    cluster.leave_result(job, body)
    return job


def to_planning(cluster: FakeCluster) -> FakeCluster:
    """Reconcile until the plan is searched for."""
    cluster.reconcile()
    finish(cluster)
    cluster.reconcile()
    cluster.reconcile()
    assert jobs(cluster) == ["plan"]
    return cluster


def planned(cluster: FakeCluster) -> FakeCluster:
    cluster.settle()
    assert condition(cluster, "PlanReady")[:2] == ("True", "Planned")
    return cluster


def told(cluster: FakeCluster) -> Json:
    observed = cluster.observed
    return make_status(observed, make_plan(observed), {})


def summary(cluster: FakeCluster) -> str:
    """The plan in force in one line; empty without one."""
    return str(told(cluster).get("plan", {}).get("summary", ""))


def condition(cluster: FakeCluster, kind: str) -> tuple[str, str, str]:
    """Status, reason and message; three empty texts if there is no such condition."""
    found = [each for each in told(cluster)["conditions"] if each["type"] == kind]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")


def bounds(cluster: FakeCluster) -> Json:
    """The bounds that the wanted schedulers read."""
    texts: dict[str, str] = cluster.objects["ConfigMap", "shop-schedule"]["data"]
    found: Json = json.loads(list(texts.values())[-1])
    return found


def arguments(cluster: FakeCluster, kind: str, role: str) -> list[str]:
    [name] = cluster.names(kind, role)
    words: list[str] = cluster.objects[kind, name]["spec"]["template"]["spec"]["containers"][0]["args"]
    return words


def test_an_order_of_claims_is_kept_before_a_plan_and_with_it() -> None:
    cluster = shop(scheduler={"order": "Deadline", "deadline": {"drop": "Never"}})
    cluster.reconcile()
    assert "--order deadline" in " ".join(arguments(cluster, "StatefulSet", "scheduler"))
    planned(cluster)
    found = " ".join(arguments(cluster, "StatefulSet", "scheduler"))
    assert "--order deadline" in found
    assert "--drop never" in found


def test_an_edit_of_the_order_needs_no_other_plan() -> None:
    cluster = planned(shop())
    change(cluster, scheduler={"order": "Deadline"}).settle()
    assert not jobs(cluster)
    assert condition(cluster, "PlanReady")[:2] == ("True", "Planned")
    assert "--order deadline" in " ".join(arguments(cluster, "StatefulSet", "scheduler"))


def test_a_profile_is_measured_while_the_defaults_serve() -> None:
    cluster = shop(model={"uri": "pvc://models/a"})
    cluster.reconcile()
    assert jobs(cluster) == ["profile"]
    status, reason, message = condition(cluster, "PlanReady")
    assert (status, reason) == ("False", "Profiling")
    assert message.endswith("measured on 4 devices, which takes about five minutes; the defaults serve")
    assert bounds(cluster) == {"max_batch_size": 16, "max_batch_tokens": 256}
    [stages] = cluster.names("StatefulSet", "stage")
    assert cluster.objects["StatefulSet", stages]["spec"]["replicas"] == 1


def test_the_steps_lead_to_a_plan_in_force_and_leave_no_job() -> None:
    cluster = to_planning(shop())
    assert condition(cluster, "PlanReady")[1] == "Planning"
    finish(cluster)
    cluster.settle()
    assert jobs(cluster) == []
    assert condition(cluster, "PlanReady") == ("True", "Planned", SUMMARY)
    assert summary(cluster) == SUMMARY
    [stages] = cluster.names("StatefulSet", "stage")
    assert cluster.objects["StatefulSet", stages]["spec"]["replicas"] == 2
    worker = arguments(cluster, "StatefulSet", "stage")
    assert "--layers" not in worker, "stages divide layers evenly by themselves"
    assert worker[worker.index("--threads") + 1] == "2"
    assert bounds(cluster) == {"max_batch_size": 9, "max_batch_tokens": 57}
    assert condition(cluster, "SloMet")[:2] == ("Unknown", "Measuring")
    assert cluster.reconcile().actions == ()


def test_results_are_config_maps_that_nobody_can_change() -> None:
    cluster = planned(shop())
    found = [
        cluster.objects["ConfigMap", name] for role in ("profile", "plan") for name in cluster.names("ConfigMap", role)
    ]
    assert [each["immutable"] for each in found] == [True, True]
    assert SUMMARY_FILE in found[1]["data"]


def test_prompts_run_whole_where_the_plan_says_so() -> None:
    cluster = shop()
    cluster.plan = plan_body(schedule(max_batch_tokens=None))
    planned(cluster)
    assert bounds(cluster)["max_batch_tokens"] is None


@pytest.mark.parametrize(
    ("layers", "spec", "flag"),
    [
        ([4, 2], {}, "4,2"),
        ([4, 3], {}, None),
        ([3, 4], {}, "3,4"),
        ([3, 3], {"parallelism": {"stages": 2, "stageLayers": [3, 3]}}, "3,3"),
    ],
)
def test_stages_are_told_their_layers_where_they_would_divide_them_otherwise(
    layers: list[int], spec: Json, flag: str | None
) -> None:
    cluster = shop(**spec)
    cluster.plan = plan_body({**ITERATION, "layers": layers})
    planned(cluster)
    worker = arguments(cluster, "StatefulSet", "stage")
    assert (worker[worker.index("--layers") + 1] if "--layers" in worker else None) == flag


def test_a_plan_with_the_layout_that_serves_replaces_no_group() -> None:
    cluster = FakeCluster(deployment(worker={"threads": 2}))
    cluster.settle()
    before = cluster.names("StatefulSet")
    change(cluster, worker={"threads": 2})
    cluster.plan = plan_body({**ITERATION, "layers": [6]}, threads=2)
    planned(cluster)
    assert (cluster.names("StatefulSet"), bounds(cluster)["max_batch_size"]) == (before, 9)


def test_a_plan_of_another_strategy_replaces_schedulers_and_sets_its_controls() -> None:
    cluster = shop()
    cluster.plan = plan_body(RRA)
    planned(cluster)
    scheduler = arguments(cluster, "StatefulSet", "scheduler")
    assert scheduler[scheduler.index("--policy") + 1] == "rra"
    controls = {
        "encode_batch": 12,
        "decode_steps": 9,
        "decode_batch": 40,
        "encode_tokens": None,
        "threshold_percent": 20,
    }
    assert bounds(cluster) == {"max_batch_size": 32, "max_batch_tokens": None, **controls}


def test_a_given_policy_without_a_plan_serves_by_the_default_one() -> None:
    cluster = shop(scheduler={"policy": "rra"})
    cluster.reconcile()
    cluster.start()
    scheduler = arguments(cluster, "StatefulSet", "scheduler")
    assert scheduler[scheduler.index("--policy") + 1] == "iteration"


def test_another_goal_keeps_the_plan_until_the_next_one_is_there_and_measures_nothing() -> None:
    cluster = planned(shop())
    before = cluster.names("StatefulSet", "stage")
    change(cluster, slo={**STATED, "latencyMs": 4000})
    cluster.plan = plan_body(schedule(max_batch_size=5, max_batch_tokens=21), summary="the next one")
    cluster.reconcile()
    assert jobs(cluster) == ["plan"]
    assert bounds(cluster)["max_batch_size"] == 9
    status, reason, message = condition(cluster, "PlanReady")
    assert (status, reason) == ("False", "Planning")
    assert message.endswith("the plan before serves")
    cluster.settle()
    assert (bounds(cluster)["max_batch_size"], summary(cluster)) == (5, "the next one")
    assert cluster.names("StatefulSet", "stage") == before, "bounds change without new pods"
    assert len(cluster.names("ConfigMap", "plan")) == 1


@pytest.mark.parametrize(
    ("spec", "is_kept"),
    [
        ({"slo": {**STATED, "percentile": 90}}, True),
        ({"images": {"worker": "worker:2"}, "model": {"uri": "pvc://models/a"}}, True),
        ({"parallelism": {"stages": 2}}, True),
        ({"parallelism": {"stages": 3}}, False),
        ({"parallelism": {"stages": 2, "stageLayers": [4, 2]}}, False),
        ({"scheduler": {"policy": "rra"}}, False),
        ({"scheduler": {"maxBatchSize": 9}}, True),
        ({"slo": {**STATED, "devices": 1}}, False),
        ({"model": {"uri": "pvc://models/b"}}, False),
        ({"model": {"uri": "pvc://models/a", "dtype": "bfloat16"}}, False),
    ],
)
def test_a_plan_for_an_earlier_spec_serves_as_long_as_it_fits(spec: Json, is_kept: bool) -> None:
    cluster = planned(shop(model={"uri": "pvc://models/a"}))
    change(cluster, **{"model": {"uri": "pvc://models/a"}, **spec})
    cluster.reconcile()
    assert (bounds(cluster)["max_batch_size"] == 9) == is_kept
    assert (summary(cluster) == SUMMARY) == is_kept


def test_a_resource_that_loses_its_goal_is_as_it_was_without_one() -> None:
    plain = FakeCluster(deployment())
    plain.settle()
    cluster = planned(shop())
    cluster.deployment = deployment(generation=2)
    cluster.settle()
    assert cluster.names("ConfigMap") == plain.names("ConfigMap")
    assert condition(cluster, "PlanReady")[0] == ""
    assert bounds(cluster) == bounds(plain)


def test_a_plan_that_meets_no_bound_serves_and_says_what_is_best() -> None:
    cluster = shop()
    cluster.plan = plan_body(shortfall="no schedule meets the goal (99 % within 8 s). Best achievable: 9.1 s")
    planned(cluster)
    status, reason, message = condition(cluster, "SloMet")
    assert (status, reason) == ("False", "Infeasible")
    expected = "no schedule meets the goal (99 % within 8 s). Best achievable: 9.1 s. The plan in force serves"
    assert message == expected
    assert bounds(cluster)["max_batch_size"] == 9


@pytest.mark.parametrize(("answers", "roles"), [(None, []), (0, []), (199, []), (200, ["plan"])])
def test_without_stated_lengths_a_plan_needs_200_counted_answers(answers: int | None, roles: list[str]) -> None:
    cluster = shop(slo=COUNTED)
    cluster.reconcile()
    finish(cluster)
    cluster.pool = replace(cluster.pool, counted_answers=answers)
    for _ in range(3):
        cluster.reconcile()
    assert jobs(cluster) == roles
    if roles:
        assert "--counted" in arguments(cluster, "Job", "plan")
    else:
        status, reason, message = condition(cluster, "PlanReady")
        assert (status, reason) == ("False", "FewAnswers")
        assert f"from 200 answers on, and the pool has counted {answers or 0} answers" in message


def test_answers_and_the_promise_of_an_older_model_say_nothing_about_the_wanted_one() -> None:
    models: list[Json] = [{"uri": f"pvc://models/{name}"} for name in "ab"]
    cluster = shop(slo=COUNTED, model=models[0])
    cluster.pool = replace(cluster.pool, counted_answers=200)
    planned(cluster)
    generation = cluster.observed.wanted_version.generation
    cluster.pool = replace(cluster.pool, generation=generation, counted_answers=300, promised_slots=2048)
    change(cluster, slo=COUNTED, model=models[1]).reconcile()
    finish(cluster)
    cluster.reconcile()
    cluster.reconcile()
    assert jobs(cluster) == []
    assert "has counted 0 answers of this model" in condition(cluster, "PlanReady")[2]
    change(cluster, model=models[1]).reconcile()
    assert jobs(cluster) == ["plan"], "stated lengths need no answers"
    assert "--least-slots" not in arguments(cluster, "Job", "plan")
    change(cluster, slo={**COUNTED, "latencyMs": 4000}, model=models[0]).reconcile()
    cluster.reconcile()
    words = arguments(cluster, "Job", "plan")
    assert words[words.index("--least-slots") + 1] == "2048"


def test_the_pool_is_asked_for_what_the_next_step_needs_and_for_nothing_else() -> None:
    plain = FakeCluster(deployment())
    assert (results_to_read(plain.observed), needs_counts(plain.observed)) == ((), False)
    cluster = shop(slo=COUNTED)
    cluster.reconcile()
    [profile] = cluster.names("Job")
    assert (results_to_read(cluster.observed), needs_counts(cluster.observed)) == ((profile,), False)
    finish(cluster)
    cluster.pool = replace(cluster.pool, counted_answers=200)
    cluster.reconcile()
    assert needs_counts(cluster.observed)
    cluster.settle()
    assert (results_to_read(cluster.observed), needs_counts(cluster.observed)) == ((), False)


def test_nothing_is_measured_before_the_model_is_there() -> None:
    cluster = shop(model={"uri": "hf://org/model"})
    cluster.reconcile()
    assert jobs(cluster) == ["fetch"]
    assert condition(cluster, "PlanReady")[1] == "WaitingForModel"
    planned(cluster)


@pytest.mark.parametrize("goal", [STATED, COUNTED])
def test_while_the_pool_does_not_answer_no_job_comes_or_goes(goal: Json) -> None:
    cluster = shop(slo=goal)
    cluster.pool = PoolStatus(problem="no answer")
    cluster.reconcile()
    assert jobs(cluster) == []
    assert condition(cluster, "PlanReady")[1] == "PoolUnreachable"
    cluster.pool = PoolStatus()
    cluster.reconcile()
    finish(cluster)
    cluster.reconcile()
    cluster.pool = PoolStatus(problem="no answer")
    cluster.reconcile()
    assert jobs(cluster) == []
    cluster.pool = PoolStatus(counted_answers=200)
    cluster.reconcile()
    cluster.pool = PoolStatus(problem="no answer")
    cluster.now_s = BORN_S + RETRY_S + LOST_S
    cluster.reconcile()
    assert jobs(cluster) == ["plan"]


def test_a_job_that_has_begun_goes_on_while_counts_grow_old() -> None:
    cluster = shop(slo=COUNTED)
    cluster.pool = PoolStatus(counted_answers=200)
    to_planning(cluster)
    cluster.pool = PoolStatus(counted_answers=199)
    cluster.reconcile()
    assert jobs(cluster) == ["plan"]


def test_suspension_takes_jobs_away_and_keeps_results() -> None:
    cluster = planned(shop())
    change(cluster, slo={**STATED, "latencyMs": 4000}, suspend=True).settle()
    assert jobs(cluster) == []
    assert condition(cluster, "PlanReady")[:2] == ("False", "Suspended")
    assert [len(cluster.names("ConfigMap", role)) for role in ("profile", "plan")] == [1, 1]


def test_the_pod_of_a_profile_is_like_that_of_a_stage_with_all_devices() -> None:
    worker = {
        "device": "cuda",
        "threads": 3,
        "resources": {"requests": {"cpu": "500m", "memory": "1.5Gi"}, "limits": {"memory": "2Gi"}},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "podPatch": {
            "spec": {
                "priorityClassName": "high",
                "containers": [{"name": "stage", "livenessProbe": {"periodSeconds": 3}}],
            }
        },
    }
    cluster = shop(worker=worker, parallelism={"tensor": 2}, slo={**STATED, "devices": 2})
    cluster.reconcile()
    [name] = cluster.names("Job")
    pod = cluster.objects["Job", name]["spec"]["template"]["spec"]
    [main] = pod["containers"]
    assert main["image"] == RELEASE.worker
    assert main["resources"]["requests"] == {"cpu": "1000m", "memory": "3.0Gi"}
    assert main["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}
    assert "livenessProbe" not in main
    assert (pod["nodeSelector"], pod["priorityClassName"], pod["restartPolicy"]) == ({"gpu": "h100"}, "high", "Never")
    assert {"key": "gpu", "operator": "Exists"} in pod["tolerations"]
    assert main["args"][main["args"].index("--ranks") + 1] == "2"
    assert pod["automountServiceAccountToken"] is False
    assert pod["activeDeadlineSeconds"] == 3600
    [stages] = cluster.names("StatefulSet", "stage")
    [stage] = cluster.objects["StatefulSet", stages]["spec"]["template"]["spec"]["containers"]
    assert stage["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    ("device", "tensor", "devices"),
    [("cpu", None, 4), ("cpu", 2, 4), ("cuda", None, 4), ("cuda", 1, 2), ("cuda", 2, 2), ("cuda", 4, 4)],
)
def test_a_profile_takes_no_more_devices_than_it_needs(device: str, tensor: int | None, devices: int) -> None:
    shape = {} if tensor is None else {"tensor": tensor}
    cluster = shop(worker={"device": device}, parallelism=shape)
    cluster.reconcile()
    words = arguments(cluster, "Job", "profile")
    assert words[words.index("--devices") + 1] == str(devices)
    assert f"measured on {devices} devices" in condition(cluster, "PlanReady")[2]
    change(cluster, worker={"device": device}, parallelism=shape, slo={**STATED, "devices": 8})
    keeps_its_profile = device == "cuda" and tensor is not None
    assert (cluster.names("Job") == list(results_to_read(cluster.observed))) == keeps_its_profile
    to_planning(change(cluster, worker={"device": device}, parallelism=shape))
    words = arguments(cluster, "Job", "plan")
    assert words[words.index("--devices") + 1] == "4"


def test_what_the_spec_gives_binds_the_plan_and_the_status_says_so() -> None:
    given = {"parallelism": {"stages": 2, "stageLayers": [3, 3]}, "scheduler": {"policy": "iteration", "kvSlots": 4096}}
    cluster = to_planning(shop(**given))
    words = arguments(cluster, "Job", "plan")
    given_flags = {"--stages": "2", "--layers": "3,3", "--strategies": "iteration"}
    # A group with memory for fewer slots than the spec chooses would not form.
    for flag, value in (given_flags | {"--slots": "4096", "--least-slots": "4096"}).items():
        assert words[words.index(flag) + 1] == value
    planned(cluster)
    assert condition(cluster, "PlanReady")[2].endswith(
        "; the spec gives stages 2, stageLayers [3, 3], policy iteration"
    )


def test_an_omitted_field_is_no_constraint() -> None:
    cluster = to_planning(shop())
    words = arguments(cluster, "Job", "plan")
    assert not {"--stages", "--tensor", "--layers", "--strategies", "--slots", "--least-slots"} & set(words)


def test_a_plan_has_room_for_what_the_pool_has_promised_to_a_request_of_the_model() -> None:
    cluster = to_planning(shop())
    cluster.pool = replace(cluster.pool, promised_slots=2048)
    [gone] = [each for each in cluster.reconcile().actions if isinstance(each, Delete)]
    assert gone.reason == "the spec or the promise of the pool has changed"
    cluster.reconcile()
    words = arguments(cluster, "Job", "plan")
    assert words[words.index("--least-slots") + 1] == "2048"
    planned(cluster)


@pytest.mark.parametrize(("of", "reason"), [("profile", "ProfileFailed"), ("plan", "PlanFailed")])
def test_a_job_that_fails_is_reported_with_its_last_words_and_made_again(of: str, reason: str) -> None:
    cluster = shop()
    cluster.reconcile()
    if of == "plan":
        to_planning(cluster)
    [job] = cluster.names("Job")
    pod = f"{job}-x"
    cluster.add_pod(pod, cluster.objects["Job", job]["spec"]["template"]["metadata"]["labels"], is_ready=False)
    ended = {"exitCode": 2, "message": "log\norca: the model is too large\n"}
    cluster.objects["Pod", pod]["status"] |= {
        "phase": "Failed",
        "containerStatuses": [{"name": "main", "restartCount": 0, "state": {"terminated": ended}}],
    }
    cluster.end_job(job, "Failed")
    message = f"pod {pod}: orca: the model is too large; the defaults serve"
    assert condition(cluster, "PlanReady") == ("False", reason, message)
    assert cluster.reconcile().actions == ()
    cluster.now_s = BORN_S + RETRY_S + 1
    cluster.reconcile()
    assert jobs(cluster) == []
    del cluster.objects["Pod", pod]
    cluster.reconcile()
    assert jobs(cluster) == [of]
    assert condition(cluster, "PlanReady")[1] == {"profile": "Profiling", "plan": "Planning"}[of]


def test_a_job_that_the_api_server_refuses_is_reported_and_the_service_is_ready() -> None:
    cluster = FakeCluster(deployment())
    cluster.settle()
    change(cluster)
    decided = make_plan(cluster.observed)
    [job] = decided.actions
    refused = [Refusal(job, "exceeded quota: count/jobs.batch")]
    found = {each["type"]: each for each in make_status(cluster.observed, decided, {}, refused)["conditions"]}
    assert (found["Accepted"]["status"], found["Ready"]["status"]) == ("True", "True")
    assert (found["PlanReady"]["status"], found["PlanReady"]["reason"]) == ("False", "Refused")
    expected = "exceeded quota: count/jobs.batch; the operator tries again from time to time; the defaults serve"
    assert found["PlanReady"]["message"] == expected


def test_a_profile_that_finds_no_devices_is_reported_and_the_defaults_serve() -> None:
    cluster = shop()
    cluster.reconcile()
    cluster.start()
    cluster.objects = {key: each for key, each in cluster.objects.items() if key[0] != "Job"}
    cluster.pool = PoolStatus()
    cluster.reconcile()
    [job] = cluster.names("Job")
    labels = cluster.objects["Job", job]["spec"]["template"]["metadata"]["labels"]
    cluster.add_pod(f"{job}-x", labels, is_ready=False, node=None)
    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "message": "4 Insufficient nvidia.com/gpu",
        "lastTransitionTime": BORN,
    }
    cluster.objects["Pod", f"{job}-x"]["status"]["conditions"] = [unplaced]
    status, reason, message = condition(cluster, "PlanReady")
    assert (status, reason) == ("False", "NoCapacity")
    assert "finds no node: 4 Insufficient nvidia.com/gpu; the defaults serve" in message
    assert condition(cluster, "Ready")[0] == "True"


def test_a_job_whose_result_the_pool_has_lost_runs_again() -> None:
    cluster = shop()
    cluster.reconcile()
    [job] = cluster.names("Job")
    cluster.end_job(job, "Complete")
    assert cluster.reconcile().actions == ()
    cluster.now_s = BORN_S + LOST_S + 1
    cluster.pool = PoolStatus(problem="no answer")
    assert not [each for each in cluster.reconcile().actions if isinstance(each, Delete)]
    cluster.pool = PoolStatus()
    [gone] = [each for each in cluster.reconcile().actions if isinstance(each, Delete)]
    assert (gone.name, gone.reason) == (job, "its result is lost")
    planned(cluster)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"\xff", "result cannot be used"),
        (b"[]", "not an object"),
        (to_body({"a/b": ""}), "something else"),
        (to_body({SUMMARY_FILE: "x"}), "result cannot be used"),
        (to_body({PLAN_FILE: "[]"}), "schedule must be an object"),
        (plan_body({**ITERATION, "policy": "waa"}), "policy must be one of iteration, rra"),
        (plan_body({**ITERATION, "layers": []}), "layers must be those of 1 to 64 stages"),
        (plan_body({**ITERATION, "layers": [3, 0]}), "layers must be a whole number from 1"),
        (plan_body({**ITERATION, "ranks": 17}), "ranks must be a whole number from 1 to 16"),
        (plan_body({**ITERATION, "ranks": True}), "ranks must be"),
        (plan_body({**ITERATION, "ranks": 3}), "the plan does not keep to what the spec gives (devices 4)"),
        (plan_body(schedule(max_batch_size=0)), "max_batch_size must be"),
        (plan_body(schedule(max_batch_tokens=9)), "max_batch_tokens must be above max_batch_size"),
        (plan_body({**RRA, "bounds": {**RRA["bounds"], "encode_batch": None}}), "encode_batch must be"),
        (plan_body({**RRA, "bounds": {**RRA["bounds"], "max_batch_size": 5}}), "must be at most 10"),
        (plan_body({**RRA, "bounds": {**RRA["bounds"], "threshold_percent": 101}}), "threshold_percent must be"),
        (plan_body(threads=0), "threads must be"),
        (plan_body(summary=" "), "summary must be one line"),
        (plan_body(summary="a\nb"), "summary must be one line"),
        (plan_body(summary="x" * 1001), "summary must be one line of at most 1000 characters"),
        (b" " * (BODY_BYTES_MAX + 1), f"the result has {BODY_BYTES_MAX + 1} bytes, more than {BODY_BYTES_MAX}"),
    ],
)
def test_a_result_that_makes_no_sense_is_refused_by_name(body: bytes, complaint: str) -> None:
    cluster = to_planning(shop())
    finish(cluster, body)
    cluster.reconcile()
    assert cluster.names("ConfigMap", "plan") == []
    status, reason, message = condition(cluster, "PlanReady")
    assert (status, reason) == ("False", "PlanFailed")
    assert complaint in message


def test_a_config_map_in_the_place_of_a_plan_that_cannot_be_read_goes() -> None:
    cluster = planned(shop())
    [name] = cluster.names("ConfigMap", "plan")
    cluster.objects["ConfigMap", name]["data"] = {}
    cluster.reconcile()
    assert cluster.names("ConfigMap", "plan") == []
    planned(cluster)


def test_only_with_a_goal_may_jobs_call_the_pool() -> None:
    def policies(cluster: FakeCluster) -> Json:
        cluster.reconcile(replace(RELEASE, has_network_policies=True))
        return {name: cluster.objects["NetworkPolicy", name]["spec"] for name in cluster.names("NetworkPolicy")}

    plain, with_goal = policies(FakeCluster(deployment())), policies(shop())
    assert with_goal.keys() - plain.keys() == {"shop-profile", "shop-plan", "shop-follow"}
    for name in ("shop-profile", "shop-plan", "shop-follow"):
        assert with_goal[name]["ingress"] == []
    assert len(with_goal["shop-pool"]["ingress"]) == len(plain["shop-pool"]["ingress"]) + 3


def test_numbers_that_the_operator_shares_with_the_planner_are_the_same() -> None:
    """The operator does not import planner and scheduler."""
    assert RELEASE.slo_check_s == CHECK_EVERY_MS / 1000
    assert planned_of_domain.DEFAULT_THRESHOLD_PERCENT == cycle.DEFAULT_THRESHOLD_PERCENT
    assert set(planned_of_domain.POLICIES) == set(STRATEGIES)
    modes = schema()["properties"]["spec"]["properties"]["slo"]["properties"]["replan"]["enum"]
    assert [each.lower() for each in modes] == [each.value for each in Replan]


def test_lengths_that_make_no_sense_are_refused_at_once_as_the_planner_would() -> None:
    chance = random.Random(1)
    refused = 0
    for _ in range(tries(500)):
        lengths = "/".join(_some_lengths(chance) for _ in range(2))
        try:
            parse_workload(lengths)
        except ValueError:
            refused += 1
            with pytest.raises(BadSpec, match=r"slo\.workload\.lengths: (prompts|outputs) "):
                deployment(slo={**COUNTED, "workload": {"lengths": lengths}})
        else:
            deployment(slo={**COUNTED, "workload": {"lengths": lengths}})
    assert refused > 0


def _some_lengths(chance: random.Random) -> str:
    """Lengths that match the pattern of the CRD."""
    ends, moments = [chance.randint(1, 9) for _ in range(2)], [chance.choice(("0", "0.5", "3", "4.25", "1000001"))]
    kind = chance.choice((1, 2, 4))
    return ":".join([*map(str, ends), str(chance.randint(0, 10)), *moments][:kind])


@pytest.mark.parametrize(
    ("amount", "factor", "found"),
    [
        ("500m", 4, "2000m"),
        ("1.5Gi", 2, "3.0Gi"),
        (1, 3, "3"),
        ("2e3", 2, "4e3"),
        (".5", 2, "1.0"),
        ("word", 2, "word"),
    ],
)
def test_amounts_are_multiplied_in_their_own_unit(amount: object, factor: int, found: str) -> None:
    assert times(amount, factor) == found


GOALS = (COUNTED, STATED, {**STATED, "latencyMs": 4000}, {**STATED, "devices": 2, "percentile": 90})


@pytest.mark.parametrize("seed", range(tries(100)))
def test_an_operator_that_dies_anywhere_still_comes_to_the_plan_for_the_spec(seed: int) -> None:
    """Plans are carried out in part, Jobs are cleaned up, results are lost, the spec changes; then all is quiet."""
    chance = random.Random(seed)
    cluster = shop(slo=chance.choice(GOALS))
    for _ in range(chance.randint(1, 30)):
        event = chance.choice(("reconcile", "die", "work", "lose", "clean up", "change", "time", "answers"))
        _let_happen(cluster, event, chance)
        assert len([name for name in cluster.names("Job") if "-profile-" in name or "-plan-" in name]) <= 2
    cluster.pool = replace(cluster.pool, problem=None, counted_answers=200)
    cluster.now_s += RETRY_S + LOST_S
    for _ in range(3):
        # Whatever has failed or was lost is made again after its time.
        cluster.settle()
        cluster.now_s += RETRY_S + LOST_S
    assert condition(cluster, "PlanReady")[:2] == ("True", "Planned")
    assert bounds(cluster)["max_batch_size"] == 9
    assert (cluster.names("Job"), [len(cluster.names("ConfigMap", each)) for each in ("profile", "plan")]) == (
        [],
        [1, 1],
    )


def _let_happen(cluster: FakeCluster, event: str, chance: random.Random) -> None:
    own = cluster.names("Job")
    if event == "reconcile":
        cluster.reconcile()
    elif event == "die":
        cluster.reconcile(dies_after=chance.randint(0, 3))
    elif event == "work" and own:
        job = chance.choice(own)
        if chance.random() < 0.7:
            cluster.leave_result(job)
        cluster.end_job(job, chance.choice(("Complete", "Failed")))
    elif event == "lose":
        cluster.pool = replace(cluster.pool, results={}, problem=chance.choice((None, "no answer")))
    elif event == "clean up" and own:
        del cluster.objects["Job", chance.choice(own)]
    elif event == "change":
        change(cluster, slo=chance.choice(GOALS))
    elif event == "time":
        cluster.now_s += chance.choice((1, LOST_S, RETRY_S))
    elif event == "answers":
        cluster.pool = replace(cluster.pool, counted_answers=chance.choice((0, 199, 200)))
