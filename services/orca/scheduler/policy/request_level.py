"""Request-level scheduling: the paper's baseline, FasterTransformer under a scheduler like Triton's.

A batch consists of the oldest waiting requests and stays the same until all of them have ended. The habits that cost
the baseline its throughput are flags, so that each can be switched off and its share measured.

Source: ORCA, sections 3 (C1, Figure 3), 4.2 (Figure 8b), 6.1 and 6.2.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from itertools import groupby

from orca.core.domain.request import reserved_slots, slots_needed
from orca.scheduler.policy.admission import charged_slots
from orca.scheduler.policy.batch import NOTHING, Admission, Batch, BatchRow, GroupRequest
from orca.scheduler.policy.policy import UNBOUNDED_ROOM, BatchBounds, BatchLimits, FreeCapacity, PromptRoom
from orca.scheduler.policy.state import GroupState


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The habits of the baseline that an iteration-level scheduler does not have. All on is the paper's baseline."""

    holds_results: bool = True  # tokens are returned only when the whole batch has ended (section 3, C1)
    computes_ended: bool = True  # ended requests are still computed until the batch ends (Figure 3)
    starts_at_shortest: bool = True  # first iteration: the length of the shortest prompt; the rest one by one (6.2)
    splits_batch: bool = True  # one batch at a time, pipelined as microbatches, with their bubbles (Figure 8b)
    reserves_full_length: bool = True  # memory for the longest sequence of the model, for each request (6.1)

    @classmethod
    def without(cls, names: Collection[str]) -> "Habits":
        """Return all habits but the named ones. Args: names: some of `HABITS`."""
        return cls(**{name: name not in names for name in HABITS})

    def in_force(self) -> tuple[str, ...]:
        return tuple(name for name in HABITS if getattr(self, name))


