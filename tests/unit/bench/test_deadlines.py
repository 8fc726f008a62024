"""`orca bench deadlines`: requests with deadlines, their figures, and the comparison of orders on virtual time."""

from collections.abc import Sequence

import pytest

from orca.bench import main as bench
from orca.bench.deadlines import admission, table
from orca.bench.deadlines.admission import admission_score, measure_admission
from orca.bench.deadlines.choices import OrderChoice, choices
from orca.bench.deadlines.compare import Comparison, ComparisonPlan, OrderScore, Surveyed, compare
from orca.bench.deadlines.engines import SimulatedRuns
from orca.bench.deadlines.fairness import waits_of
from orca.bench.deadlines.score import DeadlineScore, capacity_per_s, score
from orca.bench.deadlines.workload import (
    SLACK,
    DeadlineMix,
    OwnTime,
    deadline_trace,
    own_time,
    saturated_trace,
)
from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import OrcaError, SettingError
from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceRequest, TraceSpec
from orca.pool.order.order_rules import LATE, Drop, Order, OrderRules, Utility
from orca.scheduler.engines.step_cost import LinearCost

OWN = OwnTime(first_s=0.1, prompt_token_s=0.01, step_s=0.05)
MIX = DeadlineMix(prompt_tokens=Range(4, 16), new_tokens=Range(1, 32))
ARRIVAL, DAS = OrderChoice(order=Order.ARRIVAL), OrderChoice(order=Order.DEADLINE)


def a_trace(*requests: TraceRequest) -> Trace:
    spec = TraceSpec(requests=len(requests), prompt_tokens=Range(1, 10), new_tokens=Range(1, 10))
    return Trace(spec, requests)


def outcome(
    request: TraceRequest, *token_s: float, end_s: float | None = None, error: str | None = None
) -> RequestOutcome:
    return RequestOutcome(
        index=request.index,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
        arrival_s=request.arrival_s,
        sent_s=request.arrival_s,
        token_s=token_s,
        end_s=token_s[-1] if end_s is None else end_s,
        error=error,
    )


def test_a_deadline_is_some_times_the_own_time() -> None:
    trace = deadline_trace(MIX, OWN, requests=500, rate=10, seed=1)
    slacks = [each.deadline_ms / 1000 / OWN.until_end_s(each) for each in trace.requests if each.deadline_ms]
    assert len(slacks) == 500
    assert SLACK[0] - 0.01 < min(slacks) < 3
    assert 19 < max(slacks) < SLACK[1] + 0.01


def test_loads_differ_in_arrivals_alone() -> None:
    slow, fast = (deadline_trace(MIX, OWN, requests=50, rate=rate, seed=3) for rate in (1.0, 4.0))
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert one.arrival_s == pytest.approx(4 * other.arrival_s)
        assert (one.prompt_tokens, one.new_tokens, one.deadline_ms) == (
            other.prompt_tokens,
            other.new_tokens,
            other.deadline_ms,
        )


def test_some_requests_are_long_and_some_have_no_deadline() -> None:
    mix = DeadlineMix(prompt_tokens=Range(4, 16), new_tokens=Range(1, 32), without_deadline=0.1, long=0.05)
    requests = deadline_trace(mix, OWN, requests=2_000, rate=10, seed=0).requests
    assert 0.07 < sum(each.deadline_ms is None for each in requests) / 2_000 < 0.13
    assert 0.03 < sum(each.prompt_tokens > 16 for each in requests) / 2_000 < 0.07
    assert max(each.new_tokens for each in requests) > 250
    long = [each.prompt_tokens for each in saturated_trace(mix, requests=2_000, seed=0).requests]
    assert long == [each.prompt_tokens for each in requests]


