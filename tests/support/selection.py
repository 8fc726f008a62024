"""The share of a matrix that `make test` runs. The other parametrizations are marked `slow`, for `make check-slow`.

    @pytest.mark.covered(2)    every two values of different parameters meet in one of those that run
    @pytest.mark.sampled(3)    three of them run, as far apart as they go
    @pytest.mark.sampled(3, others="prove")    the others run under `make prove` only: they take minutes

A parametrization that has a mark of its own, `slow` or `prove`, keeps it and counts for neither.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

from support.pairs import cover


def mark_the_others(items: Iterable[pytest.Item]) -> None:
    """Mark all parametrizations that the marks of their tests leave out."""
    tests: defaultdict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if _rule(item) and not (item.get_closest_marker("slow") or item.get_closest_marker("prove")):
            tests[item.path, item.cls, item.originalname].append(item)
    for several in tests.values():
        rule = _rule(several[0])
        assert rule is not None
        chosen = _chosen(several, rule)
        for place, item in enumerate(several):
            if place not in chosen:
                item.add_marker(rule.kwargs.get("others", "slow"))


def _rule(item: pytest.Item) -> pytest.Mark | None:
    """Return the mark that says which parametrizations run."""
    return item.get_closest_marker("sampled") or item.get_closest_marker("covered")


def _chosen(several: Sequence[pytest.Function], rule: pytest.Mark) -> set[int]:
    """Return the places of those that `make test` runs."""
    [number] = rule.args
    if rule.name == "sampled":
        return {place * len(several) // number for place in range(min(number, len(several)))}
    # The ids of a parametrization, one for each `parametrize` and each fixture with parameters.
    return set(cover([dict(enumerate(item.callspec._idlist)) for item in several], number))
