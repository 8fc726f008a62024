"""One reconcile of one OrcaDeployment: observe, validate, plan, apply, write the status. Nothing is kept between two.

An action that the API server refuses (quota, admission, a patch that makes no sense) does not stop the others. A
condition reports it, and it is tried again less and less often (api_refusals.py).
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from orca.core.domain.errors import OrcaError
from orca.operator.cluster import credentials, explanations, probes
from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Cluster
from orca.operator.cluster.known_latencies import KnownLatencies
from orca.operator.domain import certificates, cluster_events, names
from orca.operator.domain.actions import Action, Annotate, Apply, HandOver, IssueCertificate, PromiseSlots
from orca.operator.domain.api_refusals import Refusal, Refusals
from orca.operator.domain.objects import Children, ObjectKey, by_key, key_of, timestamp
from orca.operator.domain.observation import Observation, Release, keys_secret
from orca.operator.domain.problems import of_secret
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.plan import pool_move, status
from orca.operator.plan.children import drift, finish, is_ours
from orca.operator.plan.plan import ReconcilePlan, make_plan
from orca.operator.plan.slo import conditions as slo_conditions
from orca.operator.plan.slo.following import check_to_read, latencies_age_max_s
from orca.operator.plan.slo.in_force import with_plan_in_force
from orca.operator.plan.slo.making import needs_counts, results_to_read
from orca.operator.plan.slo.plan_events import plan_events
from orca.operator.plan.slo.plan_status import read_plan_status
from orca.operator.plan.slots_change import slots_that_some_exceed

log = logging.getLogger(__name__)

CHANGED_BY_OTHERS = "ChangedByOthers"
"""Reason of the Event for a write that admission or another writer changes at once."""

REPORTED = ("Ready", slo_conditions.PLAN_READY, slo_conditions.SLO_MET)
"""Conditions of which each change is an Event."""

SOON_S = 2.0
"""Seconds until the next reconcile while something is on its way, beside those that events ask for."""


class _Undone(Exception):
    """The API server took a write, and the object is not as it was written."""


def refuse(cluster: Cluster, body: Json, reason: str, message: str) -> None:
    """Report in the status that the operator can do nothing for the spec as written."""
    metadata, before = body["metadata"], body.get("status", {})
    written = status.refused_status(int(metadata["generation"]), reason, message, before, time.time())
    _write_status(cluster, metadata["namespace"], metadata["name"], before, written)


def observe(cluster: Cluster, release: Release, deployment: OrcaDeployment, lost_nodes: frozenset[str]) -> Observation:
    """Read everything but the status of the pool. The Secret that leads to the pool exists afterwards.

    Raises: ApiServerError if the API server does not answer, refuses a Secret, or has one of its name that is not ours.
    """
    found = cluster.children(deployment.namespace, deployment.name)
    children = by_key(each for each in found if is_ours(deployment, each))
    drawn = by_key(cluster.create(finish(deployment, each)) for each in _missing_secrets(deployment, children))
    children |= drawn
    external = deployment.spec.pool.external
    pool_secret: Json | None
    renewed: Json | None = None
    if external is None:
        pool_secret = children["Secret", names.pool(deployment.name)]
        renewed = credentials.renewed_pool_secret(deployment, pool_secret)
    else:
        pool_secret = cluster.secret(deployment.namespace, external.url_secret.name)
    named = deployment.spec.certificates.secret_name
    observed, now_s = Children(children), time.time()
    reasons = cluster_events.reasons_to_read(observed, now_s)
    events = explanations.list_events(cluster.calls, deployment.namespace, reasons)
    observation = Observation(
        deployment=deployment,
        release=release,
        now_s=now_s,
        children=observed,
        events=cluster_events.read_events(events),
        tls_secret=_tls_secret(cluster, deployment),
        gateways=explanations.read_gateways(cluster.calls, deployment),
        pool_secret=pool_secret,
        drawn_secrets=tuple(name for _, name in drawn),
        renewed_pool_secret=renewed,
        named_certificates=None if named is None else cluster.secret(deployment.namespace, named),
        keys_problem=_keys_problem(cluster, deployment, children),
        lost_nodes=lost_nodes,
        fetch=probes.poll_fetch(observed.pods(names.FETCH)),
    )
    return with_plan_in_force(observation)


async def with_pool(observation: Observation, known: KnownLatencies) -> Observation:
    """Poll the pool, and return the complete observation, with the time at which it is complete.

    Args: known: latencies that were read before; those that are read now are noted.
    """
    deployment, secret = observation.deployment, observation.pool_secret
    age_max_s = latencies_age_max_s(observation)
    polled = await probes.poll_pool(
        deployment,
        secret,
        slots_that_some_exceed(observation),
        results=(*results_to_read(observation), *check_to_read(observation)),
        counts_answers=needs_counts(observation),
        reads_latencies=age_max_s is not None and not known.is_fresh(deployment.uid, age_max_s),
    )
    if polled.latencies is not None:
        known.note(deployment.uid, polled.revision, polled.latencies)
    elif age_max_s is not None and polled.problem is None:
        polled = replace(polled, latencies=known.find(deployment.uid, polled.revision))
    if (left := pool_move.url_left(observation)) is not None:
        polled = pool_move.judge(observation, polled, await probes.poll_pool(deployment, secret, None, url=left))
    return replace(observation, pool=polled, now_s=time.time())


def reconcile(cluster: Cluster, observation: Observation, before: Json, refusals: Refusals) -> bool:
    """Bring the cluster one step closer to what the resource asks for.

    Args: before: the status as it is. refusals: of earlier reconciles; those of this one are added.
    Returns: whether something is still on its way.
    Raises: ApiServerError if the API server does not answer.
    """
    plan = make_plan(observation)
    refused = _carry_out(cluster, observation, plan, refusals)
    written = status.make_status(observation, plan, before, refused)
    _write_status(cluster, observation.deployment.namespace, observation.name, before, written)
    _record_events(cluster, observation, before, written)
    is_acting = len(refused) < len(plan.actions) or any(each.is_of_pool for each in refused)
    return is_acting or plan.slots.is_open or status.is_on_the_way(written)


def _missing_secrets(deployment: OrcaDeployment, children: Mapping[ObjectKey, Json]) -> Iterable[Json]:
    """Draw the Secrets that have to exist and do not."""
    if deployment.spec.pool.external is None and ("Secret", names.pool(deployment.name)) not in children:
        yield credentials.pool_secret(deployment)
    keys, own = keys_secret(deployment), names.api_key(deployment.name)
    if keys is not None and keys.name == own and ("Secret", own) not in children:
        yield credentials.api_key_secret(deployment)


def _tls_secret(cluster: Cluster, deployment: OrcaDeployment) -> Json | None:
    ingress = deployment.spec.gateway.ingress
    if ingress is None or ingress.tls_secret_name is None:
        return None
    return cluster.secret(deployment.namespace, ingress.tls_secret_name)


def _keys_problem(cluster: Cluster, deployment: OrcaDeployment, children: Mapping[ObjectKey, Json]) -> str | None:
    keys, named = keys_secret(deployment), deployment.spec.gateway.api_keys_secret
    if keys is None:
        return None
    if named is None:
        own = children.get(("Secret", keys.name))
        missing = of_secret(keys.name, own, [keys.key], field="the gateway", names_keys=False)
    else:
        secret = cluster.secret(deployment.namespace, named.name)
        missing = of_secret(named.name, secret, [named.key], field="gateway.apiKeysSecret", names_keys=True)
    return None if missing is None else missing.message


def _carry_out(cluster: Cluster, observation: Observation, plan: ReconcilePlan, refusals: Refusals) -> list[Refusal]:
    """Carry out the actions of a plan.

    If a promise does not reach the pool, the plan ends there, since the actions after a promise rely on it. The next
    reconcile sends it again.

    Returns: the actions that the API server refuses or undoes, now or not long ago, and the promise that did not reach
        the pool.
    """
    deployment = observation.deployment
    refusals.begin(deployment, plan.actions)
    refused: list[Refusal] = []
    for action in plan.actions:
        refusal = _refused_handover(action, refused) or refusals.waiting(deployment, action)
        if refusal is None:
            try:
                _act(cluster, observation, action)
                if isinstance(action, IssueCertificate):
                    # If it is due again in the next reconcile, somebody has damaged it. Each write draws another one.
                    name = names.certificates(deployment.name)
                    message = f"somebody has changed the Secret {name} since it was written"
                    refusals.record(deployment, Refusal(action, message))
                continue
            except ApiServerError as error:
                if not error.is_answer:
                    raise
                log.warning("the API server refuses: %s", error, extra={"resource": deployment.name})
                refusal = Refusal(action, str(error))
                refusals.record(deployment, refusal)
            except _Undone as error:
                log.warning("%s", error, extra={"resource": deployment.name})
                refusal = Refusal(action, str(error), is_undone=True)
                refusals.record(deployment, refusal)
                now = timestamp(observation.now_s)
                cluster.record_event(deployment, CHANGED_BY_OTHERS, str(error), is_warning=True, now=now)
            except OrcaError as error:
                log.warning("the promise did not reach the pool: %s", error, extra={"resource": deployment.name})
                return [*refused, Refusal(action, str(error))]
        refused.append(refusal)
    return refused


def _refused_handover(action: Action, refused: Iterable[Refusal]) -> Refusal | None:
    """Return the refusal of an apply that would leave out a number of pods that nobody else has: it would become 1."""
    if isinstance(action, Apply):
        for each in refused:
            if isinstance(each.action, HandOver) and key_of(each.action.manifest) == key_of(action.manifest):
                return Refusal(action, each.message)
    return None


def _act(cluster: Cluster, observation: Observation, action: Action) -> None:
    """Carry out one action. Raises: ApiServerError; _Undone; OrcaError if a promise did not reach the pool."""
    deployment = observation.deployment
    context = {"namespace": deployment.namespace, "resource": deployment.name, "reason": action.reason}
    if isinstance(action, Apply):
        manifest = action.manifest
        log.info("apply", extra={"kind": manifest["kind"], "child": manifest["metadata"]["name"], **context})
        if changed := drift(manifest, _write(cluster, manifest, is_new=action.is_new)):
            # An admission webhook may do this. Another write would end in the same way.
            child = f"{manifest['kind']} {manifest['metadata']['name']}"
            raise _Undone(f"somebody changes {changed} of {child} while it is written, such as an admission webhook")
    elif isinstance(action, IssueCertificate):
        name = names.certificates(deployment.name)
        log.info("issue", extra={"kind": "Secret", "child": name, **context})
        secret = finish(deployment, credentials.certificates_secret(deployment, action, time.time()))
        written = _write(cluster, secret, is_new=action.is_new)
        if still := certificates.due_of(deployment, written, time.time()):
            raise ApiServerError(409, f"somebody changes the Secret {name} while it is written: {still.reason}")
    elif isinstance(action, HandOver):
        manifest = action.manifest
        log.info("hand over", extra={"kind": manifest["kind"], "child": manifest["metadata"]["name"], **context})
        cluster.apply(manifest, manager=names.REPLICAS_MANAGER)
    elif isinstance(action, Annotate):
        log.info("annotate", extra={"kind": action.kind, "child": action.name, **context})
        cluster.annotate(action.kind, deployment.namespace, action.name, action.uid, action.annotations)
    elif isinstance(action, PromiseSlots):
        log.info("promise", extra={"slots": action.slots, "revision": action.revision, **context})
        probes.set_promise(deployment, observation.pool_secret, action, within_s=lambda: cluster.write_s)
    else:
        log.info("delete", extra={"kind": action.kind, "child": action.name, **context})
        cluster.delete(action.kind, deployment.namespace, action.name, action.uid, is_forced=action.is_forced)


def _write(cluster: Cluster, manifest: Json, *, is_new: bool) -> Json:
    """Write an object. Returns: the object as it is now.

    Raises: ApiServerError, also if it is new and somebody else has one of that name.
    """
    return (cluster.apply_new if is_new else cluster.apply)(manifest)


def _record_events(cluster: Cluster, observation: Observation, before: Json, written: Json) -> None:
    """Record an Event when a Secret is drawn again, when the plan changes, and when one of some conditions changes.

    A change of the plan is one of what runs. Its figures change with every check.
    """
    now = timestamp(observation.now_s)
    old = {each["type"]: (each["status"], each["reason"]) for each in before.get("conditions") or []}
    for secret in observation.drawn_secrets if before else ():
        # Without this Event, nothing would show why clients' keys are refused, or why Redis restarts.
        message = f"there was no Secret {secret}, so a new one is drawn: whatever used the old one needs the new one"
        cluster.record_event(observation.deployment, "SecretDrawn", message, is_warning=True, now=now)
    for event in plan_events(read_plan_status(before), read_plan_status(written)):
        cluster.record_event(observation.deployment, event.reason, event.message, is_warning=event.is_warning, now=now)
    for each in written["conditions"]:
        has_changed = old.get(each["type"]) != (each["status"], each["reason"])
        if has_changed and (each["type"] in REPORTED or (each["type"] == "Degraded" and each["status"] == "True")):
            is_warning = each["type"] == "Degraded" or each["reason"] in slo_conditions.WARNINGS
            message = f"{each['type']} is {each['status']}: {each['message']}".removesuffix(": ")
            cluster.record_event(observation.deployment, each["reason"], message, is_warning=is_warning, now=now)


def _write_status(cluster: Cluster, namespace: str, name: str, before: Json, written: Json) -> None:
    if written != before:
        cluster.write_status(namespace, name, written)
