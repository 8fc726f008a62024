"""The requests that a group has claimed, their slots, and the steps in flight: plain data with one owner.

The loop owns a `GroupState` for the length of an epoch and alone changes it. Policies read it and return a `Batch`;
`schedule` carries the batch out and writes the step. With prefetch one unread step may be treated as if it had returned
with unknown tokens (`assume_oldest`). Below, "in flight" means neither read nor assumed.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from orca.core.domain.request import Request, Token, reserved_slots
from orca.core.domain.step import Claim, Epoch, NewRequest, Part, PrefixBlocks, Row, Step
from orca.scheduler.policy.batch import Admission, Batch, BatchRow, GroupRequest
from orca.scheduler.policy.cycle import CYCLE_START, CyclePosition
from orca.scheduler.policy.prefixes import BlockChanges, GroupPrefixes


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A submitted step whose result has not been read."""

    number: int
    batch: Batch
    submitted_ns: int = 0  # of the loop's clock
    is_assumed: bool = False  # treated as if it had returned
    evicted_blocks: int = 0  # of the prefix cache

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        return self.batch.rows


def by_arrival(entry: GroupRequest) -> int:
    return entry.request.arrival


@dataclass(slots=True, eq=False)
class GroupState:
    """Everything that the scheduler knows about one epoch of its group."""

    requests: list[GroupRequest] = field(default_factory=list)  # in order of arrival; until their slots return
    admitted: list[GroupRequest] = field(default_factory=list)  # those of them that have slots
    suspects: set[GroupRequest] = field(default_factory=set)  # those of them that must run alone
    steps: deque[StepInFlight] = field(default_factory=deque)  # unread, in order of their numbers
    reserved: int = 0  # slots, those of blocks that requests share counted for each of them
    handles: int = 0  # given out so far in this epoch
    submitted: int = 0  # number of the last step
    position: CyclePosition = CYCLE_START  # round-robin allocation: the turn in its cycle that comes next
    prefixes: GroupPrefixes | None = None  # None: each request computes all of its tokens

    @property
    def in_flight(self) -> int:
        """Batches in flight: `n_scheduled` of Algorithm 1. Steps that only free are not counted."""
        return sum(1 for step in self.steps if step.rows and not step.is_assumed)

    def add(
        self,
        request: Request,
        claim: Claim,
        log: Sequence[Token] = (),
        *,
        is_alone: bool = False,
        claimed_ns: int = 0,
    ) -> GroupRequest:
        """Add a claimed request at its place in the order of arrival."""
        known = (request.decoder_prefix or request.prompt) + tuple(token.id for token in log)
        last_token = known[-1] if known else 0
        entry = GroupRequest(request, claim, known, len(log), len(log), last_token, is_alone=is_alone)
        if request.decoder_prefix:
            entry.part, entry.source_tokens = Part.TARGET, len(request.prompt)
        entry.claimed_ns = claimed_ns
        insort(self.requests, entry, key=by_arrival)
        if is_alone:
            self.suspects.add(entry)
        return entry

    def ready(self) -> Iterator[GroupRequest]:
        """Yield the requests that are neither in flight nor over, the oldest first."""
        return (entry for entry in self.requests if not entry.in_flight and not entry.is_over)

    def end(self, entry: GroupRequest, *, is_refused: bool = False) -> None:
        """Stop scheduling it. Its slots return when no step in flight holds it; it leaves at once if it has none.

        Args: is_refused: by the stages; blocks that it still has leave the index, but for those that others have too.
        """
        entry.is_ended = True
        if is_refused:
            entry.is_refused = True
            if self.prefixes is not None:
                self.prefixes.forget(entry)
        if not entry.is_admitted and entry in self.requests:
            self._leave(entry)

    def acquit(self, entry: GroupRequest, block_tokens: int) -> None:
        """Let others join a request that ran alone and did no harm; it keeps only the slots that it needs."""
        entry.is_alone = False
        self.suspects.discard(entry)
        # A short request has given its slots back before the pool answered.
        if entry.slots and entry in self.requests:
            needed = reserved_slots(entry.tokens, entry.source_tokens, block_tokens)
            self.reserved -= entry.slots - needed
            entry.slots = needed

    def schedule(self, batch: Batch, epoch: Epoch, *, now_ns: int = 0) -> Step:
        """Carry out a policy's decision and return it as the next step of `epoch`."""
        for entry in batch.freed:
            self._free(entry)
        for admission in batch.admitted:
            self._admit(admission)
        if self.prefixes is None:
            blocks = BlockChanges(freed=[entry.handle for entry in batch.freed if entry.handle is not None])
        else:
            blocks = self.prefixes.carry_out(batch)
        new = tuple(_new_request(admission, blocks) for admission in batch.admitted)
        rows = tuple(self._run(row, now_ns) for row in batch.rows)
        if batch.sources:
            rows = tuple(map(_run_source, batch.sources)) + rows
        if batch.position is not None:
            self.position = batch.position
        self.submitted += 1
        self.steps.append(StepInFlight(self.submitted, batch, now_ns, evicted_blocks=blocks.evictions))
        return Step(
            epoch=epoch,
            number=self.submitted,
            freed=tuple(blocks.freed),
            kept=tuple(blocks.kept),
            evicted=tuple(map(PrefixBlocks._make, blocks.evicted.items())),
            new=new,
            rows=rows,
        )

    def can_assume(self) -> bool:
        """Return true if a batch is in flight, and no unread one before it is treated as returned already."""
        return self.in_flight > 0 and not any(step.is_assumed and step.rows for step in self.steps)

    def assume_oldest(self) -> None:
        """Treat the oldest batch in flight as if it had returned with unknown tokens (prefetch)."""
        _return(next(step for step in self.steps if step.rows and not step.is_assumed))

    def read(self) -> StepInFlight:
        """Remove the oldest unread step, whose result has come."""
        step = self.steps.popleft()
        if not step.is_assumed:
            _return(step)
        return step

    def receive(self, entry: GroupRequest, token: int) -> None:
        """Record the next token of a request."""
        entry.received += 1
        entry.last_token = token
        if self.prefixes is not None:
            entry.drawn.append(token)

    def check(self, block_tokens: int | None = None) -> None:
        """Recount every invariant. Raises: AssertionError.

        Args: block_tokens: slots in a block; with it, the slots of each request are recounted from its tables.
        """
        arrivals = [entry.request.arrival for entry in self.requests]
        assert arrivals == sorted(arrivals), "requests out of order"
        alive = [entry.request.id for entry in self.requests if not entry.is_ended]
        assert len(alive) == len(set(alive)), "a request is there twice"
        handles = [entry.handle for entry in self.requests if entry.handle is not None]
        assert len(handles) == len(set(handles)), "a handle is used twice"
        assert all(0 < handle <= self.handles for handle in handles), "a handle was never given out"
        assert self.admitted == [entry for entry in self.requests if entry.is_admitted], "admitted requests miscounted"
        assert self.suspects == {entry for entry in self.requests if entry.is_alone}, "suspects miscounted"
        assert self.reserved == sum(entry.slots for entry in self.requests), "slots reserved differ from their sum"
        assert sum(step.is_assumed and bool(step.rows) for step in self.steps) <= 1, "two steps are assumed"
        numbers = [step.number for step in self.steps]
        assert numbers == list(range(self.submitted - len(numbers) + 1, self.submitted + 1)), "a step is missing"
        for entry in self.requests:
            _check_entry(self, entry)
            _check_source(self, entry)
            if block_tokens is not None and entry.is_admitted and not entry.is_alone:
                tables = reserved_slots(entry.tokens, entry.source_tokens, block_tokens)
                assert entry.slots == tables, "slots differ from the blocks of its tables"
        if self.prefixes is not None:
            self.prefixes.check(self.requests)
        in_steps = [row.request for step in self.steps for row in step.rows]
        assert len(in_steps) <= 1 or not any(entry.is_alone for entry in in_steps), "one that must run alone does not"

    def _free(self, entry: GroupRequest) -> None:
        assert entry.handle is not None
        assert entry.in_flight == 0
        self._leave(entry)
        self.admitted.remove(entry)
        self.reserved -= entry.slots

    def _leave(self, entry: GroupRequest) -> None:
        place = bisect_left(self.requests, entry.request.arrival, key=by_arrival)
        del self.requests[self.requests.index(entry, place)]
        self.suspects.discard(entry)

    def _admit(self, admission: Admission) -> None:
        entry = admission.request
        self.handles += 1
        insort(self.admitted, entry, key=by_arrival)
        self.reserved += admission.slots
        entry.handle, entry.slots, entry.tokens = self.handles, admission.slots, admission.tokens
        entry.batch, entry.microbatch = admission.batch, admission.microbatch
        entry.computed = entry.prefix_tokens = admission.prefix_tokens
        entry.was_alone = entry.is_alone

    def _run(self, row: BatchRow, now_ns: int) -> Row:
        entry = row.request
        assert entry.handle is not None
        # The stages have the known tokens. They also have the newest token while it is still on its way to the master.
        # After a request was cancelled or refused, none of its tokens is received. If it is still computed, any token
        # will do.
        is_token_here = row.start >= len(entry.known) and (entry.received == entry.sampled or entry.is_ended)
        token = entry.last_token if is_token_here else None
        entry.computed = row.start + row.count
        entry.sampled += row.sample
        entry.in_flight += 1
        if not entry.iterations:
            entry.waited_ns = max(0, now_ns - entry.claimed_ns)
        entry.iterations += 1
        return Row(entry.handle, row.start, row.count, row.sample, token, entry.part)


