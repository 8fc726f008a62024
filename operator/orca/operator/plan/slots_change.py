"""How an edit of scheduler.kvSlots takes effect and loses nothing: pure.

Fewer slots:
1. The pool's door is told first, and refuses from then on what needs more.
2. While a request that was accepted before needs more, the groups that can hold it stay as they are: their schedulers
   are not changed, and no group comes or goes. One that none of them could hold holds nothing up: it waits in the pool
   for more slots, or for its deadline. It is not counted either, since the pool would look at each request for that.
3. Then schedulers change as by any edit.

More slots: schedulers change first, and when all wanted groups are formed with the new number, the door is told. So it
is of a model's new length, and where the spec gives no number any more and the groups always have room for that length.

Nothing is remembered: what a group has is read from its scheduler's template, what is promised and who needs more from
the pool. Another model has a promise of its own, which its first group states.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.operator.domain import names, problems
from orca.operator.domain.observed import (
    Observed,
    PoolLook,
    condition_of,
    is_going,
    is_pod_ready,
    is_rolled_out,
    label_map,
    seconds,
    since,
)
from orca.operator.domain.resource import Deployment, Json
from orca.operator.plan.model_change import known_generations
from orca.operator.plan.rollout import Group
from orca.operator.render import group
from orca.operator.render import pool as render_pool
from orca.operator.render.group import Outputs

ANY_NUMBER = 2**31 // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS
"""More slots than a spec can give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsChange:
    """Where an edit of the slots is; all of it empty where nothing is to be done for one."""

    promise: int | None = None  # that the pool is to be told, before anything else is done
    held: frozenset[str] = frozenset()  # groups that stay as they are, since accepted requests need them
    waits_for: int = 0  # requests that have not ended and need more than the spec gives, as far as known
    largest: int = 0  # slots that the largest of them needs
    is_open: bool = False  # groups have formed with more slots, and the pool has not heard yet what they offer


def asked_slots(deployment: Deployment) -> int | None:
    """That the spec gives to one request at most. None where it leaves that to the groups' memory."""
    chosen = deployment.spec.scheduler.kv_slots
    return None if chosen is None else _in_blocks(chosen)


def slots_that_some_exceed(deployment: Deployment, observed: Observed) -> int | None:
    """What the spec gives to one request, where some group has more. None where which requests need more decides
    nothing."""
    asked = asked_slots(deployment)
    schedulers = (each for each in observed.of_kind("StatefulSet") if names.MODEL_LABEL in label_map(each))
    return asked if asked is not None and any(_slots(each) > asked for each in schedulers) else None


def _in_blocks(slots: int) -> int:
    """What a group makes of a number of slots."""
    return slots // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS


def look(
    deployment: Deployment,
    observed: Observed,
    groups: Sequence[Group],
    outputs: Outputs,
    now_s: float,
    *,
    knows_others: bool,
) -> SlotsChange:
    """
    Args:
        outputs: the wanted ones.
        now_s: seconds since 1970.
        knows_others: whether somebody may still ask for answers of another model.
    """
    asked, pool = asked_slots(deployment), observed.pool
    wanted = ANY_NUMBER if asked is None else asked
    schedulers = _schedulers(observed, outputs)
    larger = _that_hold_more(deployment, observed, schedulers, wanted, now_s)
    if pool.problem is not None:
        return SlotsChange(held=frozenset(larger))
    if _is_another_in_force(observed, schedulers, outputs, knows_others=knows_others):
        # The wanted model was in force before. Which of its requests need more is not known; they end by drainSeconds.
        left = pool.replaced_unfinished if larger else 0
        return SlotsChange(held=frozenset(larger) if left else frozenset(), waits_for=left)
    promised = pool.promised_slots or 0
    is_lowered = promised > wanted
    has_more = 0 < promised < wanted and _are_all_formed(deployment, groups, schedulers)
    offered = min(wanted, pool.offered_slots or 0) if has_more else 0
    return SlotsChange(
        promise=wanted if is_lowered else offered if offered > promised else None,
        held=frozenset(larger) if is_lowered else _that_can_hold(larger, pool),
        waits_for=pool.larger_requests,
        largest=pool.largest_request,
        is_open=asked is not None and has_more and pool.offered_slots is None,
    )


