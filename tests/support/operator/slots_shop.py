"""A shop whose groups get other slots, as plain data: they form one by one, and its pool lets requests in and out."""

from typing import Any

from orca.operator.domain import facts, names
from orca.operator.domain.objects import is_pod_ready
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.plan.plan import ReconcilePlan
from orca.operator.plan.slots_change import asked_slots, slots_that_some_exceed
from support.operator.planned_shop import PlannedShop

MEMORY = 4096
"""Slots of a group that takes all that it has."""


class SlotsShop(PlannedShop):
    """A deployment that serves, and its pool: what is promised, and what has not ended."""

    def __init__(self, seed: int = 0, *, length: int | None = None, **spec: Any) -> None:
        """Args: length: of the model, in slots; None for one that is longer than any memory."""
        super().__init__(seed, **spec)
        self.length = length
        self.is_one_revision = False  # whatever the spec calls its models, the pool knows one
        self.generation = 0  # of the model in force
        self.in_force: str | None = None  # digest of that model
        self.promised: int | None = None
        self.needs: list[int] = []  # of the requests that have not ended, in slots
        self.settle()

    def slots(self) -> list[int]:
        """Return the slots of each group that exists."""
        return [_slots(each) for each in self.schedulers()]

    def formed(self) -> list[int]:
        """Slots of each group that serves."""
        found = (self._pod(each) for each in self.schedulers())
        return [_slots_of_pod(pod) for pod in found if pod is not None and is_pod_ready(pod)]

    def _offered(self) -> int | None:
        """Return the slots that every serving group offers, now and whenever it forms again."""
        slots = self.formed()
        is_lasting = self.length is not None or all(facts.slots(each) is not None for each in self.schedulers())
        return min([*slots, self.length or MEMORY]) if slots and is_lasting else None

    def _groups_in_force(self) -> tuple[str, ...]:
        living = [each["metadata"]["labels"] for each in self.schedulers() if self._pod(each) is not None]
        in_force = {each[names.MODEL_LABEL] for each in living} if self.is_one_revision else {self.in_force}
        return tuple(each[names.GROUP_LABEL] for each in living if each[names.MODEL_LABEL] in in_force)

    def reconcile(self) -> ReconcilePlan:
        asked = slots_that_some_exceed(self.cluster.observed)
        larger = [need for need in self.needs if asked is not None and need > asked]
        self.cluster.pool = PoolStatus(
            problem=self.pool_problem,
            revision=None if self.promised is None else "r1",
            generation=self.generation or None,
            promised_slots=self.promised,
            groups_in_force=self._groups_in_force(),
            offered_slots=self._offered(),
            larger_requests=len(larger),
            smallest_larger_request=min(larger, default=0),
            largest_request=max(larger, default=0),
        )
        decided = self.cluster.reconcile()
        if self.pool_problem is None:
            self.promised = self.cluster.pool.promised_slots
        self._start_all_but_schedulers()
        self.lost += sum(need > max(self.slots(), default=0) for need in self.needs)
        return decided

    def move(self) -> None:
        """Something happens: most often a call comes, or one ends."""
        getattr(self, self.chance.choice(["call", "call", "end", "end", "end", "restart", "form"]))()

    def call(self, need: int | None = None) -> None:
        """Let in, if it fits into what is promised."""
        need = self.chance.choice((100, 900, 2000, 4000)) if need is None else need
        if need <= (self.promised or 0):
            self.needs.append(need)

    def end(self) -> None:
        """One ends that a group runs."""
        running = [need for need in self.needs if need <= max(self.formed(), default=0)]
        if running:
            self.needs.remove(self.chance.choice(running))

    def restart(self) -> None:
        """Restart a scheduler whose StatefulSet has changed, or any other."""
        there = [each for each in self.schedulers() if self._pod(each) is not None]
        changed = [each for each in there if self._pod(each)["spec"]["containers"] != _containers(each)]  # type: ignore[index]
        for each in (changed or there)[:1]:
            self._add_pod(each)

    def form(self) -> None:
        """A group forms, unless it has fewer slots than promised."""
        for each in self.schedulers():
            pod = self._pod(each)
            if pod is None:
                self._add_pod(each)
            elif not is_pod_ready(pod) and _slots_of_pod(pod) >= (self.promised or 0):
                if self.promised is None:
                    self.promised = _slots_of_pod(pod)
                self.generation = max(self.generation, int(each["metadata"]["labels"][names.GENERATION_LABEL]))
                self.in_force = each["metadata"]["labels"][names.MODEL_LABEL]
                pod["status"]["conditions"][0]["status"] = "True"
                counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), 1)
                each["status"] = {"observedGeneration": each["metadata"]["generation"], **counts}
                return

    def settle(self) -> None:
        """Let parts and operator act in random order until nothing is left to do."""
        for _ in range(1000):
            self.move()
            if not self.reconcile().actions and self.is_over():
                return
        raise AssertionError(f"it does not come to an end: {self.promised} {self.needs} {self.slots()}")

    def is_over(self) -> bool:
        wanted = asked_slots(self.cluster.deployment) or MEMORY
        pods = [self._pod(each) for each in self.schedulers()]
        is_formed = all(pod is not None and is_pod_ready(pod) for pod in pods)
        return is_formed and self.formed() == [wanted] * self.cluster.deployment.spec.wanted_groups

    def _pod(self, scheduler: Json) -> Json | None:
        return self.cluster.objects.get(("Pod", f"{scheduler['metadata']['name']}-0"))

    def _add_pod(self, scheduler: Json) -> None:
        name = f"{scheduler['metadata']['name']}-0"
        template = scheduler["spec"]["template"]
        self.cluster.add_pod(name, template["metadata"]["labels"], is_ready=False)
        self.cluster.objects["Pod", name]["spec"] |= template["spec"]

    def _start_all_but_schedulers(self) -> None:
        kept = {
            key: each for key, each in self.cluster.objects.items() if key[1].removesuffix("-0").endswith("scheduler")
        }
        for key in kept:
            del self.cluster.objects[key]
        self.cluster.start()
        self.cluster.objects |= kept


def _slots(scheduler: Json) -> int:
    return (facts.slots(scheduler) or MEMORY) // 16 * 16


def _slots_of_pod(pod: Json) -> int:
    """Return the slots with which the pod's process has started."""
    args = pod["spec"]["containers"][0]["args"]
    return (int(args[args.index("--slots") + 1]) if "--slots" in args else MEMORY) // 16 * 16


def _containers(scheduler: Json) -> Json:
    found: Json = scheduler["spec"]["template"]["spec"]["containers"]
    return found