HABITS = tuple(habit.name for habit in fields(Habits))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLevelPolicy:
    """Batches that are fixed until they end.

    `microbatch_size` is the paper's mbs in requests; None makes the batch one microbatch, which leaves every stage but
    one idle. Without `splits_batch` the size has no meaning: up to `stages` whole batches then follow each other
    through the pipeline.
    """

    microbatch_size: int | None = None
    habits: Habits = Habits()

    @property
    def holds_results(self) -> bool:
        return self.habits.holds_results

    def select(self, state: GroupState, limits: BatchLimits) -> Batch:
        """Return the next microbatch in turn, or a new batch if requests wait and one fits.

        Microbatches run in a fixed order. If the one whose turn it is has not returned, the answer is to wait: that is
        the bubble of Figure 8b.
        """
        batches = _batches(state)
        freed = tuple(entry for members in batches for entry in self._freed(members))
        gone = set(map(id, freed))
        alive = [members for members in batches if any(id(entry) not in gone for entry in members)]
        if len(alive) < (1 if self.habits.splits_batch else limits.stages):
            reserved = charged_slots(state, freed)
            admitted = self._form_batch(state, limits, reserved)
            if admitted:
                members = [admission.request for admission in admitted]
                first = [admission.request for admission in admitted if admission.microbatch == 0]
                rows = tuple(self._row(entry, members) for entry in first)
                return Batch(freed=freed, admitted=admitted, sources=_entering(rows), rows=rows)
        rows = self._next_microbatch(alive)
        return Batch(freed=freed, sources=_entering(rows), rows=rows)

    def can_grow(self, batch: Batch, limits: BatchLimits) -> bool:
        return len(batch.rows) < limits.max_batch_size

    def free_capacity(self, state: GroupState, limits: BatchLimits) -> FreeCapacity:
        """Return the capacity for the next batch: it is claimed while the present one runs, like an engine's queue."""
        waiting = sum(not entry.is_admitted for entry in state.requests)
        return FreeCapacity(requests=limits.max_batch_size - waiting, slots=self.free_slots(state, limits))

    def free_slots(self, state: GroupState, limits: BatchLimits) -> int:
        waiting = [entry for entry in state.requests if not entry.is_admitted]
        return limits.slots - sum(_slots_for(entry, entry.request.max_total_tokens, limits) for entry in waiting)

    def prompt_room(self, state: GroupState, limits: BatchLimits) -> PromptRoom:  # noqa: ARG002 - shape of the policy
        return UNBOUNDED_ROOM

    def refuse(self, limits: BatchLimits) -> str | None:
        if limits.max_batch_tokens is not None:
            return "max_batch_tokens has no meaning under the request-level policy: leave it unset"
        full = limits.full_length_slots
        if self.habits.reserves_full_length and full > limits.slots:
            return f"the full length needs {full} slots for each request and the group has {limits.slots}"
        return None

    def describe(self, bounds: BatchBounds) -> str:  # noqa: ARG002 - its habits are its own
        size = "whole batch" if self.microbatch_size is None else str(self.microbatch_size)
        return f"request_level(microbatch={size}; habits: {', '.join(self.habits.in_force()) or 'none'})"

    def _freed(self, members: list[GroupRequest]) -> list[GroupRequest]:
        over = [entry for entry in members if entry.is_over and not entry.in_flight]
        return over if len(over) == len(members) or not self.habits.computes_ended else []

    def _form_batch(self, state: GroupState, limits: BatchLimits, reserved: int) -> tuple[Admission, ...]:
        # The batch's number is the handle that its first member will get: a number never used before in this epoch.
        number = state.handles + 1
        size = self.microbatch_size if self.habits.splits_batch else None
        admitted: list[Admission] = []
        microbatch = members = source_slots = 0  # the last microbatch, its requests, and the slots of their sources
        for entry in state.requests:
            if entry.is_admitted:
                continue
            tokens = self._tokens_for(entry, limits)
            slots = _slots_for(entry, tokens, limits)
            if len(admitted) == limits.max_batch_size or reserved + slots > limits.slots:
                break
            # The sources of a microbatch run in one step.
            own_slots = slots_needed(entry.source_tokens, limits.block_tokens)
            source_slots += own_slots
            if members == size or (members and source_slots > limits.max_source_slots):
                if size is None:
                    break
                microbatch, members, source_slots = microbatch + 1, 0, own_slots
            reserved += slots
            members += 1
            admitted.append(Admission(entry, slots, tokens, number, microbatch))
        return tuple(admitted)

    def _tokens_for(self, entry: GroupRequest, limits: BatchLimits) -> int:
        """Return the tokens to reserve. A source has its own length, so its target has the rest of the full length."""
        own = entry.request.max_total_tokens
        if not self.habits.reserves_full_length:
            return own
        return max(own, limits.max_model_len) if entry.source_tokens else limits.max_model_len

    def _next_microbatch(self, batches: Iterable[list[GroupRequest]]) -> tuple[BatchRow, ...]:
        """Return the microbatch with the fewest iterations, the oldest among equals; nothing while it runs."""
        runnable: list[_RunnableMicrobatch] = []
        for members in batches:
            if all(entry.is_over for entry in members):
                continue
            for _, microbatch in groupby(sorted(members, key=_microbatch_of), key=_microbatch_of):
                computed = [entry for entry in microbatch if self.habits.computes_ended or not entry.is_over]
                if computed:
                    iterations = max(entry.iterations for entry in computed)
                    runnable.append(_RunnableMicrobatch(iterations, computed, members))
        if not runnable:
            return NOTHING.rows
        # The batches come oldest first, and `min` returns the first of equals.
        chosen = min(runnable, key=lambda microbatch: microbatch.iterations)
        if any(entry.in_flight for entry in chosen.computed):
            return NOTHING.rows
        return tuple(self._row(entry, chosen.batch) for entry in chosen.computed)

    def _row(self, entry: GroupRequest, members: list[GroupRequest]) -> BatchRow:
        if entry.is_over and entry.computed:
            # Its last position again: that costs a row, but no slot, token or length beyond its own.
            return BatchRow(entry, entry.computed - 1, 1, sample=False)
        known = len(entry.known)
        if entry.computed == 0:
            count = known
            if self.habits.starts_at_shortest:
                # The shortest target is the start token, and every target begins with it. Sources always run whole.
                count = 1 if entry.source_tokens else min(len(other.known) for other in members)
            return BatchRow(entry, 0, count, sample=count == known)
        return BatchRow(entry, entry.computed, 1, sample=entry.computed + 1 >= known)


@dataclass(frozen=True, slots=True)
class _RunnableMicrobatch:
    """A microbatch that could run now."""

    iterations: int
    computed: list[GroupRequest]
    batch: list[GroupRequest]


def _slots_for(entry: GroupRequest, tokens: int, limits: BatchLimits) -> int:
    """Return whole blocks; for a request that must run alone all slots, so that it gets a batch of its own."""
    return limits.slots if entry.is_alone else reserved_slots(tokens, entry.source_tokens, limits.block_tokens)


def _entering(rows: Iterable[BatchRow]) -> tuple[GroupRequest, ...]:
    """Return the requests whose source runs beside these rows, their first ones."""
    return tuple(row.request for row in rows if row.request.source_tokens and not row.request.computed)


def _microbatch_of(entry: GroupRequest) -> int:
    return entry.microbatch


def _batches(state: GroupState) -> list[list[GroupRequest]]:
    """Return the admitted requests by batch, oldest batch first."""
    by_batch: dict[int, list[GroupRequest]] = {}
    for entry in state.requests:
        if entry.is_admitted:
            by_batch.setdefault(entry.batch, []).append(entry)
    return [by_batch[number] for number in sorted(by_batch)]
