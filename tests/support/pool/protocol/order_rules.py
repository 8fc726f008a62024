"""The rules of claims by an order, each left out by a class of its own: see rules.py, which has all others."""

# The rules that are taken away here are methods whose arguments then go unused.
# ruff: noqa: ARG002

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from orca.core.domain.request import End, Request
from orca.pool.memory.ordered_claim import ClaimRoom, ClassOffer, OfferReader, OrderedClaim
from orca.pool.memory.pool import MemoryPool
from orca.pool.memory.state import PoolClock, PoolState, RequestRecord
from orca.pool.memory.waiting_index import PlaceRange, WaitingIndex, WaitingIndexes, place_of
from orca.pool.order.order_rules import ClaimOrder
from orca.pool.records import Caller, OwnershipState
from orca.pool.schemas import SCHEMAS, Schemas
from orca.pool.settings import PoolSettings
from support.pool.protocol.rules import MarksOutliveSeats

NEVER_MS = 10**12
Divided = tuple[list[OfferReader], list[OfferReader], list[OfferReader]]
"""Patient requests, those in time, and late ones."""


class PatienceIsForgotten(MemoryPool):
    """Those whose patience has passed compete as all others do."""

    def _choose_by_order(
        self, caller: Caller, epoch: int, order: ClaimOrder, room: ClaimRoom
    ) -> tuple[list[RequestRecord], bool]:
        forgetful = replace(order, rules=replace(order.rules, patience_ms=NEVER_MS))
        return super()._choose_by_order(caller, epoch, forgetful, room)


class PatienceByClass(OrderedClaim):
    """Those whose patience has passed go by class: a younger one of a class with more utility goes first."""

    def _divide(self, offers: Iterable[ClassOffer]) -> Divided:
        patient, in_time, late = super()._divide(offers)
        by_class = [item for reader in patient for item in reader]
        for place, item in enumerate(by_class):
            item.starts_by = place
        return [reader for reader in patient if reader], in_time, late


class OldestOfEachClassFirst(MemoryPool):
    ordered_claim_class = PatienceByClass


class PatienceAsDeadline(OrderedClaim):
    def too_late(self) -> list[str]:
        patient, _, _ = self._divide(self.offers)
        return [*super().too_late(), *(item.id for reader in patient for item in reader)]


class PatienceEndsRequests(MemoryPool):
    ordered_claim_class = PatienceAsDeadline


class GoalsNeverPass(OrderedClaim):
    def _goal_from(self, offer: ClassOffer) -> float:
        return self.now_ms - self.order.rules.patience_ms + 1


class PassedGoalsOrderClaims(MemoryPool):
    """A goal decides until the patience has passed, whether it can still be met or not."""

    ordered_claim_class = GoalsNeverPass


class OneStage(OrderedClaim):
    def _divide(self, offers: Iterable[ClassOffer]) -> Divided:
        patient, in_time, late = super()._divide(offers)
        return [*patient, *in_time], [], late


class EachRequestReserves(MemoryPool):
    """A request that does not fit reserves the group, whether its patience has passed or not."""

    ordered_claim_class = OneStage


class KnowsItsOrder(MemoryPool):
    """Knows whether a claim is by an order."""

    is_by_order = False

    def _choose_by_order(
        self, caller: Caller, epoch: int, order: ClaimOrder, room: ClaimRoom
    ) -> tuple[list[RequestRecord], bool]:
        self.is_by_order = True
        try:
            return super()._choose_by_order(caller, epoch, order, room)
        finally:
            self.is_by_order = False


class OrdersReserveNothing(KnowsItsOrder):
    def _may_reserve(self, record: RequestRecord, epoch: int, group: str) -> bool:
        return not self.is_by_order and super()._may_reserve(record, epoch, group)


class OrdersIgnoreMarks(KnowsItsOrder):
    """A claim by an order reserves a request that is reserved for another group."""

    def _is_marked_for_another(self, record: RequestRecord, group: str) -> bool:
        return not self.is_by_order and super()._is_marked_for_another(record, group)


