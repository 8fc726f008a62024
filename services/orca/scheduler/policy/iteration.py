"""Iteration-level scheduling: `Select` of Algorithm 1 (ORCA, section 4.2)."""

import sys
from dataclasses import dataclass

from orca.core.domain.request import slots_needed
from orca.scheduler.policy.admission import charged_slots, oldest_suspect, prefix_hit, slots_for, slots_left
from orca.scheduler.policy.batch import Admission, Batch, BatchRow, GroupRequest
from orca.scheduler.policy.policy import (
    NO_CAPACITY,
    WHOLE_PROMPTS_ROOM,
    BatchBounds,
    BatchLimits,
    FreeCapacity,
    PromptRoom,
)
from orca.scheduler.policy.state import GroupState


@dataclass(frozen=True, slots=True)
class IterationPolicy:
    """First come, first served by iterations: an earlier request has run the same number of iterations or more."""

    @property
    def holds_results(self) -> bool:
        return False

    def select(self, state: GroupState, limits: BatchLimits) -> Batch:
        """Choose the requests of the next iteration, oldest first.

        A request that does not fit stops further admissions, never running requests. While ages are in order this is
        the paper's `break` (line 25): all younger ones are in the initiation phase too. After a group died its older
        requests arrive late, and a `break` would stop the younger ones that hold the very slots it waits for.

        With `max_batch_tokens` each increment costs one token. The rest goes to prompts in chunks, oldest first. A
        prompt that gets no token is skipped, and with it all younger prompts, so no prompt runs before an older one has
        run as far as it can. The bound is above `max_batch_size`, so the oldest prompt always moves on.

        A request of an encoder-decoder model enters with its whole source and all known tokens of its target, which are
        never cut. If they do not fit into the rest of the step's tokens, it waits for the next step, and with it all
        younger ones. The oldest of those that wait does not: if it does not fit beside the increments, it is the only
        one that enters with its step. Otherwise it would wait until other requests end, and requests slightly shorter
        than the bound would run one after the other. So only such a step exceeds the bound, and by less than
        `max_batch_size` unless the request itself is longer than the bound.

        While there is a request that must run alone, all others pause: a few steps show that it does no harm, or break
        the engine.

        Source: ORCA, Algorithm 1, lines 17 to 28.
        """
        freed: list[GroupRequest] = []
        staying: list[GroupRequest] = []
        for entry in state.admitted:
            if not entry.in_flight:
                (freed if entry.is_over else staying).append(entry)
        reserved = charged_slots(state, freed)
        suspect = oldest_suspect(state, reserved, limits)
        # Requests that wait for their admission may be many, and only the oldest ones have a place.
        pool = state.ready() if suspect is None else iter((suspect,))
        prompt_tokens = _prompt_tokens(staying if suspect is None else [suspect], limits)
        admitted: list[Admission] = []
        sources: list[GroupRequest] = []
        source_slots = 0
        rows: list[BatchRow] = []
        prompts: list[BatchRow] = []
        is_admitting = True
        for entry in pool:
            if len(rows) == limits.max_batch_size:
                break
            start = entry.computed
            known_left = len(entry.known) - start
            if known_left > 0 and not prompt_tokens:
                continue
            if not entry.is_admitted:
                if entry.source_tokens and not _can_enter(entry, prompt_tokens, source_slots, limits):
                    prompt_tokens = 0
                    continue
                slots = slots_for(entry, limits)
                is_admitting = is_admitting and reserved + slots <= limits.slots
                if not is_admitting:
                    continue
                reserved += slots
                hit = prefix_hit(entry, state, prompts)
                start += hit.tokens
                known_left -= hit.tokens
                admitted.append(Admission(entry, slots, entry.request.max_total_tokens, prefix=hit))
                if entry.source_tokens:
                    sources.append(entry)
                    source_slots += slots_needed(entry.source_tokens, limits.block_tokens)
                    prompt_tokens = max(prompt_tokens - entry.source_tokens, known_left)
            count = min(known_left, prompt_tokens) if known_left > 0 else 1
            rows.append(BatchRow(entry, start, count, count >= known_left))
            if known_left > 0:
                prompt_tokens -= count
                prompts.append(rows[-1])
        return Batch(freed=tuple(freed), admitted=tuple(admitted), sources=tuple(sources), rows=tuple(rows))

    def can_grow(self, batch: Batch, limits: BatchLimits) -> bool:
        return len(batch.rows) < limits.max_batch_size

    def free_capacity(self, state: GroupState, limits: BatchLimits) -> FreeCapacity:
        """Return the capacity for a full batch per stage, as far as the slots allow.

        Requests that are over do not count although a step may still hold them. Their places and slots are sure to come
        back, and a successor that was claimed by then costs no iteration.
        """
        over = sum(entry.is_over for entry in state.admitted)
        places = limits.stages * limits.max_batch_size - (len(state.requests) - over)
        if places <= 0:
            return NO_CAPACITY
        return FreeCapacity(requests=places, slots=self.free_slots(state, limits))

    def free_slots(self, state: GroupState, limits: BatchLimits) -> int:
        return slots_left(state, limits)

    def prompt_room(self, state: GroupState, limits: BatchLimits) -> PromptRoom:
        """Return the tokens that one step has for prompts, less those of prompts that are claimed and not run yet."""
        staying = [entry for entry in state.requests if not entry.is_over]
        bound = _prompt_tokens(staying, limits)
        total = WHOLE_PROMPTS_ROOM if limits.max_batch_tokens is None else bound
        return PromptRoom(total - sum(min(_initiation_tokens(entry), total) for entry in staying), total)

    def refuse(self, limits: BatchLimits) -> str | None:  # noqa: ARG002 - Algorithm 1 works under any limits
        return None

    def describe(self, bounds: BatchBounds) -> str:  # noqa: ARG002 - the name says it all
        return "iteration"


def _initiation_tokens(entry: GroupRequest) -> int:
    """Return the tokens of a request's prompt, or source and target prefix, that have not been scheduled."""
    if entry.computed >= len(entry.known):
        return 0
    return len(entry.known) - entry.computed + (0 if entry.computed else entry.source_tokens)


def _can_enter(entry: GroupRequest, prompt_tokens: int, source_slots: int, limits: BatchLimits) -> bool:
    """Return true if a request fits into the rest of a step's tokens, whole, or is the first that enters with the step.

    Args:
        prompt_tokens: those of the step that are left.
        source_slots: those of the sources of older requests that enter with the step; 0 if none enters.
    """
    if not source_slots:
        return True
    tokens = entry.source_tokens + len(entry.known)
    own_slots = slots_needed(entry.source_tokens, limits.block_tokens)
    return tokens <= prompt_tokens and source_slots + own_slots <= limits.max_source_slots


def _prompt_tokens(pool: list[GroupRequest], limits: BatchLimits) -> int:
    """Return the tokens of a step that prompts may use: the bound less one token per increment."""
    if limits.max_batch_tokens is None:
        return sys.maxsize
    increments = sum(entry.computed >= len(entry.known) for entry in pool)
    return limits.max_batch_tokens - min(increments, limits.max_batch_size)
