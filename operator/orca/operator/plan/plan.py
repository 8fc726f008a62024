"""From a spec and what is there to what has to be done, each with its reason: pure, so that it can be read and tested.

A child is written when it is missing, when its hash label tells that another spec was rendered, and when somebody has
changed what we wrote (drift). Groups come and go by rollout.py. What bears our label and is not wanted goes; volumes
and Secrets stay, they end with the resource (deletionPolicy). What reads a model that is still fetched waits for it,
and what reads an external pool for its Secret.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain

from orca.operator.domain import certificates, group_pauses, names
from orca.operator.domain.actions import Action, Apply, Delete, Issue, Nudge, Promise
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.observed import (
    Observed,
    condition_of,
    is_going,
    is_pod_ready,
    is_rolled_out,
    label_map,
    seconds,
)
from orca.operator.domain.resource import Deployment, Json, SecretKey
from orca.operator.plan import model_change, model_fetch, slots_change
from orca.operator.plan.children import KEPT_KINDS, drift, finish, hash_of
from orca.operator.plan.groups import find_groups, following_pauses
from orca.operator.plan.model_change import Change
from orca.operator.plan.rollout import Bounds, Group, Step, step
from orca.operator.plan.slots_change import SlotsChange
from orca.operator.render import account, gateway, group, model, network, pool
from orca.operator.render.group import Outputs

SILENT_S = 60.0
"""Behind the end of its grace a pod that was taken off a lost node is not waited for any longer."""

_OWNED_BY_OTHERS = frozenset({"Pod"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What an operator gives to all resources: the images of its release, of which a resource may name others."""

    gateway: str
    scheduler: str
    worker: str
    pool: str
    fetch: str
    has_network_policies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    actions: tuple[Action, ...]
    groups: tuple[Group, ...]  # as they are
    revision: str  # that the spec wants
    held: frozenset[tuple[str, str]]  # kind and name of what stays as it is for now, though another is wanted
    pauses: Mapping[str, Pause]  # by group
    is_squeezed: bool
    change: Change  # of the model
    slots: SlotsChange


def plan(deployment: Deployment, observed: Observed, release: Release, *, now_s: float) -> Plan:
    """Args: now_s: seconds since 1970, as the API server's timestamps."""
    images = release_of(deployment, release)
    revision = group.revision(deployment, images.worker)
    outputs = wanted_outputs(deployment, observed, images, now_s)
    groups = find_groups(deployment, observed, now_s)
    next_step, change = _next_step(deployment, observed, groups, revision, outputs, now_s)
    fetch = model_fetch.look(deployment, observed, images.fetch, now_s)
    is_pool_known = deployment.spec.pool.external is None or observed.pool_secret is not None
    can_start = fetch.is_there and is_pool_known
    slots = slots_change.look(deployment, observed, groups, outputs, now_s, knows_others=bool(change.others))
    if change.is_telling or not can_start or slots.held:
        next_step = _only_to_none(deployment, next_step)

    staying = _staying(deployment, groups, next_step, revision)
    startup_s = deployment.spec.startup_seconds
    following = following_pauses(observed, groups, staying, next_step, startup_s=startup_s, now_s=now_s)
    link = pool.link(deployment, observed.pool_secret)
    gateways = gateway.gateways(deployment, images.gateway, keys_secret(deployment), link, change.others)
    schedule = group.schedule(deployment)
    stages = [group.stages(deployment, images.worker, name, revision, following[name]) for name in staying]
    schedulers = {
        name: group.scheduler(deployment, images.scheduler, name, revision, outputs, link, following[name])
        for name in staying
    }
    held = {("Job", name) for name in fetch.held}
    held |= set() if can_start else _held_gateways(deployment, observed)
    held |= _held_schedulers(deployment, observed, schedulers, is_pool_known=is_pool_known)
    held |= {("StatefulSet", names.scheduler(name)) for name in slots.held}
    # It starts with the users that are in the Secret then.
    held |= set() if observed.renewed_pool_secret is None else {("StatefulSet", names.pool(deployment.name))}
    rendered = [
        account.service_account(deployment),
        *_pool_manifests(deployment, observed, images.pool),
        *fetch.manifests,
        *(each for each in gateways if can_start or each["kind"] != "Deployment"),
        *(network.policies(deployment, observed.pod_specs(group.STAGE)) if images.has_network_policies else []),
        schedule,
        *chain.from_iterable(stages),
        *chain.from_iterable(schedulers.values()),
    ]
    wanted = [each for each in rendered if _key(each) not in held]
    kept = held | {_key(each) for each in wanted}
    actions: tuple[Action, ...] = (
        *_promises(observed, slots),
        *_issues(deployment, observed, now_s),
        *_rights(observed),
        *_applies(deployment, observed, wanted),
        *_suspensions(deployment, observed, held),
        *_nudges(observed, hash_of(deployment, schedule)),
        *_leftovers(observed, kept, {each.name for each in groups}, fetch.leaving),
        *_unread_claims(deployment, observed, fetch.unread_claims),
        *_removals(observed, groups, next_step.remove, outputs),
        *_returns(observed, groups, revision, next_step.remove, change.kept, now_s),
        *_lost_pods(observed, now_s),
    )
    return Plan(
        actions=actions,
        groups=groups,
        revision=revision,
        held=frozenset(held),
        pauses=following,
        is_squeezed=next_step.is_squeezed,
        change=change,
        slots=slots,
    )


