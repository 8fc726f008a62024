"""A scheduling policy: a pure function from the group's state and its limits to the next batch.

There are three: `iteration.IterationPolicy` (Algorithm 1 of the paper), `request_level.RequestLevelPolicy` (its
baseline) and `rra.RoundRobinPolicy` (ExeGPT's cycles of encode and decode iterations). `next_batch` adds what all of
them share: the bound on batches in flight, and prefetch.
"""

from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

from orca.core.domain.encoder_decoder import SOURCE_SLOTS_MAX
from orca.core.domain.engine import PrefixCharge
from orca.core.domain.errors import SettingError
from orca.core.domain.request import least_slots, slots_needed, slots_of_any_split
from orca.scheduler.policy.batch import NOTHING, Batch
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.prefixes import GroupPrefixes
from orca.scheduler.policy.state import GroupState


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """The bounds of batches that may change while the scheduler runs. Others are in force from the next batch on."""

    max_batch_size: int  # requests in a batch: max_bs
    # Tokens in a step, sources included. Prompts run in chunks. A source runs whole: one that does not fit beside the
    # increments enters alone, so its step has more tokens. None: off, as in the paper.
    max_batch_tokens: int | None = None
    cycle: CycleControls | None = None  # round-robin allocation only, which needs it

    def with_bounds(self, bounds: "BatchBounds") -> Self:
        """Return a copy with other bounds of batches; what a subclass adds stays. Raises: SettingError."""
        return replace(self, **{field.name: getattr(bounds, field.name) for field in fields(BatchBounds)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits(BatchBounds):
    """The resources that a policy may use. Sizes of the group are known once its engine is formed."""

    stages: int  # batches in flight: n_workers of Algorithm 1
    slots: int  # KV slots: n_slots, a whole number of blocks
    block_tokens: int  # slots in a block; reservations are whole blocks
    max_model_len: int  # longest prompt + output in tokens; longest source + target
    prefetch: int = 0  # 0: Algorithm 1; 1: one more batch is submitted before the oldest has been read
    # Of the sources of a step, each in whole blocks, but for a single longer source.
    max_source_slots: int = SOURCE_SLOTS_MAX
    is_encoder_decoder: bool = False  # each request has a source and a target, and a block table for each
    are_slots_chosen: bool = False  # otherwise the memory that was free when the group formed decided them
    shares_prefixes: bool = False  # requests begin with the KV blocks of others that have the same tokens
    prefix_charge: PrefixCharge = PrefixCharge.EACH

    def __post_init__(self) -> None:
        """Raises: SettingError that names the limit if it makes no sense."""
        for name in ("stages", "max_batch_size", "slots", "block_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.prefetch not in (0, 1):
            raise SettingError(f"prefetch must be 0 or 1, not {self.prefetch}")
        if self.slots % self.block_tokens:
            raise SettingError(f"slots ({self.slots}) must be a multiple of block_tokens ({self.block_tokens})")
        # A full batch of increments must leave a token for the oldest prompt, which would wait for ever otherwise.
        if self.max_batch_tokens is not None and self.max_batch_tokens <= self.max_batch_size:
            raise SettingError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be above max_batch_size ({self.max_batch_size})"
            )

    def make_prefixes(self) -> GroupPrefixes | None:
        """Return the prefixes of a new epoch; None if requests share none."""
        if not self.shares_prefixes:
            return None
        return GroupPrefixes(self.slots, self.block_tokens, charge=self.prefix_charge)

    @property
    def refusal(self) -> str | None:
        """The reason why no request could ever run, None if one can."""
        least = least_slots(self.block_tokens, has_source=self.is_encoder_decoder)
        if self.slots >= least:
            return None
        why = ": source and target have KV blocks of their own" if self.is_encoder_decoder else ""
        return f"the group has {self.slots} KV slots, and the smallest request needs {least}{why}. Give it more slots"

    @property
    def longest_request(self) -> int:
        """Slots that any one request may need: all that there are, or those of the model's length if that is less.

        With an encoder-decoder model those of the split into source and target that needs most.
        """
        return min(self.slots, self.full_length_slots)

    @property
    def lasting_offer(self) -> int | None:
        """`longest_request`, if the group will have it each time that it forms. None if free memory decides it."""
        return self.longest_request if self.are_slots_chosen or self.slots >= self.full_length_slots else None

    @property
    def full_length_slots(self) -> int:
        """Most slots that a request of the model's length needs."""
        if self.is_encoder_decoder:
            return slots_of_any_split(self.max_model_len, self.block_tokens)
        return slots_needed(self.max_model_len, self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeCapacity:
    """The requests and slots that the group can still claim from the pool."""

    requests: int  # 0 or less: none
    slots: int  # may be left uncounted, as 0, where there is no place for a request


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """Prompt tokens of the next step: a row of the TCB paper (docs/concepts/order-of-claims.md)."""

    free: int  # not taken by requests that are claimed
    total: int


WHOLE_PROMPTS_ROOM = 512
"""Prompt tokens that a step is filled with where prompts run whole."""

UNBOUNDED_ROOM = PromptRoom(1 << 31, 1 << 31)
"""The room of a policy whose steps are bounded by requests alone."""

NO_CAPACITY = FreeCapacity(requests=0, slots=0)
"""No place for a request. A full group need not count its slots: `free_slots` does."""


class Policy(Protocol):
    """Chooses batches. Implementations hold no state: it is all in `GroupState`."""

    @property
    def holds_results(self) -> bool:
        """True if tokens reach the pool only when the whole batch of their request has ended."""
        ...

    def select(self, state: GroupState, limits: BatchLimits) -> Batch:
        """Return the next batch: requests to free, to admit, to run. If it has no rows, nothing can run now."""
        ...

    def can_grow(self, batch: Batch, limits: BatchLimits) -> bool:
        """Return true if requests that arrive before the batch is submitted could join it."""
        ...

    def free_capacity(self, state: GroupState, limits: BatchLimits) -> FreeCapacity:
        """Return how much more to claim."""
        ...

    def free_slots(self, state: GroupState, limits: BatchLimits) -> int:
        """Return the slots that could be claimed if there were a place for another request."""
        ...

    def prompt_room(self, state: GroupState, limits: BatchLimits) -> PromptRoom:
        """Return how many prompt tokens to claim for the next step, by another order than arrival."""
        ...

    def refuse(self, limits: BatchLimits) -> str | None:
        """Return the reason why the policy cannot work under these limits, None if it can."""
        ...

    def describe(self, bounds: BatchBounds) -> str:
        """Return the name, and the habits or controls in force, for logs and results."""
        ...


def next_batch(policy: Policy, state: GroupState, limits: BatchLimits) -> Batch:
    """Return the batch to submit now. If it has no rows, wait for a result or a new request.

    With prefetch 0 at most `stages` batches are in flight, and no two of them share a request (lines 8 to 10). With
    prefetch 1 the oldest is treated as returned when Algorithm 1 would wait for it. That holds for one step only, so at
    most `stages` + 1 are unread and a request is in at most two of them. The selected batch equals the one that would
    be selected after that step's return, unless its result ends a request early. So the sequence of batches is the
    same.

    A batch of a request that must run alone goes out when all steps are read, and no other batch goes out before it is
    read. With an unread step beside it, other requests would be in flight with the suspect.

    It changes `state` in one way: a step that is treated as returned stays so.

    Source: ORCA, Algorithm 1, lines 3 to 15; dissertation "Orca", section 4.4, scheduling overhead and prefetching.
    """
    batch = policy.select(state, limits) if state.in_flight < limits.stages else NOTHING
    if not batch.rows and limits.prefetch and state.can_assume():
        state.assume_oldest()
        batch = policy.select(state, limits)
    if state.steps and any(map(_is_alone, (batch, *(step.batch for step in state.steps)))):
        return NOTHING
    return batch


def _is_alone(batch: Batch) -> bool:
    """Return true for the batch of a request that must run alone: no policy puts another request beside it."""
    return len(batch.rows) == 1 and batch.rows[0].request.is_alone
