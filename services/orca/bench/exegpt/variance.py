"""Table 7: the ranges of the stage times of encode and decode iterations, with and without dynamic adjustment.

The schedule is row 3 of Table 6, simulated exactly. A range is half the distance between the two ends of the middle
99 % of the times. The paper does not say which decode iterations it compares, and a decode batch shrinks within a
phase. So the first iteration of a phase, the mean over a phase, and all iterations stand beside each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from orca.bench.exegpt.calibration import CALIBRATED, DECODER_S, ENCODER_S, TASK
from orca.bench.exegpt.rows import PaperRow
from orca.bench.exegpt.setups import OPT_13B, PERCENT, workload_of
from orca.planner.search.judge import simulation_of
from orca.planner.search.planner import Candidate
from orca.planner.search.strategies import STRATEGIES
from orca.planner.search.timeline_of import StepKinds
from orca.planner.simulate.outcomes import percentile
from orca.planner.workload.trace import TraceSpec, generate
from orca.scheduler.engines.simulated_engine import StageTime
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.policy import BatchBounds

ENCODER_RANGE, DECODER_RANGE = 7.1, 2.4
"""Ranges under RRA in per cent (Table 7)."""

REQUESTS = 8_000
KINDS = ("encode", "decode, first of a phase", "decode, mean of a phase", "decode, all")


@dataclass(frozen=True, slots=True)
class StageRange:
    """The times of one kind of iteration in a steady state."""

    times_s: Sequence[float]

    @property
    def mean_s(self) -> float:
        return fmean(self.times_s)

    @property
    def percent(self) -> float:
        """Return half the width of the middle 99 % of the times, in per cent of their mean."""
        ordered = sorted(self.times_s)
        outside = (1 - PERCENT / 100) / 2
        return 50 * (percentile(ordered, 1 - outside) - percentile(ordered, outside)) / self.mean_s

    @property
    def deviation_percent(self) -> float:
        """Return the standard deviation in per cent of the mean."""
        return 100 * pstdev(self.times_s) / self.mean_s


def table7_rows(requests: int = REQUESTS) -> list[PaperRow]:
    """Return mean stage times and their ranges, with and without dynamic adjustment."""
    rows = []
    for is_adjusted in (True, False):
        found = stage_ranges(requests, is_adjusted=is_adjusted)
        for kind in KINDS:
            settings = {"iterations": kind, "dynamic_adjustment": "on" if is_adjusted else "off"}
            is_encode = kind == "encode"
            times = found[kind]
            paper_s, paper = (ENCODER_S, ENCODER_RANGE) if is_encode else (DECODER_S, DECODER_RANGE)
            rows.append(PaperRow(what="Stage time", unit="s", settings=settings, ours=times.mean_s, paper=paper_s))
            rows.append(
                PaperRow(what="Range of stage times", unit="%", settings=settings, ours=times.percent, paper=paper)
            )
            rows.append(
                PaperRow(what="Deviation of stage times", unit="%", settings=settings, ours=times.deviation_percent)
            )
    return rows


def stage_ranges(requests: int, *, is_adjusted: bool) -> dict[str, StageRange]:
    """Simulate so many requests and return the stage times of each of KINDS, without the begin and the end."""
    workload, strategy = workload_of(TASK), STRATEGIES["rra"]
    placed = OPT_13B.placed(OPT_13B.largest_degree, workload)
    scenario = OPT_13B.scenario(OPT_13B.largest_degree, workload)
    point = (CALIBRATED.encode_batch, -CALIBRATED.decode_steps)
    candidate = Candidate(
        strategy=strategy,
        placed=placed,
        scenario=scenario,
        point=point,
        expected=strategy.estimate(scenario, point, None),
    )
    bounds = candidate.bounds
    if not is_adjusted:
        controls = CycleControls(encode_batch=CALIBRATED.encode_batch, decode_steps=CALIBRATED.decode_steps)
        bounds = BatchBounds(max_batch_size=2 * bounds.max_batch_size, cycle=controls)
    observer, times = StepKinds(), list[StageTime]()
    trace = generate(TraceSpec.of_workload(workload, requests=requests))
    simulation_of(candidate, bounds).run("rra", bounds.max_batch_size, trace, observer, times)
    return ranges_of([(observer.kinds[step][0], (end - start) / 1e6) for step, _, start, end in times])


def ranges_of(steps: Sequence[tuple[bool, float]]) -> dict[str, StageRange]:
    """Return the stage times of each of KINDS. The first and the last quarter of the cycles are left out.

    Args: steps: of one stage, in their order: whether it encodes, and its seconds.
    """
    cycles: list[list[float]] = []
    for is_encode, time_s in steps:
        if is_encode:
            cycles.append([])
        cycles[-1].append(time_s)
    steady = [cycle for cycle in cycles[len(cycles) // 4 : -len(cycles) // 4 or None] if len(cycle) > 1]
    return dict(
        zip(
            KINDS,
            (
                StageRange([cycle[0] for cycle in steady]),
                StageRange([cycle[1] for cycle in steady]),
                StageRange([fmean(cycle[1:]) for cycle in steady]),
                StageRange([time_s for cycle in steady for time_s in cycle[1:]]),
            ),
            strict=True,
        )
    )
