"""The share of a matrix that `make test` runs. The other parametrizations are marked slow, for `make check-slow`.

    @pytest.mark.covered(2)    every two values of different parameters meet in one of those that run
    @pytest.mark.sampled(3)    three of them run, as far apart as they go

A parametrization that has a mark of its own, `slow` or `prove`, keeps it and counts for neither.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

from support.pairs import cover


def mark_the_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark all parametrizations slow that the marks of their tests leave out."""
    tests: defaultdict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        has_rule = item.get_closest_marker("covered") or item.get_closest_marker("sampled")
        if has_rule and not (item.get_closest_marker("slow") or item.get_closest_marker("prove")):
            tests[item.path, item.cls, item.originalname].append(item)
    for several in tests.values():
        chosen = _chosen(several)
        for place, item in enumerate(several):
            if place not in chosen:
                item.add_marker(pytest.mark.slow)


def _chosen(several: Sequence[pytest.Function]) -> set[int]:
    """Places of those that `make test` runs."""
    if sampled := several[0].get_closest_marker("sampled"):
        [count] = sampled.args
        return {place * len(several) // count for place in range(min(count, len(several)))}
    covered = several[0].get_closest_marker("covered")
    assert covered is not None
    [strength] = covered.args
    # The ids of a parametrization, one for each `parametrize` and each fixture with parameters.
    return set(cover([dict(enumerate(item.callspec._idlist)) for item in several], strength))
