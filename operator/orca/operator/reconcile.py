"""One look at one OrcaDeployment: observe, validate, plan, apply, write its status. Nothing is kept between looks.

What an apply is refused (quota, admission, a patch that makes no sense) does not stop the others; it is told in the
condition Accepted, and tried again with the next look.
"""

import logging
import time
from dataclasses import replace
from datetime import UTC, datetime

from orca.operator import credentials, fetch_look, names, status
from orca.operator.children import finish
from orca.operator.cluster import ApiError, Cluster
from orca.operator.observed import Observed, PoolLook, by_name, condition
from orca.operator.plan import Action, Apply, Nudge, Plan, Release, keys_secret, plan
from orca.operator.render.fetch import ROLE
from orca.operator.resource import BadSpec, Deployment, Json, read

log = logging.getLogger(__name__)

SOON_S = 2.0
"""Until the next look while something is on its way, beside those that events bring."""


def reconcile(cluster: Cluster, release: Release, body: Json, pool: PoolLook, lost_nodes: frozenset[str]) -> bool:
    """Bring the cluster one step towards what the resource asks for.

    Returns: whether something is still on its way.
    Raises: ApiError when the API server does not answer.
    """
    metadata, before = body["metadata"], body.get("status", {})
    now = _now()
    try:
        deployment = read(body)
    except BadSpec as error:
        written = status.refused(int(metadata["generation"]), "BadSpec", str(error), before, now)
        _write_status(cluster, metadata["namespace"], metadata["name"], before, written)
        return False
    children = by_name(cluster.children(deployment.namespace, deployment.name))
    observed = Observed(children=children, pool=pool, lost_nodes=lost_nodes)
    observed = replace(observed, fetch=fetch_look.look(observed.pods(ROLE)))
    _make_secrets(cluster, deployment, observed)
    decided = plan(deployment, observed, release, now_s=time.time())
    refusals = _carry_out(cluster, deployment, decided)
    written = status.status(deployment, observed, decided, before, now, refusal=next(iter(refusals), None))
    _write_status(cluster, deployment.namespace, deployment.name, before, written)
    _tell(cluster, deployment, before, written, now)
    # What was refused is tried again with the next resync: sooner it would only be refused again.
    return not refusals and (bool(decided.actions) or status.is_on_the_way(written))


def _make_secrets(cluster: Cluster, deployment: Deployment, observed: Observed) -> None:
    """Those that are drawn: only where there is none."""
    if deployment.spec.pool.external is None and observed.get("Secret", names.pool(deployment.name)) is None:
        cluster.create(finish(deployment, credentials.pool_secret(deployment)))
    keys = keys_secret(deployment)
    own = names.api_key(deployment.name)
    if keys is not None and keys.name == own and observed.get("Secret", own) is None:
        cluster.create(finish(deployment, credentials.api_key_secret(deployment)))


def _carry_out(cluster: Cluster, deployment: Deployment, decided: Plan) -> list[str]:
    """Returns: what the API server refused."""
    refusals = []
    for action in decided.actions:
        try:
            _act(cluster, deployment, action)
        except ApiError as error:
            if not error.is_answer:
                raise
            log.warning("the API server refuses: %s", error, extra={"resource": deployment.name})
            refusals.append(str(error))
    return refusals


def _act(cluster: Cluster, deployment: Deployment, action: Action) -> None:
    where = {"namespace": deployment.namespace, "resource": deployment.name, "reason": action.reason}
    if isinstance(action, Apply):
        of = action.manifest
        log.info("apply", extra={"kind": of["kind"], "child": of["metadata"]["name"], **where})
        (cluster.apply_new if action.is_new else cluster.apply)(of)
    elif isinstance(action, Nudge):
        log.info("nudge", extra={"kind": "Pod", "child": action.pod, **where})
        cluster.annotate_pod(deployment.namespace, action.pod, action.uid, action.annotations)
    else:
        log.info("delete", extra={"kind": action.kind, "child": action.name, **where})
        cluster.delete(action.kind, deployment.namespace, action.name, is_forced=action.is_forced)


def _tell(cluster: Cluster, deployment: Deployment, before: Json, written: Json, now: str) -> None:
    """An Event whenever Ready or Degraded says something else, in the words of the condition."""
    old = {each["type"]: (each["status"], each["reason"]) for each in before.get("conditions") or []}
    for each in written["conditions"]:
        is_news = old.get(each["type"]) != (each["status"], each["reason"])
        if is_news and (each["type"] == "Ready" or (each["type"] == "Degraded" and each["status"] == "True")):
            is_warning = each["type"] == "Degraded"
            said = f"{each['type']} is {each['status']}: {each['message']}".removesuffix(": ")
            cluster.tell(deployment, each["reason"], said, is_warning=is_warning, now=now)


def _write_status(cluster: Cluster, namespace: str, name: str, before: Json, written: Json) -> None:
    if written != before:
        cluster.write_status(namespace, name, written)


def lost_nodes(nodes: list[Json]) -> frozenset[str]:
    """Names of the nodes that the cluster has not heard of for a while."""
    return frozenset(node["metadata"]["name"] for node in nodes if condition(node, "Ready") != "True")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
