"""Figure 10 with the message catalogues of a machine: schedules from a tenth of the lengths run on the others.

The paper translates WMT from English to German with OPT 13B and GPT-3 39B under two bounds (section 7.5). These
catalogues are translated from English as well. The planner searches on the lengths of the tenth. Its plan then runs
messages of the other nine tenths, by exact simulation, and should still meet its bound. The messages of a run are
spread evenly over all others by their lengths, in random order. Any 20,000 in a row have another 99th percentile.

The bounds are latencies of the p99 length, as in the paper. By our costs FT cannot meet them for the maximum length,
which is ten times as long here. So FT too holds the bound for the p99 length, which favours it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean

from orca.bench.exegpt.catalogues.messages import Lengths, SplitLengths, message_pairs, split, token_lengths
from orca.bench.exegpt.faster_transformer import FasterTransformer
from orca.bench.exegpt.gains import BASELINE, BOUNDS
from orca.bench.exegpt.rows import PaperRow
from orca.bench.exegpt.setups import GPT_39B, OPT_13B, PERCENT, T5_11B, Setup
from orca.bench.figures.figure import Setting
from orca.planner.search.goal import PlanGoal
from orca.planner.search.judge import SimulationJudge, simulation_of
from orca.planner.search.planner import Candidate, PlanProblem, make_plan
from orca.planner.search.strategies import STRATEGIES
from orca.planner.simulate.exact import ExactFigures, measure_exact
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceSpec, generate
from orca.planner.workload.workload import Workload

SETUPS = (OPT_13B, GPT_39B, T5_11B)
"""The two models of the paper's figure, and its encoder-decoder model."""

BOUND_NUMBERS = (0, 2)
"""The two bounds: the lowest 10 and 70 % of the baseline's latencies."""

MARGINS = (0, 10)
"""Margins of the plans' bounds in percent. A plan without one goes to its bound: chance decides on other messages."""

LONGEST = 512
"""Most tokens of a source and its translation together."""

REQUESTS = 20_000
"""Messages of a run, besides those that fill the group up and run it empty."""

TAIL = (98.5, 99.5)
"""Percentiles beside the bound's. Where they are far apart, a few messages decide whether a bound holds."""

SYSTEM = "RRA"


@dataclass(frozen=True, slots=True)
class HeldOutRun:
    """A plan from the sample, and its run on other messages."""

    setup: Setup
    bound: str
    bound_s: float
    margin: int  # in percent, for the plan
    plan: Candidate
    is_promised: bool  # it meets the bound on the sample
    figures: ExactFigures
    baseline: float  # requests per second of FT on the same messages, by formulas
    is_baseline_safe: bool  # FT meets the bound with some batch size also for the maximum length

    @property
    def settings(self) -> dict[str, Setting]:
        return {"model": str(self.setup), "bound": self.bound, "margin": f"{self.margin} %"}

    @property
    def is_met(self) -> bool:
        return self.figures.sequence_s <= self.bound_s

    @property
    def gain(self) -> float:
        """Return the throughput over that of FT."""
        return self.figures.throughput / self.baseline

    def rows(self) -> list[PaperRow]:
        found = self.figures
        rows = [
            PaperRow(
                what="p99 latency of other messages",
                unit="s",
                settings={**self.settings, "system": SYSTEM},
                ours=found.sequence_s,
                goal=(0.0, self.bound_s),
            ),
        ]
        rows += [
            PaperRow(
                what="Throughput of other messages",
                unit="requests/s",
                settings={**self.settings, "system": system},
                ours=value,
            )
            for system, value in ((SYSTEM, found.throughput), (BASELINE, self.baseline))
        ]
        return rows


def figure10_rows(
    folder: Path,
    languages: Sequence[str],
    model: Path | None,
    report: Callable[[str], None],
    *,
    setups: Sequence[Setup] = SETUPS,
    requests: int = REQUESTS,
) -> list[PaperRow]:
    """Return the lengths, and what each plan does on other messages.

    Args:
        folder: with the catalogues of each language.
        model: folder whose tokenizer counts; None: one that is learned.
    Raises: SettingError if there are too few messages.
    """
    pairs = message_pairs(folder, languages)
    report(f"{len(pairs):,} messages in {', '.join(languages)}")
    lengths = split(token_lengths(pairs, model), longest=LONGEST)
    rows = length_rows(lengths)
    runs: list[HeldOutRun] = []
    workload = workload_of_lengths(lengths.sample)
    for setup in setups:
        for number in BOUND_NUMBERS:
            own = [held_out_run(setup, workload, lengths.rest, number, requests, margin=each) for each in MARGINS]
            bound: dict[str, Setting] = {"model": str(setup), "bound": BOUNDS[number]}
            rows.append(PaperRow(what="Bound of the catalogues", unit="s", settings=bound, ours=own[0].bound_s))
            for run in own:
                rows += run.rows()
                report(
                    f"{setup}, {run.bound} ({run.bound_s:.3g} s), margin {run.margin} %: {run.plan.describe()};"
                    f" other messages: {run.figures.throughput:.3g} requests/s, 99 % in {run.figures.sequence_s:.3g} s"
                )
            runs += own
    return [*rows, *_summary(runs)]