class LateForEver(OrderedClaim):
    def _late(self, offer: ClassOffer) -> PlaceRange:
        return self.index.between(offer.of, -inf, self._begin(offer), is_low_in=True, is_high_in=False)


class ExpiredRequestsAreClaimed(MemoryPool):
    """A claim looks at requests whose deadline has passed, and asks none of them for it."""

    ordered_claim_class = LateForEver

    def _is_expired(self, record: RequestRecord) -> bool:
        return False


class UnreadableRequestsAreClaimed(MemoryPool):
    def _is_claimable(self, record: RequestRecord) -> bool:
        return not self._is_expired(record)


class KeepsEndedRequests(PoolState):
    """The index keeps a request that ends while it waits."""

    def end(self, record: RequestRecord, end: End) -> None:
        is_waiting = record.state is OwnershipState.QUEUED
        super().end(record, end)
        if is_waiting:
            self.waiting.add(record.request, None, 0)


class IndexIsNotKeptAtEnds(MemoryPool):
    state_class = KeepsEndedRequests


class ClaimsByIndex(KeepsEndedRequests):
    """Believes its index, as a script does that loads what it claims."""

    def unqueue(self, record: RequestRecord) -> None:
        if record.state is not OwnershipState.ENDED:
            super().unqueue(record)

    def check(self) -> None:
        pass


class EndedRequestsAreClaimed(MemoryPool):
    state_class = ClaimsByIndex


class LeavesIndexAtTakeBacks(PoolState):
    def take_back(self, record: RequestRecord) -> None:
        super().take_back(record)
        self.waiting.remove(record.request)


class IndexIsNotKeptAtTakeBacks(MemoryPool):
    state_class = LeavesIndexAtTakeBacks


class LeavesTakenBackAside(LeavesIndexAtTakeBacks):
    def check(self) -> None:
        pass


class TakenBackStarve(MemoryPool):
    """The same where nothing compares the index with the queue."""

    state_class = LeavesTakenBackAside


class BuildsNothing(WaitingIndexes):
    """Takes an index for whole that has only what comes from now on."""

    def of(self, revision: str) -> WaitingIndex:
        index = super().of(revision)
        index.built_to = inf
        return index


class TakesNewIndexesForWhole(PoolState):
    def __init__(self, clock: PoolClock, settings: PoolSettings, schemas: Schemas = SCHEMAS) -> None:
        super().__init__(clock, settings, schemas)
        self.waiting = BuildsNothing()

    def check(self) -> None:
        pass


class OlderThanTheIndexStarve(MemoryPool):
    state_class = TakesNewIndexesForWhole


class IndexesAtOnce(WaitingIndexes):
    def add(self, request: Request, deadline_ms: int | None, logged: int) -> None:
        if (index := self.indexes.get(request.revision)) is not None and request.id not in index.places:
            index.add(*place_of(request, deadline_ms, logged))


class KeepsWhatComesAtOnce(PoolState):
    def __init__(self, clock: PoolClock, settings: PoolSettings, schemas: Schemas = SCHEMAS) -> None:
        super().__init__(clock, settings, schemas)
        self.waiting = IndexesAtOnce()


class YoungerGoFirstWhileTheIndexIsBuilt(MemoryPool):
    """A request that comes while the index is built is in it before older ones."""

    state_class = KeepsWhatComesAtOnce


ORDER_RULES = [
    PatienceIsForgotten,
    OldestOfEachClassFirst,
    PatienceEndsRequests,
    PassedGoalsOrderClaims,
    EachRequestReserves,
    OrdersReserveNothing,
    OrdersIgnoreMarks,
    MarksOutliveSeats,
    ExpiredRequestsAreClaimed,
    UnreadableRequestsAreClaimed,
    IndexIsNotKeptAtEnds,
    EndedRequestsAreClaimed,
    IndexIsNotKeptAtTakeBacks,
    TakenBackStarve,
    OlderThanTheIndexStarve,
    YoungerGoFirstWhileTheIndexIsBuilt,
]
