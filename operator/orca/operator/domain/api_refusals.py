"""What the API server has refused (quota, admission, a patch that makes no sense), and when it is asked again.

It would say the same with the next look, so each refused action waits, longer each time. It is asked at once when the
spec is another. So does a certificate that is to be drawn again right after it was written. This is in memory and holds
no truth: an operator that starts asks once more. A pool that was not told something is told with the next look.
"""

from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass

from orca.operator.domain.actions import Action, Apply, Delete, Issue, Promise
from orca.operator.domain.resource import Deployment

WAIT_FIRST_S, WAIT_MAX_S = 5.0, 600.0


@dataclass(frozen=True, slots=True)
class Refusal:
    action: Action
    message: str  # the API server's; why a pool was not told

    @property
    def is_of_pool(self) -> bool:
        """Whether it concerns what the pool is told."""
        return isinstance(self.action, Promise)

    @property
    def is_of_volume(self) -> bool:
        """Whether it concerns a volume that is there: it cannot become as wanted, and serves as it is."""
        action = self.action
        return isinstance(action, Apply) and action.manifest["kind"] == "PersistentVolumeClaim" and not action.is_new


@dataclass(frozen=True, slots=True)
class _Wait:
    refusal: Refusal
    seconds: float
    until_s: float


class Refusals:
    """Of all resources. Looks at one resource never overlap; those at different ones may."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: clock: seconds; only differences count."""
        self._clock = clock
        self._waits: dict[str, dict[Hashable, _Wait]] = {}

    def begin(self, deployment: Deployment, actions: Sequence[Action]) -> None:
        """A look: of what was refused, only what is still wanted is remembered."""
        known = self._waits.get(deployment.uid, {})
        wanted = {_key(deployment, action) for action in actions}
        self._waits[deployment.uid] = {key: wait for key, wait in known.items() if key in wanted}

    def waiting(self, deployment: Deployment, action: Action) -> Refusal | None:
        """The last word on an action that is not to be tried yet; None for one that is."""
        wait = self._waits.get(deployment.uid, {}).get(_key(deployment, action))
        return wait.refusal if wait is not None and self._clock() < wait.until_s else None

    def note(self, deployment: Deployment, refusal: Refusal) -> None:
        waits, key = self._waits.setdefault(deployment.uid, {}), _key(deployment, refusal.action)
        seconds = min(WAIT_MAX_S, 2 * waits[key].seconds) if key in waits else WAIT_FIRST_S
        waits[key] = _Wait(refusal, seconds, self._clock() + seconds)

    def keep(self, uids: Set[str]) -> None:
        """All other resources are gone."""
        for uid in self._waits.keys() - uids:
            self._waits.pop(uid, None)


def _key(deployment: Deployment, action: Action) -> Hashable:
    """Equal for calls to do the same to the same object on behalf of the same spec."""
    if isinstance(action, Apply):
        # Not by its content, of which some comes from the clock.
        return deployment.generation, "apply", action.manifest["kind"], action.manifest["metadata"]["name"]
    if isinstance(action, Delete):
        return deployment.generation, "delete", action.kind, action.uid
    if isinstance(action, Issue):
        return deployment.generation, "issue"
    if isinstance(action, Promise):
        return deployment.generation, "promise", action.revision, action.slots
    return deployment.generation, "nudge", action.uid