def _check_entry(state: GroupState, entry: GroupRequest) -> None:
    holding = [step for step in state.steps if any(row.request is entry for row in step.rows)]
    assert entry.in_flight == sum(not step.is_assumed for step in holding), "steps in flight miscounted"
    assert entry.in_flight <= 1, "a request is in two batches in flight"
    drawing = sum(row.request is entry and row.sample for step in state.steps for row in step.rows)
    assert entry.is_ended or entry.sampled - entry.received == drawing, "tokens on their way miscounted"
    assert entry.sampled <= entry.request.max_new_tokens, "scheduled past its length"
    assert entry.is_admitted == (entry.slots > 0), "slots without admission, or the reverse"
    assert entry.is_admitted or not entry.iterations, "ran before its admission"


def _check_source(state: GroupState, entry: GroupRequest) -> None:
    assert bool(entry.source_tokens) == (entry.part is Part.TARGET), "a source without a target, or the reverse"
    has_run = entry.part is Part.TARGET and entry.computed > 0
    assert entry.sources_run == has_run, "its source did not run exactly once, with its first row"
    entering = [step for step in state.steps if entry in step.batch.sources]
    firsts = [step for step in entering if any(row.request is entry and row.start == 0 for row in step.rows)]
    assert entering == firsts, "its source is not in the step of its first row"


def _new_request(admission: Admission, blocks: BlockChanges) -> NewRequest:
    """Return an admitted request for the stages. Args: blocks: of its step."""
    entry = admission.request
    request, has_source = entry.request, entry.source_tokens > 0
    assert entry.handle is not None
    return NewRequest(
        handle=entry.handle,
        request_id=request.id,
        claim=entry.claim,
        tokens=request.prompt + entry.known[len(request.decoder_prefix) :] if has_source else entry.known,
        prompt_length=len(request.prompt),
        max_total_tokens=admission.tokens,
        sampling=request.sampling,
        decoder_prefix=request.decoder_prefix,
        max_new_tokens=request.max_new_tokens if has_source else None,
        prefix=blocks.prefixes.get(entry.handle),
    )


def _run_source(entry: GroupRequest) -> Row:
    """Return the row of a source. The first target row beside it counts as the iteration of its request."""
    assert entry.handle is not None
    entry.sources_run += 1
    return Row(entry.handle, 0, len(entry.request.prompt), False, part=Part.SOURCE)


def _return(step: StepInFlight) -> None:
    step.is_assumed = True
    for row in step.rows:
        row.request.in_flight -= 1
