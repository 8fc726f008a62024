"""How the model of a running deployment is replaced without losing a request or reading one by the wrong words: pure.

1. The gateways are given the wanted model beside those before it. Until all of them have it, no group of it comes.
2. Its groups come beside the old ones (rollout.py). The first that is formed puts its generation in force in the pool:
   new requests are the wanted model's, and those before run on in groups of theirs, of which one stays for each model.
   What has not ended drainSeconds later the pool ends as `model_replaced`.
3. When nobody can ask for an answer of the models before any more, the gateways lose them.

A model that is given up before it came into force may come into force for as long as a scheduler of it runs, also one
that is told to end: the pool is asked again when none does, and a group of it comes back for what was accepted.

With no room for groups of both models (maxSurge 0 with one replica, no free node) the old one goes first, and what it
leaves ends as `model_replaced`: the status says so. Nothing is remembered: what gateways have is read from the cluster,
what is in force and what still runs from the pool.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orca.operator.domain import names
from orca.operator.domain.observed import (
    Observed,
    has_ended,
    is_going,
    is_pod_ready,
    is_rolled_out,
    label_map,
    seconds,
    since,
)
from orca.operator.domain.resource import GATEWAY_LEAVE_S, Deployment, Json
from orca.operator.plan.rollout import Group, Step
from orca.operator.render import current_model, gateway, group
from orca.operator.render.current_model import KnownModel
from orca.operator.render.group import Outputs

MARGIN_S = 60.0
"""The pool's time runs slower than the clock, never faster: so much later than drainSeconds it must be over too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Where a change of the model is; all of it empty where nothing but the wanted one is about."""

    others: tuple[KnownModel, ...] = ()  # that gateways are given beside the wanted model
    is_telling: bool = False  # not all of them have it yet: no group of it comes
    kept: frozenset[str] = frozenset()  # old groups that stay, though the rollout may want them gone
    is_draining: bool = False  # all that those have left to do is the rest of their requests
    has_no_room: bool = False  # for both models: the one before goes first


def look(
    deployment: Deployment,
    observed: Observed,
    groups: Sequence[Group],
    next_step: Step,
    outputs: Outputs,
    now_s: float,
) -> Change:
    """
    Args:
        next_step: of the rollout, by its own rules.
        outputs: the wanted ones.
        now_s: seconds since 1970.
    """
    others = _others(deployment, observed, outputs)
    needed = _needed(deployment, observed, groups, outputs, now_s)
    is_in_the_way = _is_in_the_way(observed, groups, needed, next_step, outputs)
    kept = frozenset() if is_in_the_way else frozenset(needed.values())
    return Change(
        others=others,
        is_telling=_has_to_tell(deployment, observed, others, outputs, now_s),
        kept=kept,
        is_draining=bool(kept) and _is_in_force(observed, outputs),
        has_no_room=is_in_the_way or _is_giving_way(observed, groups, outputs),
    )


def _others(deployment: Deployment, observed: Observed, outputs: Outputs) -> tuple[KnownModel, ...]:
    wanted, pool = current_model.wanted(deployment), observed.pool
    of_groups = list(_of_groups(observed))
    if pool.problem is None:
        has_groups = any(each.identity != wanted.identity for each in of_groups)
        is_over = _is_in_force(observed, outputs) and not pool.replaced_revisions and not has_groups
        # A pool that never had a model in force has no request that anybody could ask for. The model before may be one
        # that does not exist, then, and its volume would keep gateways from starting.
        if is_over or pool.generation is None:
            return ()
    # A name that gateways have for it before none.
    found = {each.identity: each for each in (*of_groups, *_of_gateways(deployment, observed))}
    found.pop(wanted.identity, None)
    return tuple(sorted(found.values(), key=KnownModel.to_text))


def _of_groups(observed: Observed) -> Iterable[KnownModel]:
    for spec in observed.pod_specs(group.STAGE):
        yield from current_model.read_back(spec, group.STAGE)


def _of_gateways(deployment: Deployment, observed: Observed) -> Iterable[KnownModel]:
    """Models with which a gateway has come up, those of the template last.

    Of a template with which none has come up yet, the gateway's own model may not exist, unless groups have it.
    """
    for pod in filter(is_pod_ready, observed.pods(gateway.ROLE)):
        yield from current_model.read_back(pod["spec"], gateway.ROLE)
    there = observed.get("Deployment", names.gateway(deployment.name))
    if there is None:
        return
    found = current_model.read_back(there["spec"]["template"]["spec"], gateway.ROLE)
    of_groups = {each.identity for each in _of_groups(observed)}
    is_proven = is_rolled_out(there) or observed.pool.problem is not None
    for number, each in enumerate(found):
        if number > 0 or is_proven or each.identity in of_groups:
            yield each


def _has_to_tell(
    deployment: Deployment, observed: Observed, others: Sequence[KnownModel], outputs: Outputs, now_s: float
) -> bool:
    # With no other there is nothing to lose, and where there is a group of it already, gateways had it before.
    if not others or outputs.digest in known_generations(observed):
        return False
    there = observed.get("Deployment", names.gateway(deployment.name))
    if there is None or not is_rolled_out(there):
        return True
    serving = (pod for pod in observed.pods(gateway.ROLE) if _takes_calls(pod, now_s))
    pods = [there["spec"]["template"], *serving]
    wanted = current_model.wanted(deployment).identity
    return any(
        wanted not in {each.identity for each in current_model.read_back(pod["spec"], gateway.ROLE)} for pod in pods
    )


