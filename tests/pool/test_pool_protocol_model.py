"""The protocol holds under seeded walks, and each of its rules is needed: without it a walk finds a broken promise.

A failure prints its seed: `World(seed).walk()` repeats it. The rules of the pool are taken away by the subclasses here,
those of the parts around it by name (see pool_model.World).

Some rules back each other up, so that one of them alone may go: a claim's number rises at each take-back and at each
claim; and a commit compares the value at an index that is already there, which catches an owner that should not be one
at its first token. Where a rule is only seen to be needed without that comparison, its class inherits IndexOnly.
"""

# The rules that are taken away here are methods whose arguments then go unused.
# ruff: noqa: ARG002

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pool_model import World
from pool_model_stages import Violation
from pool_model_weather import Weather

from orca.core.request import End, Request, slots_needed
from orca.core.step import Claim
from orca.pool.api import CommitAnswer, CommitEntry, Entered, RequestState, Submission, Wait
from orca.pool.memory_pool import MemoryPool
from orca.pool.memory_state import ParentRecord, Record, Seat


def walk(seed: int) -> None:
    try:
        World(seed).walk()
    except Violation as violation:
        pytest.fail(f"seed {seed}: {violation}")


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_no_walk_breaks_a_promise(start: int) -> None:
    for seed in range(start, start + 20):
        walk(seed)


def test_a_walk_that_once_found_a_broken_promise_keeps_it_now() -> None:
    walk(9980)  # a join order came twice, to a stage and to the process that took its place


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(0, 20_000, 1000))
def test_no_walk_of_many_breaks_a_promise(start: int) -> None:
    for seed in range(start, start + 1000):
        walk(seed)


class IndexOnly(MemoryPool):
    """A commit at an index that is already there is taken for a repeated one, whatever its value."""

    def _is_there(self, record: Record, entry: CommitEntry) -> bool:
        return True


class ClaimsNotCompared(IndexOnly):
    def _is_owner(self, record: Record, claim: Claim) -> bool:
        return record.state is RequestState.OWNED


class CallIdNotCompared(IndexOnly):
    def _is_owner(self, record: Record, claim: Claim) -> bool:
        return record.state is RequestState.OWNED and record.number == claim.number


class NewestProcessWins(MemoryPool):
    def _may_take_seat(self, group: str, seat: Seat, is_holder_dead: bool) -> bool:
        return True


class EnteringKeepsClaims(IndexOnly):
    """A new process finds the requests of the old one under the same claims."""

    is_entering = False

    async def enter(self, *args: Any, **kwargs: Any) -> Entered | Wait:
        self.is_entering = True
        try:
            return await super().enter(*args, **kwargs)
        finally:
            self.is_entering = False

    def _take_back_all(self, group: str) -> None:
        if not self.is_entering:
            super()._take_back_all(group)


class LeavingClosesNothing(MemoryPool):
    def _close_process(self, process: str) -> None:
        pass


class ForgetsWhoHasLeftTooSoon(MemoryPool):
    """Before the last call that a process sent may have come in."""

    async def sweep(self) -> None:
        self.closed_at = {process: at for process, at in self.closed_at.items() if at > self.awake - 1000}
        await super().sweep()


class WallClockLeases(MemoryPool):
    def _awake_step(self, passed_ms: int) -> int:
        return max(0, passed_ms)


class TimeRunsBackwards(MemoryPool):
    def _awake_step(self, passed_ms: int) -> int:
        return min(passed_ms, 1000)


class GroupsReserveWhatTheyCanNeverHold(MemoryPool):
    def _may_mark(self, slots: int, total_slots: int) -> bool:
        return True


class AppendsAtAnyIndex(MemoryPool):
    def _is_next(self, record: Record, entry: CommitEntry) -> bool:
        return True


class AppendsBehindGaps(MemoryPool):
    def _is_next(self, record: Record, entry: CommitEntry) -> bool:
        return entry.index >= len(record.log)


class SweepLeavesDeadGroupsTheirRequests(MemoryPool):
    is_sweeping = False

    async def sweep(self) -> None:
        self.is_sweeping = True
        try:
            await super().sweep()
        finally:
            self.is_sweeping = False

    def _take_back_all(self, group: str) -> None:
        if not self.is_sweeping:
            super()._take_back_all(group)


class EndsAreNotFinal(MemoryPool):
    """A commit goes into a log that a cancel or deadline has ended."""

    def _commit_entry(self, entry: CommitEntry) -> CommitAnswer:
        record = self.records.get(entry.request_id)
        if record is not None and record.state is RequestState.ENDED and entry.index == len(record.log):
            record.log += entry.tokens
            record.end = End(record.end.reason, len(record.log)) if record.end else None
            return CommitAnswer.APPLIED
        return super()._commit_entry(entry)


class FirstTokensLiftNoDeadline(MemoryPool):
    def _note_first_token(self, record: Record) -> None:
        pass


class ReadersAreNotRenewed(MemoryPool):
    async def renew(self, readers: Sequence[tuple[str, str]]) -> None:
        self._begin()


class SubmitStoresAgain(MemoryPool):
    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        if submission.parent in self.parents:
            self._forget(submission.parent)
        return await super().submit(submission)

    def _forget(self, parent: str) -> None:
        known: ParentRecord = self.parents.pop(parent)
        for request in known.submission.requests:
            record = self.records.pop(request.id)
            self.bytes_reserved -= record.bytes
            if record.state is RequestState.QUEUED:
                self._unqueue(record)
            elif record.state is RequestState.OWNED:
                del self.own[record.group][request.id]


