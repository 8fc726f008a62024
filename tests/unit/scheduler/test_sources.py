"""Requests of an encoder-decoder model under Algorithm 1 and its baseline: a source row, then target rows."""

from typing import Any

import pytest

from orca.core.domain.request import Request, Token
from orca.core.domain.step import Claim, Epoch, Part, Row, Step
from orca.scheduler.observer import IterationRecord
from orca.scheduler.policy.batch import GroupRequest, Phase
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, Policy, next_batch
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.state import GroupState
from support.scheduler.scheduler_simulation import a_request, batches, lengths, schedule_all, some_limits

EPOCH = Epoch(1, "test")


def with_source(name: str, *, source: int = 3, prefix: int = 1, new: int = 4) -> Request:
    return a_request(name, prompt=source, prefix=prefix, new=new)


def source_limits(**changes: Any) -> BatchLimits:
    return some_limits(is_encoder_decoder=True, **changes)


def added(state: GroupState, name: str, arrival: int, *, log: int = 0, **sizes: int) -> GroupRequest:
    is_alone = bool(sizes.pop("alone", 0))
    request = a_request(name, prompt=sizes.pop("source", 3), prefix=sizes.pop("prefix", 1), arrival=arrival, **sizes)
    return state.add(request, Claim(1, "c"), (Token(7),) * log, is_alone=is_alone)


def run_once(state: GroupState, limits: BatchLimits, policy: Policy | None = None) -> Step:
    """One turn with one stage: submit the next batch and take its result."""
    step = state.schedule(next_batch(policy or IterationPolicy(), state, limits), EPOCH)
    for pick in state.read().rows:
        if pick.sample:
            state.receive(pick.request, 7)
    state.check(limits.block_tokens)
    return step


def test_a_request_enters_with_its_whole_source_and_the_beginning_of_its_target() -> None:
    state, limits = GroupState(), source_limits()
    entry = added(state, "A", 1, source=5, prefix=2, new=3)
    step = run_once(state, limits)
    assert step.rows == (Row(1, 0, 5, False, None, Part.SOURCE), Row(1, 0, 2, True, None, Part.TARGET))
    assert (step.tokens, step.source_tokens) == (7, 5)
    assert entry.iterations == 1, "both rows are one iteration"
    assert run_once(state, limits).rows == (Row(1, 2, 1, True, 7, Part.TARGET),)
    (new,) = step.new
    assert (new.tokens, new.prompt_length) == ((100, 101, 102, 103, 104), 5)
    assert (new.decoder_prefix, new.max_new_tokens) == ((500, 501), 3)
    assert (new.max_total_tokens, new.table_tokens) == (10, (5, 5))


def test_after_a_re_claim_the_first_target_row_holds_the_log_too() -> None:
    state = GroupState()
    entry = added(state, "A", 1, source=3, prefix=2, new=9, log=4)
    assert entry.known == (500, 501, 7, 7, 7, 7)
    step = run_once(state, source_limits())
    assert step.new[0].tokens == (100, 101, 102, 7, 7, 7, 7)
    assert step.new[0].target == entry.known
    assert [(row.part, row.count, row.sample) for row in step.rows] == [(Part.SOURCE, 3, False), (Part.TARGET, 6, True)]


def test_requests_of_a_decoder_only_model_have_no_part_and_their_messages_no_length_of_a_log() -> None:
    state = GroupState()
    state.add(a_request("A", prompt=3, new=4, arrival=1), Claim(1, "c"))
    step = run_once(state, some_limits())
    assert [row.part for row in step.rows] == [Part.UNSPECIFIED]
    assert (step.new[0].decoder_prefix, step.new[0].max_new_tokens) == ((), None)


def test_sources_precede_all_targets_in_order_of_admission_and_share_a_step_with_increments() -> None:
    state, limits = GroupState(), source_limits()
    added(state, "A", 1)
    run_once(state, limits)
    added(state, "B", 2)
    added(state, "C", 3)
    assert [(row.handle, row.part) for row in run_once(state, limits).rows] == [
        (2, Part.SOURCE),
        (3, Part.SOURCE),
        (1, Part.TARGET),
        (2, Part.TARGET),
        (3, Part.TARGET),
    ]


def test_the_blocks_of_both_tables_are_reserved() -> None:
    state, limits = GroupState(), source_limits(block_tokens=8, slots=64)
    added(state, "A", 1, source=9, prefix=1, new=8)
    run_once(state, limits)
    assert state.reserved == 16 + 16
    assert IterationPolicy().free_capacity(state, limits).slots == 32


def test_one_of_two_requests_waits_if_their_tables_do_not_fit_together() -> None:
    limits = source_limits(block_tokens=4, slots=20)
    requests = [with_source(name, source=5, new=3) for name in "AB"]  # 8 + 4 slots each
    assert batches(schedule_all(IterationPolicy(), limits, requests)) == ["aA", "A", "A", "bB", "B", "B"]


