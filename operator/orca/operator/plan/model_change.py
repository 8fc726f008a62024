"""The change of a running deployment's model, without losing a request or serving one with the wrong model: pure.

1. The gateways get the wanted model beside the older ones. Until all gateways have it, no group of it comes.
2. Its groups come beside the old ones (rollout.py). The first one that forms puts its generation in force in the pool:
   new requests are for the wanted model. Older requests run on in groups of theirs; one such group stays for each older
   model. drainSeconds later the pool ends what is left as `model_replaced`.
3. When nobody can ask for an answer of the older models any more, the gateways lose them.

A model may be given up before it came into force. While a scheduler of it runs, even one that is ending, the
model may still come into force. When none runs any more, the pool is polled again: if the model came into force, a
group of it comes back for the requests that were accepted.

If there is no room for groups of both models (maxSurge 0 with one replica, no free node), the old one goes first. What
it leaves ends as `model_replaced`, and the status says so. Nothing is remembered: the cluster tells which models
gateways have, and the pool which model is in force and what still runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from orca.operator.domain import facts, names
from orca.operator.domain.groups import Group
from orca.operator.domain.model_references import ModelReference
from orca.operator.domain.objects import has_ended, is_going, is_pod_ready, is_rolled_out, seconds, since
from orca.operator.domain.observation import Observation
from orca.operator.domain.resource import GATEWAY_LEAVE_S, Json
from orca.operator.plan.rollout import RolloutMove
from orca.operator.render import model

MARGIN_S = 60.0
"""The pool's time may run slower than the clock, never faster. So drainSeconds are over there too this much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """The state of a change of the model. All fields are empty while there is no model but the wanted one."""

    older: tuple[ModelReference, ...] = ()  # models that gateways get beside the wanted one
    waits_for_gateways: bool = False  # not all gateways have the wanted model yet: no group of it comes
    kept: frozenset[str] = frozenset()  # old groups that stay, though the rollout may want them gone
    is_draining: bool = False  # the kept groups only have to finish their requests
    has_no_room: bool = False  # for both models: the old one goes first


def plan_model_change(observation: Observation, move: RolloutMove) -> ModelChange:
    """Decide how far a change of the model is, and what it holds back. Args: move: of the rollout, by its own rules."""
    older = _older_models(observation)
    needed = _needed_groups(observation)
    is_in_the_way = _is_in_the_way(observation, needed, move)
    kept = frozenset() if is_in_the_way else frozenset(needed.values())
    return ModelChange(
        older=older,
        waits_for_gateways=_must_wait_for_gateways(observation, older),
        kept=kept,
        is_draining=bool(kept) and observation.is_wanted_in_force,
        has_no_room=is_in_the_way or _is_giving_way(observation),
    )


def _older_models(observation: Observation) -> tuple[ModelReference, ...]:
    wanted, pool = model.wanted_model(observation.deployment), observation.pool
    of_groups = _models_of_groups(observation)
    if pool.problem is None:
        # Also a group whose model is unknown.
        has_groups = any([each.identity for each in models] != [wanted.identity] for models in of_groups)
        is_over = observation.is_wanted_in_force and not pool.replaced_revisions and not has_groups
        # A pool that never had a model in force has no request that anybody could ask for. The older model may not
        # exist at all, and then its volume would keep gateways from starting.
        if is_over or pool.generation is None:
            return ()
    # Gateways come last, since they know the model's name, and groups do not.
    found = {each.identity: each for each in (*chain(*of_groups), *_models_of_gateways(observation))}
    found.pop(wanted.identity, None)
    return tuple(sorted(found.values(), key=model.older_model_flag))


def _models_of_groups(observation: Observation) -> list[list[ModelReference]]:
    """Return the model of each group; an empty list if it is unknown."""
    return [facts.models(each["metadata"]) for each in observation.children.stateful_sets(names.STAGE)]


def _models_of_gateways(observation: Observation) -> Iterable[ModelReference]:
    """Yield the models with which a gateway has come up; those of the pod template last.

    While no gateway of a template has come up yet, the own model of that template may not exist, unless groups have it.
    """
    for pod in filter(is_pod_ready, observation.children.pods(names.GATEWAY)):
        yield from facts.models(pod["metadata"])
    there = observation.children.get("Deployment", names.gateway(observation.name))
    if there is None:
        return
    of_groups = {each.identity for each in chain(*_models_of_groups(observation))}
    is_proven = is_rolled_out(there) or observation.pool.problem is not None
    for number, each in enumerate(_models_of_template(there)):
        if number > 0 or is_proven or each.identity in of_groups:
            yield each


def _models_of_template(gateways: Json) -> list[ModelReference]:
    return facts.models(gateways["spec"]["template"].get("metadata") or {})