def test_own_times_are_those_of_requests_that_ran_alone() -> None:
    short, long = TraceRequest(0, 1.0, 4, 3), TraceRequest(0, 1.0, 14, 3)
    found = own_time(
        [outcome(short, 1.14, 1.19, 1.24), outcome(short, 1.15, 1.20, 1.25), outcome(short, 9.0, 9.05, 9.1)],
        [outcome(long, 1.25, 1.30, 1.35)],
    )
    assert (found.first_s, found.prompt_token_s, found.step_s) == pytest.approx((0.11, 0.01, 0.05))
    assert found.until_end_s(long) == pytest.approx(0.11 + 0.14 + 0.1)


def test_a_score_counts_requests_that_are_due_after_the_warm_up() -> None:
    requests = [
        TraceRequest(0, 0.0, 1, 1, deadline_ms=1_000),  # due in the warm-up of two seconds
        TraceRequest(1, 1.0, 3, 2, deadline_ms=2_000),  # in time
        TraceRequest(2, 2.0, 8, 2, deadline_ms=2_000),  # ends late
        TraceRequest(3, 3.0, 1, 2, deadline_ms=2_000),  # dropped
        TraceRequest(4, 4.0, 1, 4, deadline_ms=1_000),  # ends at its deadline, with two tokens
        TraceRequest(5, 5.0, 1, 1),  # has no deadline
        TraceRequest(6, 10.0, 1, 1, deadline_ms=10),  # due after the last arrival
    ]
    outcomes = [
        outcome(requests[0], 0.5),
        outcome(requests[1], 2.0, 3.0),
        outcome(requests[2], 3.5, 4.5),
        outcome(requests[3], end_s=4.0, error=f"HTTP 504: the request was too late: {LATE}"),
        outcome(requests[4], 4.5, 4.9, end_s=5.0, error="ended with deadline_exceeded"),
        outcome(requests[5], 9.0),
        outcome(requests[6], 10.0),
    ]
    found = score(a_trace(*requests), outcomes)
    assert found == DeadlineScore(
        requests=4,
        goodput_per_s=1 / 8,
        utility_per_s=1 / 5 / 8,
        in_time=1 / 4,
        first_token_p99_s=pytest.approx(1.49),
        no_token=1 / 4,
        late_tokens=pytest.approx(4 / 6),
        misses={"late": 1, "dropped": 1, "deadline": 1},
    )


def test_a_failure_that_is_no_miss_ends_the_measurement() -> None:
    requests = [TraceRequest(0, 4.0, 1, 1, deadline_ms=2_000), TraceRequest(1, 10.0, 1, 1, deadline_ms=10)]
    refused = outcome(requests[0], end_s=4.1, error="HTTP 429: requests wait for about 5 s at the moment")
    assert score(a_trace(*requests), [refused, outcome(requests[1], 10.0)]).misses == {"refused": 1}
    broken = outcome(requests[0], end_s=4.1, error="connection: reset")
    with pytest.raises(OrcaError, match="a request failed: connection: reset"):
        score(a_trace(*requests), [broken, outcome(requests[1], 10.0)])
    with pytest.raises(OrcaError, match="use more requests"):
        score(a_trace(requests[1]), [outcome(requests[1], 10.0)])


def test_the_capacity_leaves_out_the_first_and_the_last_ends() -> None:
    requests = [TraceRequest(number, 0.0, 1, 1) for number in range(20)]
    ends = [5.0, 9.0, *(10.0 + number / 2 for number in range(16)), 40.0, 50.0]
    outcomes = [outcome(request, end) for request, end in zip(requests, ends, strict=True)]
    assert capacity_per_s(outcomes) == pytest.approx(2.0)
    with pytest.raises(OrcaError, match="1 requests failed while the capacity was measured: HTTP 429"):
        capacity_per_s([outcome(requests[0], end_s=1.0, error="HTTP 429: full")])


