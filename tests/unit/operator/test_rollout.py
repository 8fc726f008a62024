"""The planner of groups, run to its end: it gets there, and on no step does it break a bound."""

import itertools
from dataclasses import replace

import pytest

from orca.operator.domain.groups import Group
from orca.operator.plan.rollout import Bounds, RolloutMove, next_move


class Simulation:
    """Groups as a cluster would have them: each move makes one new group ready, or lets one that leaves be gone."""

    def __init__(self, *groups: Group, bounds: Bounds, wanted: str, room: int = 100) -> None:
        self.groups = {group.name: group for group in groups}
        self.bounds = bounds
        self.wanted = wanted
        self.room = room  # groups that the nodes can hold
        self.steps: list[RolloutMove] = []

    @property
    def ready(self) -> int:
        return sum(group.is_ready and not group.is_leaving for group in self.groups.values())

    @property
    def present(self) -> int:
        return sum(not group.is_leaving for group in self.groups.values())

    def decide(self) -> bool:
        """One step of the planner. Returns: whether it did anything."""
        decided = next_move(tuple(self.groups.values()), self.wanted, self.bounds)
        self.steps.append(decided)
        for name in decided.remove:
            self.groups[name] = replace(self.groups[name], is_leaving=True, is_ready=False)
        if decided.create is not None:
            name = f"{self.wanted}-{decided.create}"
            assert name not in self.groups
            self.groups[name] = Group(name=name, revision=self.wanted, ordinal=decided.create, is_placed=False)
        return bool(decided.remove or decided.create is not None)

    def move(self) -> bool:
        """The cluster's turn. Returns: whether anything moved."""
        for group in list(self.groups.values()):
            if group.is_leaving:
                del self.groups[group.name]
                return True
        for group in self.groups.values():
            if not group.is_ready and (group.is_placed or self._has_room()):
                self.groups[group.name] = replace(group, is_placed=True, is_ready=True, is_overdue=False)
                return True
            if not group.is_placed and not group.is_overdue:
                self.groups[group.name] = replace(group, is_overdue=True)
                return True
        return False

    def run(self) -> None:
        """Run the rollout to its end, and check the minimum of serving groups after each step."""
        for _ in range(1000):
            before = self.ready
            has_decided = self.decide()
            least = self.bounds.replicas - max(self.bounds.max_unavailable, 1 if self.steps[-1].is_squeezed else 0)
            assert self.ready >= min(before, least)
            assert self.present <= max(self.bounds.replicas + self.bounds.max_surge, before)
            assert sum(not group.is_placed for group in self.groups.values()) <= 1
            if not has_decided and not self.move():
                return
        raise AssertionError("it does not come to an end")

    def _has_room(self) -> bool:
        return sum(group.is_placed for group in self.groups.values()) < self.room


def serving(revision: str, count: int) -> list[Group]:
    return [Group(name=f"{revision}-{i}", revision=revision, ordinal=i, is_ready=True) for i in range(count)]


def bounds(replicas: int, surge: int = 1, unavailable: int = 0) -> Bounds:
    return Bounds(replicas=replicas, max_surge=surge, max_unavailable=unavailable)


@pytest.mark.parametrize(
    ("there", "replicas", "surge", "unavailable"),
    [case for case in itertools.product(range(4), range(4), range(3), range(3)) if case[2] or case[3]],
)
def test_every_rollout_and_change_of_scale_reaches_the_wanted_state(
    there: int, replicas: int, surge: int, unavailable: int
) -> None:
    simulation = Simulation(*serving("old", there), bounds=bounds(replicas, surge, unavailable), wanted="new")
    simulation.run()
    assert sorted(simulation.groups) == [f"new-{i}" for i in range(replicas)]
    assert simulation.ready == replicas


def test_groups_are_created_one_at_a_time() -> None:
    simulation = Simulation(bounds=bounds(3), wanted="new")
    assert simulation.decide()
    assert not simulation.decide()  # its pods have found no node yet
    simulation.move()
    assert simulation.decide()


def test_surplus_groups_are_removed_from_the_highest_ordinal() -> None:
    decided = next_move(serving("new", 3), "new", bounds(1))
    assert decided == RolloutMove(None, ("new-2", "new-1"))


def test_surplus_groups_that_do_not_serve_are_removed_first() -> None:
    broken, *others = serving("new", 3)
    assert next_move([replace(broken, is_ready=False), *others], "new", bounds(2)).remove == ("new-0",)


def test_without_room_for_the_surge_one_group_may_be_missing() -> None:
    simulation = Simulation(*serving("old", 2), bounds=bounds(2), wanted="new", room=2)
    simulation.run()
    assert sorted(simulation.groups) == ["new-0", "new-1"]
    assert any(decided.is_squeezed for decided in simulation.steps)


def test_a_revert_keeps_serving_groups_and_removes_new_ones() -> None:
    newcomer = Group(name="new-0", revision="new", ordinal=0)
    simulation = Simulation(*serving("old", 2), newcomer, bounds=bounds(2), wanted="old")
    simulation.run()
    assert sorted(simulation.groups) == ["old-0", "old-1"]
    assert all(decided.remove == ("new-0",) for decided in simulation.steps[:1])


def test_an_edit_during_a_rollout_keeps_one_group_serving() -> None:
    old, middle = serving("old", 1), [Group(name="middle-0", revision="middle", ordinal=0)]
    simulation = Simulation(*old, *middle, bounds=bounds(1), wanted="new")
    assert simulation.decide()
    assert not simulation.groups["old-0"].is_leaving
    simulation.run()
    assert sorted(simulation.groups) == ["new-0"]


def test_broken_groups_of_an_old_revision_do_not_block_the_new_one() -> None:
    broken = [replace(group, is_ready=False) for group in serving("old", 3)]
    simulation = Simulation(*broken, bounds=bounds(2, surge=0, unavailable=1), wanted="new")
    simulation.run()
    assert sorted(simulation.groups) == ["new-0", "new-1"]


def test_a_terminating_group_keeps_its_ordinal() -> None:
    leaving = Group(name="new-0", revision="new", ordinal=0, is_leaving=True)
    assert next_move([leaving], "new", bounds(1)).create == 1


def test_nothing_is_done_in_the_wanted_state() -> None:
    assert next_move(serving("new", 2), "new", bounds(2)) == RolloutMove()
