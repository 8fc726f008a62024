"""How far the fetch of the wanted model is, and what has to be done for it: pure.

A model of a hub or a store is fetched by one Job into one claim; both have the same name, which follows from where the
model comes from and its revision. The Job's success says that the model is whole. Groups and gateways that read another
model stay as they are until then (plan.py).

A Job that has failed for good is made again after RETRY_S, since what was wrong may be mended elsewhere: in a Secret,
at the hub. One that would be another now (image, token) is made again at once, unless its work is done.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orca.core.fetch_report import FetchProgress, read_reason
from orca.operator.domain import names, problems
from orca.operator.domain.observed import (
    Observed,
    condition,
    condition_of,
    has_ended,
    is_going,
    label_map,
    seconds,
    since,
)
from orca.operator.domain.problems import Trouble
from orca.operator.domain.resource import Deployment, Json
from orca.operator.domain.volumes import claims_of
from orca.operator.plan.children import hash_of
from orca.operator.render import fetch, model

RETRY_S = 120.0
LOADING = "ModelLoading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What is to be done for the models of a resource."""

    is_there: bool  # pods that read the wanted model may start
    manifests: tuple[Json, ...]  # claim and Job of the wanted model
    held: tuple[str, ...]  # Jobs that stay as they are: they have begun, or what they brought is still read
    unread_claims: tuple[str, ...]  # of models that nobody reads any more
    leaving: Mapping[str, str]  # why a Job of a wanted model goes, by its name


def look(deployment: Deployment, observed: Observed, image: str, now_s: float) -> Fetch:
    """Args: image: of the fetch. now_s: seconds since 1970."""
    read = _claims_that_are_read(observed)
    wanted = _name(deployment)
    manifests: list[Json] = []
    held = [name for job in observed.of_kind("Job") if (name := job["metadata"]["name"]) in read - {wanted}]
    leaving: dict[str, str] = {}
    if wanted is not None:
        manifests.append(fetch.claim(deployment, observed.get("PersistentVolumeClaim", wanted)))
        new, there = fetch.job(deployment, image), observed.get("Job", wanted)
        reason = None if there is None else _why_it_goes(deployment, observed, there, new, now_s)
        if there is None or is_going(there):
            manifests.append(new)
        elif reason is None:
            held.append(wanted)
        else:
            leaving[wanted] = reason
    unread = [
        each["metadata"]["name"]
        for each in observed.of_kind("PersistentVolumeClaim")
        if label_map(each).get(names.ROLE_LABEL) == fetch.ROLE and each["metadata"]["name"] not in read | {wanted}
    ]
    return Fetch(
        is_there=is_there(deployment, observed),
        manifests=tuple(manifests),
        held=tuple(held),
        unread_claims=tuple(unread),
        leaving=leaving,
    )


def is_there(deployment: Deployment, observed: Observed) -> bool:
    """Whether the wanted model is where the pods look for it, as far as the operator can know."""
    name = _name(deployment)
    if name is None:
        return True
    job, claim = observed.get("Job", name), observed.get("PersistentVolumeClaim", name)
    if job is None or claim is None or is_going(job) or is_going(claim):
        return False
    return condition(job, "Complete") == "True" and not _is_of_another_claim(job, claim)


def trouble(deployment: Deployment, observed: Observed) -> Trouble | None:
    """Why the wanted model is not there yet, with the figures of its fetch; None when it is."""
    if is_there(deployment, observed):
        return None
    job = observed.get("Job", str(_name(deployment)))
    pods = observed.pods(fetch.ROLE, model=model.digest(deployment.spec.model))
    newest = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)
    said = None if newest is None else _last_words(newest)
    if job is not None and condition(job, "Failed") == "True":
        return said or Trouble(problems.CRASHING, f"the fetch has failed: {_failure(job)}")
    if said is not None:
        return Trouble(said.reason, f"{said.message}; it is tried again")
    if newest is None:
        return Trouble(LOADING, f"the fetch of {deployment.spec.model.uri} begins")
    return problems.of_pod(newest) or _progress(deployment, observed.fetch)


def _name(deployment: Deployment) -> str | None:
    """Of claim and Job; None for a model that is not fetched."""
    wanted = deployment.spec.model
    return names.model(deployment.name, model.digest(wanted)) if wanted.is_fetched else None


def _why_it_goes(deployment: Deployment, observed: Observed, there: Json, new: Json, now_s: float) -> str | None:
    claim = observed.get("PersistentVolumeClaim", new["metadata"]["name"])
    if claim is not None and _is_of_another_claim(there, claim):
        return "it has filled a volume that is gone"
    if condition(there, "Complete") == "True":
        return None
    if label_map(there).get(names.HASH_LABEL) != hash_of(deployment, new):
        return "the spec has changed"
    failed = since(there, "Failed")
    if failed is not None and now_s - seconds(failed) > RETRY_S:
        return "it has failed, and what was wrong may be mended"
    return None


def _is_of_another_claim(job: Json, claim: Json) -> bool:
    """A claim is made before its Job."""
    return seconds(claim["metadata"]["creationTimestamp"]) > seconds(job["metadata"]["creationTimestamp"])


def _claims_that_are_read(observed: Observed) -> set[str]:
    """Of all pods but those of fetches, and of what makes such pods."""
    specs = [
        each["spec"]["template"]["spec"] for kind in ("Deployment", "StatefulSet") for each in observed.of_kind(kind)
    ]
    running = [pod for pod in observed.of_kind("Pod") if not has_ended(pod)]
    specs += [pod["spec"] for pod in running if label_map(pod).get(names.ROLE_LABEL) != fetch.ROLE]
    return {claim for spec in specs for claim in claims_of(spec)}


def _last_words(pod: Json) -> Trouble | None:
    """The reason that an ended fetch gave."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated") or {}
        if found := read_reason(ended.get("message") or ""):
            return Trouble(*found)
    return None


def _failure(job: Json) -> str:
    told = condition_of(job, "Failed")
    return str(told.get("message") or told.get("reason") or "")


def _progress(deployment: Deployment, figures: FetchProgress | None) -> Trouble:
    uri = deployment.spec.model.uri
    if figures is None or not figures.bytes_total:
        return Trouble(LOADING, f"the fetch of {uri} begins")
    done, total = figures.bytes_done, figures.bytes_total
    how_far = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB ({100 * done // total}%) of {uri} are fetched"
    problem = None if figures.problem is None else read_reason(figures.problem)
    return Trouble(LOADING, how_far) if problem is None else Trouble(problem[0], f"{problem[1]}; {how_far}")
