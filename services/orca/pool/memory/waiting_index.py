"""The index of waiting requests by order class, in memory; it is the twin of redis/scripts/waiting_index.lua."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from orca.core.domain.request import Request
from orca.pool.order.order_class import OrderClass, class_of, kind_in_force


class WaitingPlace(NamedTuple):
    """The place of a waiting request in its class."""

    score: float  # the deadline in force, or the time of submission if it has none; wall clock, ms
    arrival: int
    id: str


class PlaceRange(NamedTuple):
    """Some places of a class that follow each other. It is valid until the class changes."""

    places: Sequence[WaitingPlace]
    begin: int
    end: int


class WaitingIndex:
    """The waiting requests of one revision. Only revisions whose groups claim by an order have one."""

    def __init__(self, least_step_ms: float = 0.0) -> None:
        self._classes: dict[OrderClass, list[WaitingPlace]] = {}  # sorted
        self._places: dict[str, tuple[OrderClass, WaitingPlace]] = {}  # by request
        # Arrival up to which claims have built it: later ones are not in it. Infinite if it is whole.
        self.built_to = 0.0
        self.least_step_ms = least_step_ms  # the fastest step that a group of the revision has seen; 0 while none has

    def __iter__(self) -> Iterator[OrderClass]:
        return iter(self._classes)

    @property
    def places(self) -> Mapping[str, tuple[OrderClass, WaitingPlace]]:
        """Return class and place of each request."""
        return self._places

    @property
    def counts(self) -> dict[OrderClass, int]:
        """Return the number of requests of each class."""
        return {of: len(places) for of, places in self._classes.items()}

    @property
    def is_whole(self) -> bool:
        return self.built_to == inf

    def add(self, of: OrderClass, place: WaitingPlace) -> None:
        self._places[place.id] = of, place
        insort(self._classes.setdefault(of, []), place)

    def remove(self, request_id: str) -> None:
        """Remove a request; harmless if it is not there."""
        of, place = self._places.pop(request_id, (None, None))
        if of is None or place is None:
            return
        places = self._classes[of]
        del places[bisect_left(places, place)]
        if not places:
            del self._classes[of]

    def shared_least_step(self, own_ms: float) -> float:
        """Return the fastest step that any group of the revision has seen; 0 while the asking one has seen none.

        What is certain for one group is not certain for a faster one.
        """
        if own_ms > 0:
            self.least_step_ms = min(self.least_step_ms or own_ms, own_ms)
            return self.least_step_ms
        return 0.0

    def between(self, of: OrderClass, low: float, high: float, *, is_low_in: bool, is_high_in: bool) -> PlaceRange:
        """Return the places of a class between two scores, by rising scores. It costs no time for each of them."""
        places = self._classes.get(of, [])
        begin = (bisect_left if is_low_in else bisect_right)(places, low, key=_score)
        end = (bisect_right if is_high_in else bisect_left)(places, high, key=_score)
        return PlaceRange(places, begin, max(begin, end))


class WaitingIndexes:
    """The indexes of all revisions that have one."""

    def __init__(self) -> None:
        self.indexes: dict[str, WaitingIndex] = {}  # by revision
        self._least_steps_ms: dict[str, float] = {}  # by revision, of indexes that were dropped

    def of(self, revision: str) -> WaitingIndex:
        """Return the index of a revision, an empty one with its first claim by an order."""
        if revision not in self.indexes:
            self.indexes[revision] = WaitingIndex(self._least_steps_ms.get(revision, 0.0))
        return self.indexes[revision]

    def drop(self) -> None:
        """Drop all indexes: not every part keeps them. The fastest steps stay true."""
        self._least_steps_ms |= {revision: index.least_step_ms for revision, index in self.indexes.items()}
        self.indexes.clear()

    def add(self, request: Request, deadline_ms: int | None, logged: int) -> None:
        """Add a queued request, if its revision has an index that is built up to its arrival.

        Args:
            deadline_ms: the one in force, wall clock.
            logged: tokens that it has from earlier claims.
        """
        index = self.indexes.get(request.revision)
        if index is not None and request.arrival <= index.built_to:
            index.add(*place_of(request, deadline_ms, logged))

    def remove(self, request: Request) -> None:
        if (index := self.indexes.get(request.revision)) is not None:
            index.remove(request.id)


def place_of(request: Request, deadline_ms: int | None, logged: int) -> tuple[OrderClass, WaitingPlace]:
    """Return class and place of a waiting request. Args: as those of `WaitingIndexes.add`."""
    kind = kind_in_force(request, deadline_ms)
    score = request.submitted_ms if deadline_ms is None else deadline_ms
    return class_of(request, kind, logged), WaitingPlace(score, request.arrival, request.id)


def _score(place: WaitingPlace) -> float:
    return place.score
