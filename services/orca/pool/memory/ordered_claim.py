"""The orders of claims other than arrival, in memory: DAS, Algorithm 1 of TCB (section 5.2), over order classes.

It is the twin of redis/scripts/order.lua, which describes the stages: both give the same answers. A claim looks at the
classes, and at the requests that come first in them.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from math import ceil, inf

from orca.core.domain.request import Request, slots_needed
from orca.pool.memory.waiting_index import PlaceRange, WaitingIndex
from orca.pool.order.order_class import DeadlineKind, OrderClass, fewest_tokens, longest_of, lower_bound
from orca.pool.order.order_rules import DROPS_MAX, PASSED_MAX, ROUNDING, ClaimOrder, Drop


@dataclass(slots=True)
class ClaimRoom:
    """The room that the next step still has (TCB: a row)."""

    requests: int
    slots: int
    total_slots: int
    tokens: float  # of prompts; infinite if they need not share a step
    total_tokens: float
    block_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class ClassOffer:
    """A class, and what an order makes of it."""

    of: OrderClass
    utility: float
    density: float
    own_ms: float
    expected_ms: float
    window_ms: float  # from submission to the end of the start window; only of a class without a deadline


@dataclass(slots=True, eq=False)
class Offered:
    """A waiting request that a claim looks at."""

    id: str
    starts_by: float  # end of its start window, or of its patience; wall clock, ms
    arrival: int
    offer: ClassOffer
    slots: int = 0
    tokens: float = 0
    is_read: bool = False
    is_there: bool = False
    is_done: bool = False  # chosen, or passed over

    @property
    def key(self) -> tuple[float, int]:
        return self.starts_by, self.arrival


class OfferReader:
    """The requests of a class in a range of deadlines, each made once and only when a claim comes to it."""

    def __init__(self, offer: ClassOffer, found: PlaceRange, add_ms: float) -> None:
        self.offer = offer
        self._found = found
        self._add_ms = add_ms
        self._items: list[Offered] = []

    def __bool__(self) -> bool:
        return self._found.begin < self._found.end

    def __iter__(self) -> Iterator[Offered]:
        items, found = self._items, self._found
        for number in range(found.end - found.begin):
            if number == len(items):
                place = found.places[found.begin + number]
                items.append(Offered(place.id, place.score + self._add_ms, place.arrival, self.offer))
            yield items[number]


@dataclass(slots=True, kw_only=True)
class ClaimRow:
    """A row that is being filled.

    Args:
        room: what is left of it.
        find: returns a waiting request, None if it may not be claimed: its deadline has passed, or this release cannot
            read it.
        logged: returns the tokens that a request has from earlier claims.
    """

    room: ClaimRoom
    find: Callable[[str], Request | None]
    logged: Callable[[str], int]
    passed: int = 0  # requests that were passed over

    def take_all(self, items: Iterable[Offered]) -> Iterator[Offered]:
        """Take what fits, and pass over the rest."""
        for item in self.while_room(items):
            if self._is_closed(item.offer.of):
                continue
            if self.fits(item):
                self.take(item)
                yield item
            else:
                self.pass_over(item)

    def while_room(self, items: Iterable[Offered]) -> Iterator[Offered]:
        """Yield what is neither chosen nor passed over while anything could fit."""
        for item in items:
            if not self._has_room():
                return
            if not item.is_done:
                yield item

    def _has_room(self) -> bool:
        return min(self.room.requests, self.room.slots, self.room.tokens) > 0 and self.passed <= PASSED_MAX

    def _is_closed(self, of: OrderClass) -> bool:
        """Return true if no request of a class fits. Room only shrinks where this is asked, so it stays so."""
        prompt, output = lower_bound(of.prompt), lower_bound(of.output)
        slots = slots_needed(ceil(prompt + output), self.room.block_tokens)
        return min(prompt, self.room.total_tokens) > self.room.tokens or slots > self.room.slots

    def is_there(self, item: Offered) -> bool:
        """Return true if a request may be claimed, and read it."""
        if not item.is_read:
            request, item.is_read = self.find(item.id), True
            if request is not None:
                item.is_there, item.slots = True, request.slots(self.room.block_tokens)
                item.tokens = min(len(request.prompt) + self.logged(item.id), self.room.total_tokens)
        return item.is_there

    def fits(self, item: Offered) -> bool:
        """Return true if a request may be claimed and fits."""
        room = self.room
        is_there = self.is_there(item) and room.requests > 0
        return is_there and item.slots <= room.slots and item.tokens <= room.tokens

    def take(self, item: Offered, *, sign: int = 1) -> None:
        """Give a request its room. Args: sign: -1 gives the room back."""
        self.room.requests -= sign
        self.room.slots -= sign * item.slots
        self.room.tokens -= sign * item.tokens
        item.is_done = sign == 1

    def pass_over(self, item: Offered) -> None:
        """Leave a request to later claims."""
        item.is_done = True
        self.passed += 1


@dataclass(kw_only=True)  # without slots, for its cache
class OrderedClaim:
    """One claim by an order.

    Args:
        waiting: requests in the queue.
        may_reserve: reserves a request that does not fit for the group; False if it is reserved for another group.
    """

    order: ClaimOrder
    index: WaitingIndex
    now_ms: int
    row: ClaimRow
    may_reserve: Callable[[str], bool]
    waiting: int = 0

    @cached_property
    def offers(self) -> list[ClassOffer]:
        """The classes with waiting requests as the claim begins, those with the most utility per cost first."""
        order, times = self.order, self.order.estimates
        offers = (
            ClassOffer(
                of,
                utility=order.utility(of),
                density=order.density(of),
                own_ms=times.own_ms(of),
                expected_ms=times.expected_ms(of),
                window_ms=order.window_ms(of),
            )
            for of in self.index
        )
        return sorted(offers, key=lambda offer: -offer.density)

    def too_late(self) -> list[str]:
        """Return the requests that end now, of a bounded number with the soonest deadlines of all classes."""
        least_step_ms = self.index.shared_least_step(self.order.estimates.least_step_ms)
        if self.order.rules.drop is Drop.NEVER:
            return []
        near = [OfferReader(offer, self._near_deadline(offer, least_step_ms), 0) for offer in self.offers]
        soonest = heapq.merge(*near, key=lambda item: item.key)
        return [item.id for item in islice(soonest, DROPS_MAX) if self._is_too_late(item, least_step_ms)]

    def _near_deadline(self, offer: ClassOffer, least_step_ms: float) -> PlaceRange:
        """Return the requests of a class that may be too late: some of those whose deadlines come soon."""
        within_ms = 0.0
        if offer.of.kind is not DeadlineKind.NONE and offer.own_ms > 0:
            is_first = offer.of.kind is DeadlineKind.FIRST_TOKEN
            within_ms = min(offer.own_ms, least_step_ms * (1 if is_first else longest_of(offer.of.fewest)))
            if self.order.rules.drop is Drop.EXPECTED:
                within_ms = offer.expected_ms
        return self.index.between(offer.of, self.now_ms, self.now_ms + within_ms, is_low_in=False, is_high_in=False)

    def _is_too_late(self, item: Offered, least_step_ms: float) -> bool:
        """Return true if a request would miss its deadline if it started now. Its key begins with the deadline here."""
        request, least_ms = self.row.find(item.id), item.offer.expected_ms
        if request is not None and self.order.rules.drop is Drop.CERTAIN:
            is_first = item.offer.of.kind is DeadlineKind.FIRST_TOKEN
            least_ms = least_step_ms * (1 if is_first else max(1, fewest_tokens(request) - self.row.logged(item.id)))
        return request is not None and self.now_ms + least_ms > item.starts_by

    def choose(self) -> tuple[list[Offered], bool]:
        """Return the chosen requests in their order, and true if one that does not fit has reserved the group."""
        patient, in_time, late = self._divide(self.offers)
        if self.waiting <= self.row.room.requests:
            # All that waits has a place: the order decides nothing, and prompts need not fill one step after the other.
            self.row.room.tokens = self.row.room.total_tokens = inf
        chosen, is_blocked = self._patient(patient)
        if is_blocked:
            return chosen, True
        useful = self._useful(in_time)
        chosen += useful
        if self.order.rules.utility_share < 1:
            chosen += self.row.take_all(self._urgent(in_time, useful))
        chosen += self.row.take_all(_by_density(in_time))
        chosen += self.row.take_all(_by_density(late))
        return chosen, False

    def _patient(self, readers: Sequence[OfferReader]) -> tuple[list[Offered], bool]:
        """Return those whose patience has passed, and true if one that does not fit has reserved the group.

        Their prompts may be more than the step has room for: nobody waits longer because steps are filled evenly.
        """
        chosen: list[Offered] = []
        for item in heapq.merge(*readers, key=lambda item: item.key):
            if min(self.row.room.requests, self.row.room.slots) <= 0 or self.row.passed > PASSED_MAX:
                break
            if self.row.is_there(item) and item.slots <= self.row.room.slots:
                self.row.take(item)
                chosen.append(item)
            elif item.is_there and item.slots <= self.row.room.total_slots and self.may_reserve(item.id):
                return chosen, True
            else:
                self.row.pass_over(item)
        return chosen, False

    def _divide(self, offers: Iterable[ClassOffer]) -> tuple[list[OfferReader], list[OfferReader], list[OfferReader]]:
        """Return readers of each class: of requests whose patience has passed, of those in time, and of late ones."""
        patient, in_time, late = [], [], []
        for offer in offers:
            if offer.of.kind is DeadlineKind.NONE:
                old, young, hopeful = self._without_deadline(offer)
                patient.append(old)
                in_time += [young, hopeful]
            else:
                new = self.index.between(offer.of, self._begin(offer), inf, is_low_in=True, is_high_in=True)
                in_time.append(OfferReader(offer, new, -offer.own_ms))
                late.append(OfferReader(offer, self._late(offer), -offer.own_ms))
        return patient, in_time, late

    def _without_deadline(self, offer: ClassOffer) -> tuple[OfferReader, OfferReader, OfferReader]:
        """Return readers of a class: patience has passed; patience decides; a goal decides and can still be met."""
        patience_ms = self.order.rules.patience_ms
        passed_at, goal_from = self.now_ms - patience_ms, self._goal_from(offer)
        old = self.index.between(offer.of, -inf, passed_at, is_low_in=True, is_high_in=True)
        young = self.index.between(offer.of, passed_at, goal_from, is_low_in=False, is_high_in=False)
        hopeful = self.index.between(offer.of, goal_from, inf, is_low_in=True, is_high_in=True)
        return (
            OfferReader(offer, old, patience_ms),
            OfferReader(offer, young, patience_ms),
            OfferReader(offer, hopeful, offer.window_ms),
        )

    def _goal_from(self, offer: ClassOffer) -> float:
        """Return the soonest submission whose goal is still met if it starts now; infinite if patience ends sooner."""
        is_goal_sooner = offer.window_ms < self.order.rules.patience_ms
        return self.now_ms - offer.window_ms if is_goal_sooner else inf

    def _begin(self, offer: ClassOffer) -> float:
        """Return the soonest deadline of a class that is still met if the request starts now."""
        return self.now_ms + offer.own_ms

    def _late(self, offer: ClassOffer) -> PlaceRange:
        return self.index.between(offer.of, self.now_ms, self._begin(offer), is_low_in=False, is_high_in=False)

    def _useful(self, in_time: Sequence[OfferReader]) -> list[Offered]:
        """Return U: a share of the longest prefix by density that fits."""
        prefix: list[Offered] = []
        if not self.order.rules.utility_share:
            return prefix
        for item in self.row.while_room(_by_density(in_time)):
            if self.row.fits(item):
                self.row.take(item)
                prefix.append(item)
            elif item.is_there:
                break
            else:
                self.row.pass_over(item)
        count = self.order.rules.useful(len(prefix))
        for item in prefix[count:]:
            self.row.take(item, sign=-1)
        return prefix[:count]

    def _urgent(self, in_time: Sequence[OfferReader], useful: Sequence[Offered]) -> Iterator[Offered]:
        """Yield D: the others with enough utility, by the end of their start windows."""
        utility, least = 0.0, 0.0
        for item in useful:  # the function `sum` compensates for rounding since Python 3.12
            utility += item.offer.utility
        if useful:
            least = (1 - self.order.rules.eta) * (utility / len(useful)) * (1 - ROUNDING)
        found = [reader for reader in in_time if reader.offer.utility >= least]
        return heapq.merge(*found, key=lambda item: item.key)


def _by_density(readers: Iterable[OfferReader]) -> Iterator[Offered]:
    """Yield requests by density. Args: readers: in order of density."""
    for _, equal in groupby(filter(None, readers), key=lambda reader: reader.offer.density):
        yield from heapq.merge(*equal, key=lambda item: item.key)
