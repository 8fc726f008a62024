"""The plan of one reconcile: what to do, each action with its reason, from what was observed: pure.

A child is written if it is missing, if its hash label shows that another spec was rendered, and if somebody has changed
what we wrote (drift). Groups come and go as rollout.py says. Everything with our label that the spec does not want
goes, except volumes and Secrets: they end with the resource (deletionPolicy). Pods that read a model wait until its
fetch is complete. Pods that use an external pool wait for its Secret, which must lead to the Redis that holds the
requests (pool_move.py). What a plan for spec.slo decides is part of the spec here (slo/in_force.py).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain

from orca.operator.domain import certificates, group_pauses, names, volumes
from orca.operator.domain.actions import Action, Annotate, Apply, Delete, HandOver, IssueCertificate, PromiseSlots
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.groups import Group
from orca.operator.domain.objects import (
    ObjectKey,
    annotations,
    condition,
    has_number_from,
    is_going,
    is_pod_ready,
    is_rolled_out,
    key_of,
    label_map,
    seconds,
)
from orca.operator.domain.observation import Observation, keys_secret
from orca.operator.domain.resource import Json
from orca.operator.plan.children import KEPT_KINDS, content_hash, drift, finish, hash_of, with_object_metadata
from orca.operator.plan.model_change import ModelChange, may_come_into_force, plan_model_change
from orca.operator.plan.model_fetch import FetchPlan, plan_fetch
from orca.operator.plan.pauses import next_pauses
from orca.operator.plan.rollout import Bounds, RolloutMove, next_move
from orca.operator.plan.slo.device_loan import DeviceLoan, plan_loan
from orca.operator.plan.slo.following import PlanFollowing, follow_plan
from orca.operator.plan.slo.making import PlanMaking, plan_slo
from orca.operator.plan.slots_change import SlotsChange, plan_slots_change
from orca.operator.render import gateway, group, network, objects, pool

SILENT_S = 60.0
"""A pod that was taken off a lost node is given up this long after the end of its grace period."""

_OWNED_BY_OTHERS = frozenset({"Pod"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilePlan:
    actions: tuple[Action, ...]
    groups: tuple[Group, ...]  # as they are
    revision: str  # that the spec wants
    held: frozenset[ObjectKey]  # objects that stay as they are for now, though the spec wants them otherwise
    pauses: Mapping[str, Pause]  # by group
    is_squeezed: bool
    change: ModelChange
    slots: SlotsChange
    slo: PlanMaking
    loan: DeviceLoan
    following: PlanFollowing

    @property
    def new_groups(self) -> list[Group]:
        """Groups of the wanted revision."""
        return [each for each in self.groups if each.revision == self.revision]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decisions:
    """Decisions on which all manifests and actions of one plan depend."""

    revision: str  # that the spec wants
    move: RolloutMove
    change: ModelChange
    slots: SlotsChange
    fetch: FetchPlan
    slo: PlanMaking
    loan: DeviceLoan
    # False while the Secret of an external pool is missing, has no URL that parts accept, or names another Redis than
    # the one with the requests.
    is_pool_known: bool
    staying: Sequence[str]  # names of the groups of the wanted revision that exist or come now
    pauses: Mapping[str, Pause]

    @property
    def can_start(self) -> bool:
        """True if pods that read the wanted model and use the pool can start."""
        return self.fetch.is_complete and self.is_pool_known


def make_plan(observation: Observation) -> ReconcilePlan:
    """Decide what to do next. Made again and again, plans lead to what the spec asks for."""
    decisions = _decide(observation)
    schedule = group.schedule(observation.deployment, _bounds_in_use(observation))
    schedulers = _render_schedulers(observation, decisions)
    is_running = _runs_as_wanted(observation, decisions, schedulers, schedule)
    following = follow_plan(observation, can_start=decisions.can_start, is_running=is_running)
    held = _held_objects(observation, decisions, schedulers) | following.kept
    rendered = [
        *following.manifests,
        *_render_all_but_schedulers(observation, decisions, schedule),
        *chain.from_iterable(schedulers.values()),
    ]
    wanted = [each for each in rendered if key_of(each) not in held]
    kept = held | {key_of(each) for each in wanted}
    actions: tuple[Action, ...] = (
        *_promises(observation, decisions.slots),
        *(mark for mark in (decisions.fetch.mark, decisions.loan.mark) if mark is not None),
        *_certificates_to_issue(observation),
        *_rights(observation),
        *_handovers(observation, held),
        *_applies(observation, wanted),
        *_suspensions(observation, held),
        *_announced_schedules(observation, content_hash(observation.deployment, schedule)),
        *_leftovers(observation, kept, {**decisions.fetch.leaving, **decisions.slo.leaving, **following.leaving}),
        *_unread_claims(observation, decisions.fetch.unread_claims),
        *_removals(observation, decisions.move.remove),
        *_returns(observation, decisions),
        *_lost_pods(observation),
    )
    return ReconcilePlan(
        actions=actions,
        groups=observation.groups,
        revision=decisions.revision,
        held=frozenset(held),
        pauses=decisions.pauses,
        is_squeezed=decisions.move.is_squeezed,
        change=decisions.change,
        slots=decisions.slots,
        slo=decisions.slo,
        loan=decisions.loan,
        following=following,
    )


def _decide(observation: Observation) -> _Decisions:
    revision = group.revision(observation.deployment, observation.images.worker)
    fetch = plan_fetch(observation)
    # A Secret without a URL that parts accept counts as missing. With its URL, the parts would stop, and nobody would
    # know any more which Redis holds the requests.
    url = pool.external_url(observation.deployment, observation.pool_secret)
    is_pool_known = observation.spec.pool.external is None or (url is not None and not observation.pool.has_moved)
    slo = plan_slo(observation, can_start=fetch.is_complete and is_pool_known)
    loan = plan_loan(observation, slo, revision)
    move, change = _next_move(observation, revision, lending=loan.groups)
    slots = plan_slots_change(observation, has_older_models=bool(change.older))
    if slots.held:  # requests need the slots of all groups, which stay: a loan would begin and end without one
        loan = replace(loan, mark=None)
    if change.waits_for_gateways or not fetch.is_complete or not is_pool_known or slots.held:
        move = _only_to_none(observation, move)
    staying = _staying(observation, move, revision)
    return _Decisions(
        revision=revision,
        move=move,
        change=change,
        slots=slots,
        fetch=fetch,
        slo=slo,
        loan=loan,
        is_pool_known=is_pool_known,
        staying=staying,
        pauses=next_pauses(observation, staying, move),
    )


def _next_move(observation: Observation, revision: str, *, lending: int) -> tuple[RolloutMove, ModelChange]:
    """Return the move of the rollout, which a change of the model may hold back.

    Args: lending: number of groups that lend their devices, and are not wanted for now.
    """
    spec = observation.spec
    bounds = Bounds(
        replicas=max(0, spec.wanted_groups - lending),
        max_surge=spec.rollout.max_surge,
        max_unavailable=spec.rollout.max_unavailable,
    )
    change = plan_model_change(observation, next_move(observation.groups, revision, bounds))
    return next_move(observation.groups, revision, bounds, change.kept), change


def _only_to_none(observation: Observation, move: RolloutMove) -> RolloutMove:
    """Return a move that keeps all groups that exist, unless the spec wants no groups at all.

    For use while the wanted model is not complete, gateways do not have it, nobody knows how to reach the pool, or
    requests need slots that only these groups have.
    """
    remove = move.remove if observation.spec.wanted_groups == 0 else ()
    return RolloutMove(create=None, remove=remove, is_squeezed=move.is_squeezed)


def _staying(observation: Observation, move: RolloutMove, revision: str) -> list[str]:
    gone = {*move.remove, *(each.name for each in observation.groups if each.is_leaving)}
    staying = [each.name for each in observation.groups if each.revision == revision and each.name not in gone]
    if move.create is not None:
        staying.append(names.group(observation.name, revision, move.create))
    return staying


def _render_all_but_schedulers(observation: Observation, decisions: _Decisions, schedule: Json) -> list[Json]:
    deployment, images = observation.deployment, observation.images
    connection = pool.connection(deployment, observation.pool_secret)
    gateways = gateway.gateways(deployment, images.gateway, keys_secret(deployment), connection, decisions.change.older)
    stage_specs = [each["spec"]["template"]["spec"] for each in observation.children.stateful_sets(names.STAGE)]
    return [
        objects.service_account(deployment),
        *_render_pool(observation),
        *decisions.fetch.manifests,
        *decisions.slo.manifests,
        *(each for each in gateways if decisions.can_start or each["kind"] != "Deployment"),
        *(network.policies(deployment, stage_specs, dns_ports=images.dns_ports) if images.has_network_policies else []),
        schedule,
        *chain.from_iterable(
            group.stages(deployment, images.worker, name, decisions.pauses[name]) for name in decisions.staying
        ),
    ]


def _render_pool(observation: Observation) -> list[Json]:
    if observation.spec.pool.external is not None:
        return []
    claim = observation.children.get("PersistentVolumeClaim", names.pool(observation.name))
    return pool.managed(observation.deployment, observation.images.pool, observation.pool_secret, claim)


def _bounds_in_use(observation: Observation) -> dict[str, str]:
    """Return the batch bounds that schedulers read now, by key of the ConfigMap. The spec replaces those that it has.

    The others are for schedulers that the spec does not describe any more, in the groups that a rollout replaces.
    """
    there = observation.children.get("ConfigMap", names.schedule(observation.name)) or {}
    templates = [each["spec"]["template"] for each in observation.children.stateful_sets(names.SCHEDULER)]
    readers = [*templates, *observation.children.pods(names.SCHEDULER)]
    used = {group.bounds_key(each["spec"]) for each in readers}
    return {key: text for key, text in (there.get("data") or {}).items() if key in used}


def _render_schedulers(observation: Observation, decisions: _Decisions) -> dict[str, list[Json]]:
    """Render Service and StatefulSet of the schedulers, by group."""
    connection = pool.connection(observation.deployment, observation.pool_secret)
    return {
        name: group.scheduler(
            observation.deployment,
            observation.images.scheduler,
            name,
            observation.wanted_version,
            connection,
            decisions.pauses[name],
        )
        for name in decisions.staying
    }


def _held_objects(
    observation: Observation, decisions: _Decisions, schedulers: Mapping[str, Sequence[Json]]
) -> set[ObjectKey]:
    """Return the objects that must stay as they are for now. Args: schedulers: Service and StatefulSet by group."""
    held = {("Job", name) for name in decisions.fetch.held} | decisions.slo.kept
    if not decisions.can_start:
        held |= _held_gateways(observation)
    held |= _held_schedulers(observation, schedulers, is_pool_known=decisions.is_pool_known)
    # A scheduler that would not change may be written: that only repairs what somebody has edited.
    changing = decisions.slots.held - {name for name in schedulers if _is_as_wanted(observation, schedulers[name][1])}
    held |= {("StatefulSet", names.scheduler(name)) for name in changing}
    if volumes.find_going_pool(observation.children, observation.name) is not None:
        # The volume lives as long as the pod does.
        held.add(("StatefulSet", names.pool(observation.name)))
    if observation.renewed_pool_secret is not None:
        # Redis has to start after its Secret is written: it reads its users only then.
        held.add(("StatefulSet", names.pool(observation.name)))
    return held


def _held_gateways(observation: Observation) -> set[ObjectKey]:
    """Return the gateways, if there are any. If there are none, none come: new ones would find no tokenizer."""
    key = "Deployment", names.gateway(observation.name)
    return set() if observation.children.get(*key) is None else {key}


def _held_schedulers(
    observation: Observation, wanted: Mapping[str, Sequence[Json]], *, is_pool_known: bool
) -> set[ObjectKey]:
    """Return the schedulers that would change but have to serve until others do.

    A group whose stages are not up cannot serve with any scheduler, so it holds nobody up. Of the other groups,
    maxUnavailable may be missing, and at least one in any case: no scheduler comes up beside the one that it replaces.

    Args: wanted: Service and StatefulSet by group.
    """
    if not is_pool_known:
        return {("StatefulSet", names.scheduler(name)) for name in wanted}
    can_serve = {name for name in wanted if _has_its_stages(observation, name)}
    serving = {name for name in can_serve if observation.children.has_ready_pod(names.SCHEDULER, name)}
    floor = len(can_serve) - max(1, observation.spec.rollout.max_unavailable)
    left = len(serving)
    held = set()
    for name, (_, stateful_set) in wanted.items():
        if _is_as_wanted(observation, stateful_set) or name not in serving:
            continue
        if left - 1 >= floor:
            left -= 1
        else:
            held.add(key_of(stateful_set))
    return held


def _is_as_wanted(observation: Observation, manifest: Json) -> bool:
    """Return whether an object does not exist, or was last written from the same manifest."""
    there = observation.children.get(*key_of(manifest))
    return there is None or label_map(there).get(names.HASH_LABEL) == hash_of(observation.deployment, manifest)


def _runs_as_wanted(
    observation: Observation, decisions: _Decisions, schedulers: Mapping[str, Sequence[Json]], schedule: Json
) -> bool:
    """Return whether all groups run as the spec wants, and there are no others.

    Args: schedulers: Service and StatefulSet by group. schedule: the ConfigMap of batch bounds.
    """
    groups, children = observation.groups, observation.children
    if not groups or len(groups) != observation.spec.wanted_groups:
        return False
    if any(each.revision != decisions.revision or each.is_leaving or not each.is_ready for each in groups):
        return False
    for _, stateful_set in schedulers.values():
        there = children.get(*key_of(stateful_set))
        if there is None or not (_is_as_wanted(observation, stateful_set) and is_rolled_out(there)):
            return False
    if children.get(*key_of(schedule)) is None or not _is_as_wanted(observation, schedule):
        return False
    return not any(_announced_schedules(observation, content_hash(observation.deployment, schedule)))


def _has_its_stages(observation: Observation, group: str) -> bool:
    up = sum(map(is_pod_ready, observation.children.pods(names.STAGE, group=group)))
    return up >= observation.spec.parallelism.stages


def _certificates_to_issue(observation: Observation) -> Iterable[IssueCertificate]:
    if (issue := certificates.due(observation)) is not None:
        yield issue


def _rights(observation: Observation) -> Iterable[Apply]:
    if observation.renewed_pool_secret is not None:
        yield Apply(observation.renewed_pool_secret, "the pool's user lacks rights that this release needs")


def _promises(observation: Observation, slots: SlotsChange) -> Iterable[PromiseSlots]:
    """Yield the promise first of all: no group gets fewer slots while the pool accepts requests that need more."""
    revision, promised = observation.pool.revision, observation.pool.promised_slots
    if slots.promise is not None and revision is not None and promised is not None:
        has_fewer = slots.promise < promised
        reason = "the spec gives fewer slots to a group" if has_fewer else "all groups have more slots"
        yield PromiseSlots(revision=revision, slots=slots.promise, expected=promised, reason=reason)


def _handovers(observation: Observation, held: Set[ObjectKey]) -> Iterable[HandOver]:
    """Leave the number of gateways to the autoscaler, if the operator has written it before; before the next apply."""
    key = "Deployment", names.gateway(observation.name)
    there, spec = observation.children.get(*key), observation.spec
    if there is None or key in held or is_going(there) or spec.suspend or not spec.gateway.autoscaled:
        return
    if has_number_from(there, names.MANAGER):
        yield HandOver(gateway.only_replicas(there), "an autoscaler chooses the number of gateways")


def _applies(observation: Observation, wanted: Iterable[Json]) -> Iterable[Apply]:
    for manifest in wanted:
        there = observation.children.get(*key_of(manifest))
        finished = finish(observation.deployment, manifest)
        if there is None:
            yield Apply(finished, "it is missing", is_new=True)
        elif is_going(there):
            continue  # a later plan makes it again, once it is gone
        elif label_map(there).get(names.HASH_LABEL) != finished["metadata"]["labels"][names.HASH_LABEL]:
            yield Apply(finished, "the spec has changed")
        elif changed := drift(finished, there):
            yield Apply(finished, f"somebody has changed {changed}", is_mending=True)


def _leftovers(observation: Observation, kept: Set[ObjectKey], reasons: Mapping[str, str]) -> Iterable[Delete]:
    """Args: kept: objects that do not go. reasons: why some objects go, by name."""
    groups = {each.name for each in observation.groups}
    for (kind, name), child in sorted(observation.children.by_key.items()):
        is_of_group = label_map(child).get(names.GROUP_LABEL) in groups
        if kind in KEPT_KINDS | _OWNED_BY_OTHERS or is_of_group or is_going(child) or (kind, name) in kept:
            continue
        yield _delete(child, reasons.get(name, "the spec does not need it any more"))


def _unread_claims(observation: Observation, claims: Sequence[str]) -> Iterable[Delete]:
    for name in claims:
        claim = observation.children.by_key["PersistentVolumeClaim", name]
        if observation.spec.deletion_policy == "Delete" and not is_going(claim):
            yield _delete(claim, "no pod reads its model any more")


def _removals(observation: Observation, remove: Sequence[str]) -> Iterable[Apply | Delete]:
    """Take groups away: the scheduler first, since it gives its requests back while its stages still answer.

    Then the stages go, then the rest. Nothing remembers that a group leaves. A group without its scheduler does not
    serve, so each later move chooses it first; and if the spec wants it again meanwhile, it gets a new scheduler. If
    its model may still come into force, the scheduler is ended before it is deleted, since then the group comes back.
    """
    for each in observation.groups:
        if each.name not in remove:
            continue
        scheduler = observation.children.get("StatefulSet", names.scheduler(each.name))
        has_pods = bool(observation.children.pods(names.SCHEDULER, group=each.name))
        if scheduler is None:
            if not has_pods:
                yield _delete(observation.children.by_key["StatefulSet", each.name], "its group leaves")
        elif not may_come_into_force(observation, scheduler):
            yield _delete(scheduler, "its group leaves")
        elif scheduler["spec"]["replicas"]:
            yield _resize(observation, group.resized(scheduler, 0), "its group leaves")
        elif is_rolled_out(scheduler) and not has_pods:
            yield _delete(scheduler, "its group leaves")


def _returns(observation: Observation, decisions: _Decisions) -> Iterable[Apply]:
    """Bring back groups of another revision.

    A group that has given way comes back while it exists, since the wanted one may take long. So does a group that was
    ended and whose model came into force. The spec does not describe these groups any more, so they are written as they
    are.
    """
    for each in observation.groups:
        stages = observation.children.get("StatefulSet", each.name)
        is_new = each.revision == decisions.revision
        if stages is None or is_new or each.name in decisions.move.remove or each.is_leaving:
            continue
        pause = group_pauses.read(stages)
        scheduler = observation.children.get("StatefulSet", names.scheduler(each.name))
        if pause.is_on and pause.is_over(each.name, observation.now_s):
            for manifest in group.come_back(stages, scheduler, pause.ended):
                yield _resize(observation, manifest, "its group comes back")
        is_needed = each.name in decisions.change.kept and observation.pool.problem is None
        if is_needed and not pause.is_on and scheduler is not None and not scheduler["spec"]["replicas"]:
            yield _resize(observation, group.resized(scheduler, 1), "its model came into force")


def _suspensions(observation: Observation, held: Set[ObjectKey]) -> Iterable[Apply]:
    """Take the pods of held gateways away while the resource is suspended.

    The Deployment stays: later plans read from it which models the gateways had.
    """
    key = "Deployment", names.gateway(observation.name)
    if not observation.spec.suspend or key not in held:
        return
    there = observation.children.by_key[key]
    if there["spec"]["replicas"] and not is_going(there):
        yield _resize(observation, group.resized(there, 0), "the resource is suspended")


def _resize(observation: Observation, manifest: Json, reason: str) -> Apply:
    """Write an object as it is, but for the number of its pods. An apply takes away what it leaves out."""
    return Apply(with_object_metadata(observation.deployment, manifest), reason)


def _announced_schedules(observation: Observation, schedule: str) -> Iterable[Annotate]:
    """Annotate scheduler pods that may not have the ConfigMap of that hash; after the action that writes it."""
    for pod in observation.children.pods(names.SCHEDULER):
        metadata = pod["metadata"]
        if annotations(metadata).get(names.SCHEDULE_ANNOTATION) != schedule and not is_going(pod):
            changed = {names.SCHEDULE_ANNOTATION: schedule}
            yield Annotate("Pod", metadata["name"], metadata["uid"], changed, "its schedule has changed")


def _lost_pods(observation: Observation) -> Iterable[Delete]:
    """Delete pods that a lost node cannot end: others have to take their places.

    The old pods may still run. Claim number and epoch keep them harmless; for a fetch, digests do.
    """
    for pod in observation.children.of_kind("Pod"):
        if is_going(pod) and _may_be_forced(pod):
            if pod["spec"].get("nodeName") in observation.lost_nodes:
                yield _delete(pod, "its node is lost", is_forced=True)
            elif _is_given_up(pod, observation.now_s):
                yield _delete(pod, "its node was given up and is silent", is_forced=True)


def _is_given_up(pod: Json, now_s: float) -> bool:
    """Return whether a pod was taken off a lost node, and the node has not ended it long after its time.

    An operator that may not read nodes can know this much.
    """
    is_taken_off = condition(pod, "DisruptionTarget").get("reason") == "DeletionByTaintManager"
    # The timestamp includes the grace period.
    return is_taken_off and now_s > seconds(pod["metadata"]["deletionTimestamp"]) + SILENT_S


def _may_be_forced(pod: Json) -> bool:
    """Return whether two such pods may run at once. Two Redis on one volume would lose accepted requests."""
    role = label_map(pod).get(names.ROLE_LABEL)
    return role in (names.GATEWAY, names.SCHEDULER, names.STAGE, names.FETCH, names.PROFILE, names.PLAN, names.FOLLOW)


def _delete(child: Json, reason: str, *, is_forced: bool = False) -> Delete:
    metadata = child["metadata"]
    return Delete(child["kind"], metadata["name"], metadata["uid"], reason, is_forced)
