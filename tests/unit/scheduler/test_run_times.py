"""The run times that an order of claims is told: of tokens, and of prompt tokens."""

import pytest

from orca.core.domain.step import Claim, Epoch
from orca.scheduler.observer import IterationRecord
from orca.scheduler.order.run_times import FORGOTTEN_AFTER, LEAST_OF, RunTimes
from orca.scheduler.policy.batch import Batch
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import next_batch
from orca.scheduler.policy.state import GroupState
from support.scheduler.scheduler_simulation import a_request, some_limits

EPOCH = Epoch(1, "test")


class Steps:
    """Runs requests by hand, each step in a time that its tokens decide."""

    def __init__(self, *, max_batch_size: int = 8, in_flight: int = 1, times: RunTimes | None = None) -> None:
        self.times = times or RunTimes()
        self.now_ns = 0
        self._state = GroupState()
        self._limits = some_limits(max_batch_size=max_batch_size, stages=in_flight)
        self._in_flight = in_flight
        self._submitted: list[tuple[Batch, int]] = []  # steps that have not returned, and their times

    def add(self, name: str, *, prompt: int, new: int) -> None:
        self._state.add(a_request(name, prompt=prompt, new=new, arrival=ord(name)), Claim(1, "c"))

    def run(self, count: int, *, step_us: int = 10_000, prompt_token_us: int = 500) -> None:
        """Read so many results. A stage begins a step when it has none."""
        for _ in range(count):
            while len(self._submitted) < self._in_flight:
                batch = next_batch(IterationPolicy(), self._state, self._limits)
                self._state.schedule(batch, EPOCH)
                self._submitted.append((batch, self.now_ns))
            batch, submitted_ns = self._submitted.pop(0)
            prompt_tokens = sum(row.count for row in batch.rows if row.is_of_prompt)
            self.now_ns += 1000 * (step_us + prompt_token_us * prompt_tokens)
            self._state.read()
            for row in batch.rows:
                if row.sample:
                    self._state.receive(row.request, 7)
            self.times.iterated(
                IterationRecord(epoch=EPOCH, step=1, batch=batch, submitted_ns=submitted_ns, returned_ns=self.now_ns)
            )


def test_nothing_is_known_before_the_first_step() -> None:
    times = RunTimes()
    assert (times.token_ms, times.prompt_token_ms, times.least_token_ms) == (0.0, 0.0, 0.0)


def test_the_time_between_tokens_and_that_of_prompt_tokens_are_measured() -> None:
    steps = Steps()
    steps.add("A", prompt=3, new=200)
    steps.run(10)
    assert steps.times.token_ms == pytest.approx(10.0)
    assert steps.times.prompt_token_ms == 0.0, "there was no step without a prompt before"
    for name in "BCDEF":
        steps.add(name, prompt=40, new=100)
        steps.run(1)
    assert steps.times.prompt_token_ms == pytest.approx(0.5)
    assert steps.times.token_ms > 10.0, "others' prompts are part of the time between two tokens"


def test_the_shortest_time_counts_after_enough_steps() -> None:
    steps = Steps()
    steps.add("A", prompt=3, new=200)
    steps.run(LEAST_OF, step_us=9_000)
    assert steps.times.least_token_ms == 0.0, "the first step has no token before"
    steps.run(1, step_us=9_000)
    assert steps.times.least_token_ms == pytest.approx(9.0)
    steps.run(LEAST_OF, step_us=7_000)
    steps.run(LEAST_OF, step_us=12_000)
    assert steps.times.least_token_ms == pytest.approx(7.0)


def test_a_stall_and_results_that_are_read_at_once_change_nothing() -> None:
    steps = Steps()
    steps.add("A", prompt=3, new=500)
    for _ in range(5):
        steps.run(20, step_us=10_000)
        steps.run(1, step_us=30_000_000)
        steps.run(1, step_us=1)
    assert steps.times.token_ms == pytest.approx(10.0)
    assert steps.times.least_token_ms == pytest.approx(10.0)


def test_averages_follow_a_change() -> None:
    steps = Steps()
    steps.add("A", prompt=3, new=500)
    steps.run(100, step_us=10_000)
    steps.run(200, step_us=20_000)
    assert steps.times.token_ms == pytest.approx(20.0, rel=0.05)


def test_a_request_is_followed_over_the_steps_of_other_micro_batches() -> None:
    steps = Steps(max_batch_size=1, in_flight=3)
    for name in "ABC":
        steps.add(name, prompt=3, new=100)
    steps.run(3 * LEAST_OF + 9)
    assert steps.times.token_ms == pytest.approx(30.0, rel=0.1)
    assert steps.times.least_token_ms == pytest.approx(30.0)


def test_the_request_of_a_broken_epoch_is_not_waited_for() -> None:
    steps = Steps()
    steps.add("A", prompt=3, new=100)
    steps.run(5)
    other = Steps(times=steps.times)
    steps.times.broke(EPOCH, "killed")
    other.add("B", prompt=3, new=100)
    other.run(100, step_us=20_000)
    assert steps.times.token_ms == pytest.approx(20.0, rel=0.05)


def test_the_cost_of_a_prompt_token_is_measured_in_output_tokens() -> None:
    steps = Steps()
    assert steps.times.prompt_cost == 1.0
    for name in "ABCD":
        steps.add(name, prompt=3, new=200)
    steps.run(20)
    assert steps.times.prompt_cost == 1.0, "no prompt came after a step without one"
    steps.add("E", prompt=10, new=100)
    steps.run(40, prompt_token_us=500)
    # A step of 10 ms has four or five rows, so an output token costs some 2 ms, and a prompt token 0.5 ms.
    assert steps.times.prompt_cost == pytest.approx(0.22, abs=0.03)


def test_requests_that_end_are_followed_by_others() -> None:
    steps = Steps()
    for number in range(20):
        steps.add(chr(ord("A") + number), prompt=3, new=4)
    steps.run(9)
    assert steps.times.token_ms == pytest.approx(10.0, rel=0.5)


def test_with_more_stages_a_token_takes_a_step_of_each_micro_batch() -> None:
    steps = Steps(max_batch_size=4, in_flight=2)
    for name in "ABCDEFGH":
        steps.add(name, prompt=3, new=300)
    steps.run(200)
    assert steps.times.token_ms == pytest.approx(20.0)


def test_a_request_that_has_left_is_watched_no_longer() -> None:
    steps = Steps()
    steps.add("A", prompt=3, new=400)
    steps.run(10)
    gone = GroupState().add(a_request("B", new=9), Claim(1, "c"))  # given back, so no step holds it any more
    steps.times._watched = gone
    steps.run(FORGOTTEN_AFTER + 20, step_us=20_000)
    assert steps.times.token_ms > 15.0
