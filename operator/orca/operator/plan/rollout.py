"""The rollout of groups: pure moves, each over the groups that exist, until nothing is left to do.

    floor   = replicas - maxUnavailable     the rollout never takes the number of groups that serve below this
    ceiling = replicas + maxSurge           groups that exist, not counting those that leave

1. Groups come one at a time, and the next one only after all pods of the last have found a node: two groups that are
   half placed would wait for each other's GPUs for ever. (Groups of two resources give way to each other:
   group_pauses.py.)
2. A group goes if the number of those that serve stays at the floor without it. An old group that does not serve also
   goes if it is in the way of a new one.
3. If the new group finds no node and no group may be missing, one may be missing (`is_squeezed`): there is no room for
   the surge.

The wanted revision is what the spec says now. So an edit or a revert in the middle of a rollout needs no record of its
progress. Groups of the revision that is wanted again count as new, all others as old.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from orca.operator.domain.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    replicas: int
    max_surge: int
    max_unavailable: int


@dataclass(frozen=True, slots=True)
class RolloutMove:
    """One move of a rollout. There is nothing to do if both `create` and `remove` are empty."""

    create: int | None = None  # ordinal of a new group of the wanted revision
    remove: tuple[str, ...] = ()
    is_squeezed: bool = False  # there was no room for the surge


def next_move(groups: Sequence[Group], wanted: str, bounds: Bounds, kept: Set[str] = frozenset()) -> RolloutMove:
    """Return the next move towards `replicas` groups of the revision `wanted` and no others.

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
    return RolloutMove(create, tuple(remove), is_squeezed)


def _least_useful_first(groups: Sequence[Group]) -> list[Group]:
    """Sort groups: those that do not serve first, then by falling ordinal."""
    return sorted(groups, key=lambda group: (group.is_ready, -group.ordinal))


def _free_ordinal(groups: Sequence[Group]) -> int:
    taken = {group.ordinal for group in groups}
    return next(ordinal for ordinal in range(len(taken) + 1) if ordinal not in taken)
