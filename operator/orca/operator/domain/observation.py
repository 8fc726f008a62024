"""The observation of one reconcile: the resource, the objects in the cluster, the answer of the pool, and the time.

An Observation is made once per reconcile, after all reads, and never changes or outlives it. Pure code takes it as its
argument and decides from nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from orca.core.fetch_report import FetchProgress
from orca.core.plan_report import PlanReport
from orca.operator.domain import facts, names
from orca.operator.domain.cluster_events import Events
from orca.operator.domain.groups import Group, read_groups
from orca.operator.domain.model_references import outputs_digest
from orca.operator.domain.objects import Children, label_map
from orca.operator.domain.resource import DeploymentSpec, Json, OrcaDeployment, SecretKey
from orca.operator.domain.slo.following import FollowRecord
from orca.operator.domain.slo.planned import PlannedService
from orca.pool.latency_counts import LatencyCounts
from orca.pool.order.deadline_counts import DeadlineCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The settings of an operator for all resources: images of its release, which a resource may replace by others."""

    gateway: str
    scheduler: str
    worker: str
    pool: str
    fetch: str
    has_network_policies: bool = False
    dns_ports: tuple[int, ...] = (53,)  # that NetworkPolicies let pods call
    slo_check_s: float = 600.0  # seconds from check to check of a plan for spec.slo


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The answer of the pool, or why there is none."""

    queued: int = 0
    running: int = 0
    oldest_wait_ms: int = 0
    generation: int | None = None  # of the model in force; None if there never was one
    replaced_revisions: tuple[str, ...] = ()  # of older models, whose answers somebody may still read
    replaced_unfinished: int = 0  # requests of older models that wait or run
    revision: str | None = None  # of the model in force, as the pool names it
    promised_slots: int | None = None  # to one request of it; None until a group formed
    groups_in_force: tuple[str, ...] = ()  # of the model in force, whose schedulers live, formed or not
    offered_slots: int | None = None  # that every formed group offers to one request; None if one does not say
    # Requests of the model in force that need more than scheduler.kvSlots and have not ended; 0 also if not asked.
    larger_requests: int = 0
    smallest_larger_request: int = 0  # slots that the smallest of them needs
    largest_request: int = 0  # slots that the largest of them needs
    older_schema: int | None = None  # the number in force, if it is that of the release before
    # Answers of the model in force that ended by themselves in the last hours; None if not asked.
    counted_answers: int | None = None
    # Latencies of the answers of the model in force; None if not asked, or if no model is in force.
    latencies: LatencyCounts | None = None
    deadlines: DeadlineCounts | None = None  # of the model in force; None if no model is in force
    # Results of Jobs by their keys, as far as they were asked for and are there.
    results: Mapping[str, bytes] = field(default_factory=dict)
    problem: str | None = None  # None if the pool answered
    has_moved: bool = False  # the Secret names another Redis than the one that holds the requests (plan/pool_move.py)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The model that the spec wants, as schedulers present it to the pool."""

    digest: str  # model_references.outputs_digest
    generation: int  # the highest comes into force in the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """The plan that the deployment runs, or is about to run."""

    name: str  # of the ConfigMap that holds it
    planned: PlannedService
    report: PlanReport | None = None  # None: a release without reports has made it
    is_wanted: bool  # it is for the present spec
    following: FollowRecord | None = None  # None: nothing was noted yet, or the plan is for an earlier spec
    made_s: float  # seconds since 1970 at which the first plan for its spec was made


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The facts of one reconcile. Properties are computed at most once."""

    deployment: OrcaDeployment  # as it is to run: with what a plan decides (plan/slo/in_force.py)
    stated: OrcaDeployment | None = None  # as its author wrote it; None if that is the same
    plan_in_force: PlanInForce | None = None  # of spec.slo; None: there is no plan yet, or no slo
    release: Release
    now_s: float  # seconds since 1970, as in the API server's timestamps
    children: Children = field(default_factory=Children)
    pool_secret: Json | None = None  # by which the pool is reached; None if there is none
    drawn_secrets: tuple[str, ...] = ()  # names of Secrets that did not exist until this reconcile
    renewed_pool_secret: Json | None = None  # what the pool's Secret must become first; None if it may stay as it is
    named_certificates: Json | None = None  # the Secret that the spec names; None if there is none, or none is named
    keys_problem: str | None = None  # why gateways cannot have the API keys that the spec names; None if they can
    pool: PoolStatus = field(default_factory=lambda: PoolStatus(problem="it was not polled yet"))
    lost_nodes: frozenset[str] = frozenset()
    events: Events = field(default_factory=dict)  # of the cluster, about what is missing
    tls_secret: Json | None = None  # that the Ingress names; None if there is none, or none is named
    # Gateways to which the route attaches, by namespace and name, as far as the operator may read them.
    gateways: Mapping[tuple[str, str], Json] = field(default_factory=dict)
    fetch: FetchProgress | None = None  # of the running fetch of the model; None if none runs, or it does not answer

    @property
    def spec(self) -> DeploymentSpec:
        return self.deployment.spec

    @property
    def author_deployment(self) -> OrcaDeployment:
        """The deployment as its author wrote it."""
        return self.stated or self.deployment

    @property
    def name(self) -> str:
        return self.deployment.name

    @cached_property
    def images(self) -> Release:
        """The release with the images that the spec names instead."""
        images, release = self.spec.images, self.release
        return replace(
            release,
            gateway=images.gateway or release.gateway,
            scheduler=images.scheduler or release.scheduler,
            worker=images.worker or release.worker,
            pool=images.pool or release.pool,
            fetch=images.fetch or release.fetch,
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups that exist, by name."""
        return read_groups(self.children, self.spec.startup_seconds, self.now_s)

    @cached_property
    def schedulers(self) -> Mapping[str, Json]:
        """The StatefulSet of the scheduler, by group."""
        found = {label_map(each).get(names.GROUP_LABEL): each for each in self.children.stateful_sets(names.SCHEDULER)}
        return {group: each for group, each in found.items() if group is not None}

    @cached_property
    def model_digests(self) -> Mapping[str, str]:
        """The digest of what decides outputs, by group. A group without a scheduler or a digest has none."""
        found = {group: facts.model_digest(each) for group, each in self.schedulers.items()}
        return {group: digest for group, digest in found.items() if digest is not None}

    @cached_property
    def generations(self) -> Mapping[str, int]:
        """The highest generation that schedulers were given, by digest; 0 if it is unknown."""
        found: dict[str, int] = {}
        for group, digest in self.model_digests.items():
            found[digest] = max(facts.generation(self.schedulers[group]), found.get(digest, 0))
        return found

    @cached_property
    def wanted_version(self) -> ModelVersion:
        """The wanted model, with a generation above that of every other model which is still there.

        The generation stays while that holds, so that no scheduler restarts for it. A new one comes from the clock: it
        rises also if a resource is made again over a pool that was kept. If the clock went back meanwhile, the pool
        says so.
        """
        digest = outputs_digest(self.spec.model, self.images.worker)
        others = dict(self.generations)
        same = others.pop(digest, 0)
        in_force = self.pool.generation
        # A model that never came into force does not count.
        served = [each for each in others.values() if in_force is None or each <= in_force]
        if same >= (in_force or 0) and same > max(served, default=0):
            return ModelVersion(digest, same)
        return ModelVersion(digest, max([int(self.now_s), *(each + 1 for each in (in_force or 0, *others.values()))]))

    @cached_property
    def pool_in_use(self) -> str | None:
        """The URL of the external pool that gateways or schedulers use; None if the pool is managed, or unknown."""
        gateways = self.children.get("Deployment", names.gateway(self.name))
        users = [*self.schedulers.values()] if gateways is None else [gateways, *self.schedulers.values()]
        return next((url for each in users if (url := facts.pool_url(each)) is not None), None)

    @property
    def is_wanted_in_force(self) -> bool:
        """Compare generations: a model that was in force before and is wanted again gets a new generation."""
        return (self.pool.generation or 0) >= self.wanted_version.generation

    @property
    def is_another_known_in_force(self) -> bool:
        """True if the groups that exist tell that another model than the wanted one is in force.

        False is no proof that the wanted one is: without groups, nobody knows.
        """
        others = {each for digest, each in self.generations.items() if digest != self.wanted_version.digest}
        return self.pool.generation is not None and self.pool.generation in others


def keys_secret(deployment: OrcaDeployment) -> SecretKey | None:
    """Return where the API keys of the gateways are; None if anybody may call."""
    chosen = deployment.spec.gateway
    if chosen.open_to_all:
        return None
    return chosen.api_keys_secret or SecretKey(name=names.api_key(deployment.name), key=names.API_KEYS_FILE)
