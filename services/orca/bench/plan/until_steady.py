"""Runs that are long enough for a steady state: how many requests that takes depends on how many a group holds."""

from collections.abc import Callable
from typing import TypeVar

from orca.planner.simulate.steady_state import NoSteadyState

GROWTH = 1.5
"""Requests of a run for each one of the run before, which had no steady state."""

Result = TypeVar("Result")

ATTEMPTS = 8
"""Runs after which it is not for want of requests: the last one has 17 times as many as the first."""


def until_steady(run: Callable[[int], Result], requests: int) -> tuple[int, Result]:
    """Run, each time with more requests, until a run has a steady state.

    Args: run: with a number of requests; raises NoSteadyState. requests: of the first run.
    Returns: the requests and the result of the run that has one.
    Raises: NoSteadyState of the last attempt.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return requests, run(requests)
        except NoSteadyState:
            requests = int(GROWTH * requests) + 1
    return requests, run(requests)
