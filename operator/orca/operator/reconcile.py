"""One look at one OrcaDeployment: observe, validate, plan, apply, write its status. Nothing is kept between looks.

What an apply is refused (quota, admission, a patch that makes no sense) does not stop the others; it is told in a
condition, and tried again less and less often (api_refusals.py).
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from orca.core.domain.errors import OrcaError
from orca.operator.cluster import credentials, fetch_probe, pool_probe
from orca.operator.cluster.api_server import ApiError, Cluster
from orca.operator.domain import certificates, names
from orca.operator.domain.actions import Action, Apply, Issue, Nudge, Promise
from orca.operator.domain.api_refusals import Refusal, Refusals
from orca.operator.domain.observed import Observed, by_name
from orca.operator.domain.problems import of_secret
from orca.operator.domain.resource import Deployment, Json
from orca.operator.plan import status
from orca.operator.plan.children import drift, finish, is_ours
from orca.operator.plan.plan import Plan, Release, keys_secret, plan
from orca.operator.render.fetch import ROLE

log = logging.getLogger(__name__)

SOON_S = 2.0
"""Until the next look while something is on its way, beside those that events bring."""


def refuse(cluster: Cluster, body: Json, reason: str, message: str) -> None:
    """Say in the status that nothing can be done for the spec as written."""
    metadata, before = body["metadata"], body.get("status", {})
    written = status.refused(int(metadata["generation"]), reason, message, before, _now())
    _write_status(cluster, metadata["namespace"], metadata["name"], before, written)


def observe(cluster: Cluster, deployment: Deployment, lost_nodes: frozenset[str]) -> Observed:
    """What there is, but for what the pool says: the Secret by which it can be asked is there then.

    Raises: ApiError when the API server does not answer, or refuses a Secret.
    """
    found = cluster.children(deployment.namespace, deployment.name)
    children = by_name(each for each in found if is_ours(deployment, each))
    children |= by_name(cluster.create(finish(deployment, each)) for each in _missing_secrets(deployment, children))
    external, renewed = deployment.spec.pool.external, None
    if external is None:
        pool_secret = children["Secret", names.pool(deployment.name)]
        renewed = credentials.renewed_pool_secret(deployment, pool_secret)
    else:
        pool_secret = cluster.secret(deployment.namespace, external.url_secret.name)
    named = deployment.spec.certificates.secret_name
    observed = Observed(
        children=children,
        pool_secret=pool_secret,
        renewed_pool_secret=renewed,
        named_certificates=None if named is None else cluster.secret(deployment.namespace, named),
        keys_problem=_keys_problem(cluster, deployment),
        lost_nodes=lost_nodes,
    )
    return replace(observed, fetch=fetch_probe.look(observed.pods(ROLE)))


def reconcile(
    cluster: Cluster, release: Release, deployment: Deployment, observed: Observed, before: Json, refusals: Refusals
) -> bool:
    """Bring the cluster one step towards what the resource asks for.

    Args: before: the status as it is. refusals: of earlier looks; those of this one are added.
    Returns: whether something is still on its way.
    Raises: ApiError when the API server does not answer.
    """
    now = _now()
    decided = plan(deployment, observed, release, now_s=time.time())
    refused = _carry_out(cluster, deployment, observed, decided, refusals)
    written = status.status(deployment, observed, decided, before, now, refused)
    _write_status(cluster, deployment.namespace, deployment.name, before, written)
    _tell(cluster, deployment, before, written, now)
    is_acting = len(refused) < len(decided.actions) or any(each.is_of_pool for each in refused)
    return is_acting or decided.slots.is_open or status.is_on_the_way(written)


def _missing_secrets(deployment: Deployment, children: Mapping[tuple[str, str], Json]) -> Iterable[Json]:
    """Those that are drawn: only where there is none."""
    if deployment.spec.pool.external is None and ("Secret", names.pool(deployment.name)) not in children:
        yield credentials.pool_secret(deployment)
    keys, own = keys_secret(deployment), names.api_key(deployment.name)
    if keys is not None and keys.name == own and ("Secret", own) not in children:
        yield credentials.api_key_secret(deployment)


def _keys_problem(cluster: Cluster, deployment: Deployment) -> str | None:
    named = deployment.spec.gateway.api_keys_secret
    if named is None or deployment.spec.gateway.open_to_all:
        return None
    secret = cluster.secret(deployment.namespace, named.name)
    missing = of_secret(named.name, secret, [named.key], field="gateway.apiKeysSecret", names_keys=True)
    return None if missing is None else missing.message


def _carry_out(
    cluster: Cluster, deployment: Deployment, observed: Observed, decided: Plan, refusals: Refusals
) -> list[Refusal]:
    """A pool that is not told of its promise is told with the next look, and until then all stays as it is: what comes
    behind a promise relies on it.

    Returns: what the API server refuses, now or not long ago, or the pool was not told.
    """
    refusals.begin(deployment, decided.actions)
    refused = []
    for action in decided.actions:
        refusal = refusals.waiting(deployment, action)
        if refusal is None:
            try:
                _act(cluster, deployment, observed, action)
                if isinstance(action, Issue):
                    # Due again with the next look it has been spoiled since, and each write draws another one.
                    said = f"somebody has changed the Secret {names.certificates(deployment.name)} since it was written"
                    refusals.note(deployment, Refusal(action, said))
                continue
            except ApiError as error:
                if not error.is_answer:
                    raise
                log.warning("the API server refuses: %s", error, extra={"resource": deployment.name})
                refusal = Refusal(action, str(error))
                refusals.note(deployment, refusal)
            except OrcaError as error:
                log.warning("the pool was not told: %s", error, extra={"resource": deployment.name})
                return [*refused, Refusal(action, str(error))]
        refused.append(refusal)
    return refused


def _act(cluster: Cluster, deployment: Deployment, observed: Observed, action: Action) -> None:
    """Raises: ApiError; OrcaError where the pool was not told."""
    where = {"namespace": deployment.namespace, "resource": deployment.name, "reason": action.reason}
    if isinstance(action, Apply):
        of = action.manifest
        log.info("apply", extra={"kind": of["kind"], "child": of["metadata"]["name"], **where})
        if changed := drift(of, _write(cluster, of, is_new=action.is_new)):
            # As an admission webhook does it: once more would be the same again.
            child = f"{of['kind']} {of['metadata']['name']}"
            raise ApiError(409, f"somebody changes {changed} of {child} while it is written")
    elif isinstance(action, Issue):
        name = names.certificates(deployment.name)
        log.info("issue", extra={"kind": "Secret", "child": name, **where})
        secret = finish(deployment, credentials.certificates_secret(deployment, action, time.time()))
        written = _write(cluster, secret, is_new=action.is_new)
        if still := certificates.due_of(deployment, written, time.time()):
            raise ApiError(409, f"somebody changes the Secret {name} while it is written: {still.reason}")
    elif isinstance(action, Nudge):
        log.info("nudge", extra={"kind": "Pod", "child": action.pod, **where})
        cluster.annotate_pod(deployment.namespace, action.pod, action.uid, action.annotations)
    elif isinstance(action, Promise):
        log.info("promise", extra={"slots": action.slots, "revision": action.revision, **where})
        pool_probe.set_promise(deployment, observed.pool_secret, action, within_s=lambda: cluster.write_s)
    else:
        log.info("delete", extra={"kind": action.kind, "child": action.name, **where})
        cluster.delete(action.kind, deployment.namespace, action.name, action.uid, is_forced=action.is_forced)


def _write(cluster: Cluster, manifest: Json, *, is_new: bool) -> Json:
    """Returns: what is there now. Raises: ApiError, also where it is new and somebody else has one of that name."""
    return (cluster.apply_new if is_new else cluster.apply)(manifest)


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


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
