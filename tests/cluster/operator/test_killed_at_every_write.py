"""An operator that is killed at any of its writes and restarted reaches the state of an undisturbed one.

A point is a journey of a resource, a number, and a moment. The operator dies just before that write of the journey
reaches the API server. Or it dies just after the write was carried out and before the operator knows. In a chain the
journeys follow one another in one namespace, all with the same number. A journey that comes to its end with fewer
writes has no such point; numbers rise until no journey has one.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import pytest

from orca.operator.domain import names
from orca.operator.plan.children import KEPT_KINDS
from support.operator.api_server import ApiServer
from support.operator.end_state import State, difference
from support.operator.fake_nodes import NOW, FakeNodes, Json
from support.operator.journeys import (
    GOAL_JOURNEYS,
    JOURNEYS,
    MODEL_JOURNEYS,
    SLOTS_JOURNEYS,
    Journey,
    JourneyRunner,
    creation,
    journey_runner,
)
from support.operator.operator_runs import prepare
from support.operator.recording_proxy import At, Call, Moment
from support.operator.shop import WITHIN_S
from support.waiting import wait_until

AT_A_TIME = 4
"""Chains; they mostly wait."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("nodes")]
EVERY = range(1, 1000)
"""More than any journey has writes."""
ALL = [pytest.mark.prove, pytest.mark.timeout(3600)]


@dataclass(frozen=True, slots=True)
class Point:
    """One journey that is over. The operator died at the write `fatal`; None when it made no such write."""

    journey: Journey
    moment: Moment
    fatal: Call | None
    writes: Sequence[Call]
    state: State


Begin = Callable[[str], AbstractContextManager[JourneyRunner]]
Death = tuple[str, str, Moment]
"""Journey, write, and moment of it."""


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[FakeNodes]:
    """Start nodes on which fetches end at once."""
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": NOW, "finishedAt": NOW}
    fetched: Json = {"phase": "Succeeded", "state": {"terminated": ended}}
    prepare()
    with FakeNodes(server, {"one": {}, "two": {}}) as nodes:
        nodes.says = lambda pod: fetched if pod.metadata.labels.get(names.ROLE_LABEL) == "fetch" else None
        yield nodes


@pytest.fixture
def begin(server: ApiServer, tmp_path: Path, redis_login: dict[str, str]) -> Begin:
    """Gets the name of a namespace."""
    return lambda namespace: journey_runner(server, tmp_path, namespace, redis_login)


@pytest.mark.parametrize(
    ("journeys", "numbers"),
    [
        pytest.param(JOURNEYS[:2], [3, 10], id="sample"),
        pytest.param(JOURNEYS, EVERY, id="all", marks=ALL),
        pytest.param(MODEL_JOURNEYS, EVERY, id="models", marks=ALL),
        pytest.param(SLOTS_JOURNEYS[:2], [2], id="slots-sample"),
        pytest.param(SLOTS_JOURNEYS, EVERY, id="slots", marks=ALL),
        pytest.param(GOAL_JOURNEYS[:2], [2], id="goal-sample"),
        pytest.param(GOAL_JOURNEYS, EVERY, id="goal", marks=ALL),
    ],
)
def test_a_killed_operator_reaches_the_same_state_as_an_undisturbed_one(
    begin: Begin, journeys: Sequence[Journey], numbers: Iterable[int]
) -> None:
    chain = f"life-{_word(*(each.name for each in journeys))}"

    def travel(number: int | None, moment: Moment) -> list[Point]:
        with begin(f"{chain}-{moment.value}-{number or 'alone'}") as one:
            return [_point(one, journey, number, moment) for journey in journeys]

    undisturbed = travel(None, Moment.BEFORE)

    def die(number: int, moment: Moment) -> list[Point]:
        return _checked(undisturbed, travel(number, moment))

    def die_in(journey: str, what: str, moment: Moment) -> list[Point]:
        """The order of writes is not always the same, so some have to be waited for by name."""
        with begin(f"{chain}-{moment.value}-{_word(journey, what)}") as one:
            points = [_point(one, each, what if each.name == journey else None, moment) for each in journeys]
        return _checked(undisturbed, points)

    deaths = {death for points in _chains(die, numbers) for death in _deaths(points)}
    if numbers is EVERY:
        wanted = {
            (each.journey.name, call.what, moment) for each in undisturbed for call in each.writes for moment in Moment
        }
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            missed = [threads.submit(die_in, *death) for death in sorted(wanted - deaths, key=str)]
        chains, failures = _ended(missed)
        deaths |= {death for points in chains for death in _deaths(points)}
        print(f"different writes covered before and after {len(wanted & deaths)}/{len(wanted)}")
        _raise_all(failures)
        assert wanted <= deaths, f"nobody died at {wanted - deaths}"