def _takes_calls(pod: Json, now_s: float) -> bool:
    """Whether new calls may still come to a gateway: one that ends serves on until nobody sends it any."""
    if has_ended(pod):
        return False
    if not is_going(pod):
        return True
    metadata = pod["metadata"]
    told_s = seconds(metadata["deletionTimestamp"]) - metadata.get("deletionGracePeriodSeconds", 0)
    # Timestamps are whole seconds.
    return now_s < told_s + GATEWAY_LEAVE_S + 1


def _needed(
    deployment: Deployment, observed: Observed, groups: Sequence[Group], outputs: Outputs, now_s: float
) -> Mapping[str, str]:
    """One group for each old model that has requests, by the model's digest."""
    if deployment.spec.wanted_groups == 0 or _is_overdue(deployment, observed, outputs, now_s):
        return {}
    digests, generations = _digests(observed), known_generations(observed)
    needed = {digest for digest in generations if _has_requests(observed, digest, outputs)}
    old = [each for each in groups if not each.is_leaving and digests.get(each.name) in needed]
    # Last those that serve, of these the one with most room for a request, and the oldest name.
    by_use = sorted(old, key=lambda each: (each.is_ready, _room(observed, each), -each.ordinal))
    return {digests[each.name]: each.name for each in by_use}


def _room(observed: Observed, of: Group) -> float:
    """Slots of a group, which differ between groups of a model while an edit of them is on its way."""
    chosen = group.slots(observed.children["StatefulSet", names.scheduler(of.name)])
    return math.inf if chosen is None else chosen


def _is_in_the_way(
    observed: Observed, groups: Sequence[Group], needed: Mapping[str, str], next_step: Step, outputs: Outputs
) -> bool:
    """Whether the only way on is without what is needed: there is no room for both models."""
    digests, generations = _digests(observed), known_generations(observed)
    present = [each for each in groups if not each.is_leaving]
    coming = [each for each in present if digests.get(each.name) == outputs.digest]
    is_coming = next_step.create is not None or any(each.is_placed or not each.is_overdue for each in coming)
    # One that only drains makes room by itself.
    makes_room = any(generations[digest] < (observed.pool.generation or 0) for digest in needed)
    old = {each.name for each in groups} - {each.name for each in coming}
    return bool(needed) and not is_coming and not makes_room and old <= set(needed.values())


def _is_giving_way(observed: Observed, groups: Sequence[Group], outputs: Outputs) -> bool:
    """Whether the last groups of the model in force are on their way out while the wanted one is not in force."""
    digests, generations = _digests(observed), known_generations(observed)
    is_gone = observed.pool.generation is not None and observed.pool.generation not in generations.values()
    return is_gone and not _is_in_force(observed, outputs) and any(each.name not in digests for each in groups)


def _has_requests(observed: Observed, digest: str, outputs: Outputs) -> bool:
    """Whether groups of an old model have something to do: new requests, or the last of those before."""
    pool, generation = observed.pool, known_generations(observed)[digest]
    if digest == outputs.digest:
        return False
    # A generation above the one in force may be of a model that was in force before, by a lower one.
    return pool.problem is not None or generation == pool.generation or pool.replaced_unfinished > 0


def _is_overdue(deployment: Deployment, observed: Observed, outputs: Outputs, now_s: float) -> bool:
    """Whether the pool must have ended all requests of models before, even if it does not say so."""
    newest = observed.pods(group.SCHEDULER, generation=str(outputs.generation))
    ready = [since(pod, "Ready") for pod in newest if is_pod_ready(pod)]
    if not ready or not (observed.pool.problem is not None or _is_in_force(observed, outputs)):
        return False
    formed_s = min(seconds(at) for at in ready if at is not None)
    return now_s - formed_s > deployment.spec.drain_seconds + MARGIN_S


def _is_in_force(observed: Observed, outputs: Outputs) -> bool:
    """By generations: one that was in force before and is wanted again has a new one, and comes into force anew."""
    return (observed.pool.generation or 0) >= outputs.generation


def may_come_into_force(observed: Observed, of: Json, outputs: Outputs) -> bool:
    """Whether the pool would take the model of a scheduler for the newest, though another one is wanted.

    Args: of: the scheduler's StatefulSet.
    """
    digest = label_map(of)[names.MODEL_LABEL]
    return digest != outputs.digest and known_generations(observed)[digest] > (observed.pool.generation or 0)


def _digests(observed: Observed) -> Mapping[str, str]:
    """Of the outputs of each group; none of a group whose scheduler is gone."""
    found = map(label_map, observed.of_kind("StatefulSet"))
    return {each[names.GROUP_LABEL]: each[names.MODEL_LABEL] for each in found if names.MODEL_LABEL in each}


def known_generations(observed: Observed) -> Mapping[str, int]:
    """The highest that schedulers of each outputs digest were given."""
    found: dict[str, int] = {}
    for labels in map(label_map, observed.of_kind("StatefulSet")):
        if names.MODEL_LABEL in labels:
            digest, generation = labels[names.MODEL_LABEL], int(labels[names.GENERATION_LABEL])
            found[digest] = max(generation, found.get(digest, 0))
    return found
