"""The protocol holds under seeded walks, and each of its rules is needed: without it a walk finds a broken promise.

A failure prints its seed: `Simulation(seed).walk()` repeats it. The rules of the pool are taken away by subclasses (see
pool_model_rules), those of the parts around it by name (see pool_model.Simulation).
"""

from dataclasses import replace

import pytest

from orca.pool.memory.pool import MemoryPool
from support.pool.protocol.faults import FAULTS, FaultSettings
from support.pool.protocol.model import Simulation
from support.pool.protocol.order_rules import ORDER_RULES
from support.pool.protocol.rules import (
    CALL_RULES,
    FORGET_RULES,
    POISON_RULES,
    POOL_RULES,
    PROMISE_RULES,
    REVISION_RULES,
    AppendsBehindGaps,
    CallIdNotCompared,
    EnteringKeepsClaims,
    FirstTokensLiftNoDeadline,
    ForgetsWhoHasLeftTooSoon,
    GapsCostNoClaim,
    KeyedNamesAreFreeAtOnce,
    MarksOutliveSeats,
    NewestProcessWins,
    TimeRunsBackwards,
)
from support.pool.protocol.stages import Violation


def walk(seed: int, faults: FaultSettings | None = None) -> None:
    try:
        Simulation(seed, faults=faults).walk()
    except Violation as violation:
        pytest.fail(f"seed {seed}: {violation}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", range(0, 80, 20))
def test_no_random_walk_violates_a_guarantee(start: int) -> None:
    for seed in range(start, start + 20):
        walk(seed)


def test_a_walk_that_once_found_a_violation_finds_none_now() -> None:
    walk(9980)  # a join order came twice, to a stage and to the process that took its place


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(0, 20_000, 1000))
def test_none_of_many_random_walks_violates_a_guarantee(start: int) -> None:
    for seed in range(start, start + 1000):
        walk(seed)


OTHER_RULES = ["step numbers", "results in order", "no cancel timer"]
RARELY_NEEDED = {
    CallIdNotCompared,
    FirstTokensLiftNoDeadline,
    ForgetsWhoHasLeftTooSoon,
    NewestProcessWins,
    TimeRunsBackwards,
}
"""Many walks go by until one finds a broken promise."""
# Rules that only show in rare faults.
FAIL_OVERS = FaultSettings(faults=("crash", "fail_over", "freeze", "sync", "fail_over"), has_replica=True)
CRASHES = FaultSettings(faults=("crash", "double"), fault_rate=0.02)
REPLACEMENTS = FaultSettings(
    faults=("crash", "freeze", "double", "scale_away", "replace", "replace"), fault_rate=0.04, has_next_revision=True
)
PROMISES = FaultSettings(faults=("crash", "freeze", "drain", "restate", "restate"), fault_rate=0.04)
DELETIONS = FaultSettings(
    faults=("crash", "freeze", "double", "drain", "forget", "forget", "free_name", "free_name", "fail_over"),
    fault_rate=0.06,
    has_replica=True,
    keyed_rate=0.4,
)
# No call comes late, so only a reader can notice that a name stands for another answer.
PUNCTUAL_DELETIONS = replace(DELETIONS, repeat_rate=0.0)
POISON = FaultSettings(faults=("crash", "freeze", "double", "break_stage", "drain"), fault_rate=0.02, poison_rate=0.3)
CROWDED = FaultSettings(faults=("crash", "freeze", "double", "drain"), fault_rate=0.02, large_prompt=50)
BROKEN_FROM_OUTSIDE = FaultSettings(faults=("break_stage",), fault_rate=0.3, repeat_rate=0.0, poison_rate=0.1)
# Claims by an order. Half of the requests are large or have a deadline, so groups are reserved and requests too late.
ORDERS = FaultSettings(
    faults=("crash", "freeze", "double", "drain", "pause", "pause"),
    fault_rate=0.05,
    repeat_rate=0.1,
    large_prompt=50,
    order_rate=1.0,
    newer_rate=0.05,
)
# Claims of both kinds in turn, while the revision and the number of the schema change.
MIXED_ORDERS = replace(
    ORDERS,
    faults=(*(fault for fault in FAULTS if fault != "fail_over"), "pause", "replace", "change_schema"),
    repeat_rate=0.4,
    order_rate=0.6,
    has_next_revision=True,
)
ORDERS_AND_DELETIONS = replace(DELETIONS, large_prompt=50, order_rate=0.6, newer_rate=0.05)
RESTARTED_STAGES = FaultSettings(faults=("break_stage",), fault_rate=0.03)

ORDERED_WALKS = [
    pytest.param(ORDERS, id="orders"),
    pytest.param(MIXED_ORDERS, id="mixed"),
    pytest.param(ORDERS_AND_DELETIONS, id="deletions"),
]


def finds_violation(
    pool_class: type[MemoryPool],
    without: frozenset[str] = frozenset(),
    faults: FaultSettings | None = None,
    seeds: int = 400,
) -> bool:
    for seed in range(seeds):
        try:
            Simulation(seed, pool_class=pool_class, without=without, faults=faults).walk()
        except Violation:
            return True
    return False


