"""Runs one setting in real processes, and measures its steady state by the logs of its scheduler and its stages."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from orca.bench.client import run_trace
from orca.bench.plan.iteration_log import read_answers
from orca.bench.plan.real.case import PERCENT, RealCase
from orca.bench.plan.real.setting import RealSetting
from orca.bench.plan.simulate_runs import WARM_UP_REQUESTS
from orca.bench.plan.until_steady import until_steady
from orca.bench.system import running_system
from orca.core.domain.errors import OrcaError
from orca.planner.simulate.steady_state import saturated_window, steady_figures
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceSpec, generate

IN_FLIGHT_FACTOR = 3
"""Requests of a run for each one that the group holds, besides the wanted ones: a group fills up, runs empty, and in
between the longest answers begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealFigures:
    """The figures of the steady state of one run."""

    requests: int  # that finished in it
    throughput: float  # requests per second
    latency_s: float  # from first step to last token, 99th percentile
    step_ms: float  # a step on one stage, mean
    step_rows: float  # requests of a step, mean
    idle: float  # share of the time in which a stage does not compute, mean of the stages


def requests_of(setting: RealSetting, answers: int) -> int:
    """Return the requests of a run with about so many answers in its steady state.

    The baseline runs whole batches, and half as many answers: those of a batch end together, and it is slow.
    """
    held = IN_FLIGHT_FACTOR * setting.in_flight
    if setting.strategy == "request_level":
        return -(-(answers // 2 + held) // setting.in_flight) * setting.in_flight
    return answers + held


def run_setting(case: RealCase, setting: RealSetting, *, requests: int, seed: int, folder: Path) -> RealFigures:
    """Serve requests that are all submitted at once. Every setting gets the same ones for a seed.

    Args: requests: of the first run; others follow with more if it is too short. folder: for logs, which are removed.
    Raises: ServerFailed; OrcaError if a request fails; NoSteadyState as `until_steady` does.
    """

    def run(enough: int) -> RealFigures:
        trace = generate(TraceSpec.of_workload(case.workload, requests=enough, seed=seed))
        with TemporaryDirectory(dir=folder, prefix="run-") as scratch:
            logs = Path(scratch) / "logs"
            asyncio.run(_serve(case, setting, trace, logs))
            return read_figures(logs, skip=WARM_UP_REQUESTS)

    return until_steady(run, requests)[1]


async def _serve(case: RealCase, setting: RealSetting, trace: Trace, logs: Path) -> None:
    options = [*setting.words(), "--iteration-log", str(logs)]
    vocab_size = case.profile.key.vocab_size
    async with running_system(str(case.model), options, logs.parent, vocab_size=vocab_size) as target:
        warm_up = TraceSpec(requests=WARM_UP_REQUESTS, prompt_tokens=Range(8, 8), new_tokens=Range(8, 8), seed=2)
        outcomes = await run_trace(target, generate(warm_up)) + await run_trace(target, trace)
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    if failed:
        raise OrcaError(f"{setting.text}: {len(failed)} requests failed: {failed[0]}")


def read_figures(logs: Path, *, skip: int = 0) -> RealFigures:
    """Return the figures of a run.

    Args: skip: leave out so many of the first answers, those of a warm-up.
    Raises: NoSteadyState if the run is too short for one.
    """
    answers = read_answers(logs / "scheduler-0.jsonl", skip=skip)
    steady = steady_figures(answers, percent=PERCENT)
    window = saturated_window(answers)
    stages = [_read_steps(file, window) for file in sorted(logs.glob("worker-*.jsonl"))]
    steps = [step for stage in stages for step in stage]
    if not steps:
        raise OrcaError("the stages have logged no step in the steady state")
    span_s = window[1] - window[0]
    return RealFigures(
        requests=steady.requests,
        throughput=steady.throughput,
        latency_s=steady.sequence_s,
        step_ms=1000 * fmean(map(_time_s, steps)),
        step_rows=fmean(len(step["handles"]) for step in steps),
        idle=1 - fmean(sum(map(_time_s, stage)) / span_s for stage in stages),
    )


def _read_steps(file: Path, window: tuple[float, float]) -> Sequence[Mapping[str, Any]]:
    """Return the steps with rows that a stage began in the window."""
    steps = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    return [step for step in steps if step["handles"] and window[0] <= step["start_ns"] / 1e9 < window[1]]


def _time_s(step: Mapping[str, Any]) -> float:
    return float(step["end_ns"] - step["start_ns"]) / 1e9
