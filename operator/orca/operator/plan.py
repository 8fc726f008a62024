"""From a spec and what is there to what has to be done, each with its reason: pure, so that it can be read and tested.

A child is written when it is missing, when its hash label tells that another spec was rendered, and when somebody has
changed what we wrote (drift). Groups come and go by rollout.py. What bears our label and is not wanted goes; volumes
and Secrets stay, they end with the resource (deletionPolicy). What reads a model that is still fetched waits for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orca.operator import model_fetch, names
from orca.operator.children import KEPT_KINDS, drift, finish, hash_of
from orca.operator.observed import Observed, is_going, is_placed, is_pod_ready, label_map, seconds
from orca.operator.render import gateway, group, model, network, pool
from orca.operator.render.group import Outputs
from orca.operator.resource import Deployment, Json, SecretKey
from orca.operator.rollout import Bounds, Group, Step, step

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


@dataclass(frozen=True, slots=True)
class Apply:
    manifest: Json
    reason: str
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    kind: str
    name: str
    reason: str
    is_forced: bool = False  # without waiting for a kubelet that is gone


@dataclass(frozen=True, slots=True)
class Nudge:
    """Make the kubelet bring a changed ConfigMap to a pod at once."""

    pod: str
    uid: str
    annotations: Mapping[str, str]
    reason: str


Action = Apply | Delete | Nudge


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    actions: tuple[Action, ...]
    groups: tuple[Group, ...]  # as they are
    revision: str  # that the spec wants
    is_squeezed: bool


def plan(deployment: Deployment, observed: Observed, release: Release, *, now_s: float) -> Plan:
    """Args: now_s: seconds since 1970, as the API server's timestamps."""
    images = release_of(deployment, release)
    revision = group.revision(deployment, images.worker)
    groups = find_groups(deployment, observed, now_s)
    spec = deployment.spec
    bounds = Bounds(
        replicas=spec.wanted_groups,
        max_surge=spec.rollout.max_surge,
        max_unavailable=spec.rollout.max_unavailable,
    )
    fetch = model_fetch.look(deployment, observed, images.fetch, now_s)
    next_step = step(groups, revision, bounds)
    gateways = gateway.gateways(deployment, images.gateway, keys_secret(deployment))
    if not fetch.is_there:
        next_step, gateways = _held(deployment, next_step), _gateways_as_they_are(deployment, observed, gateways)
    wanted = [
        *(pool.managed(deployment, images.pool) if spec.pool.external is None else []),
        *fetch.manifests,
        *gateways,
        *(network.policies(deployment) if images.has_network_policies else []),
    ]
    staying = _staying(deployment, groups, next_step, revision)
    outputs = wanted_outputs(deployment, observed, images, now_s)
    schedule = group.schedule(deployment)
    wanted.append(schedule)
    wanted += _group_manifests(deployment, observed, staying, images, revision, outputs)
    old = {each.name for each in groups}
    actions: list[Action] = list(_applies(deployment, observed, wanted))
    actions += _nudges(observed, hash_of(deployment, schedule))
    actions += _leftovers(observed, wanted, old, fetch.leaving)
    actions += _unread_claims(deployment, observed, fetch.unread_claims)
    actions += _removals(observed, groups, next_step.remove)
    actions += _lost_pods(observed)
    return Plan(actions=tuple(actions), groups=groups, revision=revision, is_squeezed=next_step.is_squeezed)


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


def _held(deployment: Deployment, next_step: Step) -> Step:
    """While the wanted model is not there, the groups of the present one stay, unless none are wanted at all."""
    remove = next_step.remove if deployment.spec.wanted_groups == 0 else ()
    return Step(create=None, remove=remove, is_squeezed=next_step.is_squeezed)


def _gateways_as_they_are(deployment: Deployment, observed: Observed, gateways: Sequence[Json]) -> list[Json]:
    """Meanwhile the gateways stay too; without any, or suspended, there are none: new ones would find no tokenizer."""
    there = None if deployment.spec.suspend else observed.get("Deployment", names.gateway(deployment.name))
    others = [each for each in gateways if each["kind"] != "Deployment"]
    return others if there is None else [*others, there]


