"""Rules of admission that policies share: the slots of a request, and the turn of one that must run alone."""

from collections.abc import Sequence

from orca.core.domain.request import reserved_slots
from orca.scheduler.policy.batch import NO_HIT, BatchRow, GroupRequest, PrefixHit
from orca.scheduler.policy.policy import BatchLimits
from orca.scheduler.policy.state import GroupState


def slots_for(entry: GroupRequest, limits: BatchLimits) -> int:
    """Return the slots that a request needs for its whole length, in whole blocks."""
    return reserved_slots(entry.request.max_total_tokens, entry.source_tokens, limits.block_tokens)


def charged_slots(state: GroupState, leaving: Sequence[GroupRequest] = ()) -> int:
    """Return the slots that requests take from the group, once some of them have left.

    With prefixes whose blocks are charged once, these are the slots of all blocks that requests have, each counted
    once, and those that they may still take.
    """
    reserved = state.reserved - sum(entry.slots for entry in leaving)
    return reserved if state.prefixes is None else reserved - state.prefixes.uncharged_slots(leaving)


def slots_left(state: GroupState, limits: BatchLimits) -> int:
    """Return the slots that all requests of the group leave, those that are not admitted yet included."""
    over = [entry for entry in state.admitted if entry.is_over]
    waiting = (entry for entry in state.requests if not entry.is_admitted and not entry.is_over)
    return limits.slots - charged_slots(state, over) - sum(slots_for(entry, limits) for entry in waiting)


def prefix_hit(entry: GroupRequest, state: GroupState, prompts: Sequence[BatchRow]) -> PrefixHit:
    """Return the blocks of others with which a request begins if it is picked now; none without a prefix cache.

    Args: prompts: rows of the same batch that run tokens of older requests' prompts.
    """
    return NO_HIT if state.prefixes is None else state.prefixes.hit(entry, prompts)


def oldest_suspect(state: GroupState, reserved: int, limits: BatchLimits) -> GroupRequest | None:
    """Return the oldest request that must run alone and has its slots, or gets them before an older one needs them.

    Args: reserved: slots of all admitted requests that stay.
    """
    if not state.suspects:
        return None
    for entry in state.ready():
        if not entry.is_admitted:
            reserved += slots_for(entry, limits)
        if entry.is_alone and (entry.is_admitted or reserved <= limits.slots):
            return entry
    return None