def _next_step(
    deployment: Deployment,
    observed: Observed,
    groups: Sequence[Group],
    revision: str,
    outputs: Outputs,
    now_s: float,
) -> tuple[Step, Change]:
    """Of the rollout, which a change of the model may hold back."""
    spec = deployment.spec
    bounds = Bounds(
        replicas=spec.wanted_groups,
        max_surge=spec.rollout.max_surge,
        max_unavailable=spec.rollout.max_unavailable,
    )
    change = model_change.look(deployment, observed, groups, step(groups, revision, bounds), outputs, now_s)
    return step(groups, revision, bounds, change.kept), change


def release_of(deployment: Deployment, release: Release) -> Release:
    images = deployment.spec.images
    return replace(
        release,
        gateway=images.gateway or release.gateway,
        scheduler=images.scheduler or release.scheduler,
        worker=images.worker or release.worker,
        pool=images.pool or release.pool,
        fetch=images.fetch or release.fetch,
    )


def _pool_manifests(deployment: Deployment, observed: Observed, image: str) -> list[Json]:
    if deployment.spec.pool.external is not None:
        return []
    claim = observed.get("PersistentVolumeClaim", names.pool(deployment.name))
    return pool.managed(deployment, image, observed.pool_secret, claim)


def _only_to_none(deployment: Deployment, next_step: Step) -> Step:
    """While the wanted model is not there, gateways do not have it, how to reach the pool is not known, or requests
    need slots that only these groups have, the groups that are there stay, unless none are wanted at all."""
    remove = next_step.remove if deployment.spec.wanted_groups == 0 else ()
    return Step(create=None, remove=remove, is_squeezed=next_step.is_squeezed)


def _held_gateways(deployment: Deployment, observed: Observed) -> set[tuple[str, str]]:
    """Meanwhile the gateways stay too; where there are none, none come: new ones would find no tokenizer."""
    key = "Deployment", names.gateway(deployment.name)
    return set() if observed.get(*key) is None else {key}


def wanted_outputs(deployment: Deployment, observed: Observed, images: Release, now_s: float) -> Outputs:
    """The wanted model with a generation above that of every other model which is still there.

    It stays as it is while that holds, so that no scheduler restarts for it. A new one is the clock's: it rises also
    where a resource is made again over a pool that was kept. A clock that went back since is told by the pool.
    """
    digest = model.outputs_digest(deployment.spec.model, images.worker)
    others = dict(model_change.known_generations(observed))
    same = others.pop(digest, 0)
    in_force = observed.pool.generation
    # A model that never came into force is left behind as if it had not been asked for.
    served = [each for each in others.values() if in_force is None or each <= in_force]
    if same >= (in_force or 0) and same > max(served, default=0):
        return Outputs(digest, same)
    return Outputs(digest, max([int(now_s), *(each + 1 for each in (in_force or 0, *others.values()))]))


def keys_secret(deployment: Deployment) -> SecretKey | None:
    """Where the gateways' keys are: the user's Secret, or the one that the operator makes; None serves without."""
    chosen = deployment.spec.gateway
    if chosen.open_to_all:
        return None
    return chosen.api_keys_secret or SecretKey(name=names.api_key(deployment.name), key=names.API_KEYS_FILE)


def _staying(deployment: Deployment, groups: Sequence[Group], next_step: Step, revision: str) -> list[str]:
    """Names of the groups of the wanted revision that are there or come now."""
    gone = {*next_step.remove, *(each.name for each in groups if each.is_leaving)}
    staying = [each.name for each in groups if each.revision == revision and each.name not in gone]
    if next_step.create is not None:
        staying.append(names.group(deployment.name, revision, next_step.create))
    return staying


