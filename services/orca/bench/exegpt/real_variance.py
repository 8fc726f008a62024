"""Table 7 on real stages: the ranges of stage times of encode and decode iterations, with and without adjustment.

The schedule is a quarter of row 3 of Table 6, on task S at a quarter of its lengths. Two stages with a thread each
write their steps to logs. The steps of all micro-batches of an iteration count together, as in Table 7.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from orca.bench.client import run_trace
from orca.bench.exegpt.calibration import CALIBRATED, TASK
from orca.bench.exegpt.rows import PaperRow
from orca.bench.exegpt.variance import StageRange, ranges_of
from orca.bench.figures.figure import Setting
from orca.bench.system import running_system
from orca.core.domain.errors import OrcaError
from orca.core.domain.model import load_model_info
from orca.planner.search.strategies import threshold_percent
from orca.planner.simulate.rra_phases import decode_phases
from orca.planner.workload.tasks import task_workload
from orca.planner.workload.trace import TraceSpec, generate
from orca.scheduler.policy.cycle import CycleControls

STAGES = 2
SCALE = 0.25
ENCODE_BATCH, DECODE_STEPS = round(CALIBRATED.encode_batch * SCALE), round(CALIBRATED.decode_steps * SCALE)
REQUESTS = 900
"""Requests of a run: the pool refuses more than 1,000 that wait."""

CYCLES_MIN = 2
"""Fewest cycles that have a range."""

ROUNDS = 3
"""Runs with and without adjustment, in turn. Their cycles count together."""


def real_table7_rows(
    model: Path,
    report: Callable[[str], None],
    *,
    requests: int = REQUESTS,
    rounds: int = ROUNDS,
    scale: float = SCALE,
) -> list[PaperRow]:
    """Return mean stage times and their ranges on each stage, with and without dynamic adjustment.

    Args:
        requests: of each run.
        rounds: runs of each kind.
        scale: factor of the lengths of the task.
    Raises: ServerFailed; OrcaError if a request fails, or too few cycles are whole.
    """
    times: dict[tuple[bool, int, str], list[float]] = {}
    for number in range(rounds):
        for is_adjusted in (True, False):
            report(f"{model.name}, round {number + 1} of {rounds}: dynamic adjustment {_switch(is_adjusted)}")
            stages = _run(model, requests, number, scale, is_adjusted=is_adjusted)
            for stage, steps in enumerate(stages):
                for kind, found in ranges_of(iteration_times(steps, STAGES, DECODE_STEPS)).items():
                    times.setdefault((is_adjusted, stage, kind), []).extend(found.times_s)
    rows = []
    for (is_adjusted, stage, kind), each in times.items():
        if len(each) < CYCLES_MIN:
            raise OrcaError(f"stage {stage} ran {len(each)} whole cycles in a steady state: run more requests")
        settings: dict[str, Setting] = {
            "timeline": "real",
            "model": model.name,
            "stage": stage,
            "iterations": kind,
            "dynamic_adjustment": _switch(is_adjusted),
        }
        found = StageRange(each)
        for what, unit, value in (
            ("Real stage time", "ms", 1000 * found.mean_s),
            ("Range of real stage times", "%", found.percent),
            ("Deviation of real stage times", "%", found.deviation_percent),
        ):
            rows.append(PaperRow(what=what, unit=unit, settings=settings, ours=value))
    return rows


def _switch(is_on: bool) -> str:
    return "on" if is_on else "off"


def controls_of(scale: float, *, is_adjusted: bool) -> CycleControls:
    """Return the controls of the schedule; with adjustment also what the cycle is planned for, as a plan states it."""
    if not is_adjusted:
        return CycleControls(encode_batch=ENCODE_BATCH, decode_steps=DECODE_STEPS)
    workload = task_workload(TASK, scale)
    batch = ENCODE_BATCH * decode_phases(workload, DECODE_STEPS).mean_phases
    return CycleControls(
        encode_batch=ENCODE_BATCH,
        decode_steps=DECODE_STEPS,
        decode_batch=max(round(batch), ENCODE_BATCH),
        encode_tokens=max(1, round(ENCODE_BATCH * workload.prompts.mean)),
        threshold_percent=threshold_percent(workload, ENCODE_BATCH),
    )


def _run(model: Path, requests: int, seed: int, scale: float, *, is_adjusted: bool) -> list[list[Mapping[str, Any]]]:
    """Serve requests that all arrive at once. Returns: the steps of each stage."""
    controls = controls_of(scale, is_adjusted=is_adjusted)
    most = 2 * (controls_of(scale, is_adjusted=True).decode_batch or 0) + ENCODE_BATCH
    options = ["--policy", "rra", "--stages", str(STAGES), "--threads", "1"]
    options += ["--max-batch-size", str(ceil(most / STAGES)), "--prefetch", "1"]
    for name, value in asdict(controls).items():
        options += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    trace = generate(TraceSpec.of_workload(task_workload(TASK, scale), requests=requests, seed=seed))

    async def serve(logs: Path) -> None:
        vocab_size = load_model_info(model).vocab_size
        more = [*options, "--iteration-log", str(logs)]
        async with running_system(str(model), more, logs.parent, vocab_size=vocab_size) as target:
            outcomes = await run_trace(target, trace)
        if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
            raise OrcaError(f"{len(failed)} requests failed: {failed[0]}")

    with TemporaryDirectory(prefix="orca-table7-") as scratch:
        logs = Path(scratch) / "logs"
        asyncio.run(serve(logs))
        return [
            [orjson.loads(line) for line in file.read_bytes().splitlines()]
            for file in sorted(logs.glob("worker-*.jsonl"))
        ]


def iteration_times(steps: Sequence[Mapping[str, Any]], stages: int, decode_steps: int) -> list[tuple[bool, float]]:
    """Return the iterations of whole cycles: whether each encodes, and the seconds that the stage computed in it.

    A cycle is whole if each iteration has a step of every micro-batch.

    Args: steps: lines of the log of a stage (worker/rank/stage_log.py).
    """
    cycles: list[list[tuple[bool, float]]] = []
    was_encode = False
    for step in steps:
        if not step["handles"]:
            continue
        is_encode = bool(step["new"])
        if not cycles or (is_encode and not was_encode):
            cycles.append([])
        cycles[-1].append((is_encode, (step["end_ns"] - step["start_ns"]) / 1e9))
        was_encode = is_encode
    kinds = [True] * stages + [False] * (stages * decode_steps)
    whole = [cycle for cycle in cycles if [is_encode for is_encode, _ in cycle] == kinds]
    return [
        (number == 0, sum(time_s for _, time_s in cycle[number * stages : (number + 1) * stages]))
        for cycle in whole
        for number in range(1 + decode_steps)
    ]
