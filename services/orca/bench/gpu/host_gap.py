"""The host gap: the time from the end of a step's last kernel to the beginning of the next step's first kernel.

It is read from PyTorch's profiler, which records on the device when each kernel ran, and on the host which call
launched it. A kernel belongs to the step that launched it, whenever it ran. Profiling makes the host slower, so this is
rather more than the gap of a step without the profiler. If the profiler sees no kernels (it may lack the permission),
two events around each step's computation measure the gap. They miss the launch time of the first kernel, and include
the copies of tokens after the last one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from orca.bench.gpu.device import wait
from orca.bench.gpu.steps import BatchSteps

STEPS = 10
_FIRST = 2
"""Number of first gaps that do not count: the profiler sets itself up in its first steps."""
_MARK = "orca step "


@dataclass(frozen=True, slots=True)
class HostGap:
    seconds: float  # the median
    by: str  # profiler or events


def host_gap(steps: BatchSteps, device: torch.device) -> HostGap | None:
    """Measure the gap over `STEPS` steps, or twice as many. Returns: None if the device is the host."""
    if device.type != "cuda":
        return None
    with suppress(RuntimeError):  # the profiler cannot begin
        if gaps := step_gaps(profiled(steps, device)):
            return HostGap(median(gaps[_FIRST:] or gaps), "profiler")
    return HostGap(median(_between_events(steps)), "events")


def step_gaps(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the gaps between consecutive steps, in seconds.

    Args:
        events: of a Chrome trace: times in microseconds; steps are annotations named `orca step N`, and a kernel has
            the correlation number of the call that launched it.
    """
    steps: dict[int, tuple[float, float]] = {}
    ordered: dict[int, float] = {}
    kernels: list[tuple[int, float, float]] = []
    for event in events:
        kind, name, number = event.get("cat"), str(event.get("name")), event.get("args", {}).get("correlation")
        if kind == "user_annotation" and name.startswith(_MARK):
            steps[int(name.removeprefix(_MARK))] = (event["ts"], event["ts"] + event["dur"])
        elif kind in ("cuda_runtime", "cuda_driver") and number is not None:
            ordered[number] = event["ts"]
        elif kind == "kernel" and number is not None:
            kernels.append((number, event["ts"], event["ts"] + event["dur"]))
    spans: list[tuple[float, float]] = []
    for _, (begin, end) in sorted(steps.items()):
        own = [each[1:] for each in kernels if begin <= ordered.get(each[0], -1.0) < end]
        if own:
            spans.append((min(first for first, _ in own), max(last for _, last in own)))
    return [max(0.0, after[0] - before[1]) / 1e6 for before, after in pairwise(spans)]


def profiled(steps: BatchSteps, device: torch.device) -> Sequence[Mapping[str, Any]]:
    """Profile `STEPS` steps. Returns: the events of the profiler's Chrome trace."""
    profiler: Any = torch.profiler  # untyped in parts
    with profiler.profile(activities=profiler.supported_activities()) as profile:
        for number in range(STEPS):
            mark: AbstractContextManager[object] = profiler.record_function(f"{_MARK}{number}")
            with mark:
                steps.step()
        wait(device)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events: list[Mapping[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def _between_events(steps: BatchSteps) -> list[float]:
    cuda: Any = torch.cuda  # untyped in parts
    marks = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(STEPS)]
    for begins, ends in marks:
        steps.step(begins.record, ends.record)
    cuda.synchronize()
    return [float(before[1].elapsed_time(after[0])) / 1e3 for before, after in pairwise(marks)]