def _held_schedulers(
    deployment: Deployment, observed: Observed, wanted: Mapping[str, Sequence[Json]], *, is_pool_known: bool
) -> set[tuple[str, str]]:
    """Of the schedulers that would be changed, those that go on serving until others do.

    A group whose stages are not up cannot serve whatever its scheduler is: it holds nobody up. Of the others,
    maxUnavailable may be missing, and one in any case, since no scheduler comes up beside the one that it replaces.

    Args: wanted: Service and StatefulSet by group.
    """
    if not is_pool_known:
        return {("StatefulSet", names.scheduler(name)) for name in wanted}
    can_serve = {name for name in wanted if _has_its_stages(deployment, observed, name)}
    serving = {name for name in can_serve if any(map(is_pod_ready, observed.pods("scheduler", group=name)))}
    floor = len(can_serve) - max(1, deployment.spec.rollout.max_unavailable)
    left = len(serving)
    held = set()
    for name, (_, stateful_set) in wanted.items():
        there = observed.get(*_key(stateful_set))
        is_as_wanted = there is None or label_map(there).get(names.HASH_LABEL) == hash_of(deployment, stateful_set)
        if is_as_wanted or name not in serving:
            continue
        if left - 1 >= floor:
            left -= 1
        else:
            held.add(_key(stateful_set))
    return held


def _has_its_stages(deployment: Deployment, observed: Observed, name: str) -> bool:
    up = sum(map(is_pod_ready, observed.pods(group.STAGE, group=name)))
    return up >= deployment.spec.parallelism.stages


def _issues(deployment: Deployment, observed: Observed, now_s: float) -> Iterable[Issue]:
    if (issue := certificates.due(deployment, observed, now_s)) is not None:
        yield issue


def _rights(observed: Observed) -> Iterable[Apply]:
    if observed.renewed_pool_secret is not None:
        yield Apply(observed.renewed_pool_secret, "the pool's user lacks rights that this release needs")


def _promises(observed: Observed, slots: SlotsChange) -> Iterable[Promise]:
    """Before anything else: no group gets fewer slots while the door lets in what needs more."""
    revision, promised = observed.pool.revision, observed.pool.promised_slots
    if slots.promise is not None and revision is not None and promised is not None:
        has_fewer = slots.promise < promised
        reason = "the spec gives fewer slots to a group" if has_fewer else "all groups have more slots"
        yield Promise(revision=revision, slots=slots.promise, expected=promised, reason=reason)


def _applies(deployment: Deployment, observed: Observed, wanted: Iterable[Json]) -> Iterable[Apply]:
    for manifest in wanted:
        there = observed.get(*_key(manifest))
        finished = finish(deployment, manifest)
        if there is None:
            yield Apply(finished, "it is missing", is_new=True)
        elif is_going(there):
            continue  # it comes back once it is gone
        elif label_map(there).get(names.HASH_LABEL) != finished["metadata"]["labels"][names.HASH_LABEL]:
            yield Apply(finished, "the spec has changed")
        elif changed := drift(finished, there):
            yield Apply(finished, f"somebody has changed {changed}", is_mending=True)


def _leftovers(
    observed: Observed, staying: Set[tuple[str, str]], groups: Set[str], reasons: Mapping[str, str]
) -> Iterable[Delete]:
    """Args: staying: kinds and names of what does not go. reasons: why some go, by name."""
    for (kind, name), child in sorted(observed.children.items()):
        is_of_group = label_map(child).get(names.GROUP_LABEL) in groups
        if kind in KEPT_KINDS | _OWNED_BY_OTHERS or is_of_group or is_going(child) or (kind, name) in staying:
            continue
        yield _delete(child, reasons.get(name, "the spec has no more need of it"))


def _unread_claims(deployment: Deployment, observed: Observed, claims: Sequence[str]) -> Iterable[Delete]:
    for name in claims:
        claim = observed.children["PersistentVolumeClaim", name]
        if deployment.spec.deletion_policy == "Delete" and not is_going(claim):
            yield _delete(claim, "nobody reads its model any more")


