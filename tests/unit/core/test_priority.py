"""Priorities and the weights that stand for them."""

import itertools

import orjson
import pytest

from orca.core.priority import LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY, priority_of, weight_of

ALL = range(MOST_URGENT_PRIORITY, LEAST_URGENT_PRIORITY + 1)


@pytest.mark.parametrize("priority", ALL)
def test_a_priority_comes_back_from_its_stored_weight(priority: int) -> None:
    stored = orjson.loads(orjson.dumps(weight_of(priority)))
    assert stored == weight_of(priority)
    assert priority_of(stored) == priority


def test_each_step_towards_less_urgent_halves_the_weight() -> None:
    weights = [weight_of(priority) or 1.0 for priority in ALL]
    assert len(weights) == 17
    assert {later / earlier for earlier, later in itertools.pairwise(weights)} == {0.5}


def test_the_default_priority_stores_no_weight() -> None:
    assert weight_of(0) is None
