"""Curves of latency over throughput, from hand-made points."""

from collections.abc import Sequence

from orca.bench.curve import CurvePoint, lines, points_json, side_by_side
from orca.bench.sweep import Sweep, run_sweep
from orca.planner.simulate.outcomes import RequestOutcome, RunReport, summarise
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceSpec


def figures(requests: int, latency_s: float) -> RunReport:
    """One token per request, all at once: requests / latency_s is the throughput, latency_s that per token."""
    return summarise(
        [
            RequestOutcome(
                index=index,
                prompt_tokens=1,
                new_tokens=1,
                arrival_s=0.0,
                sent_s=0.0,
                token_s=(latency_s,),
                end_s=latency_s,
            )
            for index in range(requests)
        ]
    )


def point(policy: str, rate: float | None, requests: int, latency_s: float) -> CurvePoint:
    report = figures(requests, latency_s)
    return CurvePoint(policy=policy, scheduling=policy, max_batch_size=8, rate=rate, report=report)


POINTS = [
    point("iteration", 10.0, 1, 0.1),
    point("iteration", 20.0, 4, 0.2),
    point("iteration", None, 30, 1.0),
    point("request_level", 10.0, 1, 0.2),
    point("request_level", 20.0, 8, 1.0),
]


def test_curves_are_shown_side_by_side_with_a_row_per_rate() -> None:
    _, heads, *rows = side_by_side(POINTS, is_normalised=True)
    assert heads.split() == ["rate", "iteration(8)", "request_level(8)"]
    assert [row.split() for row in rows] == [
        ["10", "10.00", "100.0", "5.00", "200.0"],
        ["20", "20.00", "200.0", "8.00", "1000.0"],
        ["at", "once", "30.00", "1000.0", "-", "-"],
    ]


def test_latencies_are_in_milliseconds_where_they_are_not_normalised() -> None:
    assert side_by_side(POINTS, is_normalised=False)[0] == "requests/s, and median ms, of each curve:"


def test_one_curve_alone_has_nothing_beside_it() -> None:
    assert side_by_side(POINTS[:3], is_normalised=True) == []


def test_the_table_has_a_row_for_each_point() -> None:
    table = lines(POINTS, is_normalised=True)
    assert len(table) == 1 + len(POINTS)
    assert [row.split()[0] for row in table[1:]] == ["iteration(8)"] * 3 + ["request_level(8)"] * 2
    assert "200.0" in table[2]


def test_points_are_written_as_plain_data() -> None:
    first = points_json(POINTS)[0]
    assert (first["policy"], first["rate_per_s"], first["report"]["requests"]) == ("iteration", 10.0, 1)


def test_a_sweep_runs_every_policy_size_and_rate_on_the_same_requests() -> None:
    seen: list[tuple[str, int, list[float | None]]] = []

    def measure(policy: str, size: int, traces: Sequence[Trace]) -> list[RunReport]:
        seen.append((policy, size, [trace.spec.rate for trace in traces]))
        assert len({tuple(request.new_tokens for request in trace.requests) for trace in traces}) == 1
        return [figures(1, 0.1) for _ in traces]

    spec = TraceSpec(requests=5, prompt_tokens=Range(1, 9), new_tokens=Range(1, 9))
    sweep = Sweep(spec=spec, policies=("iteration", "request_level"), max_batch_sizes=(1, 8), rates=(1.0, 2.0))
    points = run_sweep(sweep, measure, [].append)
    assert seen == [(p, size, [1.0, 2.0]) for p in ("iteration", "request_level") for size in (1, 8)]
    assert [(point.curve, point.rate) for point in points][:2] == [("iteration(1)", 1.0), ("iteration(1)", 2.0)]
    assert len(points) == 8