def test_an_acquitted_request_keeps_the_blocks_of_both_tables() -> None:
    state, limits = GroupState(), source_limits(block_tokens=4, slots=64, max_model_len=32)
    policy = RequestLevelPolicy(habits=Habits.without(["reserves_full_length"]))
    entry = added(state, "A", 1, source=5, new=4, alone=1)
    run_once(state, limits, policy)
    assert state.reserved == 64
    state.acquit(entry, limits.block_tokens)
    state.check(limits.block_tokens)
    assert state.reserved == 16, "two blocks for a source of 5 tokens, two for a target of 5"


def test_the_bound_on_a_step_counts_sources_and_the_beginnings_of_targets() -> None:
    limits = source_limits(max_batch_size=4, max_batch_tokens=11)
    requests = [with_source(name, source=4, new=2) for name in "ABC"]
    assert batches(schedule_all(IterationPolicy(), limits, requests)) == ["abAB", "cABC", "C"]


def test_a_source_that_does_not_fit_waits_whole_and_no_younger_one_passes_it() -> None:
    limits = source_limits(max_batch_size=4, max_batch_tokens=10)
    requests = [with_source("A", source=2, new=2), with_source("B", source=7, new=1), with_source("C", source=1, new=1)]
    steps = schedule_all(IterationPolicy(), limits, requests)
    assert batches(steps) == ["aA", "bAB", "cC"]
    assert lengths(steps)[1] == [7, 1, 1]


@pytest.mark.parametrize("source", range(40, 80))
def test_no_length_of_sources_near_the_bound_makes_the_batch_smaller(source: int) -> None:
    """Requests that waited until they fit beside all increments would run one after the other."""
    limits = source_limits(max_batch_size=8, max_batch_tokens=64)
    requests = [with_source(name, source=source, new=20) for name in "ABCDEFGHIJKLMNOP"]
    steps = schedule_all(IterationPolicy(), limits, requests)
    assert len([step for step in steps if step.rows]) == 8 + 2 * 20 - 1, "one enters with each step, and each has 20"
    assert max(step.tokens for step in steps) < max(64, source + 1) + 8


@pytest.mark.parametrize("bound", [6, 10], ids=["longer than the bound", "longer than its rest"])
def test_a_source_that_does_not_fit_beside_the_increments_enters_alone(bound: int) -> None:
    limits = source_limits(max_batch_size=4, max_batch_tokens=bound)
    requests = [with_source("A", source=2, new=3), with_source("B", source=9, new=2), with_source("C", source=1, new=1)]
    steps = schedule_all(IterationPolicy(), limits, requests)
    assert batches(steps) == ["aA", "bAB", "cABC"]
    assert lengths(steps)[1] == [9, 1, 1]


def test_the_sources_of_a_step_are_bounded_but_for_a_single_longer_one() -> None:
    limits = source_limits(max_batch_size=4, max_source_slots=6)
    sizes = {"A": 3, "B": 3, "C": 1, "D": 7}
    requests = [with_source(name, source=size, new=1) for name, size in sizes.items()]
    assert batches(schedule_all(IterationPolicy(), limits, requests)) == ["abAB", "cC", "dD"]


def test_sources_are_bounded_in_whole_blocks() -> None:
    limits = source_limits(max_batch_size=4, max_source_slots=12, block_tokens=4, slots=400, max_model_len=20)
    requests = [with_source(name, source=size, new=1) for name, size in {"A": 1, "B": 5, "C": 1, "D": 13}.items()]
    assert batches(schedule_all(IterationPolicy(), limits, requests)) == ["abAB", "cC", "dD"]
    assert batches(schedule_all(baseline(None), limits, requests)) == ["abAB", "cC", "dD"]


def test_a_long_log_counts_for_the_bound_and_is_not_cut() -> None:
    limits = source_limits(max_batch_size=2, max_batch_tokens=8)
    requests = [with_source("A", source=2, new=9), with_source("B", source=2, new=9)]
    steps = schedule_all(IterationPolicy(), limits, requests, logs={"A.0": 8, "B.0": 3})
    assert lengths(steps)[:2] == [[2, 9], [2, 4]]


def test_a_suspect_enters_alone_whatever_its_length() -> None:
    state, limits = GroupState(), source_limits(max_batch_tokens=6)
    added(state, "A", 1, new=9)
    run_once(state, limits)
    added(state, "B", 2, source=9, alone=1)
    assert [(row.handle, row.part) for row in run_once(state, limits).rows] == [(2, Part.SOURCE), (2, Part.TARGET)]