def test_an_order_has_the_same_controls_for_both_engines() -> None:
    assert (ARRIVAL.rules, ARRIVAL.words) == (None, ["--order", "arrival"])
    [edf, first, second] = choices(
        (Order.EDF, Order.DEADLINE), utility=Utility.INVERSE_LENGTH, drop=Drop.NEVER, etas=(25, 90), patience_s=5
    )
    assert edf.eta_percent is None
    assert [first.name, second.name] == ["deadline, eta 25 %", "deadline, eta 90 %"]
    assert first.rules == OrderRules(utility=Utility.INVERSE_LENGTH, eta=0.25, patience_ms=5_000, drop=Drop.NEVER)
    controls = "--utility inverse_length --drop never --patience-s 5"
    assert " ".join(first.words) == f"--order deadline {controls} --eta-percent 25"
    assert " ".join(edf.words) == f"--order edf {controls}"


def small_runs() -> SimulatedRuns:
    shape = EngineShape(stages=2, slots=8_192, block_tokens=16, max_model_len=1_024)
    return SimulatedRuns(Simulation(shape=shape, cost=LinearCost(step_us=20_000, token_us=100)), max_batch_size=2)


def test_order_deadline_has_more_answers_in_time_under_overload() -> None:
    plan = ComparisonPlan(mix=MIX, choices=[ARRIVAL, DAS], loads=[0.5, 3.0], requests=300, seeds=[0])
    found = compare(small_runs(), plan, print)
    (idle,), (idle_das,) = found.of(ARRIVAL, 0.5), found.of(DAS, 0.5)
    assert min(idle.in_time, idle_das.in_time) > 0.9
    (full,), (full_das,) = found.of(ARRIVAL, 3.0), found.of(DAS, 3.0)
    assert full_das.goodput_per_s > 1.5 * full.goodput_per_s
    assert full_das.late_tokens < 0.1


def of_goodput(goodput: float) -> DeadlineScore:
    return DeadlineScore(
        requests=10,
        goodput_per_s=goodput,
        utility_per_s=0.02,
        in_time=0.5,
        first_token_p99_s=None,
        no_token=1.0,
        late_tokens=0.0,
        misses={"dropped": 5},
    )


def test_figures_are_medians_and_ratios_within_a_seed() -> None:
    edf = OrderChoice(order=Order.EDF)
    goodputs: Sequence[tuple[OrderChoice, Sequence[float]]] = (
        (ARRIVAL, (2.0, 4.0, 1.0)),
        (edf, (5.0, 2.0, 2.0)),
        (DAS, (6.0, 6.0, 6.0)),
    )
    scores = [
        OrderScore(choice, 2.0, seed, of_goodput(value))
        for choice, values in goodputs
        for seed, value in enumerate(values)
    ]
    comparison = Comparison([Surveyed(0, 3.0, OWN)], scores)
    found = {
        (each.what, each.settings.get("order"), each.settings.get("cause")): each
        for each in table.figures(comparison, [ARRIVAL, edf, DAS], [2.0], {"model": "m"})
        if each.what != "Capacity"
    }
    goodput = found["Goodput", "arrival", None]
    assert (goodput.value, goodput.spread, goodput.runs) == (2.0, (1.0, 4.0), 3)
    assert found["Goodput against arrival", "deadline", None].spread == (1.5, 6.0)
    assert found["Goodput against the best other order", "deadline", None].value == 1.5
    assert found["Utility", "deadline", None].value == 20
    assert found["Misses", "edf", "dropped"].value == 50
    assert ("Time to first token, p99", "edf", None) not in found, "no request got a token"


