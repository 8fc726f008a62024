"""Pictures of curves. matplotlib starts a process of the system to find its fonts, once on each machine."""

from pathlib import Path

from orca.bench.curve import CurvePoint
from orca.bench.plot import plot_curves
from orca.planner.simulate.outcomes import RequestOutcome, summarise


def point(policy: str, rate: float, latency_s: float) -> CurvePoint:
    """A run of one request with one token."""
    outcome = RequestOutcome(
        index=0,
        prompt_tokens=1,
        new_tokens=1,
        arrival_s=0.0,
        sent_s=0.0,
        token_s=(latency_s,),
        end_s=latency_s,
    )
    return CurvePoint(policy=policy, scheduling=policy, max_batch_size=8, rate=rate, report=summarise([outcome]))


def test_a_plot_of_curves_is_written(tmp_path: Path) -> None:
    points = [point("iteration", 10.0, 0.1), point("iteration", 20.0, 0.2), point("request_level", 10.0, 0.2)]
    plot_curves(points, tmp_path / "curves.svg", is_normalised=True)
    assert "request_level(8)" in (tmp_path / "curves.svg").read_text()