def test_with_prefetch_a_sampled_token_is_fed_to_the_target() -> None:
    state, limits = GroupState(), source_limits(prefetch=1)
    added(state, "A", 1, new=9)
    state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)
    fed = state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)
    assert fed.rows == (Row(1, 1, 1, True, None, Part.TARGET),)
    state.check(limits.block_tokens)


def baseline(microbatch_size: int | None = None, *, without: tuple[str, ...] = ()) -> RequestLevelPolicy:
    return RequestLevelPolicy(microbatch_size=microbatch_size, habits=Habits.without(without))


def test_the_baseline_runs_whole_sources_and_starts_every_target_at_its_start_token() -> None:
    requests = [with_source("A", source=2, new=9), with_source("B", source=5, prefix=2, new=9)]
    steps = schedule_all(baseline(), source_limits(max_batch_size=2), requests, logs={"A.0": 7, "B.0": 6})
    assert batches(steps)[:2] == ["abAB", "AB"]
    assert lengths(steps)[0] == [2, 5, 1, 1]
    assert all(count == [1, 1] for count in lengths(steps)[1:])
    drawn = [[row.sample for row in step.rows if row.handle == 1] for step in steps if step.rows]
    # Its known tokens, the two that it may still draw, and its last position again while B has one more.
    assert drawn == [[False, False], *[[False]] * 6, [True], [True], [False]]


def test_without_that_habit_the_known_beginning_of_a_target_runs_at_once() -> None:
    requests = [with_source("A", source=2, new=3), with_source("B", source=5, prefix=2, new=3)]
    policy = baseline(without=("starts_at_shortest",))
    steps = schedule_all(policy, source_limits(max_batch_size=2), requests, logs={"B.0": 1})
    assert lengths(steps)[0] == [2, 5, 1, 3]


def test_the_full_length_of_a_request_is_its_source_and_the_rest_for_its_target() -> None:
    state, limits = GroupState(), source_limits(block_tokens=8, slots=64, max_model_len=30)
    added(state, "A", 1, source=9, new=2)
    (new,) = run_once(state, limits, baseline()).new
    assert new.table_tokens == (21, 9)
    assert new.slots(8) == state.reserved == 24 + 16
    assert state.reserved <= limits.full_length_slots == 40


@pytest.mark.parametrize(("microbatch_size", "expected"), [(None, ["abAB", "cC", "dD"]), (2, ["abAB", "cC", "dD"])])
def test_a_microbatch_has_no_more_sources_than_a_step(microbatch_size: int | None, expected: list[str]) -> None:
    limits = source_limits(max_batch_size=4, max_source_slots=6)
    sizes = {"A": 3, "B": 3, "C": 1, "D": 7}
    requests = [with_source(name, source=size, new=1) for name, size in sizes.items()]
    steps = schedule_all(baseline(microbatch_size), limits, requests)
    assert batches(steps) == expected
    assert len({step.number for step in steps if step.new}) == (3 if microbatch_size is None else 1)


def test_a_group_too_small_for_one_full_length_in_the_worst_split_is_refused() -> None:
    limits = source_limits(block_tokens=8, slots=32, max_model_len=32)
    refusal = baseline().refuse(limits)
    assert refusal is not None
    assert "40" in refusal
    assert baseline().refuse(source_limits(block_tokens=8, slots=40, max_model_len=32)) is None


def test_an_ended_request_of_the_baseline_does_not_run_its_source_again() -> None:
    requests = [with_source("A", new=1), with_source("B", new=3)]
    steps = schedule_all(baseline(), source_limits(max_batch_size=2), requests)
    assert batches(steps) == ["abAB", "AB", "AB"]


@pytest.mark.parametrize("slots", range(8, 64, 4))
def test_the_promise_is_what_a_request_may_need_in_any_split(slots: int) -> None:
    limits = source_limits(block_tokens=4, slots=slots, max_model_len=30)
    full = max(a_request(prompt=source, prefix=1, new=29 - source).slots(4) for source in range(1, 29))
    assert limits.longest_request == min(slots, full)
    assert limits.lasting_offer == (full if slots >= full else None)


def test_the_iteration_log_names_the_part_of_each_row() -> None:
    state, limits = GroupState(), source_limits()
    added(state, "A", 1, source=3, prefix=2)
    batch = next_batch(IterationPolicy(), state, limits)
    record = IterationRecord(epoch=EPOCH, step=1, batch=batch, submitted_ns=1, returned_ns=2)
    assert [row.as_list() for row in record.rows] == [
        ["A.0", Phase.INITIATION, 0, 3, "source"],
        ["A.0", Phase.INITIATION, 0, 2, "target"],
    ]
    assert record.tokens == 5
    assert b'[["A.0","initiation",0,3,"source"],["A.0","initiation",0,2,"target"]]' in record.as_json()
