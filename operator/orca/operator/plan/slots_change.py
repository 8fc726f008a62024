"""An edit of scheduler.kvSlots, and how it takes effect without losing a request: pure.

Fewer slots:
1. The pool gets the new bound first, and from then on refuses requests that need more.
2. While an accepted request needs more, the groups that can hold it stay as they are: their schedulers do not change,
   and no group comes or goes. A request that no group could hold holds nothing up: it waits in the pool for more slots,
   or for its deadline. It is not counted either, since the pool would have to check every request for that.
3. Then schedulers change as with any edit.

More slots: schedulers change first. When all wanted groups have formed with the new number, the pool gets the new
bound. The same holds for a model's new length, and for a spec without a number if the groups always have room for that
length.

Nothing is remembered: the schedulers' StatefulSets tell how many slots a group has, and the pool what is promised and
which requests need more. Another model has a promise of its own, which its first group makes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.operator.domain import facts, names, problems
from orca.operator.domain.objects import condition, is_going, is_pod_ready, is_rolled_out, seconds, since
from orca.operator.domain.observation import Observation, PoolStatus
from orca.operator.domain.resource import Json, OrcaDeployment

ANY_NUMBER = 2**31 // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS
"""More slots than a spec can give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsChange:
    """The state of an edit of the slots. All fields are empty if there is nothing to do for one."""

    promise: int | None = None  # to set in the pool before anything else is done
    held: frozenset[str] = frozenset()  # groups that stay as they are, since accepted requests need them
    waits_for: int = 0  # requests that have not ended and need more than the spec gives, as far as known
    largest: int = 0  # slots that the largest of them needs
    is_open: bool = False  # groups have formed with more slots, and the pool does not know yet what they offer


def asked_slots(deployment: OrcaDeployment) -> int | None:
    """Return how many slots the spec gives to one request; None if the memory of the groups decides."""
    chosen = deployment.spec.scheduler.kv_slots
    return None if chosen is None else _in_blocks(chosen)


def slots_that_some_exceed(observation: Observation) -> int | None:
    """Return how many slots the spec gives to one request if some group has more.

    None means that nothing depends on which requests need more.
    """
    asked = asked_slots(observation.deployment)
    has_more = asked is not None and any(_slots(each) > asked for each in observation.schedulers.values())
    return asked if has_more else None


def _in_blocks(slots: int) -> int:
    """Round a number of slots down to whole blocks, as a group does."""
    return slots // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS


def plan_slots_change(observation: Observation, *, has_older_models: bool) -> SlotsChange:
    """Decide what to promise, and which groups must stay.

    Args: has_older_models: whether somebody may still ask for answers of another model.
    """
    asked, pool = asked_slots(observation.deployment), observation.pool
    wanted = ANY_NUMBER if asked is None else asked
    schedulers = _schedulers_of_wanted_model(observation)
    larger = _groups_with_more(observation, schedulers, wanted)
    if pool.problem is not None:
        return SlotsChange(held=frozenset(larger))
    if _is_another_in_force(observation, schedulers, has_older_models=has_older_models):
        # The wanted model was in force earlier. Which of its requests need more is unknown; they end by drainSeconds.
        left = pool.replaced_unfinished if larger else 0
        return SlotsChange(held=frozenset(larger) if left else frozenset(), waits_for=left)
    promised = pool.promised_slots or 0
    is_lowered = promised > wanted
    has_more = 0 < promised < wanted and _are_all_formed(observation, schedulers)
    offered = min(wanted, pool.offered_slots or 0) if has_more else 0
    return SlotsChange(
        promise=wanted if is_lowered else offered if offered > promised else None,
        held=frozenset(larger) if is_lowered else _groups_that_can_hold(larger, pool),
        waits_for=pool.larger_requests,
        largest=pool.largest_request,
        is_open=asked is not None and has_more and pool.offered_slots is None,
    )