def _must_wait_for_gateways(observation: Observation, older: Sequence[ModelReference]) -> bool:
    # Without an older model there is nothing to lose. If a group of the wanted model exists, gateways had it before.
    if not older or observation.wanted_version.digest in observation.generations:
        return False
    there = observation.children.get("Deployment", names.gateway(observation.name))
    if there is None or not is_rolled_out(there):
        return True
    wanted = model.wanted_model(observation.deployment).identity
    given = [_models_of_template(there)]
    for pod in observation.children.pods(names.GATEWAY):
        models = facts.models(pod["metadata"])
        # The Deployment is rolled out, so a pod that stays and whose annotation is gone is of the newest template.
        if _takes_calls(pod, observation.now_s) and (models or is_going(pod)):
            given.append(models)
    return any(wanted not in {each.identity for each in models} for models in given)


def _takes_calls(pod: Json, now_s: float) -> bool:
    """Return whether a gateway may still get new calls: one that is ending serves until nobody sends it any."""
    if has_ended(pod):
        return False
    if not is_going(pod):
        return True
    metadata = pod["metadata"]
    ordered_s: float = seconds(metadata["deletionTimestamp"]) - metadata.get("deletionGracePeriodSeconds", 0)
    # Timestamps are whole seconds.
    return now_s < ordered_s + GATEWAY_LEAVE_S + 1


def _needed_groups(observation: Observation) -> Mapping[str, str]:
    """Return one group for each old model that has requests, by the model's digest."""
    if observation.spec.wanted_groups == 0 or _must_have_drained(observation):
        return {}
    digests = observation.model_digests
    needed = {digest for digest in observation.generations if _has_requests(observation, digest)}
    old = [each for each in observation.groups if not each.is_leaving and digests.get(each.name) in needed]
    # The last one of a digest stays: one that serves, of these the one with the most slots, and the lowest ordinal.
    by_use = sorted(old, key=lambda each: (each.is_ready, _slots(observation, each), -each.ordinal))
    return {digests[each.name]: each.name for each in by_use}


def _slots(observation: Observation, group: Group) -> float:
    """Return the slots of a group, 0 if they are unknown.

    They differ between groups of a model while an edit of kvSlots is on its way.
    """
    scheduler = observation.schedulers[group.name]
    slots = facts.slots(scheduler)
    if slots is None:
        return math.inf if facts.are_slots_known(scheduler) else 0
    return slots


def _is_in_the_way(observation: Observation, needed: Mapping[str, str], move: RolloutMove) -> bool:
    """Return whether the rollout can only go on without the needed groups: there is no room for both models."""
    digests, generations = observation.model_digests, observation.generations
    present = [each for each in observation.groups if not each.is_leaving]
    coming = [each for each in present if digests.get(each.name) == observation.wanted_version.digest]
    is_coming = move.create is not None or any(each.is_placed or not each.is_overdue for each in coming)
    # A model that only drains makes room by itself.
    makes_room = any(generations[digest] < (observation.pool.generation or 0) for digest in needed)
    old = {each.name for each in observation.groups} - {each.name for each in coming}
    return bool(needed) and not is_coming and not makes_room and old <= set(needed.values())


def _is_giving_way(observation: Observation) -> bool:
    """Return whether the last groups of the model in force are going, and the wanted model is not in force yet."""
    in_force = observation.pool.generation
    is_gone = in_force is not None and in_force not in observation.generations.values()
    has_leaving = any(each.name not in observation.model_digests for each in observation.groups)
    return is_gone and not observation.is_wanted_in_force and has_leaving


def _has_requests(observation: Observation, digest: str) -> bool:
    """Return whether groups of an old model have something to do: new requests, or the rest of the old ones."""
    pool, generation = observation.pool, observation.generations[digest]
    if digest == observation.wanted_version.digest:
        return False
    # A generation above the one in force may be of a model that was in force earlier, under a lower generation. An
    # unknown one may be that in force.
    return pool.problem is not None or generation in (0, pool.generation) or pool.replaced_unfinished > 0


def _must_have_drained(observation: Observation) -> bool:
    """Return whether the pool must have ended all requests of older models by now, even if it does not answer."""
    generation = observation.wanted_version.generation
    newest = observation.children.pods(names.SCHEDULER, generation=str(generation))
    ready = [since(pod, "Ready") for pod in newest if is_pod_ready(pod)]
    if not ready or not (observation.pool.problem is not None or observation.is_wanted_in_force):
        return False
    formed_s = min(seconds(timestamp) for timestamp in ready if timestamp is not None)
    return observation.now_s - formed_s > observation.spec.drain_seconds + MARGIN_S


def may_come_into_force(observation: Observation, scheduler: Json) -> bool:
    """Return whether the pool would take the model of a scheduler for the newest, though the spec wants another one.

    Args: scheduler: its StatefulSet.
    """
    digest = facts.model_digest(scheduler)
    if digest is None or digest == observation.wanted_version.digest:
        return False
    return observation.generations[digest] > (observation.pool.generation or 0)
