"""Algorithm 1 as the paper draws it, and its rules at the edges."""

import pytest

from orca.core.domain.errors import SettingError
from orca.core.domain.request import Token
from orca.core.domain.step import Claim, Epoch, NewRequest
from orca.scheduler.policy.batch import NOTHING, GroupRequest, Phase
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import next_batch
from orca.scheduler.policy.state import GroupState
from support.scheduler.scheduler_simulation import a_request, batches, lengths, schedule_all, some_limits

EPOCH = Epoch(1, "test")


def named(*names: str, **sizes: int) -> list[GroupRequest]:
    state = GroupState()
    return [state.add(a_request(name, arrival=i, **sizes), Claim(1, "c")) for i, name in enumerate(names, 1)]


def a_state(*entries: GroupRequest) -> GroupState:
    state = GroupState()
    for entry in entries:
        state.add(entry.request, entry.claim)
    return state


def run_once(state: GroupState, limits: object, token: int = 7) -> str:
    """One turn with one stage: submit the next batch and take its result. Returns the names in it."""
    state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)  # type: ignore[arg-type]
    names = ""
    for pick in state.read().rows:
        names += pick.request.request.parent
        if pick.sample:
            state.receive(pick.request, token)
    state.check()
    return names


def test_figure_4_runs_two_increments_and_two_prompts_of_other_lengths_in_one_iteration() -> None:
    limits = some_limits(max_batch_size=4)
    state = GroupState()
    state.add(a_request("1", prompt=2, arrival=1), Claim(1, "c"))
    run_once(state, limits)
    state.add(a_request("2", prompt=1, arrival=2), Claim(1, "c"))
    run_once(state, limits)
    state.add(a_request("3", prompt=2, arrival=3), Claim(1, "c"))
    state.add(a_request("4", prompt=3, arrival=4), Claim(1, "c"))

    step = state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)

    # x1 has x11..x14 and runs position 3, x2 has x21, x22 and runs position 1; x3 and x4 run their prompts whole.
    assert [(row.start, row.count, row.sample) for row in step.rows] == [
        (3, 1, True),
        (1, 1, True),
        (0, 2, True),
        (0, 3, True),
    ]
    assert step.tokens == 7, "the flat tensor of Figure 5 has seven rows"


def test_figure_8a_three_workers_take_ab_cd_ef_and_then_ab_again() -> None:
    limits = some_limits(stages=3, max_batch_size=2)
    steps = schedule_all(IterationPolicy(), limits, [a_request(name, new=3) for name in "ABCDEF"])
    assert batches(steps) == ["AB", "CD", "EF", "AB", "CD", "EF", "AB", "CD", "EF"]


def test_at_most_n_workers_batches_are_in_flight_and_they_share_no_request() -> None:
    limits = some_limits(stages=2, max_batch_size=1)
    state = a_state(*named("A", "B", "C"))
    for _ in range(2):
        state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)
    assert state.in_flight == 2
    assert [step.rows[0].request.request.parent for step in state.steps] == ["A", "B"]
    assert next_batch(IterationPolicy(), state, limits) == NOTHING


def test_a_late_request_joins_and_an_early_one_leaves_while_others_run() -> None:
    limits = some_limits()
    state = GroupState()
    state.add(a_request("A", new=5, arrival=1), Claim(1, "c"))
    state.add(a_request("B", new=2, arrival=2), Claim(1, "c"))
    turns = [run_once(state, limits)]
    state.add(a_request("C", new=2, arrival=3), Claim(1, "c"))
    turns += [run_once(state, limits) for _ in range(4)]
    assert turns == ["AB", "ABC", "AC", "A", "A"]


def test_phases_go_from_initiation_over_running_to_increment() -> None:
    (entry,) = named("A")
    state = GroupState(requests=[entry])
    assert entry.phase is Phase.INITIATION
    state.schedule(next_batch(IterationPolicy(), state, some_limits()), EPOCH)
    assert entry.phase is Phase.RUNNING
    state.read()
    assert entry.phase is Phase.INCREMENT