def _schedulers_of_wanted_model(observation: Observation) -> dict[str, Json]:
    """Return the StatefulSets of the wanted model's schedulers that are not being deleted, by group.

    The pool may take the older model for the same one, for example if only the image that holds it is new. Then the
    schedulers of both count.
    """
    found = {name: each for name, each in observation.schedulers.items() if not is_going(each)}
    digest = observation.wanted_version.digest
    wanted = {name for name, each in found.items() if facts.model_digest(each) == digest}
    if not wanted.isdisjoint(observation.pool.groups_in_force):
        wanted |= set(observation.pool.groups_in_force)
    return {name: each for name, each in found.items() if name in wanted}


def _groups_with_more(observation: Observation, schedulers: Mapping[str, Json], wanted: int) -> Mapping[str, int]:
    """Return the slots of groups that have more than wanted and serve, or may soon serve.

    While the pool does not answer, no group forms, so the time for which a group has not served does not count.
    """
    if observation.spec.wanted_groups == 0:
        return {}
    return {
        name: _slots(each)
        for name, each in schedulers.items()
        if _slots(each) > wanted and (observation.pool.problem is not None or _may_serve(observation, name, each))
    }


def _slots(scheduler: Json) -> int:
    """Return the most slots that a group can have. For one that takes what its memory holds, nobody knows."""
    chosen = facts.slots(scheduler)
    return _in_blocks(ANY_NUMBER if chosen is None else chosen)


def _groups_that_can_hold(larger: Mapping[str, int], pool: PoolStatus) -> frozenset[str]:
    """Return the groups that have room for one of the larger requests."""
    has_requests = pool.larger_requests > 0
    return frozenset(name for name, slots in larger.items() if has_requests and slots >= pool.smallest_larger_request)


def _may_serve(observation: Observation, name: str, scheduler: Json) -> bool:
    """Return whether a group serves or may soon serve.

    A group does not count if it has given way, can never serve as it is, or has not come up in its startup time.
    """
    if not scheduler["spec"]["replicas"]:
        return False
    pods = observation.children.pods(names.SCHEDULER, group=name)
    late_s = observation.now_s - observation.spec.startup_seconds
    pool_since_s = _pool_since_s(observation)
    return not pods or any(_comes_up(pod, pool_since_s, late_s) for pod in pods)


def _pool_since_s(observation: Observation) -> float:
    """Return since when there is a pool with which a group can form. For an external pool, nobody knows."""
    if observation.spec.pool.external is not None:
        return -math.inf
    ready = (since(pod, "Ready") for pod in observation.children.pods(names.POOL) if is_pod_ready(pod))
    return max((seconds(timestamp) for timestamp in ready if timestamp is not None), default=math.inf)


def _comes_up(pod: Json, pool_since_s: float, late_s: float) -> bool:
    """Args: late_s: a pod that could have formed its group since before this moment has had its startup time."""
    if is_pod_ready(pod) or is_going(pod):
        return True
    problem = problems.of_pod(pod)
    changed = condition(pod, "Ready").get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
    is_in_time = max(seconds(changed), pool_since_s) >= late_s
    return is_in_time and (problem is None or problem.reason != problems.BAD_CONFIGURATION)


def _is_another_in_force(observation: Observation, schedulers: Mapping[str, Json], *, has_older_models: bool) -> bool:
    """Return whether the pool accepts requests for another model than the wanted one.

    The wanted model may be in force under a generation that no StatefulSet has any more, for example after a time
    without groups. Then a group of it shows that, even one that cannot form before the promise changes.
    """
    pool, version, others = observation.pool, observation.wanted_version, dict(observation.generations)
    if any(name in pool.groups_in_force for name in schedulers):
        return False
    if pool.generation in (None, version.generation, others.pop(version.digest, None)):
        return False
    return has_older_models or pool.generation in others.values()


def _are_all_formed(observation: Observation, schedulers: Mapping[str, Json]) -> bool:
    """Return whether as many groups as wanted have formed with the slots that the spec gives.

    For a moment after a change, the old scheduler pod is still ready, but it soon offers nothing any more.
    """
    ready = {each.name for each in observation.groups if each.is_ready and not each.is_leaving}
    asked = observation.spec.scheduler.kv_slots
    formed = {
        name
        for name, each in schedulers.items()
        if name in ready and is_rolled_out(each) and facts.slots(each) == asked
    }
    return len(formed) == len(schedulers) >= max(1, observation.spec.wanted_groups)