class RetiresAtOnce(MemoryPool):
    async def set_revision(self, revision: str, generation: int) -> str:
        before = self.revision
        in_force = await super().set_revision(revision, generation)
        if before is not None and before != in_force:
            self._retired.set(before, self.awake)
        return in_force


class RetiresNobody(MemoryPool):
    def _end_retired(self, revision: str) -> int:
        return 0


class OlderGenerationsWin(MemoryPool):
    async def set_revision(self, revision: str, generation: int) -> str:
        self._generation = 0
        return await super().set_revision(revision, generation)


class RevisionsShareAQueue(MemoryPool):
    def _queue(self, revision: str) -> list[tuple[int, str]]:
        return super()._queue("every")


class BlamesNobody(MemoryPool):
    def _blame(self, group: str, blamed: Mapping[str, Claim]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ()


class BlamesAllOfTheGroup(MemoryPool):
    """Whoever is in the group when its engine fails counts as on trial, whatever it has committed."""

    def _blame(self, group: str, blamed: Mapping[str, Claim]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        for request_id in blamed.keys() & self.own.get(group, {}).keys():
            self.own[group][request_id].is_on_trial = True
        return super()._blame(group, blamed)


class CommitsAcquitNobody(MemoryPool):
    def _acquit(self, record: Record) -> None:
        pass


class SuspectsRunInCompany(MemoryPool):
    def _slots_of(self, record: Record, total_slots: int, block_tokens: int) -> int:
        return slots_needed(record.request.max_total_tokens, block_tokens)


POISON_RULES = [BlamesNobody, BlamesAllOfTheGroup, CommitsAcquitNobody, SuspectsRunInCompany]
REVISION_RULES = [RetiresAtOnce, RetiresNobody, OlderGenerationsWin, RevisionsShareAQueue]
POOL_RULES = [
    ClaimsNotCompared,
    CallIdNotCompared,
    NewestProcessWins,
    LeavingClosesNothing,
    ForgetsWhoHasLeftTooSoon,
    WallClockLeases,
    TimeRunsBackwards,
    GroupsReserveWhatTheyCanNeverHold,
    AppendsAtAnyIndex,
    AppendsBehindGaps,
    SweepLeavesDeadGroupsTheirRequests,
    EndsAreNotFinal,
    FirstTokensLiftNoDeadline,
    ReadersAreNotRenewed,
    SubmitStoresAgain,
]
OTHER_RULES = ["stage epochs", "step numbers", "results in order", "no cancel timer"]
# Rules that only show in rare weather.
FAIL_OVERS = Weather(faults=("crash", "fail_over", "freeze", "sync", "fail_over"), has_replica=True)
CRASHES = Weather(faults=("crash", "double"), fault_rate=0.02)
REPLACEMENTS = Weather(
    faults=("crash", "freeze", "double", "scale_away", "replace", "replace"), fault_rate=0.04, has_next_revision=True
)
POISON = Weather(faults=("crash", "freeze", "double", "break_stage", "drain"), fault_rate=0.02, poison_rate=0.3)
BROKEN_FROM_OUTSIDE = Weather(faults=("break_stage",), fault_rate=0.3, repeat_rate=0.0, poison_rate=0.1)
RESTARTED_STAGES = Weather(faults=("break_stage",), fault_rate=0.03)


def finds_violation(
    pool_class: type[MemoryPool],
    without: frozenset[str] = frozenset(),
    weather: Weather | None = None,
    seeds: int = 400,
) -> bool:
    for seed in range(seeds):
        try:
            World(seed, pool_class=pool_class, without=without, weather=weather).walk()
        except Violation:
            return True
    return False


@pytest.mark.parametrize("pool_class", POOL_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_the_pool_is_needed(pool_class: type[MemoryPool]) -> None:
    needs_fail_over = pool_class in (CallIdNotCompared, AppendsBehindGaps)
    assert finds_violation(pool_class, weather=FAIL_OVERS if needs_fail_over else None)


@pytest.mark.parametrize("start", range(0, 40, 20))
def test_no_walk_in_which_revisions_replace_each_other_breaks_a_promise(start: int) -> None:
    for seed in range(start, start + 20):
        try:
            World(seed, weather=REPLACEMENTS).walk()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}")


@pytest.mark.parametrize("pool_class", REVISION_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_the_revisions_is_needed(pool_class: type[MemoryPool]) -> None:
    assert finds_violation(pool_class, weather=REPLACEMENTS)


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_requests_that_break_every_stage_end_with_an_error_and_take_no_other_with_them(start: int) -> None:
    for seed in range(start, start + 20):
        try:
            World(seed, weather=POISON).walk()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}")


@pytest.mark.parametrize("pool_class", POISON_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_against_poison_is_needed(pool_class: type[MemoryPool]) -> None:
    assert finds_violation(pool_class, weather=POISON)


def test_blame_for_deaths_from_outside_ends_innocent_requests() -> None:
    assert not finds_violation(MemoryPool, weather=BROKEN_FROM_OUTSIDE, seeds=40)
    assert finds_violation(MemoryPool, frozenset({"outside is innocent"}), BROKEN_FROM_OUTSIDE)


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_each_rule_around_the_pool_is_needed(rule: str) -> None:
    assert finds_violation(MemoryPool, frozenset({rule}))


def test_a_process_that_adopts_the_claims_of_another_breaks_the_log() -> None:
    assert finds_violation(EnteringKeepsClaims, frozenset({"never adopt"}), CRASHES)


def test_a_restarted_stage_that_obeys_the_order_to_its_predecessor_breaks_the_log() -> None:
    assert finds_violation(MemoryPool, frozenset({"joins by process"}), RESTARTED_STAGES)