def test_all_slots_a_request_may_ever_need_are_reserved_in_whole_blocks_when_it_is_first_scheduled() -> None:
    state = a_state(*named("A", prompt=5, new=4))
    state.schedule(next_batch(IterationPolicy(), state, some_limits(block_tokens=8, slots=64)), EPOCH)
    assert state.reserved == 16


def test_a_request_that_does_not_fit_stops_younger_ones_even_if_they_would_fit() -> None:
    limits = some_limits(slots=10)
    requests = [a_request("A", prompt=4, new=4), a_request("B", prompt=4, new=4), a_request("C", prompt=1, new=1)]
    assert batches(schedule_all(IterationPolicy(), limits, requests)) == ["A", "A", "A", "A", "BC", "B", "B", "B"]


def test_an_older_request_that_arrives_late_and_does_not_fit_does_not_stop_running_ones() -> None:
    limits = some_limits(slots=10)
    state = GroupState()
    state.add(a_request("young", prompt=4, new=3, arrival=5), Claim(1, "c"))
    run_once(state, limits)
    state.add(a_request("old", prompt=4, new=4, arrival=1), Claim(1, "c"))
    state.add(a_request("youngest", prompt=1, new=1, arrival=9), Claim(1, "c"))
    assert [run_once(state, limits) for _ in range(3)] == ["young", "young", "oldyoungest"]


def test_an_older_request_that_arrives_late_precedes_younger_ones_if_it_fits() -> None:
    limits = some_limits(max_batch_size=1)
    state = a_state(*named("B", "C"))
    run_once(state, limits)
    state.add(a_request("A", new=2, arrival=0), Claim(1, "c"))
    assert [run_once(state, limits) for _ in range(3)] == ["A", "A", "B"]


def test_slots_return_only_when_the_last_step_that_holds_the_request_has_returned() -> None:
    limits = some_limits(prefetch=1)
    state = a_state(*named("A", new=9))
    for _ in range(2):
        state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)
    step = state.read()
    state.receive(step.rows[0].request, 7)
    state.end(step.rows[0].request)
    assert IterationPolicy().select(state, limits).freed == (), "the second step still holds it"
    state.read()
    assert IterationPolicy().select(state, limits).freed == (step.rows[0].request,)


def test_prefetch_leaves_the_token_to_the_stages_until_it_has_been_read() -> None:
    limits = some_limits(prefetch=1)
    state = a_state(*named("A", new=9))
    fed = [state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH) for _ in range(2)][1]
    assert fed.rows[0].token is None
    assert next_batch(IterationPolicy(), state, limits) == NOTHING, "two steps at most hold a request"
    for _ in range(2):
        state.receive(state.read().rows[0].request, 41)
    known = state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)
    assert known.rows[0].token == 41


def test_prefetch_frees_slots_one_step_after_the_last_one_that_held_the_request() -> None:
    limits = some_limits(prefetch=1, max_batch_size=1)
    steps = schedule_all(IterationPolicy(), limits, [a_request("A", new=1), a_request("B", new=1)])
    assert [(step.freed, len(step.new)) for step in steps] == [((), 1), ((1,), 1), ((2,), 0)]


def test_a_request_that_starts_again_runs_its_prompt_and_its_log_at_once() -> None:
    state = GroupState()
    state.add(a_request("A", prompt=3, new=4), Claim(2, "c"), log=(Token(8), Token(9)))
    step = state.schedule(next_batch(IterationPolicy(), state, some_limits()), EPOCH)
    assert isinstance(step.new[0], NewRequest)
    assert (step.new[0].tokens, step.new[0].prompt_length) == ((100, 101, 102, 8, 9), 3)
    assert (step.rows[0].start, step.rows[0].count, step.rows[0].sample) == (0, 5, True)


def test_chunked_prefill_gives_each_increment_its_token_and_the_oldest_prompts_the_rest() -> None:
    limits = some_limits(max_batch_size=3, max_batch_tokens=5)
    requests = [a_request("A", prompt=2, new=4), a_request("B", prompt=9, new=1), a_request("C", prompt=2, new=2)]
    steps = schedule_all(IterationPolicy(), limits, requests)
    assert batches(steps) == ["AB", "AB", "ABC", "AC"]
    assert lengths(steps) == [[2, 3], [1, 4], [1, 2, 2], [1, 1]]


