"""Actions that the API server has refused (quota, admission, a patch that makes no sense), and when to try each again.

The next reconcile would be refused in the same way, so each refused action waits, longer each time. A changed spec ends
the wait. A certificate that is due again right after it was written waits in the same way. So does a write that
admission undoes. That is the cluster's wish, so it is an Event and no fault of the spec.

This is in memory and holds no truth: an operator that starts tries once more. A promise that did not reach the pool is
no refusal: the next reconcile sends it again.
"""

from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass

from orca.operator.domain import names
from orca.operator.domain.actions import Action, Annotate, Apply, Delete, HandOver, IssueCertificate, PromiseSlots
from orca.operator.domain.objects import label_map
from orca.operator.domain.resource import OrcaDeployment

WAIT_FIRST_S, WAIT_MAX_S = 5.0, 600.0
TRIES_AGAIN = "the operator tries again from time to time"


@dataclass(frozen=True, slots=True)
class Refusal:
    action: Action
    message: str  # of the API server, or why the promise did not reach the pool
    is_undone: bool = False  # the API server took the write, and admission or another writer changed it at once

    @property
    def is_of_pool(self) -> bool:
        """True if it concerns the promise to the pool."""
        return isinstance(self.action, PromiseSlots)

    @property
    def is_of_volume(self) -> bool:
        """True if it concerns a volume that exists: it cannot become as wanted, and serves as it is."""
        action = self.action
        if isinstance(action, Annotate):
            return action.kind == "PersistentVolumeClaim"
        return isinstance(action, Apply) and action.manifest["kind"] == "PersistentVolumeClaim" and not action.is_new

    @property
    def is_of_plan(self) -> bool:
        """True if it concerns a Job or a result of a plan for spec.slo, which nothing that serves needs."""
        action = self.action
        if isinstance(action, Annotate):
            return action.kind == "Job"
        if not isinstance(action, Apply) or action.manifest["kind"] not in ("Job", "ConfigMap"):
            return False
        return label_map(action.manifest).get(names.ROLE_LABEL) in (names.PROFILE, names.PLAN, names.FOLLOW)


@dataclass(frozen=True, slots=True)
class _Wait:
    refusal: Refusal
    seconds: float
    until_s: float


class Refusals:
    """The refusals of all resources. Reconciles of one resource never overlap; those of different ones may."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: clock: seconds; only differences count."""
        self._clock = clock
        self._waits: dict[str, dict[Hashable, _Wait]] = {}

    def begin(self, deployment: OrcaDeployment, actions: Sequence[Action]) -> None:
        """Begin a reconcile: forget refusals of actions that are not wanted any more."""
        known = self._waits.get(deployment.uid, {})
        wanted = {_key(deployment, action) for action in actions}
        self._waits[deployment.uid] = {key: wait for key, wait in known.items() if key in wanted}

    def waiting(self, deployment: OrcaDeployment, action: Action) -> Refusal | None:
        """Return the last refusal of an action that has to wait; None for an action to try now."""
        wait = self._waits.get(deployment.uid, {}).get(_key(deployment, action))
        return wait.refusal if wait is not None and self._clock() < wait.until_s else None

    def record(self, deployment: OrcaDeployment, refusal: Refusal) -> None:
        waits, key = self._waits.setdefault(deployment.uid, {}), _key(deployment, refusal.action)
        seconds = min(WAIT_MAX_S, 2 * waits[key].seconds) if key in waits else WAIT_FIRST_S
        waits[key] = _Wait(refusal, seconds, self._clock() + seconds)

    def keep(self, uids: Set[str]) -> None:
        """Forget all other resources: they are gone."""
        for uid in self._waits.keys() - uids:
            self._waits.pop(uid, None)


def _key(deployment: OrcaDeployment, action: Action) -> Hashable:
    """Return a key that is equal for actions that do the same to the same object on behalf of the same spec."""
    if isinstance(action, Apply):
        # The content does not count, since some of it comes from the clock.
        return deployment.generation, "apply", action.manifest["kind"], action.manifest["metadata"]["name"]
    if isinstance(action, Delete):
        return deployment.generation, "delete", action.kind, action.uid
    if isinstance(action, HandOver):
        return deployment.generation, "hand over", action.manifest["metadata"]["name"]
    if isinstance(action, IssueCertificate):
        return deployment.generation, "issue"
    if isinstance(action, PromiseSlots):
        return deployment.generation, "promise", action.revision, action.slots
    return deployment.generation, "annotate", action.uid
