"""The checks of a plan in force: from the time at which one is due to the plan that runs, and what stops nothing."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orca.core.job_files import PLAN_FILE, STATE_FILE, read_files, to_body
from orca.operator.domain import names
from orca.operator.domain.actions import Apply, Delete
from orca.operator.domain.api_refusals import Refusal
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.keys import plan_key
from orca.operator.plan.plan import make_plan
from orca.operator.plan.slo.following import LATENCIES_AGE_S, check_to_read, latencies_age_max_s
from orca.operator.plan.slo.making import LOST_S
from orca.operator.plan.status import make_status
from support.effort import tries
from support.operator.clusters import BORN, RELEASE, FakeCluster
from support.operator.deployments import deployment
from support.operator.followed_shop import (
    BEGIN_MS,
    GOAL,
    bounds_of,
    check_again,
    condition_of,
    finish_check,
    followed_shop,
    latencies,
    notes,
    status,
    wait_for_check,
)
from support.operator.planned_files import ITERATION, RRA, SUMMARY, check_body, plan_body, report, schedule

CHECK_S = RELEASE.slo_check_s
SMALLER = schedule(max_batch_size=5, max_batch_tokens=21)
"""Another schedule of the same layout."""


def change(cluster: FakeCluster, **spec: Any) -> None:
    cluster.deployment = deployment(generation=cluster.deployment.generation + 1, **{"slo": GOAL, **spec})


def answer(cluster: FakeCluster, awake_ms: int = BEGIN_MS, **of: Any) -> None:
    """Let the pool tell latencies."""
    cluster.pool = replace(cluster.pool, latencies=latencies(awake_ms, **of))


def words(cluster: FakeCluster) -> list[str]:
    """Return the arguments of the check."""
    found: list[str] = main_container(cluster)["args"]
    return found


def main_container(cluster: FakeCluster) -> Json:
    [job] = cluster.names("Job", names.FOLLOW)
    [main] = cluster.objects["Job", job]["spec"]["template"]["spec"]["containers"]
    return dict(main)


def value(cluster: FakeCluster, flag: str) -> str | None:
    """Return the value of a flag of the check; None if it is left out."""
    found = words(cluster)
    return found[found.index(flag) + 1] if flag in found else None


def test_a_check_is_due_ten_minutes_after_the_plan_and_after_the_last_one() -> None:
    cluster = followed_shop()
    cluster.now_s += CHECK_S - 2
    assert cluster.reconcile().actions == ()
    cluster.now_s += 2
    cluster.reconcile()
    key = plan_key(cluster.deployment, RELEASE.worker)
    assert cluster.names("Job") == [f"shop-check-{key}-1"]
    finish_check(cluster)
    cluster.settle()
    assert cluster.names("Job") == []
    assert cluster.names("ConfigMap", names.FOLLOW) == [f"shop-follow-{key}"]
    assert (notes(cluster)["check"], notes(cluster)["checked_s"]) == (1, int(cluster.now_s))
    cluster.now_s += CHECK_S - 2
    assert cluster.reconcile().actions == ()
    cluster.now_s += 2
    cluster.reconcile()
    assert cluster.names("Job") == [f"shop-check-{key}-2"]


def test_a_clock_that_was_set_back_stops_no_checks() -> None:
    cluster = followed_shop()
    check_again(cluster)
    cluster.now_s -= CHECK_S + 1
    cluster.reconcile()
    assert len(cluster.names("Job", names.FOLLOW)) == 1


def test_another_plan_of_a_check_is_in_force_without_new_pods() -> None:
    cluster = followed_shop()
    pods = cluster.names("Pod")
    check_again(cluster, check_body(SMALLER, summary="the smaller one", report_text=report(is_new=True)))
    assert (bounds_of(cluster)["max_batch_size"], status(cluster)["plan"]["summary"]) == (5, "the smaller one")
    assert cluster.names("Pod") == pods
    assert condition_of(cluster, "PlanReady") == ("True", "Planned", "the smaller one")
    assert len(cluster.names("ConfigMap", names.PLAN)) == 1


def test_another_layout_of_a_check_is_a_rollout() -> None:
    cluster = followed_shop()
    before = cluster.names("StatefulSet", "stage")
    check_again(cluster, check_body({**RRA, "layers": [6]} | {"bounds": {**RRA["bounds"], "decode_batch": 30}}))
    [stages] = cluster.names("StatefulSet", "stage")
    assert [stages] != before
    assert cluster.objects["StatefulSet", stages]["spec"]["replicas"] == 1
    [scheduler] = cluster.names("StatefulSet", "scheduler")
    arguments = cluster.objects["StatefulSet", scheduler]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--policy") + 1] == "rra"


def test_the_pod_of_a_check_is_like_that_of_a_scheduler_and_takes_what_others_leave() -> None:
    patch = {"spec": {"priorityClassName": "low"}}
    cluster = followed_shop(scheduler={"podPatch": patch, "kvSlots": 4096}, replicas=2, parallelism={"stages": 2})
    job = wait_for_check(cluster)
    pod, main = cluster.objects["Job", job]["spec"]["template"]["spec"], main_container(cluster)
    assert (main["image"], main["args"][0]) == (RELEASE.scheduler, "follow")
    assert main["resources"]["requests"]["cpu"] == "100m"
    assert (pod["priorityClassName"], pod["restartPolicy"]) == ("low", "Never")
    assert pod["automountServiceAccountToken"] is False
    assert pod["activeDeadlineSeconds"] == 3600
    expected = {
        "--plan": f"/etc/orca/plan/{PLAN_FILE}",
        "--state": None,
        "--replan": "auto",
        "--latency-ms": "8000",
        "--devices": "4",
        "--workload": "32:512/1:128",
        "--stages": "2",
        "--least-slots": "4096",
        "--slots": "4096",
        "--deployment": "ns/shop",
        "--result-key": job,
        "--counted": None,
    }
    assert {flag: value(cluster, flag) for flag in expected} == expected
    assert "ORCA_FOLLOW_POOL" in [each["name"] for each in main["env"]]
    [mounted] = [each["configMap"] for each in pod["volumes"] if each["name"] == "plan"]
    assert mounted == {
        "name": cluster.names("ConfigMap", names.PLAN)[0],
        "items": [{"key": PLAN_FILE, "path": PLAN_FILE}],
    }


def test_the_next_check_goes_on_from_the_state_of_the_last_one() -> None:
    cluster = followed_shop()
    answer(cluster)
    check_again(cluster)
    job = wait_for_check(cluster)
    assert value(cluster, "--state") == f"/etc/orca/plan/{STATE_FILE}"
    volumes = cluster.objects["Job", job]["spec"]["template"]["spec"]["volumes"]
    [mounted] = [each["configMap"] for each in volumes if each["name"] == "plan"]
    assert mounted["name"] == cluster.names("ConfigMap", names.FOLLOW)[0]
    assert [each["key"] for each in mounted["items"]] == [PLAN_FILE, STATE_FILE]


@pytest.mark.parametrize("mode", ["Auto", "Recommend", "Off"])
def test_what_becomes_of_a_better_plan_is_the_choice_of_the_spec_and_needs_no_other_plan(mode: str) -> None:
    cluster = followed_shop()
    change(cluster, slo={**GOAL, "replan": mode})
    assert cluster.reconcile().actions == ()
    wait_for_check(cluster)
    assert value(cluster, "--replan") == mode.lower()


def test_a_plan_of_a_check_that_began_before_the_choice_changed_is_not_taken() -> None:
    cluster = followed_shop()
    wait_for_check(cluster)
    finish_check(cluster, check_body(SMALLER))
    change(cluster, slo={**GOAL, "replan": "Off"})
    cluster.settle()
    assert bounds_of(cluster)["max_batch_size"] == 9


def test_a_check_goes_on_while_groups_come_and_go() -> None:
    cluster = followed_shop()
    wait_for_check(cluster)
    change(cluster, replicas=2)
    assert not [each for each in cluster.reconcile().actions if isinstance(each, Delete)]


def test_a_record_that_the_api_server_refuses_starts_no_check_again_and_again() -> None:
    cluster = followed_shop()
    wait_for_check(cluster)
    for second in range(5):
        # Each time the record would begin at another moment, since none is kept.
        answer(cluster, BEGIN_MS + 1000 * second)
        for record in cluster.names("ConfigMap", names.FOLLOW):
            del cluster.objects["ConfigMap", record]
        assert not [each for each in cluster.reconcile().actions if isinstance(each, Delete)]


def test_a_recommended_plan_is_named_and_does_not_run() -> None:
    cluster = followed_shop(slo={**GOAL, "replan": "Recommend"})
    check_again(cluster, check_body(report_text=report(reason="a miss", recommended="RRA, B_E 5")))
    shown = status(cluster)["plan"]
    assert (shown["recommended"], shown["reason"]) == ("RRA, B_E 5", "a miss")
    assert bounds_of(cluster)["max_batch_size"] == 9


def fail(cluster: FakeCluster, message: str) -> str:
    """Let the check fail. Returns: the name of its pod."""
    [job] = cluster.names("Job", names.FOLLOW)
    pod = f"{job}-x"
    cluster.add_pod(pod, cluster.objects["Job", job]["spec"]["template"]["metadata"]["labels"], is_ready=False)
    ended = {"exitCode": 2, "message": f"log\n{message}\n"}
    cluster.objects["Pod", pod]["status"] |= {
        "phase": "Failed",
        "containerStatuses": [{"name": "scheduler", "restartCount": 0, "state": {"terminated": ended}}],
    }
    cluster.end_job(job, "Failed", at="2026-01-01T00:10:01Z")
    return pod


def test_a_check_that_fails_leaves_everything_as_it_is_and_is_made_again_in_its_turn() -> None:
    cluster = followed_shop()
    job = wait_for_check(cluster)
    pod = fail(cluster, "orca follow: out of luck")
    assert cluster.reconcile().actions == ()
    ready, reason, message = condition_of(cluster, "PlanReady")
    assert (ready, reason) == ("True", "Planned")
    assert message == f"{SUMMARY}; the plan is not checked: pod {pod}: orca follow: out of luck"
    assert status(cluster)["plan"]["problem"] == f"pod {pod}: orca follow: out of luck"
    cluster.now_s += CHECK_S + 1
    cluster.reconcile()
    assert cluster.names("Job") == []
    del cluster.objects["Pod", pod]
    cluster.reconcile()
    assert cluster.names("Job") == [job]
    finish_check(cluster)
    cluster.settle()
    assert condition_of(cluster, "PlanReady")[2] == SUMMARY
    assert notes(cluster)["check"] == 1


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"[]", "not an object"),
        (plan_body(), "there is no report.json"),
        (check_body(report_text="{}"), "the report: planned_lengths is missing"),
        (check_body({**ITERATION, "ranks": 3}), "the plan does not keep to what the spec gives (devices 4)"),
        (check_body({**ITERATION, "policy": "waa"}), "policy must be one of"),
        (to_body({STATE_FILE: "{}"}), "there is no report.json"),
        (to_body(read_files(check_body()) | {"following.json": "{}"}), "a check leaves no file following.json"),
        (to_body(read_files(check_body()) | {"latencies-before.json": "{}"}), "no file latencies-before.json"),
        (check_body(report_text=report().replace("7.4", "1e308")), "latency_s must be 0 or from 1e-09 to 1e+09"),
        (check_body(report_text=report().replace("12000", "9223372036854775808")), "answers must be 0 or from"),
    ],
)
def test_a_result_that_makes_no_sense_or_breaks_a_constraint_is_not_taken(body: bytes, complaint: str) -> None:
    cluster = followed_shop()
    job = wait_for_check(cluster)
    cluster.end_job(job, "Complete", at="2026-01-01T00:10:01Z")
    cluster.leave_result(job, body)
    cluster.now_s += LOST_S + 5
    assert cluster.reconcile().actions == ()
    ready, _, message = condition_of(cluster, "PlanReady")
    assert ready == "True"
    assert complaint in message
    assert bounds_of(cluster)["max_batch_size"] == 9
    cluster.now_s += CHECK_S
    [gone] = [each for each in cluster.reconcile().actions if isinstance(each, Delete)]
    assert (gone.name, gone.reason) == (job, "its result cannot be used")
    cluster.reconcile()
    assert cluster.names("Job") == [job]


def test_a_check_whose_result_the_pool_has_lost_runs_again() -> None:
    cluster = followed_shop()
    job = wait_for_check(cluster)
    cluster.end_job(job, "Complete", at="2026-01-01T00:10:01Z")
    assert cluster.reconcile().actions == ()
    cluster.now_s += LOST_S + 1
    [gone] = [each for each in cluster.reconcile().actions if isinstance(each, Delete)]
    assert (gone.name, gone.reason) == (job, "its result is lost")
    cluster.reconcile()
    assert cluster.names("Job") == [job]


def test_a_check_that_the_api_server_refuses_is_reported_and_the_plan_stays_ready() -> None:
    cluster = followed_shop()
    cluster.now_s += CHECK_S
    observed = cluster.observed
    decided = make_plan(observed)
    [job] = decided.actions
    found = {
        each["type"]: each
        for each in make_status(observed, decided, {}, [Refusal(job, "exceeded quota")])["conditions"]
    }
    assert (found["PlanReady"]["status"], found["Accepted"]["status"]) == ("True", "True")
    assert "the plan is not checked: exceeded quota; the operator tries again" in found["PlanReady"]["message"]


def unreachable(cluster: FakeCluster) -> None:
    cluster.pool = PoolStatus(problem="no answer")


def suspended(cluster: FakeCluster) -> None:
    change(cluster, suspend=True)


def without_groups(cluster: FakeCluster) -> None:
    change(cluster, replicas=0)


def without_profile(cluster: FakeCluster) -> None:
    [profile] = cluster.names("ConfigMap", names.PROFILE)
    del cluster.objects["ConfigMap", profile]


@pytest.mark.parametrize("case", [unreachable, suspended, without_groups, without_profile])
def test_no_check_begins_while_nobody_could_use_it(case: Callable[[FakeCluster], None]) -> None:
    cluster = followed_shop()
    case(cluster)
    cluster.settle()
    cluster.now_s += 2 * CHECK_S
    cluster.reconcile()
    assert cluster.names("Job") == []
    ready, _, message = condition_of(cluster, "PlanReady")
    assert ready == "True"
    assert ("there is no profile" in message) == (case is without_profile)


def test_a_check_that_runs_stays_while_the_pool_does_not_answer_and_goes_with_the_service() -> None:
    cluster = followed_shop()
    job = wait_for_check(cluster)
    before = cluster.pool
    cluster.pool = PoolStatus(problem="no answer")
    cluster.reconcile()
    assert cluster.names("Job") == [job]
    cluster.pool = before
    suspended(cluster)
    cluster.reconcile()
    assert cluster.names("Job") == []


def test_another_goal_drops_the_checks_and_the_checked_plan_serves_until_the_next_one() -> None:
    cluster = followed_shop()
    check_again(cluster, check_body(SMALLER))
    wait_for_check(cluster)
    change(cluster, slo={**GOAL, "latencyMs": 4000})
    cluster.reconcile()
    assert cluster.names("Job", names.FOLLOW) == []
    assert bounds_of(cluster)["max_batch_size"] == 5
    assert condition_of(cluster, "PlanReady")[0] == "False"
    before = cluster.names("ConfigMap", names.FOLLOW)
    cluster.settle()
    assert bounds_of(cluster)["max_batch_size"] == 9
    assert len(cluster.names("ConfigMap", names.PLAN)) == 1
    assert not {*before} & {*cluster.names("ConfigMap", names.FOLLOW)}


def test_a_checked_plan_for_an_earlier_spec_that_does_not_fit_gives_way_to_the_defaults() -> None:
    cluster = followed_shop()
    check_again(cluster, check_body(SMALLER))
    change(cluster, parallelism={"stages": 3})
    cluster.reconcile()
    assert bounds_of(cluster)["max_batch_size"] == 16


def test_a_resource_that_loses_its_goal_keeps_nothing_of_its_checks() -> None:
    plain = FakeCluster(deployment())
    plain.settle()
    cluster = followed_shop()
    answer(cluster)
    check_again(cluster, check_body(SMALLER))
    wait_for_check(cluster)
    cluster.deployment = deployment(generation=9)
    cluster.settle()
    assert (cluster.names("ConfigMap"), cluster.names("Job")) == (plain.names("ConfigMap"), [])
    assert bounds_of(cluster) == bounds_of(plain)


def test_the_first_plan_serves_again_if_somebody_deletes_or_breaks_the_record() -> None:
    cluster = followed_shop()
    check_again(cluster, check_body(SMALLER))
    [record] = cluster.names("ConfigMap", names.FOLLOW)
    for data in ({}, {"following.json": "{"}, {"following.json": '{"check": "x"}'}, {PLAN_FILE: "{}"}):
        cluster.objects["ConfigMap", record]["data"] = data
        cluster.reconcile()
        assert (cluster.names("ConfigMap", names.FOLLOW), bounds_of(cluster)["max_batch_size"]) == ([], 9)
        check_again(cluster, check_body(SMALLER))
        assert bounds_of(cluster)["max_batch_size"] == 5
    files = read_files(check_body({**SMALLER, "ranks": 3}))
    cluster.objects["ConfigMap", record]["data"] |= files
    cluster.reconcile()
    assert bounds_of(cluster)["max_batch_size"] == 9, "an edited plan that needs too many devices"


def test_a_result_of_an_earlier_check_with_the_same_number_is_not_taken() -> None:
    cluster = followed_shop()
    check_again(cluster, check_body(SMALLER))
    [record] = cluster.names("ConfigMap", names.FOLLOW)
    del cluster.objects["ConfigMap", record]
    job = wait_for_check(cluster)
    assert job in cluster.pool.results
    cluster.reconcile()
    assert (cluster.names("Job", names.FOLLOW), bounds_of(cluster)["max_batch_size"]) == ([job], 9)
    finish_check(cluster, check_body(schedule(max_batch_size=7)))
    cluster.settle()
    assert bounds_of(cluster)["max_batch_size"] == 7


def test_the_time_since_when_a_plan_runs_is_noted_once_and_again_for_another_plan() -> None:
    cluster = followed_shop()
    assert cluster.names("ConfigMap", names.FOLLOW) == []
    answer(cluster, 5000)
    cluster.settle()
    assert notes(cluster) == {"check": 0, "checked_s": 0, "since_ms": 5000}
    answer(cluster, 6000)
    assert cluster.reconcile().actions == ()
    check_again(cluster)
    assert notes(cluster)["since_ms"] == 5000, "the plan stays"
    wait_for_check(cluster)
    finish_check(cluster, check_body(SMALLER))
    cluster.reconcile()
    assert notes(cluster)["since_ms"] is None
    cluster.reconcile()
    assert notes(cluster)["since_ms"] is None, "the schedulers have yet to learn the bounds"
    answer(cluster, 9000)
    cluster.settle()
    assert notes(cluster)["since_ms"] == 9000


def test_a_plan_does_not_run_before_the_last_group_has_it() -> None:
    cluster = followed_shop(replicas=2)
    check_again(cluster, check_body({**RRA, "layers": [6]} | {"bounds": {**RRA["bounds"], "decode_batch": 30}}))
    [*_, last] = cluster.names("StatefulSet", "scheduler")
    cluster.make_unready(f"{last}-0")
    answer(cluster)
    cluster.reconcile()
    assert notes(cluster)["since_ms"] is None
    cluster.start()
    cluster.reconcile()
    assert notes(cluster)["since_ms"] == BEGIN_MS


def test_a_plan_does_not_run_before_the_schedulers_learn_its_bounds() -> None:
    cluster = followed_shop()
    wait_for_check(cluster)
    finish_check(cluster, check_body(SMALLER))
    answer(cluster)
    cluster.reconcile()
    cluster.reconcile(dies_after=1)
    assert bounds_of(cluster)["max_batch_size"] == 5
    cluster.reconcile()
    assert notes(cluster)["since_ms"] is None, "only now, their pods are told"
    cluster.reconcile()
    assert notes(cluster)["since_ms"] == BEGIN_MS


def test_an_emptied_pool_counts_from_0_again() -> None:
    cluster = followed_shop()
    answer(cluster, 5000)
    cluster.settle()
    answer(cluster, 100)
    cluster.settle()
    assert notes(cluster)["since_ms"] == 100


def test_the_pool_is_asked_for_latencies_only_with_a_plan_and_at_once_only_when_the_time_counts() -> None:
    assert latencies_age_max_s(FakeCluster(deployment()).observed) is None
    cluster = FakeCluster(deployment(slo=GOAL))
    assert (latencies_age_max_s(cluster.observed), check_to_read(cluster.observed)) == (None, ())
    cluster = followed_shop()
    assert latencies_age_max_s(cluster.observed) == 0.0
    answer(cluster)
    cluster.settle()
    assert latencies_age_max_s(cluster.observed) == LATENCIES_AGE_S
    job = wait_for_check(cluster)
    assert check_to_read(cluster.observed) == ()
    cluster.end_job(job, "Complete")
    assert check_to_read(cluster.observed) == (job,)
    [scheduler] = cluster.names("Pod", "scheduler")
    cluster.end_job(job, "Failed")
    [record] = cluster.names("ConfigMap", names.FOLLOW)
    del cluster.objects["ConfigMap", record]
    cluster.make_unready(scheduler)
    assert latencies_age_max_s(cluster.observed) == LATENCIES_AGE_S, "nothing to note while a group is away"


def test_each_check_is_one_write_of_one_object() -> None:
    cluster = followed_shop()
    answer(cluster)
    cluster.settle()
    wait_for_check(cluster)
    finish_check(cluster, check_body(SMALLER))
    actions = cluster.reconcile().actions
    assert [
        (each.manifest["kind"], each.manifest["metadata"]["name"]) for each in actions if isinstance(each, Apply)
    ] == [("ConfigMap", cluster.names("ConfigMap", names.FOLLOW)[0])]
    assert len(actions) == 1


SCHEDULES = (ITERATION, SMALLER, schedule(max_batch_size=7), RRA, {**ITERATION, "layers": [6]})


@pytest.mark.parametrize("seed", range(tries(60)))
def test_an_operator_that_dies_anywhere_runs_what_the_last_check_says(seed: int) -> None:
    """Plans are carried out in part, Jobs fail and are cleaned up, results and the pool are lost; then all is quiet."""
    chance = random.Random(seed)
    cluster = followed_shop()
    answer(cluster)
    last = 0
    for _ in range(chance.randint(5, 40)):
        _let_happen(cluster, chance)
        done = _checks_done(cluster)
        assert done in (last, last + 1), "checks are taken one after another"
        last = done
        assert condition_of(cluster, "PlanReady")[0] == "True"
        assert len(cluster.names("Job")) <= 2
    cluster.pool = replace(cluster.pool, problem=None)
    for _ in range(4):
        cluster.settle()
        cluster.now_s += CHECK_S + LOST_S + 1
    cluster.check = check_body(SMALLER)
    for _ in range(3):
        cluster.settle()
        cluster.now_s += CHECK_S + LOST_S + 1
    assert bounds_of(cluster)["max_batch_size"] == 5
    answer(cluster, BEGIN_MS + 1)
    cluster.settle()
    assert notes(cluster)["since_ms"] is not None
    assert [len(cluster.names("ConfigMap", role)) for role in (names.PROFILE, names.PLAN, names.FOLLOW)] == [1, 1, 1]


def _checks_done(cluster: FakeCluster) -> int:
    return int(notes(cluster)["check"]) if cluster.names("ConfigMap", names.FOLLOW) else 0


def _let_happen(cluster: FakeCluster, chance: random.Random) -> None:
    event = chance.choice(("reconcile", "die", "die", "work", "work", "lose", "clean up", "time", "start", "promise"))
    own = cluster.names("Job", names.FOLLOW)
    if event == "reconcile":
        cluster.reconcile()
    elif event == "die":
        cluster.reconcile(dies_after=chance.randint(0, 3))
    elif event == "work" and own:
        cluster.check = check_body(chance.choice(SCHEDULES))
        if chance.random() < 0.7:
            cluster.leave_result(own[0])
        cluster.end_job(own[0], chance.choice(("Complete", "Complete", "Failed")), at=BORN)
    elif event == "lose":
        problem = chance.choice((None, "no answer"))
        cluster.pool = replace(cluster.pool, results={}, problem=problem)
    elif event == "clean up" and own:
        del cluster.objects["Job", own[0]]
    elif event == "time":
        cluster.now_s += chance.choice((1, LOST_S, CHECK_S))
    elif event == "start":
        for kind, name in list(cluster.objects):
            if kind == "Job":
                del cluster.objects[kind, name]
        cluster.start()
    elif event == "promise":
        cluster.pool = replace(cluster.pool, promised_slots=chance.choice((None, 512, 1024)))


def test_notes_of_another_release_do_not_discard_its_plan() -> None:
    cluster = followed_shop()
    check_again(cluster, check_body(SMALLER))
    [record] = cluster.names("ConfigMap", names.FOLLOW)
    data = cluster.objects["ConfigMap", record]["data"]
    data["following.json"] = json.dumps({"check": 1, "checked_s": 5, "of_tomorrow": [1]})
    cluster.reconcile()
    assert bounds_of(cluster)["max_batch_size"] == 5


def test_the_record_is_json_that_people_can_read() -> None:
    cluster = followed_shop()
    answer(cluster)
    cluster.settle()
    [name] = cluster.names("ConfigMap", names.FOLLOW)
    config_map = cluster.objects["ConfigMap", name]
    assert "immutable" not in config_map
    assert json.loads(config_map["data"]["following.json"]) == {"check": 0, "checked_s": 0, "since_ms": BEGIN_MS}
