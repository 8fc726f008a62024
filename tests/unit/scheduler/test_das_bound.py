"""Theorem 5.1 by brute force: DAS, slot after slot, against the exact optimum of small instances.

Theorem 5.1 of TCB promises eta * q / (eta * q + 1) of the optimum. These lines show more, eta / (1 + eta), for one
dimension and weights of 1:

1. The optimum runs some requests that DAS runs as well, at some time. Together they have at most the utility V of DAS.
2. The others of its row k at time t wait while DAS fills that row, because DAS never runs them.
3. Of those that wait, no row can hold more utility than the s shortest have. U has at least the share eta of that.
4. So the others have at most V_tk / eta in each row: OPT <= V + V / eta.

For eta = q = 1/2 the theorem promises 1/5, and the lines above show 1/3.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random

import pytest

from orca.scheduler.policy.das import FilledRow, WaitingRequest, das, open_windows

LENGTH_MAX = 12
UNIT = math.lcm(*range(1, LENGTH_MAX + 1))
SHARES = (10, 25, 50, 75, 90)
"""Values of eta in percent."""
CLIMB = 1_000
"""Instances of a search after which it begins from scratch."""

# The utility of a length, in units, so that sums are exact.
UTILITIES: dict[str, Callable[[int], int]] = {
    "inverse_length": lambda length: UNIT // length,
    "equal": lambda _: UNIT,
}

Fill = Callable[[Sequence[WaitingRequest], Sequence[tuple[int]], int], list[FilledRow]]
"""A scheduler: those that wait, the rows, and eta in percent."""


@dataclass(frozen=True, slots=True)
class Task:
    """A request of the paper: it may start at any time from `arrival` to `deadline`."""

    length: int
    arrival: int
    deadline: int


@dataclass(frozen=True, slots=True)
class Instance:
    """All requests of a run of some time slots, each with a batch of `rows` rows."""

    tasks: tuple[Task, ...]
    row_length: int
    rows: int
    times: int


@dataclass(frozen=True, slots=True)
class Result:
    """The utility that a scheduler gets from an instance, and the optimum."""

    found: int
    optimum: int
    instance: Instance

    @property
    def ratio(self) -> Fraction:
        return Fraction(self.found, self.optimum)


def by_das(waiting: Sequence[WaitingRequest], rows: Sequence[tuple[int]], percent: int) -> list[FilledRow]:
    return das(waiting, rows, eta=percent / 100, q=(100 - percent) / 100)


def by_deadline(waiting: Sequence[WaitingRequest], rows: Sequence[tuple[int]], _: int) -> list[FilledRow]:
    """Fill the rows by deadline alone: DAS whose lengths and utilities are all the same."""
    alike = {replace(request, length=1, utility=1): request for request in waiting}
    return [replace(row, chosen=tuple(map(alike.__getitem__, row.chosen))) for row in das(list(alike), rows)]


@pytest.mark.parametrize("utility", UTILITIES)
def test_das_is_within_its_bound_of_the_optimum(utility: str) -> None:
    search(by_das, utility, instances=1_000)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("utility", UTILITIES)
def test_das_is_within_its_bound_of_the_optimum_of_a_hundred_thousand_instances(utility: str) -> None:
    for percent, worst in search(by_das, utility, instances=100_000).items():
        print(f"{utility}, eta {percent} %: worst ratio {worst.ratio} = {float(worst.ratio):.4f}: {worst.instance}")


@pytest.mark.parametrize("utility", UTILITIES)
def test_the_search_finds_that_deadlines_alone_break_the_bound(utility: str) -> None:
    with pytest.raises(AssertionError, match="below eta"):
        search(by_deadline, utility, instances=1_000)


def search(fill: Fill, utility: str, *, instances: int) -> dict[int, Result]:
    """Return the worst instance for each eta, in percent.

    Half of the instances are random. The others are small changes of a bad one, and the worse one of the two is changed
    next. Such a climb is for one eta, and begins from scratch after some instances.
    """
    chance = Random(utility)
    worst: dict[int, Result] = {}
    for number in range(instances):
        if number % CLIMB == 0:
            climb: Result | None = None
            aim = SHARES[number // CLIMB % len(SHARES)]
        instance = changed(climb.instance, chance) if climb and chance.random() < 0.5 else random_instance(chance)
        values = [UTILITIES[utility](task.length) for task in instance.tasks]
        optimum = best(values, servable_sets(instance))
        for percent in SHARES:
            found = Result(sum(values[n] for n in run_online(instance, fill, utility, percent)), optimum, instance)
            check(found, percent)
            if percent not in worst or found.ratio < worst[percent].ratio:
                worst[percent] = found
            if percent == aim and (climb is None or found.ratio <= climb.ratio):
                climb = found
    return worst


def check(result: Result, percent: int) -> None:
    eta = Fraction(percent, 100)
    product = eta * (1 - eta)
    assert result.ratio <= 1, f"above the optimum, so one of the two is wrong: {result}"
    assert result.ratio >= product / (product + 1), f"below eta * q / (eta * q + 1) for eta = {eta}: {result}"
    assert result.ratio >= eta / (1 + eta), f"below eta / (1 + eta) for eta = {eta}: {result}"


def run_online(instance: Instance, fill: Fill, utility: str, percent: int) -> list[int]:
    """Return the places of the tasks that a scheduler runs in time. It knows only those that have arrived."""
    value = UTILITIES[utility]
    waiting = {
        place: WaitingRequest(
            arrival=place,
            sizes=(task.length,),
            utility=value(task.length) / UNIT,
            length=task.length,
            deadline=task.deadline,
        )
        for place, task in enumerate(instance.tasks)
    }
    served: list[int] = []
    for time in range(instance.times):
        arrived = [waiting[place] for place in waiting if instance.tasks[place].arrival <= time]
        for row in fill(open_windows(arrived, time), [(instance.row_length,)] * instance.rows, percent):
            for request in row.chosen:
                served.append(request.arrival)
                del waiting[request.arrival]
    return served


def servable_sets(instance: Instance) -> set[int]:
    """Return sets of tasks, as bit masks, that can be served in time: each such set is part of one of them.

    A row is filled until no other present task fits. A task that an earlier row has served leaves a gap there.
    """
    servable = {0}
    for time in range(instance.times):
        fillings = full_rows(instance, time)
        for _ in range(instance.rows):
            servable = {served | filling for served in servable for filling in fillings}
    return servable


def full_rows(instance: Instance, time: int) -> list[int]:
    """Return all sets of tasks, as bit masks, that fit a row at a time and leave no room for another one."""
    present = [(1 << n, task.length) for n, task in enumerate(instance.tasks) if task.arrival <= time <= task.deadline]
    lengths = {0: 0}  # of each set that fits
    for bit, length in present:
        longer = {tasks | bit: total + length for tasks, total in lengths.items()}
        lengths |= {tasks: total for tasks, total in longer.items() if total <= instance.row_length}
    return [
        tasks
        for tasks, total in lengths.items()
        if all(tasks & bit or total + length > instance.row_length for bit, length in present)
    ]


def best(values: Sequence[int], sets: Iterable[int]) -> int:
    """Return the largest sum of values of a set. Args: sets: bit masks."""
    return max(sum(value for place, value in enumerate(values) if tasks >> place & 1) for tasks in sets)


def random_instance(chance: Random) -> Instance:
    """Return an instance of 2 to 9 tasks with few or many different lengths."""
    row_length = chance.randint(2, LENGTH_MAX)
    lengths = [chance.randint(1, row_length) for _ in range(chance.randint(1, 9))]
    times = chance.randint(1, 4)
    tasks = tuple(a_task(chance, chance.choice(lengths), times) for _ in range(chance.randint(2, 9)))
    return Instance(tasks, row_length=row_length, rows=chance.randint(1, 2), times=times)


def a_task(chance: Random, length: int, times: int) -> Task:
    arrival = chance.randrange(times)
    return Task(length, arrival, chance.randrange(arrival, times))


def changed(instance: Instance, chance: Random) -> Instance:
    """Return an instance of which one or two tasks are others, and in some cases a task or a unit more or less."""
    tasks = list(instance.tasks)
    for _ in range(chance.randint(1, 2)):
        length = chance.choice([chance.randint(1, instance.row_length), chance.choice(tasks).length])
        tasks[chance.randrange(len(tasks))] = a_task(chance, length, instance.times)
    if chance.random() < 0.2 and len(tasks) < 9:
        tasks.append(chance.choice(tasks))
    elif chance.random() < 0.2 and len(tasks) > 2:
        tasks.pop()
    row_length = instance.row_length + chance.choice([0, 0, 0, 1, -1])
    row_length = min(max(row_length, *(task.length for task in tasks)), LENGTH_MAX)
    return replace(instance, tasks=tuple(tasks), row_length=row_length)


# The optimum itself


def optimum_of(utility: str, *tasks: Task, row_length: int, rows: int = 1, times: int = 1) -> Fraction:
    """Return the optimum, in the utility of one request of length 1."""
    instance = Instance(tasks, row_length=row_length, rows=rows, times=times)
    return Fraction(best([UTILITIES[utility](task.length) for task in tasks], servable_sets(instance)), UNIT)


def test_the_optimum_leaves_to_a_later_time_what_can_wait() -> None:
    tasks = [Task(4, 0, 0), Task(2, 0, 1), Task(2, 0, 1)]
    assert optimum_of("equal", *tasks, row_length=4, times=2) == 3
    assert optimum_of("inverse_length", *tasks, row_length=4, times=2) == Fraction(1, 4) + 1


def test_the_optimum_serves_a_task_once_and_in_its_window_only() -> None:
    assert optimum_of("equal", Task(1, 1, 2), row_length=5, rows=2, times=4) == 1
    assert optimum_of("equal", Task(3, 0, 0), Task(3, 0, 0), row_length=5, times=4) == 1
    assert optimum_of("equal", Task(3, 0, 0), Task(3, 0, 0), row_length=5, rows=2) == 2


def test_the_optimum_of_a_row_is_that_of_its_best_filling() -> None:
    lengths = (6, 5, 5, 4)
    tasks = [Task(length, 0, 0) for length in lengths]
    assert optimum_of("equal", *tasks, row_length=10) == 2
    assert optimum_of("inverse_length", *tasks, row_length=10) == Fraction(1, 4) + Fraction(1, 5)