@pytest.mark.parametrize("numbers", [pytest.param([7], id="sample"), pytest.param(EVERY, id="all", marks=ALL)])
@pytest.mark.parametrize("policy", ["Keep", "Delete"])
def test_objects_that_a_killed_operator_leaves_are_deleted_with_the_resource(
    begin: Begin, policy: str, numbers: Iterable[int]
) -> None:
    def travel(number: int, moment: Moment) -> list[Point]:
        with begin(f"{policy.lower()}-{moment.value}-{number}") as one:
            journey = creation(deletionPolicy=policy)
            fatal = one.make(journey, number, moment)
            made = one.children()
            one.delete_while_no_operator_runs()
            kept = {child for child in made if child[0] in KEPT_KINDS and policy == "Keep"}
            wait_until(lambda: one.children() == kept, WITHIN_S, lambda: f"{fatal}: {one.children()}, not {kept}")
            return [Point(journey, moment, fatal, one.proxy.record.writes, {})]

    for [point] in _chains(travel, numbers):
        assert not point.writes, f"killed {point.moment.value} {point.fatal}: then {point.writes}"


@pytest.mark.parametrize("numbers", [pytest.param([5], id="sample"), pytest.param(EVERY, id="all", marks=ALL)])
@pytest.mark.parametrize("policy", ["Keep", "Delete"])
def test_objects_written_for_a_resource_that_was_just_deleted_are_deleted_with_it(
    begin: Begin, policy: str, numbers: Iterable[int]
) -> None:
    def travel(number: int, moment: Moment) -> list[Point]:
        with begin(f"vain-{policy.lower()}-{moment.value}-{number}") as one:
            journey = creation(deletionPolicy=policy)
            write = one.make_in_vain(journey, number, moment)
            kinds = KEPT_KINDS if policy == "Keep" else frozenset()
            if write is not None:
                wait_until(
                    lambda: {kind for kind, _ in one.children()} <= kinds,
                    WITHIN_S,
                    lambda: f"deleted {moment.value} write {number}, {write}: {one.children()} are left",
                )
            return [Point(journey, moment, write, [], {})]

    assert list(_chains(travel, numbers))


def _word(*names: str) -> str:
    """Return a word for the name of a namespace."""
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:8]


def _chains(travel: Callable[[int, Moment], list[Point]], numbers: Iterable[int]) -> Iterator[list[Point]]:
    """Some at a time, until a number was too high for any point. Prints how many points there were.

    Raises: ExceptionGroup in the end, of all chains that failed: one does not keep the others from being seen.
    """
    count = 0
    failures: list[Exception] = []
    rest = iter(numbers)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        while some := list(islice(rest, AT_A_TIME // len(Moment))):
            chains, failed = _ended([threads.submit(travel, *chain) for chain in product(some, Moment)])
            yield from chains
            failures += failed
            count += sum(point.fatal is not None for points in chains for point in points)
            if not chains or not all(any(point.fatal for point in points) for points in chains):
                break
    print(f"points covered {count}/{count}")
    _raise_all(failures)


def _ended(futures: Iterable[Future[list[Point]]]) -> tuple[list[list[Point]], list[Exception]]:
    """Return the results of all runs, once all have ended."""
    chains, failures = [], []
    for future in futures:
        try:
            chains.append(future.result())
        except Exception as failure:  # whatever it was, the other chains are seen first
            failures.append(failure)
    return chains, failures


def _raise_all(failures: Sequence[Exception]) -> None:
    if failures:
        raise ExceptionGroup("chains that did not end as an undisturbed one does", failures)


def _point(one: JourneyRunner, journey: Journey, at: At | None, moment: Moment) -> Point:
    fatal = one.make(journey, at, moment)
    writes = one.proxy.record.writes
    if fatal is not None:
        one.recover(journey)
    wait_until(one.is_at_rest, WITHIN_S, lambda: f"{journey.name}, {fatal}: {one.state()}")
    return Point(journey, moment, fatal, writes, one.state())


def _checked(undisturbed: Sequence[Point], points: list[Point]) -> list[Point]:
    """Those points. Raises: AssertionError with the first one that ends elsewhere, and how."""
    for wanted, found in zip(undisturbed, points, strict=True):
        story = f"{found.journey.name}: killed {found.moment.value} {found.fatal}"
        differs = difference(wanted.state, found.state)
        assert not differs, f"{story}\n{differs}"
        if found.fatal is not None:
            print(story)
    return points


def _deaths(points: Sequence[Point]) -> Iterator[Death]:
    return ((each.journey.name, each.fatal.what, each.moment) for each in points if each.fatal is not None)