def test_waits_stand_beside_their_promises() -> None:
    requests = [
        TraceRequest(0, 0.0, 1, 2),
        TraceRequest(1, 0.0, 1, 2),
        TraceRequest(2, 0.0, 1, 100),
        TraceRequest(3, 0.0, 1, 2, deadline_ms=9_000),
    ]
    before = [outcome(each, 10.0 + each.index, 20.0) for each in requests]
    now = [outcome(requests[0], 42.0, 43.0), outcome(requests[1], 51.0, 54.0), outcome(requests[2], 30.0, 34.0)]
    now.append(outcome(requests[3], end_s=9.0, error="ended with deadline_exceeded"))
    found = waits_of(a_trace(*requests), OrderChoice(order=Order.DEADLINE), before, now)
    by_kind = {(each.deadline, each.length): each for each in found}
    usual = by_kind["none", "usual"]
    assert (usual.requests, usual.by_arrival_s, usual.longest_s, usual.promised_s) == (2, 11.0, 51.0, 45.0)
    assert (usual.broken, usual.closest_s) == (1, -6.0)
    assert by_kind["none", "ten times"].broken == 0
    assert by_kind["2 to 20 x own time", "usual"].longest_s == 9.0
    assert by_kind["2 to 20 x own time", "usual"].promised_s is None
    with pytest.raises(OrcaError, match="a request without a deadline failed: HTTP 500"):
        waits_of(a_trace(requests[0]), DAS, before[:1], [outcome(requests[0], 1.0, error="HTTP 500: no")])


def test_verdicts_stand_beside_what_became_of_the_requests() -> None:
    requests = [TraceRequest(number, float(number), 1, 1, deadline_ms=1_000) for number in range(7)]
    late = "ended with deadline_exceeded"
    outcomes = [
        outcome(requests[0], 0.5),  # due in the warm-up: it has a deadline, but one second counts for nothing
        outcome(requests[1], 1.5),
        outcome(requests[2], end_s=3.0, error=late),
        outcome(requests[3], 3.5),
        outcome(requests[4], end_s=5.0, error=late),
        outcome(requests[5], 5.5),
        outcome(requests[6], 6.5),  # due after the last arrival
    ]
    found = admission_score(DAS, 2.0, a_trace(*requests), outcomes, {"r3", "r4", "r6"})
    assert (found.requests, found.refused, found.refused_in_time, found.accepted_late) == (5, 2, 1, 1)
    shares = {each.what: each.value for each in admission.figures([found], {"model": "m"})}
    assert shares == {"Calls that admission refuses": 40, "Refused, but in time": 20, "Accepted, but late": 20}


def test_admission_by_arrival_refuses_calls_under_overload_alone() -> None:
    plan = ComparisonPlan(mix=MIX, choices=[ARRIVAL], loads=[0.5, 3.0], requests=500, seeds=[0])
    idle, full = measure_admission(small_runs(), plan, print)
    assert (idle.refused, idle.accepted_late) == (0, 0)
    assert 0 < full.refused < full.requests
    assert full.refused_in_time < 0.1 * full.refused


def test_the_command_simulates_and_shows_every_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = "deadlines --engine simulated --requests 100 --seeds 1 --loads 2 --orders arrival,deadline --jobs 1"
    assert bench.main([*words.split(), "--max-batch-size", "1", "--stages", "1"]) == 0
    shown = capsys.readouterr().out
    assert "capacity" in shown
    assert "load 2, deadline: goodput against arrival" in shown


def test_waits_of_patient_requests_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = "deadlines --fairness --minutes 0.3 --patience-s 5 --requests 60 --orders deadline"
    assert bench.main(words.split()) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    patient = [line for line in lines if line[:2] == ["deadline", "none"]]
    assert patient
    assert all(line[-1] == "0" for line in patient), "a promise is broken"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--orders deadline,deadline", "--orders names an order twice"),
        ("--orders deadline --eta-percents 100", "eta must be above 0 and below 1"),
        ("--engine real --fairness", "--fairness runs on simulated stages"),
        ("--engine real --admission", "--admission runs on simulated stages"),
        ("--minutes 3", "--minutes is for --fairness"),
        ("--admission --rates 3", "--rates is for --overhead"),
        ("--engine real --jobs 2", "--jobs is for --engine simulated"),
        ("--engine real --slots 64", "--slots is an option of the simulated engine"),
        ("--engine simulated --model DIR", "--model is for --engine real"),
        ("--engine simulated -- --stages 2", "--engine simulated does not start `orca up`"),
    ],
)
def test_options_that_do_not_fit_are_named(words: str, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        bench.main(["deadlines", *words.split()])
