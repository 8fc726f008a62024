"""Round-robin allocation: one encode iteration of new requests, then N_D decode iterations, again and again.

New requests never share a step with those that decode. So decode steps are short and equally long, and a batch that
shrinks as requests end is filled up once in a cycle. The cycle and its controls are in `cycle.py`.

Source: ExeGPT (ASPLOS '24), sections 4.1 and 5.2, Figure 4(a).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orca.core.domain.request import slots_needed
from orca.scheduler.policy.admission import charged_slots, oldest_suspect, prefix_hit, slots_for, slots_left
from orca.scheduler.policy.batch import NO_HIT, Admission, Batch, BatchRow, GroupRequest, PrefixHit
from orca.scheduler.policy.cycle import CYCLE_START, CycleControls, CyclePosition, turns
from orca.scheduler.policy.policy import (
    NO_CAPACITY,
    UNBOUNDED_ROOM,
    BatchBounds,
    BatchLimits,
    FreeCapacity,
    PromptRoom,
)
from orca.scheduler.policy.state import GroupState


@dataclass(frozen=True, slots=True)
class RoundRobinPolicy:
    """Encode and decode iterations, each in as many micro-batches as there are stages.

    A request gets its micro-batch at its admission, the one with the fewest members, and stays in it. So iteration u of
    a micro-batch can begin as soon as its iteration u - 1 has returned, whatever the others do.
    """

    @property
    def holds_results(self) -> bool:
        return False

    def select(self, state: GroupState, limits: BatchLimits) -> Batch:
        """Return the batch of the micro-batch whose turn it is, with the position of the cycle after it.

        Turns come in a fixed order. A micro-batch without requests is skipped, and so is a phase without requests. If
        the one whose turn it is has not returned, the answer is to wait: that is the bubble. No request waits for an
        encode batch to fill up: the iteration runs with those that are there, and later ones join it at the turns that
        are left.

        While there is a request that must run alone, all others pause, and so does the cycle.
        """
        freed = tuple(entry for entry in state.admitted if entry.is_over and not entry.in_flight)
        reserved = charged_slots(state, freed)
        staying = [entry for entry in state.requests if not entry.is_over]
        microbatches = _microbatches(staying, limits.stages)
        suspect = oldest_suspect(state, reserved, limits)
        if suspect is not None:
            smallest = min(range(limits.stages), key=lambda number: len(microbatches[number]))
            new = [] if suspect.is_admitted else [_admission(suspect, smallest, limits)]
            return _batch(freed, new, [_row(suspect)])
        waiting = [entry for entry in staying if not entry.is_admitted]
        is_decoding = any(microbatches)
        for turn in turns(state.position, _controls(limits), stages=limits.stages, is_decoding=is_decoding):
            members = microbatches[turn.microbatch]
            if turn.is_encoding:
                entering = _entering(waiting, turn, reserved, limits, [len(each) for each in microbatches])
                if entering:
                    new, rows = _enter(entering, turn.microbatch, limits, state)
                    entered = turn.entering(len(entering), sum(map(_prompt_tokens, entering)))
                    return _batch(freed, new, rows, entered.after(limits.stages))
            elif members:
                if any(entry.in_flight for entry in members):
                    break
                # There are more only after `max_batch_size` was lowered.
                rows = [_row(entry) for entry in members[: limits.max_batch_size]]
                return _batch(freed, [], rows, turn.after(limits.stages))
        return Batch(freed=freed)

    def can_grow(self, batch: Batch, limits: BatchLimits) -> bool:
        """Return true for an encode batch with free places: no request joins those that decode."""
        return len(batch.rows) < limits.max_batch_size and any(row.is_of_prompt for row in batch.rows)

    def free_capacity(self, state: GroupState, limits: BatchLimits) -> FreeCapacity:
        """Return the capacity of the next encode iteration, as far as the slots allow: other groups get the rest.

        There is none before the last decode iteration. Until then another group may be able to run a request earlier.
        """
        staying = [entry for entry in state.requests if not entry.is_over]
        waiting = [entry for entry in staying if not entry.is_admitted]
        decoding = len(staying) - len(waiting)
        turn = state.position if decoding and state.position.is_encoding else CYCLE_START
        controls = _controls(limits)
        places = controls.places(decoding=decoding, entered=turn.entered)
        places = min(places, limits.stages * limits.max_batch_size - decoding)
        is_early = not state.position.is_encoding and state.position.iteration < controls.decode_steps
        if decoding and is_early:
            places = 0
        if waiting and not controls.has_room(turn.entered_tokens + sum(map(_prompt_tokens, waiting))):
            places = 0
        if places <= len(waiting):
            return NO_CAPACITY
        return FreeCapacity(requests=places - len(waiting), slots=self.free_slots(state, limits))

    def free_slots(self, state: GroupState, limits: BatchLimits) -> int:
        return slots_left(state, limits)

    def prompt_room(self, state: GroupState, limits: BatchLimits) -> PromptRoom:  # noqa: ARG002 - shape of the policy
        return UNBOUNDED_ROOM

    def refuse(self, limits: BatchLimits) -> str | None:
        if limits.max_batch_tokens is not None:
            return "max_batch_tokens has no meaning under the policy rra, which runs prompts whole: leave it unset"
        if limits.cycle is None:
            return "the policy rra needs encode_batch and decode_steps"
        broken = limits.cycle.broken_rule(stages=limits.stages, max_batch_size=limits.max_batch_size)
        if broken is None:
            return None
        name, rule = broken
        return f"{name} ({getattr(limits.cycle, name)}) must be {rule}"

    def describe(self, bounds: BatchBounds) -> str:
        return f"rra({'no controls' if bounds.cycle is None else bounds.cycle.describe()})"


def _controls(limits: BatchLimits) -> CycleControls:
    assert limits.cycle is not None, "the policy has refused these limits"
    return limits.cycle


def _microbatches(staying: Sequence[GroupRequest], stages: int) -> list[list[GroupRequest]]:
    """Return the admitted requests of each micro-batch, oldest first."""
    microbatches: list[list[GroupRequest]] = [[] for _ in range(stages)]
    for entry in staying:
        if entry.is_admitted:
            microbatches[entry.microbatch].append(entry)
    return microbatches


def _entering(
    waiting: Sequence[GroupRequest], turn: CyclePosition, reserved: int, limits: BatchLimits, sizes: Sequence[int]
) -> list[GroupRequest]:
    """Return the requests that enter at a turn of the encode iteration, oldest first.

    Those that may still enter with the iteration are divided among the micro-batches whose turns are left, and the
    oldest ones enter now. A request that does not fit stops further admissions. The first one of an iteration enters
    even if its prompt alone is above the bound of tokens.

    Args:
        waiting: those that are not admitted, in the order of claims.
        sizes: members of each micro-batch.
    """
    controls = _controls(limits)
    places = controls.places(decoding=sum(sizes), entered=turn.entered)
    fitting: list[GroupRequest] = []
    tokens = turn.entered_tokens
    for entry in waiting[:places]:
        reserved += slots_for(entry, limits)
        tokens += _prompt_tokens(entry)
        is_first = not (turn.entered or fitting)
        if reserved > limits.slots or not (is_first or controls.has_room(tokens)):
            break
        fitting.append(entry)
    entering: list[GroupRequest] = []
    source_slots = 0
    for entry in fitting[: _share(sizes[turn.microbatch :], len(fitting), limits.max_batch_size)]:
        # The sources of a micro-batch run in one step.
        source_slots += slots_needed(entry.source_tokens, limits.block_tokens)
        if entering and source_slots > limits.max_source_slots:
            break
        entering.append(entry)
    return entering


def _share(sizes: Sequence[int], entering: int, size_max: int) -> int:
    """Return how many requests the first micro-batch gets if each one goes to the smallest micro-batch."""
    grown = list(sizes)
    for _ in range(entering):
        smallest = min(range(len(grown)), key=grown.__getitem__)
        if grown[smallest] >= size_max:
            break
        grown[smallest] += 1
    return grown[0] - sizes[0]


def _prompt_tokens(entry: GroupRequest) -> int:
    """Return the tokens of a prompt, or of a source, that count for the bound of an encode iteration."""
    return entry.source_tokens or len(entry.known)


def _admission(entry: GroupRequest, microbatch: int, limits: BatchLimits, prefix: PrefixHit = NO_HIT) -> Admission:
    slots, tokens = slots_for(entry, limits), entry.request.max_total_tokens
    return Admission(entry, slots, tokens, microbatch=microbatch, prefix=prefix)


def _enter(
    entering: Sequence[GroupRequest], microbatch: int, limits: BatchLimits, state: GroupState
) -> tuple[list[Admission], list[BatchRow]]:
    """Admit new requests, and return their rows: all that they know, but for prefixes that they need not compute."""
    admitted: list[Admission] = []
    rows: list[BatchRow] = []
    for entry in entering:
        hit = prefix_hit(entry, state, rows)
        admitted.append(_admission(entry, microbatch, limits, hit))
        rows.append(BatchRow(entry, hit.tokens, len(entry.known) - hit.tokens, True))
    return admitted, rows


def _row(entry: GroupRequest) -> BatchRow:
    """Return the row of a request: all known tokens that it has not run, otherwise its next one."""
    return BatchRow(entry, entry.computed, max(len(entry.known) - entry.computed, 1), True)


def _batch(
    freed: tuple[GroupRequest, ...],
    admitted: Sequence[Admission],
    rows: Sequence[BatchRow],
    position: CyclePosition | None = None,
) -> Batch:
    sources = tuple(row.request for row in rows if row.request.source_tokens and not row.start)
    return Batch(freed=freed, admitted=tuple(admitted), sources=sources, rows=tuple(rows), position=position)
