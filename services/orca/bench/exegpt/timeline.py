"""Figure 4(a): the steps of some cycles on every stage, from the simulator and from the logs of real stages.

A cycle encodes micro-batches 1 to S, then runs N_D decode iterations of each. `problems_of` checks just that.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from orca.bench.client import run_trace
from orca.bench.exegpt.rows import PaperRow
from orca.bench.exegpt.setups import OPT_13B, workload_of
from orca.bench.figures.figure import Setting
from orca.bench.system import running_system
from orca.cli.model_folder import find_model
from orca.cli.small_model import small_model_folder
from orca.core.domain.model import load_model_info
from orca.planner.pictures.timeline import Box, draw_timeline
from orca.planner.search.planner import Candidate
from orca.planner.search.strategies import STRATEGIES
from orca.planner.search.timeline_of import timeline_of
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate

SIMULATED = (1, (16, -3))
"""Ranks, and the point of the simulated schedule: OPT 13B in four stages, task S."""

REAL_STAGES, REAL_ENCODE_BATCH, REAL_DECODE_STEPS = 2, 8, 4
REAL_REQUESTS = 96
SHOWN_CYCLES = 2

STEP_ORDER = "encode micro-batches 1 to S, then each decode iteration of 1 to S"


@dataclass(frozen=True, slots=True)
class CycleShape:
    """The steps that a cycle must have."""

    stages: int
    decode_steps: int
    is_real: bool = False  # a real stage records its end after its message has left: the next one may begin before that

    def order(self) -> list[tuple[bool, int]]:
        """Return the steps of a cycle on a stage: whether each encodes, and its micro-batch."""
        return [(iteration == 0, number) for iteration in range(1 + self.decode_steps) for number in range(self.stages)]


def simulated_boxes() -> tuple[CycleShape, list[Box]]:
    """Return whole cycles of the real scheduler on simulated stages."""
    ranks, point = SIMULATED
    scenario, strategy = OPT_13B.scenario(ranks, workload_of("S")), STRATEGIES["rra"]
    candidate = Candidate(
        strategy=strategy,
        placed=OPT_13B.placed(ranks, workload_of("S")),
        scenario=scenario,
        point=point,
        expected=strategy.estimate(scenario, point, None),
    )
    shape = CycleShape(scenario.stages, -point[1])
    return shape, whole_cycles(timeline_of(candidate), shape)


def real_boxes(folder: Path | None = None) -> tuple[CycleShape, list[Box]]:
    """Run the small model on real stages under load, and return whole cycles from the logs of its stages.

    Args: folder: keeps the logs; None: they are removed. Raises: ServerFailed, OrcaError.
    """
    shape = CycleShape(REAL_STAGES, REAL_DECODE_STEPS, is_real=True)
    with TemporaryDirectory(prefix="orca-timeline-") as scratch:
        logs = Path(scratch) if folder is None else folder
        asyncio.run(_serve(logs, Path(scratch)))
        lines = [line for file in sorted(logs.glob("worker-*.jsonl")) for line in _read(file)]
    return shape, whole_cycles(boxes_of_logs(lines), shape)


async def _serve(logs: Path, scratch: Path) -> None:
    model = str(small_model_folder())
    vocab_size = load_model_info(find_model(model)[0]).vocab_size
    options = ["--policy", "rra", "--stages", str(REAL_STAGES), "--iteration-log", str(logs), "--max-batch-size", "64"]
    options += ["--encode-batch", str(REAL_ENCODE_BATCH), "--decode-steps", str(REAL_DECODE_STEPS)]
    spec = TraceSpec(requests=REAL_REQUESTS, prompt_tokens=Range(24, 64), new_tokens=Range(8, 24), rate=None, seed=0)
    async with running_system(model, options, scratch, vocab_size=vocab_size) as target:
        await run_trace(target, generate(spec))


def _read(file: Path) -> Iterator[Mapping[str, Any]]:
    for line in file.read_bytes().splitlines():
        yield orjson.loads(line)


def boxes_of_logs(lines: Iterable[Mapping[str, Any]]) -> list[Box]:
    """Return a box for each step of each stage, in the order of their starts (worker/rank/stage_log.py).

    The logs have no micro-batches. Requests that share a step are of the same one, which is numbered by its first step.
    """
    steps = sorted((line for line in lines if line["handles"]), key=lambda line: int(line["step"]))
    members: dict[int, int] = {}  # handle -> the smallest handle that it is known to share steps with
    for line in steps:
        together = {_root(members, handle) for handle in line["handles"]}
        for root in together:
            members[root] = min(together)
    numbers: dict[int, int] = {}
    boxes = []
    for line in steps:
        root = _root(members, line["handles"][0])
        number = numbers.setdefault(root, len(numbers))
        boxes.append(
            Box(
                stage=line["stage"],
                start_s=line["start_ns"] / 1e9,
                end_s=line["end_ns"] / 1e9,
                is_encode=bool(line["new"]),
                microbatch=number,
            )
        )
    return sorted(boxes, key=lambda box: (box.start_s, box.stage))


def _root(members: dict[int, int], handle: int) -> int:
    while (above := members.setdefault(handle, handle)) != handle:
        handle = above
    return handle


def whole_cycles(boxes: Sequence[Box], shape: CycleShape, cycles: int = SHOWN_CYCLES) -> list[Box]:
    """Return so many whole cycles from the middle of a run, the same steps on every stage; none if there are none.

    Micro-batches are numbered again, by their order in the first cycle.
    """
    by_stage = _by_stage(boxes)
    first_stage = by_stage.get(0, [])
    size = len(shape.order()) * cycles
    starts = [
        place
        for place, box in enumerate(first_stage)
        if box.is_encode and (place == 0 or not first_stage[place - 1].is_encode)
        if place + size <= len(first_stage)
    ]
    for start in sorted(starts, key=lambda place: abs(place - len(first_stage) // 2)):
        shown = [box for each in by_stage.values() for box in each[start : start + size]]
        names = list(dict.fromkeys(box.microbatch for box in first_stage[start : start + size]))
        renamed = [replace(box, microbatch=names.index(box.microbatch)) for box in shown if box.microbatch in names]
        if not problems_of(renamed, shape):
            return renamed
    return []


def problems_of(boxes: Sequence[Box], shape: CycleShape) -> list[str]:
    """Return what is wrong with the intervals of whole cycles; nothing if they are those of Figure 4(a)."""
    problems = []
    by_stage = _by_stage(boxes)
    if set(by_stage) != set(range(shape.stages)):
        problems.append(f"there are boxes of stages {sorted(by_stage)}, not of {shape.stages}")
    for stage, each in by_stage.items():
        for one, other in pairwise(each):
            if other.start_s < one.end_s - 1e-9:
                problems.append(f"stage {stage}: a step begins before the one before it has ended")
        order = [(box.is_encode, box.microbatch) for box in each]
        whole = shape.order()
        if len(order) % len(whole) or order != whole * (len(order) // len(whole)):
            problems.append(f"stage {stage}: the order is not {STEP_ORDER}")
    for stage in range(1, shape.stages):
        for before, after in zip(by_stage.get(stage - 1, ()), by_stage.get(stage, ()), strict=False):
            if after.start_s < (before.start_s if shape.is_real else before.end_s) - 1e-9:
                problems.append(f"stage {stage} begins a step before stage {stage - 1} has ended it")
    for place in range(shape.stages):
        for earlier, later in pairwise([box for box in by_stage.get(0, ()) if box.microbatch == place]):
            last = _end_on_last(by_stage, earlier, shape)
            if not later.is_encode and last is not None and later.start_s < last - 1e-9:
                problems.append(f"micro-batch {place + 1} decodes before its token is drawn")
    return problems


def _end_on_last(by_stage: Mapping[int, Sequence[Box]], box: Box, shape: CycleShape) -> float | None:
    """Return when the step of a box of stage 0 ends on the last stage."""
    place = by_stage[0].index(box)
    last = by_stage.get(shape.stages - 1, ())
    return last[place].end_s if place < len(last) else None


def _by_stage(boxes: Iterable[Box]) -> dict[int, list[Box]]:
    found: dict[int, list[Box]] = {}
    for box in sorted(boxes, key=lambda each: (each.stage, each.start_s)):
        found.setdefault(box.stage, []).append(box)
    return found


def figure4_rows(pictures: Path | None) -> list[PaperRow]:
    """Check the intervals of both timelines, and draw them. Args: pictures: folder for the SVGs; None: draw none."""
    rows = []
    for name, (shape, boxes) in (("simulated", simulated_boxes()), ("real", real_boxes())):
        settings: dict[str, Setting] = {"timeline": name, "stages": shape.stages, "decode_steps": shape.decode_steps}
        steps = len(boxes) / shape.stages
        wanted = SHOWN_CYCLES * len(shape.order())
        rows.append(
            PaperRow(what="Steps of whole cycles", unit="steps", settings=settings, ours=steps, goal=(wanted, wanted))
        )
        problems = len(problems_of(boxes, shape))
        rows.append(
            PaperRow(what="Intervals out of order", unit="intervals", settings=settings, ours=problems, goal=(0, 0))
        )
        if pictures is not None and boxes:
            title = f"Round-robin allocation, {shape.stages} stages, {shape.decode_steps} decode iterations ({name})"
            (pictures / f"figure-4-{name}.svg").write_text(draw_timeline(boxes, title=title), encoding="utf-8")
    return rows