def length_rows(lengths: SplitLengths) -> list[PaperRow]:
    """Return how many messages there are, and how long they are."""
    rows = []
    for share, part in (("10 %", lengths.sample), ("90 %", lengths.rest)):
        of_part: dict[str, Setting] = {"share": share}
        rows.append(PaperRow(what="Messages", unit="messages", settings=of_part, ours=len(part)))
        workload = workload_of_lengths(part)
        for text, marginal in (("source", workload.prompts), ("translation", workload.outputs)):
            own: dict[str, Setting] = {**of_part, "text": text}
            for what, value in (
                ("Tokens of a message, mean", marginal.mean),
                ("Tokens of a message, deviation", marginal.deviation),
                ("Tokens of a message, p99", float(marginal.percentile(PERCENT))),
                *((f"Tokens of a message, p{each}", float(marginal.percentile(each))) for each in TAIL),
            ):
                rows.append(PaperRow(what=what, unit="tokens", settings=own, ours=value))
        rows.append(
            PaperRow(
                what="Correlation of source and translation", unit="of 1", settings=of_part, ours=workload.correlation
            )
        )
    left_out: dict[str, Setting] = {"longest": LONGEST}
    rows.append(PaperRow(what="Messages left out", unit="%", settings=left_out, ours=lengths.left_out_percent))
    return rows


def workload_of_lengths(lengths: Sequence[Lengths]) -> Workload:
    """Return the workload of counted lengths."""
    counted = sorted(Counter(lengths).items())
    cells = ((Range(source, source), Range(target, target), float(count)) for (source, target), count in counted)
    return Workload.of_cells(cells, source="message catalogues", answers=len(lengths))


def held_out_run(
    setup: Setup, workload: Workload, rest: Sequence[Lengths], number: int, requests: int, *, margin: int = 0
) -> HeldOutRun:
    """Plan on a workload, and run the plan on other lengths.

    Args:
        number: of the bound in BOUNDS.
        margin: of the plan's bound, in percent.
    """
    baseline = FasterTransformer(setup, workload, has_percentile_bounds=True)
    bound_s = baseline.bounds()[number]
    goal = PlanGoal(latency_ms=1000 * bound_s, percentile=PERCENT, margin_percent=margin)
    longest = LONGEST + setup.is_encoder_decoder
    layouts = [
        replace(placed, capacity=replace(placed.capacity, max_model_len=longest))
        for placed in (setup.placed(ranks, workload) for ranks in setup.degrees())
    ]
    problem = PlanProblem(
        workload=workload,
        goal=goal,
        layouts=layouts,
        strategies=[STRATEGIES["rra"]],
        is_encoder_decoder=setup.is_encoder_decoder,
    )
    outcome = make_plan(problem, SimulationJudge(goal=goal), confirm=SimulationJudge.confirming(goal))
    plan = outcome.chosen.candidate
    best = max(
        (point for point in baseline.points if point.percentile_s <= bound_s), key=lambda point: point.throughput
    )
    others = workload_of_lengths(rest)
    return HeldOutRun(
        setup=setup,
        bound=BOUNDS[number],
        bound_s=bound_s,
        margin=margin,
        plan=plan,
        is_promised=outcome.is_met,
        figures=_run(plan, others, requests),
        baseline=FasterTransformer(setup, others).point(best.batch).throughput,
        is_baseline_safe=baseline.best(bound_s) is not None,
    )


def _run(plan: Candidate, others: Workload, requests: int) -> ExactFigures:
    expected, bounds = plan.expected, plan.bounds
    return measure_exact(
        simulation_of(plan, bounds),
        plan.strategy.name,
        bounds.max_batch_size,
        trace_of(others, requests + 3 * ceil(expected.throughput * expected.latency_s)),
        percent=PERCENT,
    )


def trace_of(others: Workload, requests: int) -> Trace:
    """Return messages that all arrive at once. Their lengths are spread evenly over the workload as a whole.

    No part of the trace is more even than chance makes it, so batches differ as those of real texts do.
    """
    return generate(TraceSpec.of_workload(others, requests=requests, stratum=requests))


def _summary(runs: Sequence[HeldOutRun]) -> list[PaperRow]:
    rows = []
    for margin in MARGINS:
        own = [run for run in runs if run.margin == margin]
        settings: dict[str, Setting] = {"system": SYSTEM, "margin": f"{margin} %"}
        met = 100 * fmean(run.is_met for run in own)
        gain = fmean(run.gain for run in own)
        rows += [
            PaperRow(what="Bounds met on other messages", unit="%", settings=settings, ours=met, goal=(100.0, 100.0)),
            PaperRow(what="Mean gain over FT, catalogues", unit="x", settings=settings, ours=gain),
        ]
    missed = sum(not run.is_baseline_safe for run in runs if run.margin == MARGINS[0])
    what = "Bounds that FT does not meet for the maximum length"
    return [*rows, PaperRow(what=what, unit="bounds", settings={"system": BASELINE}, ours=missed)]
