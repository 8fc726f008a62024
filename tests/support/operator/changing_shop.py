"""A shop whose model changes, as plain data: a cluster whose parts come up by and by, and what its pool would hold."""

from collections import Counter
from typing import Any

from orca.operator.domain import facts, names
from orca.operator.domain.model_references import ModelReference
from orca.operator.domain.objects import is_pod_ready
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.plan.plan import ReconcilePlan
from orca.operator.render import model
from support.operator.clusters import BORN
from support.operator.planned_shop import PlannedShop


class ChangingShop(PlannedShop):
    """A deployment that serves a model, and its pool: who is in force, and what of which model waits or is kept."""

    def __init__(self, seed: int = 0, **spec: Any) -> None:
        super().__init__(seed, **spec)
        self.in_force = "", 0  # digest and generation
        self.requests: Counter[str] = Counter()  # by digest
        self.recorded: set[str] = set()
        self.ending: dict[str, Json] = {}  # labels of schedulers that were told to end, and have not yet
        self.late_share = 0.5  # of them form their group before they end
        self.settle()

    def digests(self, *, formed: bool = False) -> list[str]:
        """Return the model digests of the groups that exist, or only of those that serve."""
        pods = self.cluster.objects
        return [
            each["metadata"]["labels"][names.MODEL_LABEL]
            for each in self.schedulers()
            if not formed or is_pod_ready(pods.get(("Pod", f"{each['metadata']['name']}-0"), {"metadata": {}}))
        ]

    def known(self) -> list[list[ModelReference]]:
        """The models of each gateway that serves."""
        pods = [
            each for (kind, name), each in self.cluster.objects.items() if (kind, name[:12]) == ("Pod", "shop-gateway")
        ]
        return [facts.models(pod["metadata"]) for pod in pods]

    def reconcile(self) -> ReconcilePlan:
        digest, generation = self.in_force
        old = Counter({each: count for each, count in self.requests.items() if each != digest})
        self.cluster.pool = PoolStatus(
            problem=self.pool_problem,
            generation=generation or None,
            replaced_unfinished=old.total(),
            replaced_revisions=tuple(sorted(self.recorded - {digest})),
        )
        before = {each["metadata"]["name"]: each for each in self.schedulers() if each["spec"]["replicas"]}
        decided = self.cluster.reconcile()
        self._let_linger(before)
        self._start("shop-pool")
        for job in self.cluster.names("Job"):
            self.cluster.end_job(job, "Complete")
        self.lost += sum(count for each, count in self.requests.items() if each not in self.digests())
        return decided

    def move(self) -> None:
        """Something happens: most often a call comes, or one ends."""
        kind = self.chance.choice(["call", "call", "end", "end", "end", "gateways", "group", "retention", "linger"])
        getattr(self, kind)()

    def call(self) -> None:
        if self.in_force[0]:
            self.requests[self.in_force[0]] += 1
            self.recorded.add(self.in_force[0])

    def end(self) -> None:
        running = [digest for digest in self.digests(formed=True) if self.requests[digest]]
        if running:
            self.requests[self.chance.choice(running)] -= 1
            self.requests += Counter()

    def retention(self) -> None:
        self.recorded = {each for each in self.recorded if self.requests[each]}

    def gateways(self) -> None:
        """All of them are replaced."""
        self._start("shop-gateway")

    def group(self) -> None:
        """One more group forms, or forms again with a changed scheduler; the newest of them is in force."""
        waiting = [each for each in self.schedulers() if not self.is_started(each) and self._has_place(each)]
        for each in waiting[:1]:
            name = each["metadata"]["name"]
            assert self.is_known_everywhere(name.removesuffix("-scheduler")), "a group came before gateways knew it"
            self._start(name.removesuffix("-scheduler"))
            self._start(name)
            self._form(each["metadata"]["labels"])

    def linger(self) -> None:
        """A scheduler ends at last; it may have formed its group before, for a SIGTERM is lost on one that starts."""
        if not self.ending:
            return
        name = self.chance.choice(sorted(self.ending))
        labels = self.ending.pop(name)
        if self.chance.random() < self.late_share:
            self._form(labels)
        del self.cluster.objects["Pod", f"{name}-0"]
        there = self.cluster.objects.get(("StatefulSet", name))
        if there is not None:
            there["status"] = {"observedGeneration": there["metadata"]["generation"]}

    def _form(self, labels: Json) -> None:
        formed = labels[names.MODEL_LABEL], int(labels[names.GENERATION_LABEL])
        self.in_force = max(self.in_force, formed, key=lambda one: one[1])

    def _let_linger(self, before: dict[str, Json]) -> None:
        """Args: before: the schedulers that were there, by name."""
        left = {each["metadata"]["name"] for each in self.schedulers() if each["spec"]["replicas"]}
        for name in before.keys() - left:
            self.ending[name] = before[name]["spec"]["template"]["metadata"]["labels"]
            self.cluster.add_pod(f"{name}-0", self.ending[name])
            self.cluster.objects["Pod", f"{name}-0"]["metadata"]["deletionTimestamp"] = BORN

    def _has_place(self, scheduler: Json) -> bool:
        return scheduler["spec"]["replicas"] > 0 and scheduler["metadata"]["name"] not in self.ending

    def is_started(self, scheduler: Json) -> bool:
        """Return whether the scheduler's pod exists and has the newest template."""
        pod = self.cluster.objects.get(("Pod", f"{scheduler['metadata']['name']}-0"), {"spec": {}})
        return pod["spec"].get("containers") == scheduler["spec"]["template"]["spec"]["containers"]

    def is_known_everywhere(self, group: str) -> bool:
        [own] = facts.models(self.cluster.objects["StatefulSet", group]["metadata"])
        return all(own.identity in {each.identity for each in of_one} for of_one in self.known())

    def _start(self, controller: str) -> None:
        rest = {key: each for key, each in self.cluster.objects.items() if key[0] != "Pod" and key[1] != controller}
        for key in rest:
            del self.cluster.objects[key]
        self.cluster.start()
        self.cluster.objects |= rest

    def settle(self) -> None:
        """Let parts and operator act in random order until nothing is left to do."""
        for _ in range(1000):
            self.move()
            decided = self.reconcile()
            if not decided.actions and self.is_over(decided):
                return
        raise AssertionError(f"it does not come to an end: {self.in_force} {self.requests} {self.digests()}")

    def is_over(self, decided: ReconcilePlan) -> bool:
        is_rolled = all(each.revision == decided.revision and each.is_ready for each in decided.groups)
        has_groups = len(decided.groups) == self.cluster.deployment.spec.replicas
        wanted = [model.wanted_model(self.cluster.deployment)]
        is_done = all(digest == self.in_force[0] for digest in +self.requests)
        return (
            is_done and is_rolled and has_groups and bool(self.known()) and all(each == wanted for each in self.known())
        )
