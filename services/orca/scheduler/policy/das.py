"""Deadline-aware scheduling (DAS): which waiting requests enter the rows of a batch, for the most utility in time.

A row is filled with three parts of the waiting requests, in this order. Whatever no longer fits is passed over.

    N_t, densest first:     1  2  3  4  5  6  7  8  9
    s = 6 fit the row:      1  2  3  4  5  6
    U, utility:             1  2  3                      the first p = ceil(eta * s)
    D, deadline:                     4  5  6  7          utility >= q * mean of U; the most urgent first
    rest:                                        8  9    densest first

In one dimension and with weights of 1, the utility over time is at least eta / (1 + eta) of what a scheduler gets that
knows the future. Theorem 5.1 promises less, eta * q / (eta * q + 1). For eta = q = 1/2 these are 1/3 and 1/5.

The paper leaves these points open:

- Density is utility / length. For utility 1 / length this is the paper's order. For weights it keeps one heavy and long
  request from displacing any number of light ones. Ties go by deadline, then by arrival, and so do those of D.
- s counts the longest prefix that fits in all dimensions. If not even the first request fits, s is 0 and U is empty.
  The mean of its utility counts as 0 then, so D is everything that waits.
- If all that waits fits the row, the three parts contain all of it. So lines 4 to 6 of Algorithm 1 need no code.
- Placed requests leave N_t after each row.
- A deadline is the end of the window for starting, d_n, wherever requests are put in order.

Source: TCB (ICPP '22), section 5, Algorithms 1 and 2. The names N_t, U, D, s, p, eta, q and z are those of the paper.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import sub

from orca.core.domain.errors import SettingError

ROUNDING = 1e-9
"""Difference below which a number counts as equal to its bound: eta = 0.28 and s = 25 give p = 7, not 8.

The result uses only divisions, products and sums of doubles, in a fixed order. So a Lua script can repeat it exactly.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request n of N_t. Times are whole numbers in a unit of the caller's choice, such as milliseconds."""

    arrival: int  # its number in the order of arrivals, a_n, which also is its name
    sizes: tuple[int, ...]  # what it takes of each dimension of a row; in the paper one, its length
    utility: float  # v_n, its weight included: 1 for goodput, 1 / length in the paper
    length: float  # l_n: tokens that it costs
    deadline: int | None = None  # last moment of its answer; None: it has none, and comes after those that have one
    own_time: int = 0  # how long it runs; 0 if `deadline` is already the last moment of its start

    def __post_init__(self) -> None:
        """Raises: ValueError that names the request if one of its numbers makes no sense."""
        for name in ("utility", "length"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"request {self.arrival}: {name} must be above 0 and finite, not {value}")
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"request {self.arrival}: a size must be at least 0, not {min(self.sizes)}")
        if self.own_time < 0:
            raise ValueError(f"request {self.arrival}: own_time must be at least 0, not {self.own_time}")

    @property
    def latest_start(self) -> float:
        """The end of its window, d_n: a later start misses the deadline. Infinite without a deadline."""
        return math.inf if self.deadline is None else self.deadline - self.own_time


@dataclass(frozen=True, slots=True)
class FilledRow:
    """A row of a batch, H_tk. It may be empty."""

    chosen: tuple[WaitingRequest, ...]  # in the order in which they were put
    p: int  # so many of them, the first ones, are U
    s: int  # requests in the longest prefix of N_t, densest first, that fits the row

    @property
    def utility_set(self) -> tuple[WaitingRequest, ...]:
        """The set U, densest first."""
        return self.chosen[: self.p]


@dataclass(frozen=True, slots=True)
class SlottedBatch:
    """Rows that are divided into slots, and what found no slot."""

    z: int  # size of a slot; the last slot of a row may be smaller
    rows: tuple[tuple[tuple[WaitingRequest, ...], ...], ...]  # requests of each slot of each row
    returned: tuple[WaitingRequest, ...]  # these go back to the queue


def open_windows(waiting: Iterable[WaitingRequest], now: int) -> list[WaitingRequest]:
    """Return the requests that can still be in time if they start now; `das` expects no others.

    Source: TCB, section 5.1, constraint (12); section 5.2, which leaves all others out of N_t.
    """
    return [request for request in waiting if now <= request.latest_start]


def das(
    waiting: Iterable[WaitingRequest], rows: Sequence[Sequence[int]], *, eta: float = 0.5, q: float = 0.5
) -> list[FilledRow]:
    """Fill the rows of a batch, one after the other.

    Args:
        waiting: N_t, in any order: the result does not depend on it.
        rows: what each row can take, by dimension.
        eta: share of U in the requests that would fit if only utility counted, above 0 and below 1.
        q: share of the mean utility of U that a request needs to be in D, 1 - eta.
    Returns: a filled row for each of `rows`.
    Raises: SettingError if eta or q is out of its range; ValueError if there is no row, if dimensions differ, or if two
        requests have the same arrival.
    Source: TCB, section 5.2, Algorithm 1.
    """
    left = sorted(waiting, key=_by_density)  # line 7
    _check(left, rows, eta=eta, q=q)
    filled = []
    for row in rows:  # line 3
        filled.append(_fill(left, row, eta=eta, q=q))
        placed = {request.arrival for request in filled[-1].chosen}
        left = [request for request in left if request.arrival not in placed]
    return filled


