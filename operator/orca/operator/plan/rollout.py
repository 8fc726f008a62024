"""Which groups come and which go: a pure step over what is there, taken again and again until nothing is left to do.

    floor   = replicas - maxUnavailable     groups that serve are never taken below it on purpose
    ceiling = replicas + maxSurge           groups that exist, those that leave not counted

1. Groups come one at a time, and the next one only when all pods of the last have found a node: two groups that are
   half placed would wait for each other's GPUs for ever. (Groups of two resources give way to each other:
   group_pauses.py.)
2. A group goes if those that serve stay at the floor without it. An old one that does not serve goes also when it is
   in the way of a new one.
3. If the new group finds no node and nothing may be missing, one may (`is_squeezed`): there is no room for the surge.

The wanted revision is whatever the spec says now. So an edit or a revert in the middle of a rollout needs no memory of
where it was: groups of the revision that is wanted again count as new ones, all others as old.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group as it is in the cluster."""

    name: str
    revision: str
    ordinal: int
    is_ready: bool = False  # formed: it serves
    is_placed: bool = True  # all of its pods have a node
    is_overdue: bool = False  # it is not placed, and has had its startup time, or has given way for that
    is_leaving: bool = False  # it drains and goes, whatever is wanted now


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    replicas: int
    max_surge: int
    max_unavailable: int


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now; nothing when both are empty."""

    create: int | None = None  # ordinal of a new group of the wanted revision
    remove: tuple[str, ...] = ()
    is_squeezed: bool = False  # there was no room for the surge


def step(groups: Sequence[Group], wanted: str, bounds: Bounds, kept: Set[str] = frozenset()) -> Step:
    """The next step towards `replicas` groups of the revision `wanted` and no others.

    Args: kept: names of old groups that must not go yet (model_change.py).
    """
    present = [group for group in groups if not group.is_leaving]
    new = [group for group in present if group.revision == wanted]
    old = [group for group in present if group.revision != wanted]
    is_squeezed = bounds.max_unavailable == 0 and bool(old) and any(group.is_overdue for group in new)
    floor = max(0, bounds.replicas - (1 if is_squeezed else bounds.max_unavailable))
    surplus = _least_useful_first(new)[: max(0, len(new) - bounds.replicas)]
    ready = sum(group.is_ready for group in present) - sum(group.is_ready for group in surplus)
    has_room = len(present) - len(surplus) < bounds.replicas + bounds.max_surge
    create = None
    if len(new) < bounds.replicas and has_room and all(group.is_placed for group in new):
        create = _free_ordinal([group for group in groups if group.revision == wanted])
    remove = [group.name for group in surplus]
    is_blocked = len(new) < bounds.replicas and not has_room
    for group in _least_useful_first([each for each in old if each.name not in kept]):
        if ready - group.is_ready >= floor:
            ready -= group.is_ready
        elif group.is_ready or not is_blocked:
            continue
        remove.append(group.name)
        is_blocked = False
    return Step(create, tuple(remove), is_squeezed)


def _least_useful_first(groups: Sequence[Group]) -> list[Group]:
    """Those that do not serve, then the youngest names."""
    return sorted(groups, key=lambda group: (group.is_ready, -group.ordinal))


def _free_ordinal(groups: Sequence[Group]) -> int:
    taken = {group.ordinal for group in groups}
    return next(ordinal for ordinal in range(len(taken) + 1) if ordinal not in taken)