@pytest.mark.parametrize(
    "pool_class",
    [pytest.param(rule, marks=pytest.mark.slow if rule in RARELY_NEEDED else ()) for rule in POOL_RULES],
    ids=lambda rule: rule.__name__,
)
def test_each_rule_of_the_pool_is_needed(pool_class: type[MemoryPool]) -> None:
    needs_fail_over = pool_class in (CallIdNotCompared, AppendsBehindGaps)
    assert finds_violation(pool_class, faults=FAIL_OVERS if needs_fail_over else None)


@pytest.mark.parametrize("pool_class", CALL_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_about_order_and_repeated_calls_is_needed(pool_class: type[MemoryPool]) -> None:
    # A pool that never fails over keeps what an owner sent before, and sees no gap. A mark outlives nothing where only
    # one group can hold its request.
    weathers = {GapsCostNoClaim: FAIL_OVERS, MarksOutliveSeats: CROWDED}
    assert finds_violation(pool_class, faults=weathers.get(pool_class), seeds=100)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", range(0, 40, 20))
def test_no_random_walk_with_replaced_revisions_violates_a_guarantee(start: int) -> None:
    for seed in range(start, start + 20):
        walk(seed, REPLACEMENTS)


@pytest.mark.parametrize("pool_class", REVISION_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_the_revisions_is_needed(pool_class: type[MemoryPool]) -> None:
    assert finds_violation(pool_class, faults=REPLACEMENTS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", range(0, 40, 20))
def test_no_random_walk_with_changing_slots_violates_a_guarantee(start: int) -> None:
    for seed in range(start, start + 20):
        walk(seed, PROMISES)


@pytest.mark.parametrize("pool_class", PROMISE_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_the_promised_slots_is_needed(pool_class: type[MemoryPool]) -> None:
    assert finds_violation(pool_class, faults=PROMISES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", range(0, 40, 20))
def test_no_random_walk_with_forgotten_parents_violates_a_guarantee(start: int) -> None:
    for seed in range(start, start + 20):
        walk(seed, DELETIONS)


@pytest.mark.parametrize("pool_class", FORGET_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_forgetting_is_needed(pool_class: type[MemoryPool]) -> None:
    assert finds_violation(pool_class, faults=DELETIONS)


def test_a_reader_of_a_keyed_name_that_is_free_at_once_sees_two_answers() -> None:
    assert not finds_violation(MemoryPool, faults=PUNCTUAL_DELETIONS, seeds=20)
    assert finds_violation(KeyedNamesAreFreeAtOnce, faults=PUNCTUAL_DELETIONS)


def test_walks_make_calls_of_one_key_again_and_again() -> None:
    accepted = 0
    for seed in range(20):
        simulation = Simulation(seed, faults=DELETIONS)
        simulation.walk()
        accepted += simulation.keyed.accepted
    assert accepted > 20


@pytest.mark.parametrize("faults", ORDERED_WALKS)
def test_no_random_walk_with_claims_by_an_order_violates_a_guarantee(faults: FaultSettings) -> None:
    for seed in range(15):
        walk(seed, faults)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(0, 10_000, 1000))
@pytest.mark.parametrize("faults", ORDERED_WALKS)
def test_none_of_many_walks_with_claims_by_an_order_violates_a_guarantee(start: int, faults: FaultSettings) -> None:
    for seed in range(start, start + 1000):
        walk(seed, faults)


@pytest.mark.parametrize("pool_class", ORDER_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_claims_by_an_order_is_needed(pool_class: type[MemoryPool]) -> None:
    assert finds_violation(pool_class, faults=ORDERS, seeds=40)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", range(0, 80, 20))
def test_requests_that_break_every_stage_end_with_an_error_and_end_no_other(start: int) -> None:
    for seed in range(start, start + 20):
        walk(seed, POISON)


@pytest.mark.parametrize("pool_class", POISON_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_against_poison_is_needed(pool_class: type[MemoryPool]) -> None:
    assert finds_violation(pool_class, faults=POISON)


def test_suspects_that_run_with_others_end_innocent_requests() -> None:
    assert finds_violation(MemoryPool, frozenset({"suspects run alone"}), POISON)


@pytest.mark.slow
def test_blame_for_external_deaths_ends_innocent_requests() -> None:
    assert not finds_violation(MemoryPool, faults=BROKEN_FROM_OUTSIDE, seeds=40)
    assert finds_violation(MemoryPool, frozenset({"outside is innocent"}), BROKEN_FROM_OUTSIDE)


@pytest.mark.parametrize("rule", [pytest.param("stage epochs", marks=pytest.mark.slow), *OTHER_RULES])
def test_each_rule_around_the_pool_is_needed(rule: str) -> None:
    assert finds_violation(MemoryPool, frozenset({rule}))


@pytest.mark.slow
def test_a_process_that_adopts_the_claims_of_another_breaks_the_log() -> None:
    assert finds_violation(EnteringKeepsClaims, frozenset({"never adopt"}), CRASHES)


@pytest.mark.slow
def test_a_restarted_stage_that_obeys_the_order_to_its_predecessor_breaks_the_log() -> None:
    assert finds_violation(MemoryPool, frozenset({"joins by process"}), RESTARTED_STAGES)