def slotted_das(
    waiting: Iterable[WaitingRequest], row_lengths: Sequence[int], *, eta: float = 0.5, q: float = 0.5
) -> SlottedBatch:
    """Fill rows of one dimension as `das` does, then put each row's requests into its slots, first fit.

    All rows have slots of one size z, the largest request of all sets U. So no request of U is too large for a slot.
    The rest of a row beyond its whole slots is a last, smaller slot. It takes only what would find no slot otherwise.

    If U is empty in all rows, the rows stay whole: each is one slot, as in Algorithm 1.

    Args: as those of `das`; each request has one size.
    Raises: as `das`.
    Source: TCB, section 5.3, Algorithm 2.
    """
    filled = das(waiting, [(length,) for length in row_lengths], eta=eta, q=q)  # line 2
    largest = max((request.sizes[0] for row in filled for request in row.utility_set), default=0)  # lines 3 and 4
    z = largest or max(1, *row_lengths)
    slotted, returned = [], []
    for row, length in zip(filled, row_lengths, strict=True):  # line 6
        sizes = [min(z, length - start) for start in range(0, length, z)]  # line 5
        slots, without_slot = _first_fit(row.chosen, sizes)  # line 7
        slotted.append(slots)
        returned += without_slot
    return SlottedBatch(z, tuple(slotted), tuple(returned))


def _by_density(request: WaitingRequest) -> tuple[float, float, int]:
    return (-request.utility / request.length, *_by_deadline(request))


def _by_deadline(request: WaitingRequest) -> tuple[float, int]:
    return request.latest_start, request.arrival


def _check(waiting: Sequence[WaitingRequest], rows: Sequence[Sequence[int]], *, eta: float, q: float) -> None:
    for name, value in (("eta", eta), ("q", q)):
        if not 0 < value < 1:
            raise SettingError(f"{name} must be above 0 and below 1, not {value}")
    if abs(eta + q - 1) > ROUNDING:
        raise SettingError(f"eta + q must be 1, not {eta} + {q}")
    if not rows:
        raise ValueError("a batch must have at least one row")
    dimensions = len(rows[0])
    if not dimensions:
        raise ValueError("a row must have at least one dimension")
    for row in rows:
        if len(row) != dimensions:
            raise ValueError(f"all rows must have the same dimensions, not {dimensions} and {len(row)}")
    for request in waiting:
        if len(request.sizes) != dimensions:
            raise ValueError(
                f"request {request.arrival}: {len(request.sizes)} sizes, but a row has {dimensions} dimensions"
            )
    arrivals = [request.arrival for request in waiting]
    if len(set(arrivals)) < len(arrivals):
        raise ValueError(f"two requests have the arrival {max(arrivals, key=arrivals.count)}")


def _fill(ordered: Sequence[WaitingRequest], row: Sequence[int], *, eta: float, q: float) -> FilledRow:
    """Fill one row. Args: ordered: those that wait, densest first. Source: Algorithm 1, lines 8 to 15."""
    s = _fitting_prefix(ordered, row)
    # A utility set that is not empty has at least one request, however small eta is.
    p = max(1, math.ceil(eta * s - ROUNDING)) if s else 0
    utility_set, others = ordered[:p], ordered[p:]
    wanted = q * _mean_utility(utility_set) * (1 - ROUNDING)
    deadline_set = sorted((request for request in others if request.utility >= wanted), key=_by_deadline)
    rest = [request for request in others if request.utility < wanted]
    return FilledRow(_put([*utility_set, *deadline_set, *rest], row), p=p, s=s)


def _fitting_prefix(requests: Iterable[WaitingRequest], row: Sequence[int]) -> int:
    """Return how many requests fit before the first one that does not."""
    room, count = tuple(row), 0
    for request in requests:
        room = _room_after(request, room)
        if min(room) < 0:
            break
        count += 1
    return count


def _put(requests: Iterable[WaitingRequest], row: Sequence[int]) -> tuple[WaitingRequest, ...]:
    """Return those that a row takes, greedily: one that does not fit is passed over."""
    room, taken = tuple(row), []
    for request in requests:
        after = _room_after(request, room)
        if min(after) >= 0:
            room = after
            taken.append(request)
    return tuple(taken)


def _room_after(request: WaitingRequest, room: tuple[int, ...]) -> tuple[int, ...]:
    """Return what is left of each dimension; a negative number if the request does not fit."""
    return tuple(map(sub, room, request.sizes))


def _mean_utility(requests: Sequence[WaitingRequest]) -> float:
    """Return the mean utility; 0 if there are no requests."""
    total = 0.0
    # The function `sum` compensates for rounding since Python 3.12. Python 3.11 and Lua do not.
    for request in requests:
        total += request.utility
    return total / len(requests) if requests else 0


def _first_fit(
    requests: Iterable[WaitingRequest], sizes: Iterable[int]
) -> tuple[tuple[tuple[WaitingRequest, ...], ...], list[WaitingRequest]]:
    """Return the requests of each slot of a row, and those that fit in none."""
    free = list(sizes)
    slots: list[list[WaitingRequest]] = [[] for _ in free]
    without_slot = []
    for request in requests:
        (size,) = request.sizes
        place = next((number for number, room in enumerate(free) if size <= room), None)
        if place is None:
            without_slot.append(request)
        else:
            slots[place].append(request)
            free[place] -= size
    return tuple(map(tuple, slots)), without_slot
