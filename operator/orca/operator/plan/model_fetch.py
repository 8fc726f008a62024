"""The fetch of the wanted model: its progress, and what to do for it. Pure.

One Job fetches a model from a hub or a store into one claim. Both have the same name, which follows from the source of
the model and its revision. When the Job succeeds, the model is complete. Until then, groups and gateways that read
another model stay as they are (plan.py).

The claim is then marked with the model (facts.py), since many clusters clean up finished Jobs. A marked claim needs no
Job. A claim that takes the place of a marked one has no valid mark, so the model is fetched again.

A Job that has failed for good is made again after RETRY_S: somebody may have fixed the cause meanwhile, in a Secret or
at the hub. A Job that would be another one now (image, token, podPatch) is made again at once, unless it has succeeded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orca.core.fetch_report import FetchProgress, read_reason
from orca.operator.domain import cluster_events, facts, names, problems, volumes
from orca.operator.domain.actions import Annotate
from orca.operator.domain.model_references import source_digest
from orca.operator.domain.objects import (
    condition,
    condition_status,
    has_ended,
    is_going,
    label_map,
    seconds,
    since,
)
from orca.operator.domain.observation import Observation
from orca.operator.domain.problems import Problem
from orca.operator.domain.resource import Json
from orca.operator.domain.volumes import claims_of
from orca.operator.plan.children import hash_of
from orca.operator.render import fetch

RETRY_S = 120.0
LOADING = "ModelLoading"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """The objects to write and to delete for the models of a resource."""

    is_complete: bool  # pods that read the wanted model may start
    manifests: tuple[Json, ...]  # claim and Job of the wanted model
    mark: Annotate | None  # for the claim of the wanted model; None if it has its mark, or must not have it yet
    held: tuple[str, ...]  # Jobs that stay as they are: they have begun, or pods still read what they fetched
    unread_claims: tuple[str, ...]  # of models that no pod reads any more
    leaving: Mapping[str, str]  # why a Job of the wanted model goes, by its name


def plan_fetch(observation: Observation) -> FetchPlan:
    """Plan the claim and the Job of the wanted model, and find claims that nobody reads."""
    children = observation.children
    read = _claims_in_use(observation)
    wanted = _name(observation)
    manifests: list[Json] = []
    held = [name for job in children.of_kind("Job") if (name := job["metadata"]["name"]) in read - {wanted}]
    leaving: dict[str, str] = {}
    if wanted is not None:
        manifests.append(fetch.claim(observation.deployment, children.get("PersistentVolumeClaim", wanted)))
        new, there = fetch.job(observation.deployment, observation.images.fetch), children.get("Job", wanted)
        reason = None if there is None else _why_it_goes(observation, there, new)
        if there is None or is_going(there):
            manifests += [] if _is_marked(observation) else [new]
        elif reason is None:
            held.append(wanted)
        else:
            leaving[wanted] = reason
    unread = [
        each["metadata"]["name"]
        for each in children.of_kind("PersistentVolumeClaim")
        if label_map(each).get(names.ROLE_LABEL) == names.FETCH and each["metadata"]["name"] not in read | {wanted}
    ]
    return FetchPlan(
        is_complete=is_complete(observation),
        mark=_mark(observation),
        manifests=tuple(manifests),
        held=tuple(held),
        unread_claims=tuple(unread),
        leaving=leaving,
    )


def is_complete(observation: Observation) -> bool:
    """Return whether the wanted model is where the pods look for it, as far as the operator can know."""
    name = _name(observation)
    if name is None:
        return True
    job, claim = observation.children.get("Job", name), _claim(observation)
    if claim is None:
        return False
    if facts.is_fetched(observation.spec.model, claim):
        return True
    if job is None or is_going(job):
        return False
    return condition_status(job, "Complete") == "True" and not _is_for_older_claim(job, claim)


def find_problem(observation: Observation) -> Problem | None:
    """Return why the wanted model is not complete yet, with the figures of its fetch; None if it is."""
    if is_complete(observation):
        return None
    job = observation.children.get("Job", str(_name(observation)))
    pods = observation.children.pods(names.FETCH, model=source_digest(observation.spec.model))
    newest = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)
    reported = None if newest is None else _reported_problem(newest)
    if job is not None and condition_status(job, "Failed") == "True":
        return reported or Problem(problems.CRASHING, f"the fetch has failed: {_failure(job)}")
    if reported is not None:
        return Problem(reported.reason, f"{reported.message}; the fetch tries again")
    claim = observation.children.get("PersistentVolumeClaim", str(_name(observation)))
    if claim is not None and is_going(claim):
        name = claim["metadata"]["name"]
        message = f"the volume {name} of the model is being deleted; the model is fetched again when no pod uses it"
        return Problem(volumes.GOING, message)
    known = [] if job is None else [job]
    if refused := cluster_events.why_no_pods(observation.children, observation.events, known):
        return refused
    if newest is None:
        return Problem(LOADING, f"the fetch of {observation.spec.model.uri} begins")
    waits = cluster_events.why_pods_wait(observation.children, observation.events, [newest], observation.now_s)
    return waits or problems.of_pod(newest) or _progress(observation.spec.model.uri, observation.fetch)


def _name(observation: Observation) -> str | None:
    """Return the name of claim and Job; None for a model that is not fetched."""
    wanted = observation.spec.model
    return names.model(observation.name, source_digest(wanted)) if wanted.is_fetched else None


def _claim(observation: Observation) -> Json | None:
    """Return the claim of the wanted model; None if there is none, or if it is being deleted."""
    name = _name(observation)
    claim = None if name is None else observation.children.get("PersistentVolumeClaim", name)
    return None if claim is None or is_going(claim) else claim


def _is_marked(observation: Observation) -> bool:
    claim = _claim(observation)
    return claim is not None and facts.is_fetched(observation.spec.model, claim)


def _mark(observation: Observation) -> Annotate | None:
    claim = _claim(observation)
    if claim is None or _is_marked(observation) or not is_complete(observation):
        return None
    name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]
    marks = facts.fetched_annotations(observation.spec.model, claim)
    return Annotate("PersistentVolumeClaim", name, uid, marks, "its model is complete")


def _why_it_goes(observation: Observation, there: Json, new: Json) -> str | None:
    claim = observation.children.get("PersistentVolumeClaim", new["metadata"]["name"])
    if claim is not None and _is_for_older_claim(there, claim):
        return "the volume that it filled is gone"
    if condition_status(there, "Complete") == "True":
        return None
    if _is_marked(observation):
        return "the model is complete without it"
    if label_map(there).get(names.HASH_LABEL) != hash_of(observation.deployment, new):
        return "the spec has changed"
    failed = since(there, "Failed")
    if failed is not None and observation.now_s - seconds(failed) > RETRY_S:
        return "it has failed, and somebody may have fixed the cause"
    return None


def _is_for_older_claim(job: Json, claim: Json) -> bool:
    """Return whether a Job filled an earlier claim of this name. A claim is made before its Job."""
    return seconds(claim["metadata"]["creationTimestamp"]) > seconds(job["metadata"]["creationTimestamp"])


def _claims_in_use(observation: Observation) -> set[str]:
    """Return the claims of all pods except those of fetches, and of everything that makes such pods."""
    children = observation.children
    specs = [
        each["spec"]["template"]["spec"] for kind in ("Deployment", "StatefulSet") for each in children.of_kind(kind)
    ]
    running = [pod for pod in children.of_kind("Pod") if not has_ended(pod)]
    specs += [pod["spec"] for pod in running if label_map(pod).get(names.ROLE_LABEL) != names.FETCH]
    return {claim for spec in specs for claim in claims_of(spec)}


def _reported_problem(pod: Json) -> Problem | None:
    """Return the reason that an ended fetch gave."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated") or {}
        if found := read_reason(ended.get("message") or ""):
            return Problem(*found)
    return None


def _failure(job: Json) -> str:
    failed = condition(job, "Failed")
    return str(failed.get("message") or failed.get("reason") or "")


def _progress(uri: str, figures: FetchProgress | None) -> Problem:
    if figures is None or not figures.bytes_total:
        return Problem(LOADING, f"the fetch of {uri} begins")
    done, total = figures.bytes_done, figures.bytes_total
    progress = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB ({100 * done // total}%) of {uri} are fetched"
    problem = None if figures.problem is None else read_reason(figures.problem)
    return Problem(LOADING, progress) if problem is None else Problem(problem[0], f"{problem[1]}; {progress}")