def _schedulers(observed: Observed, outputs: Outputs) -> dict[str, Json]:
    """StatefulSets of the schedulers of the wanted model that are not on their way out, by group.

    To the pool the model before may be the same one, as where an image that holds it is new: then those of both.
    """
    found = {
        label_map(each)[names.GROUP_LABEL]: each
        for each in observed.of_kind("StatefulSet")
        if names.MODEL_LABEL in label_map(each) and not is_going(each)
    }
    wanted = {name for name, each in found.items() if label_map(each)[names.MODEL_LABEL] == outputs.digest}
    if not wanted.isdisjoint(observed.pool.groups_in_force):
        wanted |= set(observed.pool.groups_in_force)
    return {name: each for name, each in found.items() if name in wanted}


def _that_hold_more(
    deployment: Deployment, observed: Observed, schedulers: Mapping[str, Json], wanted: int, now_s: float
) -> Mapping[str, int]:
    """Groups with more slots than wanted that serve, or may do so before long, and the slots of each.

    While the pool does not answer, no group forms, and how long one has not served tells nothing.
    """
    if deployment.spec.wanted_groups == 0:
        return {}
    return {
        name: _slots(each)
        for name, each in schedulers.items()
        if _slots(each) > wanted
        and (observed.pool.problem is not None or _may_serve(deployment, observed, name, each, now_s))
    }


def _slots(scheduler: Json) -> int:
    """That its group has at most: of one that takes what its memory gives nobody knows."""
    chosen = group.slots(scheduler)
    return _in_blocks(ANY_NUMBER if chosen is None else chosen)


def _that_can_hold(larger: Mapping[str, int], pool: PoolLook) -> frozenset[str]:
    """Those of the groups with which a larger request fits."""
    fits = pool.larger_requests > 0
    return frozenset(name for name, slots in larger.items() if fits and slots >= pool.smallest_larger_request)


def _may_serve(deployment: Deployment, observed: Observed, name: str, scheduler: Json, now_s: float) -> bool:
    """Not a group that has given way, can never serve as it is, or has had the time of a start and has not come up."""
    if not scheduler["spec"]["replicas"]:
        return False
    pods = observed.pods(group.SCHEDULER, group=name)
    pool_since_s, late_s = _pool_since_s(deployment, observed), now_s - deployment.spec.startup_seconds
    return not pods or any(_comes_up(pod, pool_since_s, late_s) for pod in pods)


def _pool_since_s(deployment: Deployment, observed: Observed) -> float:
    """Since when there is a pool with which a group can form. Of an external one nobody knows."""
    if deployment.spec.pool.external is not None:
        return -math.inf
    ready = (since(pod, "Ready") for pod in observed.pods(render_pool.ROLE) if is_pod_ready(pod))
    return max((seconds(at) for at in ready if at is not None), default=math.inf)


def _comes_up(pod: Json, pool_since_s: float, late_s: float) -> bool:
    """Args: late_s: what could have formed since before that has had the time of a start."""
    if is_pod_ready(pod) or is_going(pod):
        return True
    trouble = problems.of_pod(pod)
    told = condition_of(pod, "Ready").get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
    is_in_time = max(seconds(told), pool_since_s) >= late_s
    return is_in_time and (trouble is None or trouble.reason != problems.BAD_CONFIGURATION)


def _is_another_in_force(
    observed: Observed, schedulers: Mapping[str, Json], outputs: Outputs, *, knows_others: bool
) -> bool:
    """Whether the pool accepts for another model than the wanted one.

    The wanted one may be in force under a generation that no StatefulSet bears any more, as after a time without
    groups: a group of it tells, also one that cannot form before the promise is another.
    """
    pool, others = observed.pool, dict(known_generations(observed))
    if any(name in pool.groups_in_force for name in schedulers):
        return False
    if pool.generation in (None, outputs.generation, others.pop(outputs.digest, None)):
        return False
    return knows_others or pool.generation in others.values()


def _are_all_formed(deployment: Deployment, groups: Sequence[Group], schedulers: Mapping[str, Json]) -> bool:
    """Whether all groups of the wanted model are formed with the slots that the spec gives, as many as are wanted.

    One whose scheduler is still the one before is ready too, for a moment, and offers nothing any more in the next.
    """
    ready = {each.name for each in groups if each.is_ready and not each.is_leaving}
    formed = {
        name
        for name, each in schedulers.items()
        if name in ready and is_rolled_out(each) and group.slots(each) == deployment.spec.scheduler.kv_slots
    }
    return len(formed) == len(schedulers) >= max(1, deployment.spec.wanted_groups)