def test_a_chunk_draws_a_token_only_when_it_holds_the_end_of_the_prompt() -> None:
    limits = some_limits(max_batch_size=1, max_batch_tokens=4)
    steps = schedule_all(IterationPolicy(), limits, [a_request("A", prompt=10, new=2)])
    rows = [step.rows[0] for step in steps if step.rows]
    assert [(row.start, row.count, row.sample) for row in rows] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]


def test_a_prompt_without_tokens_left_stops_younger_prompts_but_no_increments() -> None:
    limits = some_limits(stages=2, max_batch_size=3, max_batch_tokens=4)
    state = GroupState()
    state.add(a_request("C", prompt=1, new=9, arrival=3), Claim(1, "c"))
    run_once(state, limits)
    state.add(a_request("A", prompt=9, new=1, arrival=1), Claim(1, "c"))
    state.add(a_request("B", prompt=1, new=1, arrival=2), Claim(1, "c"))
    batch = next_batch(IterationPolicy(), state, limits)
    assert [(pick.request.request.parent, pick.count) for pick in batch.rows] == [("A", 3), ("C", 1)]


def suspected(state: GroupState, name: str, arrival: int, **sizes: int) -> GroupRequest:
    return state.add(a_request(name, arrival=arrival, **sizes), Claim(1, "c"), is_alone=True)


def test_requests_that_must_run_alone_run_one_by_one_while_others_keep_their_slots() -> None:
    limits, state = some_limits(max_batch_size=4), GroupState()
    state.add(a_request("A", arrival=1, new=9), Claim(1, "c"))
    assert run_once(state, limits) == "A"
    before = state.reserved
    suspects = [suspected(state, name, arrival, new=9) for arrival, name in enumerate("BC", 2)]
    for suspect in suspects:
        assert [run_once(state, limits) for _ in range(2)] == [suspect.request.parent] * 2
        state.acquit(suspect, limits.block_tokens)
    assert run_once(state, limits) == "ABC"
    assert state.reserved == 3 * before


def test_a_request_that_must_run_alone_waits_for_slots_and_is_not_overtaken() -> None:
    limits, state = some_limits(slots=20), GroupState()
    state.add(a_request("A", arrival=1, prompt=3, new=9), Claim(1, "c"))
    suspected(state, "B", arrival=2, prompt=3, new=9)
    state.add(a_request("C", arrival=3, prompt=3, new=2), Claim(1, "c"))
    assert [run_once(state, limits) for _ in range(10)] == ["A"] * 9 + ["B"]


def test_a_request_that_must_run_alone_does_not_overtake_an_older_waiting_request() -> None:
    limits, state = some_limits(slots=20), GroupState()
    state.add(a_request("A", arrival=1, prompt=3, new=2), Claim(1, "c"))
    run_once(state, limits)
    state.add(a_request("B", arrival=2, prompt=3, new=15), Claim(1, "c"))
    suspected(state, "C", arrival=3, prompt=3, new=9)
    assert [run_once(state, limits) for _ in range(3)] == ["A", "B", "B"]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_no_other_step_is_in_flight_beside_a_request_that_must_run_alone(prefetch: int) -> None:
    limits, state = some_limits(stages=2, max_batch_size=1, prefetch=prefetch), GroupState()
    for arrival, name in enumerate("AB", 1):
        state.add(a_request(name, arrival=arrival, new=9), Claim(1, "c"))
        state.schedule(next_batch(IterationPolicy(), state, limits), EPOCH)
    suspect = suspected(state, "C", arrival=3, new=9)
    while state.steps:
        assert next_batch(IterationPolicy(), state, limits) == NOTHING
        for pick in state.read().rows:
            state.receive(pick.request, 7)
    batch = next_batch(IterationPolicy(), state, limits)
    assert [pick.request for pick in batch.rows] == [suspect]
    state.schedule(batch, EPOCH)
    assert next_batch(IterationPolicy(), state, limits) == NOTHING
    state.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("stages", 0), ("max_batch_size", 0), ("prefetch", 2), ("max_batch_tokens", 4), ("block_tokens", 0)],
)
def test_a_limit_that_makes_no_sense_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(SettingError, match=name):
        some_limits(**{name: value})