def wanted_outputs(deployment: Deployment, observed: Observed, images: Release, now_s: float) -> Outputs:
    """The wanted model with a generation above that of every other model which is still there.

    It stays as it is while that holds, so that no scheduler restarts for it. A new one is the clock's: it rises also
    where a resource is made again over a pool that was kept.
    """
    digest = model.outputs_digest(deployment.spec.model, images.worker)
    same, other = 0, 0
    for child in observed.of_kind("StatefulSet"):
        labels = label_map(child)
        if names.GENERATION_LABEL in labels:
            generation = int(labels[names.GENERATION_LABEL])
            if labels[names.MODEL_LABEL] == digest:
                same = max(same, generation)
            else:
                other = max(other, generation)
    return Outputs(digest, same if same > other else max(int(now_s), other + 1))


def keys_secret(deployment: Deployment) -> SecretKey | None:
    """Where the gateways' keys are: the user's Secret, or the one that the operator makes; None serves without."""
    chosen = deployment.spec.gateway
    if chosen.open_to_all:
        return None
    return chosen.api_keys_secret or SecretKey(name=names.api_key(deployment.name), key="keys")


def find_groups(deployment: Deployment, observed: Observed, now_s: float) -> tuple[Group, ...]:
    """The groups that exist, also those of which only a part does."""
    found: dict[str, str] = {}
    for child in observed.of_kind("StatefulSet"):
        labels = label_map(child)
        if names.GROUP_LABEL in labels:
            found[labels[names.GROUP_LABEL]] = labels[names.REVISION_LABEL]
    return tuple(_group(deployment, observed, name, revision, now_s) for name, revision in sorted(found.items()))


def _group(deployment: Deployment, observed: Observed, name: str, revision: str, now_s: float) -> Group:
    stages = observed.get("StatefulSet", name)
    pods = observed.pods("stage", group=name)
    wanted_pods = 0 if stages is None else int(stages["spec"]["replicas"])
    is_all_placed = stages is not None and len(pods) >= wanted_pods and all(map(is_placed, pods))
    return Group(
        name=name,
        revision=revision,
        ordinal=names.ordinal(name),
        is_ready=any(is_pod_ready(pod) for pod in observed.pods("scheduler", group=name)),
        is_placed=is_all_placed,
        is_overdue=stages is not None and not is_all_placed and _age_s(stages, now_s) > deployment.spec.startup_seconds,
        is_leaving=stages is not None and is_going(stages),
    )


def _age_s(child: Json, now_s: float) -> float:
    return now_s - seconds(child["metadata"]["creationTimestamp"])


def _staying(deployment: Deployment, groups: Sequence[Group], next_step: Step, revision: str) -> list[str]:
    """Names of the groups of the wanted revision that are there or come now."""
    gone = {*next_step.remove, *(each.name for each in groups if each.is_leaving)}
    staying = [each.name for each in groups if each.revision == revision and each.name not in gone]
    if next_step.create is not None:
        staying.append(names.group(deployment.name, revision, next_step.create))
    return staying


def _group_manifests(
    deployment: Deployment,
    observed: Observed,
    staying: Sequence[str],
    images: Release,
    revision: str,
    outputs: Outputs,
) -> list[Json]:
    """Stages of all groups that stay, and their schedulers; of those, one at a time is changed while others serve."""
    manifests = []
    changes_left = 1
    for name in staying:
        manifests += group.stages(deployment, images.worker, name, revision)
        service, stateful_set = group.scheduler(deployment, images.scheduler, name, revision, outputs)
        there = observed.get("StatefulSet", names.scheduler(name))
        if there is not None and hash_of(deployment, stateful_set) != label_map(there).get(names.HASH_LABEL):
            is_serving = any(is_pod_ready(pod) for pod in observed.pods("scheduler", group=name))
            others_serve = all(
                any(is_pod_ready(pod) for pod in observed.pods("scheduler", group=other))
                for other in staying
                if other != name
            )
            if is_serving and not (others_serve and changes_left):
                stateful_set = there
            else:
                changes_left -= is_serving
        manifests += [service, stateful_set]
    return manifests


