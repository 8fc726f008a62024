"""The efficiencies that the paper's numbers imply, for each layout that `T_P=4` could mean (Tables 6 and 7).

OPT 13B on four A40, task S. Two numbers decide two efficiencies: the stage time of the encoder (Table 7: 1.68 s) that
of arithmetic, and the throughput of row 3 of Table 6 (B_E 52, N_D 13: 25.23/s) that of moved bytes. The paper's
numbers do not separate memory from links, so both have the same efficiency.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca.bench.exegpt.roofline import Efficiencies
from orca.bench.exegpt.rows import PaperRow, within
from orca.bench.exegpt.setups import OPT_13B, workload_of
from orca.bench.figures.figure import Setting
from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.expected_steps import expected_step, stage_times, whole_prompts
from orca.planner.simulate.rra import FORMULAS, estimate_rra

TASK = "S"
ENCODER_S, DECODER_S = 1.68, 0.038
"""Stage times under RRA (Table 7)."""

TOLERANCE = 0.15
"""Goal for the row that is predicted."""

_LEAST = 0.02

RANKS = (4, 1)
"""T_P=4 could mean four ranks of one stage, or four stages."""


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A row of Table 6 with an RRA schedule."""

    number: int
    encode_batch: int
    decode_steps: int
    latency_s: float
    throughput: float

    @property
    def settings(self) -> dict[str, int]:
        return {"row": self.number, "encode_batch": self.encode_batch, "decode_steps": self.decode_steps}


CALIBRATED = ScheduleRow(3, 52, 13, 10.23, 25.23)
PREDICTED = ScheduleRow(4, 49, 7, 16.87, 26.15)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The efficiencies of one layout."""

    ranks: int
    efficiencies: Efficiencies
    source: str = "row 3 and Table 7"  # of the paper's numbers that decide them

    @property
    def layout(self) -> str:
        return f"{OPT_13B.devices // self.ranks} x {self.ranks}"

    @property
    def settings(self) -> dict[str, str]:
        return {"layout": self.layout, "calibrated_on": self.source}

    def scenario(self) -> Scenario:
        return OPT_13B.scenario(self.ranks, workload_of(TASK), self.efficiencies)

    def estimate(self, row: ScheduleRow, formula: str) -> Estimate:
        return estimate_rra(self.scenario(), row.encode_batch, row.decode_steps, formula=formula)

    def misfit(self, formula: str) -> float:
        """Return the mean relative error of the paper's four numbers: latency and throughput of both rows."""
        errors = []
        for row in (CALIBRATED, PREDICTED):
            found = self.estimate(row, formula)
            errors += [abs(found.latency_s / row.latency_s - 1), abs(found.throughput / row.throughput - 1)]
        return sum(errors) / len(errors)


def calibrations() -> list[Calibration]:
    """Return both layouts, each calibrated in both ways."""
    return [find(ranks) for ranks in RANKS for find in (calibrate, calibrate_alike)]


def calibrate(ranks: int) -> Calibration:
    """Return the efficiencies of a layout. One that would have to be above 1 is 1, and the layout fits badly."""

    def with_bytes(share: float) -> Calibration:
        def encoder_s(arithmetic: float) -> float:
            return stage_encode_s(Calibration(ranks, Efficiencies(arithmetic=arithmetic, memory=share, links=share)))

        arithmetic = _solve(encoder_s, ENCODER_S, falls=True)
        return Calibration(ranks, Efficiencies(arithmetic=arithmetic, memory=share, links=share))

    def throughput(share: float) -> float:
        return with_bytes(share).estimate(CALIBRATED, "orca").throughput

    return with_bytes(_solve(throughput, CALIBRATED.throughput, falls=False))


def calibrate_alike(ranks: int) -> Calibration:
    """Return a layout with one efficiency for all rates, which only the throughput of row 3 decides."""

    def alike(share: float) -> Calibration:
        return Calibration(ranks, Efficiencies(arithmetic=share, memory=share, links=share), "row 3 alone")

    def throughput(share: float) -> float:
        return alike(share).estimate(CALIBRATED, "orca").throughput

    return alike(_solve(throughput, CALIBRATED.throughput, falls=False))


def stage_encode_s(calibration: Calibration) -> float:
    """Return the time that one stage spends on the encode iteration of row 3, all its micro-batches together."""
    scenario = calibration.scenario()
    count = min(scenario.stages, CALIBRATED.encode_batch)
    requests = CALIBRATED.encode_batch / count
    shape = expected_step(scenario, entering=whole_prompts(scenario, requests), first_tokens=requests)
    return count * max(stage_times(scenario.costs, shape)) / 1e6


def stage_decode_s(calibration: Calibration) -> float:
    """Return the mean time of a decode iteration of row 3."""
    found = calibration.estimate(CALIBRATED, "orca")
    return (found.cycle_s - found.details["encode_s"]) / CALIBRATED.decode_steps


def table6_rows(calibrations: Sequence[Calibration]) -> list[PaperRow]:
    """Return latency and throughput of both rows for every layout. The best layout's row 4 has a goal."""
    best = best_of(calibrations)
    rows = []
    for each in calibrations:
        for formula in FORMULAS:
            for row in (CALIBRATED, PREDICTED):
                found = each.estimate(row, formula)
                has_goal = each is best and row is PREDICTED
                settings: dict[str, Setting] = {**row.settings, **each.settings, "formula": formula}
                for what, unit, ours, paper in (
                    ("Latency of row", "s", found.latency_s, row.latency_s),
                    ("Throughput of row", "requests/s", found.throughput, row.throughput),
                ):
                    goal = within(paper, TOLERANCE) if has_goal else None
                    rows.append(PaperRow(what=what, unit=unit, settings=settings, ours=ours, paper=paper, goal=goal))
            misfit = 100 * each.misfit(formula)
            settings = {**each.settings, "formula": formula}
            rows.append(PaperRow(what="Mean error of the four numbers", unit="%", settings=settings, ours=misfit))
        rows += _layout_rows(each)
    return rows


def best_of(calibrations: Sequence[Calibration]) -> Calibration:
    """Return the first calibration of the layout that fits the paper's four numbers best in any way."""
    ranks = min(calibrations, key=lambda each: each.misfit("orca")).ranks
    return next(each for each in calibrations if each.ranks == ranks)


def _layout_rows(calibration: Calibration) -> list[PaperRow]:
    layout = calibration.settings
    rows = [
        PaperRow(
            what="Stage time of an encode iteration",
            unit="s",
            settings=layout,
            ours=stage_encode_s(calibration),
            paper=ENCODER_S,
        ),
        PaperRow(
            what="Time of a decode iteration",
            unit="s",
            settings=layout,
            ours=stage_decode_s(calibration),
            paper=DECODER_S,
        ),
    ]
    for name in ("arithmetic", "memory", "links"):
        value = getattr(calibration.efficiencies, name)
        rows.append(PaperRow(what="Efficiency", unit="%", settings={**layout, "rate": name}, ours=100 * value))
    return rows


def _solve(value: Callable[[float], float], wanted: float, *, falls: bool) -> float:
    """Return the share from _LEAST to 1 at which a monotone function has a value, or the nearer end."""
    low, high = _LEAST, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if (value(middle) < wanted) == falls:
            high = middle
        else:
            low = middle
    return high if high == 1.0 else (low + high) / 2
