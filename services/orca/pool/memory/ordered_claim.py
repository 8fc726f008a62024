"""The orders of claims other than arrival, in memory: DAS, Algorithm 1 of TCB (section 5.2), over order classes.

It is the twin of redis/scripts/order.lua, which describes the stages: both give the same answers. A claim looks at the
classes, and at the requests that come first in them.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, inf

from orca.core.domain.request import Request
from orca.pool.memory.waiting_index import PlaceRange, WaitingIndex
from orca.pool.order.order_class import DeadlineKind, OrderClass, fewest_tokens
from orca.pool.order.order_rules import DROPS_MAX, PASSED_MAX, ROUNDING, ClaimOrder, Drop


@dataclass(slots=True)
class ClaimRoom:
    """The room that the next step still has (TCB: a row)."""

    requests: int
    slots: int
    total_slots: int
    tokens: int  # of prompts
    total_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class ClassOffer:
    """A class, and what an order makes of it."""

    of: OrderClass
    utility: float
    density: float
    own_ms: float
    expected_ms: float


@dataclass(slots=True, eq=False)
class Offered:
    """A waiting request that a claim looks at."""

    id: str
    starts_by: float  # end of its start window, or of its patience; wall clock, ms
    arrival: int
    offer: ClassOffer
    slots: int = 0
    tokens: int = 0
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
class OrderedClaim:
    """One claim by an order.

    Args:
        find: returns a waiting request, None if it may not be claimed: its deadline has passed, or this release cannot
            read it.
        may_reserve: reserves a request that does not fit for the group; False if it is reserved for another group.
    """

    order: ClaimOrder
    index: WaitingIndex
    now_ms: int
    room: ClaimRoom
    slots_of: Callable[[Request], int]
    find: Callable[[str], Request | None]
    may_reserve: Callable[[str], bool]
    passed: int = 0

    def offers(self) -> list[ClassOffer]:
        """Return the classes with waiting requests, those with the most utility per cost first."""
        order, times = self.order, self.order.estimates
        offers = (
            ClassOffer(of, order.utility(of), order.density(of), times.own_ms(of), times.expected_ms(of))
            for of in self.index
        )
        return sorted(offers, key=lambda offer: (-offer.density, str(offer.of)))

    def too_late(self, tokens_of: Callable[[str], int]) -> list[str]:
        """Return the requests that end now. Args: tokens_of: returns the tokens that a request has."""
        drop, found = self.order.rules.drop, []
        left = 0 if drop is Drop.NEVER else DROPS_MAX
        for offer in self.offers():
            if offer.of.kind is DeadlineKind.NONE or not offer.own_ms:
                continue
            late = self._late(offer)
            for place in late.places[late.begin : min(late.end, late.begin + left)]:
                left -= 1
                request, least_ms = self.find(place.id), offer.expected_ms
                if request is not None and drop is Drop.CERTAIN:
                    is_first = offer.of.kind is DeadlineKind.FIRST_TOKEN
                    steps = 1 if is_first else max(1, fewest_tokens(request) - tokens_of(place.id))
                    least_ms = self.order.estimates.least_step_ms * steps
                if request is not None and self.now_ms + least_ms > place.score:
                    found.append(place.id)
        return found

    def choose(self) -> tuple[list[str], bool]:
        """Return the chosen requests in their order, and true if one that does not fit has reserved the group."""
        offers = self.offers()
        patient, in_time, late = self._divide(offers)
        chosen: list[Offered] = []
        for item in self._while_room(heapq.merge(*patient, key=lambda item: item.key)):
            if self._fits(item):
                self._take(item)
                chosen.append(item)
            elif item.is_there and item.slots <= self.room.total_slots and self.may_reserve(item.id):
                return [item.id for item in chosen], True
            else:
                self._pass(item)
        useful = self._useful(in_time)
        chosen += useful
        if self.order.rules.utility_share < 1:
            chosen += self._take_all(self._urgent(in_time, useful))
        chosen += self._take_all(_by_density(in_time))
        chosen += self._take_all(_by_density(late))
        return [item.id for item in chosen], False

    def _divide(self, offers: Iterable[ClassOffer]) -> tuple[list[OfferReader], list[OfferReader], list[OfferReader]]:
        """Return readers of each class: of requests whose patience has passed, of those in time, and of late ones."""
        patient, in_time, late = [], [], []
        for offer in offers:
            if offer.of.kind is DeadlineKind.NONE:
                wait_ms = self.order.rules.patience_ms
                passed_at = self.now_ms - wait_ms
                old = self.index.between(offer.of, -inf, passed_at, is_low_in=True, is_high_in=True)
                new = self.index.between(offer.of, passed_at, inf, is_low_in=False, is_high_in=True)
                patient.append(OfferReader(offer, old, wait_ms))
                in_time.append(OfferReader(offer, new, wait_ms))
            else:
                new = self.index.between(offer.of, self._begin(offer), inf, is_low_in=True, is_high_in=True)
                in_time.append(OfferReader(offer, new, -offer.own_ms))
                late.append(OfferReader(offer, self._late(offer), -offer.own_ms))
        return patient, in_time, late

    def _begin(self, offer: ClassOffer) -> float:
        """Return the soonest deadline of a class that is still met if the request starts now."""
        return self.now_ms + offer.own_ms

    def _late(self, offer: ClassOffer) -> PlaceRange:
        return self.index.between(offer.of, self.now_ms, self._begin(offer), is_low_in=False, is_high_in=False)

    def _useful(self, in_time: Sequence[OfferReader]) -> list[Offered]:
        """Return U: a share of the longest prefix by density that fits."""
        prefix: list[Offered] = []
        for item in self._while_room(_by_density(in_time)):
            if self._fits(item):
                self._take(item)
                prefix.append(item)
            elif item.is_there:
                break
            else:
                self._pass(item)
        count = ceil(self.order.rules.utility_share * len(prefix) - ROUNDING)
        for item in prefix[count:]:
            self._take(item, sign=-1)
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

    def _take_all(self, items: Iterable[Offered]) -> Iterator[Offered]:
        """Take what fits, and pass over the rest."""
        for item in self._while_room(items):
            if self._fits(item):
                self._take(item)
                yield item
            else:
                self._pass(item)

    def _while_room(self, items: Iterable[Offered]) -> Iterator[Offered]:
        """Yield what is neither chosen nor passed over while anything could fit."""
        for item in items:
            if not self._has_room():
                return
            if not item.is_done:
                yield item

    def _has_room(self) -> bool:
        return min(self.room.requests, self.room.slots, self.room.tokens) > 0 and self.passed <= PASSED_MAX

    def _fits(self, item: Offered) -> bool:
        if not item.is_read:
            request, item.is_read = self.find(item.id), True
            if request is not None:
                item.is_there, item.slots = True, self.slots_of(request)
                item.tokens = min(len(request.prompt), self.room.total_tokens)
        room = self.room
        return item.is_there and room.requests > 0 and item.slots <= room.slots and item.tokens <= room.tokens

    def _take(self, item: Offered, *, sign: int = 1) -> None:
        """Give a request its room. Args: sign: -1 gives the room back."""
        self.room.requests -= sign
        self.room.slots -= sign * item.slots
        self.room.tokens -= sign * item.tokens
        item.is_done = sign == 1

    def _pass(self, item: Offered) -> None:
        item.is_done = True
        self.passed += 1


def _by_density(readers: Iterable[OfferReader]) -> Iterator[Offered]:
    """Yield requests by density. Args: readers: in order of density."""
    for _, equal in groupby(filter(None, readers), key=lambda reader: reader.offer.density):
        yield from heapq.merge(*equal, key=lambda item: item.key)