def _removals(
    observed: Observed, groups: Sequence[Group], remove: Sequence[str], outputs: Outputs
) -> Iterable[Apply | Delete]:
    """The scheduler first: it gives its requests back while its stages still answer. Then the stages, then the rest.

    Nothing remembers that a group leaves. One without its scheduler does not serve, so each later step chooses it
    first; and if it is wanted again meanwhile, it gets a new scheduler. Only where its model may still come into force
    a scheduler is ended before it is deleted, for then its group comes back.
    """
    for each in groups:
        if each.name not in remove:
            continue
        scheduler = observed.get("StatefulSet", names.scheduler(each.name))
        has_pods = bool(observed.pods("scheduler", group=each.name))
        if scheduler is None:
            if not has_pods:
                yield _delete(observed.children["StatefulSet", each.name], "its group leaves")
        elif not model_change.may_come_into_force(observed, scheduler, outputs):
            yield _delete(scheduler, "its group leaves")
        elif scheduler["spec"]["replicas"]:
            yield Apply(group.resized(scheduler, 0, {}), "its group leaves")
        elif is_rolled_out(scheduler) and not has_pods:
            yield _delete(scheduler, "its group leaves")


def _returns(
    observed: Observed, groups: Sequence[Group], revision: str, remove: Sequence[str], kept: Set[str], now_s: float
) -> Iterable[Apply]:
    """Groups of another revision that have given way come back as well while they are there: the wanted one may take
    long. So do those that were ended, and whose model came into force. The spec tells of them no more, so they are
    written as they are.

    Args: kept: names of groups whose models have requests.
    """
    for each in groups:
        stages = observed.get("StatefulSet", each.name)
        if stages is None or each.revision == revision or each.name in remove or each.is_leaving:
            continue
        pause = group_pauses.read(stages)
        scheduler = observed.get("StatefulSet", names.scheduler(each.name))
        if pause.is_on and pause.is_over(each.name, now_s):
            for manifest in group.come_back(stages, scheduler, pause.ended):
                yield Apply(manifest, "its group comes back")
        is_needed = each.name in kept and observed.pool.problem is None
        if is_needed and not pause.is_on and scheduler is not None and not scheduler["spec"]["replicas"]:
            yield Apply(group.resized(scheduler, 1, {}), "its model came into force")


def _suspensions(deployment: Deployment, observed: Observed, held: Set[tuple[str, str]]) -> Iterable[Apply]:
    """Gateways that stay as they are have no pods while the resource is suspended. Which models they were given is read
    from them later, so they are not deleted."""
    key = "Deployment", names.gateway(deployment.name)
    if not deployment.spec.suspend or key not in held:
        return
    there = observed.children[key]
    if there["spec"]["replicas"] and not is_going(there):
        yield Apply(group.resized(there, 0, {}), "the resource is suspended")


def _nudges(observed: Observed, schedule: str) -> Iterable[Nudge]:
    """For scheduler pods that may not have the ConfigMap of that hash; behind the call that writes it."""
    for pod in observed.pods("scheduler"):
        metadata = pod["metadata"]
        told = (metadata.get("annotations") or {}).get(names.SCHEDULE_ANNOTATION)
        if told != schedule and not is_going(pod):
            annotations = {names.SCHEDULE_ANNOTATION: schedule}
            yield Nudge(metadata["name"], metadata["uid"], annotations, "its schedule has changed")


def _lost_pods(observed: Observed, now_s: float) -> Iterable[Delete]:
    """Pods that a lost node cannot end: others have to take their places. Claim number and epoch keep them harmless;
    of a fetch, digests do."""
    for pod in observed.of_kind("Pod"):
        if is_going(pod) and _may_be_forced(pod):
            if pod["spec"].get("nodeName") in observed.lost_nodes:
                yield _delete(pod, "its node is lost", is_forced=True)
            elif _is_given_up(pod, now_s):
                yield _delete(pod, "its node was given up and is silent", is_forced=True)


def _is_given_up(pod: Json, now_s: float) -> bool:
    """Whether the cluster took a pod off a node that it had lost, and the node has not ended it long after its time:
    what an operator can know that may not read nodes."""
    given_up = condition_of(pod, "DisruptionTarget").get("reason") == "DeletionByTaintManager"
    # Its grace is part of the timestamp.
    return given_up and now_s > seconds(pod["metadata"]["deletionTimestamp"]) + SILENT_S


def _may_be_forced(pod: Json) -> bool:
    """Not the pool's: two Redis on one volume would lose what either accepted."""
    return label_map(pod).get(names.ROLE_LABEL) in ("gateway", "scheduler", "stage", "fetch")


def _delete(child: Json, reason: str, *, is_forced: bool = False) -> Delete:
    metadata = child["metadata"]
    return Delete(child["kind"], metadata["name"], metadata["uid"], reason, is_forced)


def _key(manifest: Json) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