def _applies(deployment: Deployment, observed: Observed, wanted: Iterable[Json]) -> Iterable[Apply]:
    for manifest in wanted:
        there = observed.get(manifest["kind"], manifest["metadata"]["name"])
        if there is manifest:
            continue
        finished = finish(deployment, manifest)
        if there is None:
            yield Apply(finished, "it is missing", is_new=True)
        elif is_going(there):
            continue  # it comes back once it is gone
        elif label_map(there).get(names.HASH_LABEL) != finished["metadata"]["labels"][names.HASH_LABEL]:
            yield Apply(finished, "the spec has changed")
        elif changed := drift(finished, there):
            yield Apply(finished, f"somebody has changed {changed}")


def _leftovers(
    observed: Observed, wanted: Iterable[Json], groups: set[str], reasons: Mapping[str, str]
) -> Iterable[Delete]:
    """Args: reasons: why some go, by name."""
    names_wanted = {(each["kind"], each["metadata"]["name"]) for each in wanted}
    for (kind, name), child in sorted(observed.children.items()):
        is_of_group = label_map(child).get(names.GROUP_LABEL) in groups
        if kind in KEPT_KINDS | _OWNED_BY_OTHERS or is_of_group or is_going(child) or (kind, name) in names_wanted:
            continue
        yield Delete(kind, name, reasons.get(name, "the spec has no more need of it"))


def _unread_claims(deployment: Deployment, observed: Observed, claims: Sequence[str]) -> Iterable[Delete]:
    for name in claims:
        if deployment.spec.deletion_policy == "Delete" and not is_going(
            observed.children["PersistentVolumeClaim", name]
        ):
            yield Delete("PersistentVolumeClaim", name, "nobody reads its model any more")


def _removals(observed: Observed, groups: Sequence[Group], remove: Sequence[str]) -> Iterable[Delete]:
    """The scheduler first: it gives its requests back while its stages still answer. Then the stages, then the rest.

    Nothing remembers that a group leaves. One without its scheduler does not serve, so each later step chooses it
    first; and if it is wanted again meanwhile, it gets a new scheduler.
    """
    for each in groups:
        if each.name not in remove:
            continue
        scheduler = names.scheduler(each.name)
        if observed.get("StatefulSet", scheduler) is not None:
            yield Delete("StatefulSet", scheduler, "its group leaves")
        elif not observed.pods("scheduler", group=each.name):
            yield Delete("StatefulSet", each.name, "its group leaves")


def _nudges(observed: Observed, schedule: str) -> Iterable[Nudge]:
    """For scheduler pods that may not have the ConfigMap of that hash; behind the call that writes it."""
    for pod in observed.pods("scheduler"):
        metadata = pod["metadata"]
        told = (metadata.get("annotations") or {}).get(names.SCHEDULE_ANNOTATION)
        if told != schedule and not is_going(pod):
            annotations = {names.SCHEDULE_ANNOTATION: schedule}
            yield Nudge(metadata["name"], metadata["uid"], annotations, "its schedule has changed")


def _lost_pods(observed: Observed) -> Iterable[Delete]:
    """Pods that a lost node cannot end: others have to take their places. Claim number and epoch keep them harmless;
    of a fetch, digests do."""
    for pod in observed.of_kind("Pod"):
        if is_going(pod) and pod["spec"].get("nodeName") in observed.lost_nodes and _may_be_forced(pod):
            yield Delete("Pod", pod["metadata"]["name"], "its node is lost", is_forced=True)


def _may_be_forced(pod: Json) -> bool:
    """Not the pool's: two Redis on one volume would lose what either accepted."""
    return label_map(pod).get(names.ROLE_LABEL) in ("gateway", "scheduler", "stage", "fetch")
