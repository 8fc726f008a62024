"""Runs every policy and max batch size over rising arrival rates: the points of the curves (ORCA, section 6.2).

A `Measure` makes the runs: on a whole system of processes over HTTP (`measure_real`), or with the real scheduler on
simulated stages (`planner.simulate.simulated_run.Simulation`). The sweep treats both in the same way.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench.client import run_trace
from orca.bench.curve import CurvePoint
from orca.bench.system import running_system
from orca.planner.simulate.outcomes import RunReport, summarise
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceSpec, generate
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.policies import policy_of
from orca.scheduler.policy.policy import BatchBounds
from orca.scheduler.policy.request_level import HABITS, RequestLevelPolicy

Measure = Callable[[str, int, Sequence[Trace]], Iterable[RunReport]]
"""(policy, max batch size, traces) -> a report of each trace; every trace starts on an idle system."""

ANY_VOCAB = 256
"""Number of token ids that every model has, for prompts to a server with an unknown model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The runs to make: every combination of policy, max batch size and rate."""

    spec: TraceSpec  # each of `rates` replaces its rate
    policies: Sequence[str]
    baseline: RequestLevelPolicy = field(default_factory=RequestLevelPolicy)  # the policy named `request_level`
    cycle: CycleControls | None = None  # the controls of the policy `rra`
    max_batch_sizes: Sequence[int]
    rates: Sequence[float]  # requests/s

    def scheduling(self, policy: str, max_batch_size: int) -> str:
        """Return the full description of a policy."""
        bounds = BatchBounds(max_batch_size=max_batch_size, cycle=self.cycle)
        return policy_of(policy, self.baseline).describe(bounds)


def run_sweep(sweep: Sweep, measure: Measure, report_progress: Callable[[str], None]) -> list[CurvePoint]:
    """Make all runs of a sweep.

    Returns: the points of one curve after the other, in the order of the rates.
    """
    points = []
    for policy in sweep.policies:
        for size in sweep.max_batch_sizes:
            report_progress(f"{policy}, max batch size {size}: {len(sweep.rates)} arrival rates")
            traces = [generate(_at_rate(sweep.spec, rate)) for rate in sweep.rates]
            for rate, report in zip(sweep.rates, measure(policy, size, traces), strict=True):
                points.append(
                    CurvePoint(
                        policy=policy,
                        scheduling=sweep.scheduling(policy, size),
                        max_batch_size=size,
                        rate=rate,
                        report=report,
                    )
                )
    return points


def _at_rate(spec: TraceSpec, rate: float) -> TraceSpec:
    return replace(spec, rate=rate)


def measure_real(
    model: str,
    up_options: Sequence[str],
    baseline: RequestLevelPolicy,
    cycle: CycleControls | None = None,
    *,
    vocab_size: int,
) -> Measure:
    """Return a `Measure` of `orca up` on this machine: one system per policy and max batch size, for all its traces."""

    async def run(policy: str, max_batch_size: int, traces: Sequence[Trace], folder: Path) -> list[RunReport]:
        # The paper's engine computes each prompt.
        paper = ["--prefix-cache", "false"]
        options = ["--policy", policy, "--max-batch-size", str(max_batch_size), *paper, *up_options]
        options += baseline_flags(baseline) if policy == "request_level" else []
        options += cycle_flags(cycle) if policy == "rra" and cycle is not None else []
        async with running_system(model, options, folder, vocab_size=vocab_size) as target:
            await run_trace(target, _warm_up(traces[0].spec))
            return [summarise(await run_trace(target, trace)) for trace in traces]

    def measure(policy: str, max_batch_size: int, traces: Sequence[Trace]) -> list[RunReport]:
        with TemporaryDirectory(prefix="orca-bench-") as folder:
            return asyncio.run(run(policy, max_batch_size, traces, Path(folder)))

    return measure


def baseline_flags(baseline: RequestLevelPolicy) -> list[str]:
    """Return the options of `orca up` for the baseline."""
    flags = [] if baseline.microbatch_size is None else ["--microbatch-size", str(baseline.microbatch_size)]
    off = [name for name in HABITS if name not in baseline.habits.in_force()]
    return [*flags, "--without-habits", ",".join(off)] if off else flags


def cycle_flags(cycle: CycleControls) -> list[str]:
    """Return the options of `orca up` for the controls of the policy `rra`."""
    chosen = {name: value for name, value in asdict(cycle).items() if value is not None}
    return [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _warm_up(spec: TraceSpec) -> Trace:
    return generate(TraceSpec(requests=4, prompt_tokens=spec.prompt_tokens, new_tokens=Range(4, 4), seed=1_000_003))
