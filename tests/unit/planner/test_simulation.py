"""Traces through the real scheduler on simulated stages: what the paper's Figures 10 and 11 say, on virtual time."""

from dataclasses import replace

import pytest

from orca.bench.simulate import ENGINES
from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import SettingError
from orca.planner.simulate.outcomes import RunReport
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import PRESETS, Trace, TraceSpec, generate
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.observer import IterationHistory, IterationRecord
from orca.scheduler.policy.cycle import CycleControls

PAPER = ENGINES["175b"]


def trace(rate: float | None, *, requests: int = 100, lengths: tuple[Range, Range] = PRESETS["paper"]) -> Trace:
    return generate(TraceSpec(requests=requests, prompt_tokens=lengths[0], new_tokens=lengths[1], rate=rate, seed=3))


def report(policy: str, max_batch_size: int, wanted: Trace) -> RunReport:
    [only] = PAPER.measure(policy, max_batch_size, [wanted])
    assert only.errors == {}
    assert only.requests == len(wanted.requests)
    return only


def median_ms_per_token(figures: RunReport) -> float:
    assert figures.normalised_s is not None
    return 1000 * figures.normalised_s.p50


def test_every_request_gets_exactly_its_tokens_in_order_of_time() -> None:
    for outcome in PAPER.run("iteration", 8, trace(4.0)):
        assert (outcome.error, len(outcome.token_s)) == (None, outcome.new_tokens)
        assert outcome.arrival_s < outcome.token_s[0]
        assert list(outcome.token_s) == sorted(outcome.token_s)
        assert outcome.token_s[-1] == outcome.end_s


def test_the_same_trace_gives_the_same_times() -> None:
    assert PAPER.run("iteration", 8, trace(2.0)) == PAPER.run("iteration", 8, trace(2.0))


def test_a_lone_request_takes_what_its_iterations_cost() -> None:
    shape = EngineShape(stages=2, slots=512, block_tokens=16, max_model_len=512)
    alone = Simulation(shape=shape, cost=LinearCost(step_us=1_000, token_us=10))
    [outcome] = alone.run("iteration", 1, trace(None, requests=1, lengths=(Range(50, 50), Range(5, 5))))
    # Five iterations through two stages: one of 50 prompt tokens, four of one token.
    assert outcome.latency_s == pytest.approx(2 * (5 * 1_000 + (50 + 4) * 10) / 1e6, abs=1e-4)


@pytest.mark.parametrize("policy", ["iteration", "request_level", "rra"])
def test_a_lone_request_with_a_source_takes_one_step_for_both_and_then_its_increments(policy: str) -> None:
    shape = EngineShape(stages=2, slots=512, block_tokens=16, max_model_len=56)
    cost = LinearCost(step_us=1_000, token_us=10, source_token_us=4)
    cycle = CycleControls(encode_batch=1, decode_steps=2)
    alone = Simulation(shape=shape, cost=cost, is_encoder_decoder=True, cycle=cycle)
    [outcome] = alone.run(policy, 1, trace(None, requests=1, lengths=(Range(50, 50), Range(5, 5))))
    assert outcome.error is None
    # The first iteration has 50 source tokens and the start token, the others have one token.
    assert outcome.latency_s == pytest.approx(2 * (5 * 1_000 + 50 * 4 + 5 * 10) / 1e6, abs=1e-4)


@pytest.mark.parametrize(("slots", "max_model_len"), [(512, 55), (64, 56)])
def test_a_request_with_a_source_that_does_not_fit_is_refused_with_both_numbers(slots: int, max_model_len: int) -> None:
    shape = EngineShape(stages=1, slots=slots, block_tokens=16, max_model_len=max_model_len)
    short = Simulation(shape=shape, cost=LinearCost(), is_encoder_decoder=True)
    with pytest.raises(SettingError, match="56 tokens, and one that needs 80 slots"):
        short.run("iteration", 1, trace(None, requests=1, lengths=(Range(50, 50), Range(5, 5))))


def test_iteration_level_beats_request_level_on_the_trace_of_the_paper() -> None:
    ours, theirs = (report(policy, 8, trace(2.0)) for policy in ("iteration", "request_level"))
    assert ours.requests_per_s > 2.5 * theirs.requests_per_s
    assert median_ms_per_token(theirs) > 5 * median_ms_per_token(ours)


def test_request_level_returns_nothing_before_its_batch_ends() -> None:
    outcomes = PAPER.run("request_level", 8, trace(None, requests=8))
    assert len({outcome.end_s for outcome in outcomes}) == 1
    assert len({outcome.end_s for outcome in PAPER.run("iteration", 8, trace(None, requests=8))}) > 4


def test_with_round_robin_allocation_a_new_prompt_never_lengthens_a_decode_step() -> None:
    """A long prompt costs the others one encode iteration in a cycle, whole. Their decode steps stay short."""

    def steps(policy: str) -> list[IterationRecord]:
        history = IterationHistory()
        simulation = replace(PAPER, cycle=CycleControls(encode_batch=4, decode_steps=16))
        simulation.run(policy, 8, trace(2.0, lengths=(Range(256, 512), Range(32, 64))), history)
        return [record for record in history.records if record.rows]

    def mixed(records: list[IterationRecord]) -> int:
        counts = [[row.count for row in record.rows] for record in records]
        return sum(min(each) == 1 < max(each) for each in counts)

    assert mixed(steps("rra")) == 0
    assert mixed(steps("iteration")) > 20


def test_a_larger_max_batch_size_raises_throughput_without_raising_latency() -> None:
    runs = [report("iteration", size, trace(4.0)) for size in (1, 8, 32)]
    throughput = [run.requests_per_s for run in runs]
    latency = [median_ms_per_token(run) for run in runs]
    assert throughput == sorted(throughput)
    assert throughput[2] > 4 * throughput[0]
    assert latency == sorted(latency, reverse=True)


@pytest.mark.slow
def test_equal_requests_narrow_the_gap() -> None:
    """The problem of early-finished requests does not occur there (ORCA, section 6.2, Figure 11)."""

    def gap(wanted: Trace) -> float:
        ours, theirs = (report(policy, 8, wanted) for policy in ("iteration", "request_level"))
        return ours.requests_per_s / theirs.requests_per_s

    alike = trace(None, lengths=(Range(128, 128), Range(64, 64)))
    assert 1.0 < gap(alike) < 0.7 * gap(trace(None))


def test_prefetch_changes_no_token() -> None:
    plain, ahead = (replace(PAPER, prefetch=prefetch).run("iteration", 8, trace(4.0)) for prefetch in (0, 1))
    assert [outcome.token_ids for outcome in plain] == [outcome.token_ids for outcome in ahead]


def test_a_trace_that_can_never_fit_is_refused() -> None:
    small = replace(PAPER, shape=replace(PAPER.shape, slots=64))
    with pytest.raises(SettingError, match="64 slots"):
        small.run("iteration", 8, trace(1.0))


def test_a_policy_that_cannot_run_on_the_engine_is_refused() -> None:
    # Room for every request of the trace, but not for the model's full length, which the baseline reserves.
    small = replace(PAPER, shape=replace(PAPER.shape, slots=1024))
    with pytest.raises(SettingError, match="full length needs 2048 slots"):
        small.run("request_level", 8, trace(1.0))
