"""Mutants of the scheduler do what their names say: a run against one that changes nothing would prove nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from orca.core.domain.request import Request, Token
from orca.core.domain.step import Claim, Epoch, Step
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import next_batch
from orca.scheduler.policy.state import GroupState
from support.checker.installed_mutant import installed_mutant
from support.scheduler.scheduler_simulation import a_request, schedule_all, some_limits


def request(name: str, *tokens: int, new: int = 1, arrival: int = 1) -> Request:
    return replace(a_request(name, new=new, arrival=arrival), prompt=tokens)


def another_lives() -> list[Step]:
    """A request begins with blocks of one that ended, while a third one runs."""
    first = [request("A", *[1] * 8, new=30), request("B", *[2] * 8, arrival=2)]
    limits = some_limits(block_tokens=4, slots=64, shares_prefixes=True)
    return schedule_all(IterationPolicy(), limits, first, late=[(8, request("C", *[2] * 8, 9, arrival=3))])


def few_blocks() -> list[Step]:
    """All requests differ, and fill the memory several times over."""
    requests = [request(name, *[at] * 8, new=4, arrival=at) for at, name in enumerate("ABCDE", 1)]
    limits = some_limits(block_tokens=4, slots=32, max_batch_size=1, shares_prefixes=True)
    return schedule_all(IterationPolicy(), limits, requests)


@pytest.mark.parametrize(
    ("mutant", "run", "error"),
    [
        ("a block of another request", another_lives, "a shared block holds other tokens"),
        ("an eviction not sent", few_blocks, None),  # the counts of free blocks differ
    ],
)
def test_a_mutant_of_shared_blocks_breaks_the_stages_that_have_tokens_in_their_blocks(
    mutant: str, run: Callable[[], list[Step]], error: str | None
) -> None:
    assert run()
    with installed_mutant(mutant), pytest.raises(AssertionError, match=error):
        run()


def test_a_log_loses_its_first_token_when_its_request_starts_again() -> None:
    state, limits = GroupState(), some_limits()
    state.add(request("A", 1, 2, new=9), Claim(3, "test/1"), [Token(5), Token(6), Token(8)])
    with installed_mutant("token left out"):
        step = state.schedule(next_batch(IterationPolicy(), state, limits), Epoch(1, "test"))
    assert [new.tokens for new in step.new] == [(1, 2, 6, 8, 8)]
