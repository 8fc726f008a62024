"""A few cycles of a schedule in its steady state, as boxes of a timeline (ExeGPT, Figure 4)."""

from dataclasses import dataclass, field

from orca.planner.pictures.timeline import Box
from orca.planner.search.judge import simulation_of
from orca.planner.search.planner import Candidate
from orca.planner.workload.trace import TraceSpec, generate
from orca.scheduler.engines.simulated_engine import StageTime
from orca.scheduler.observer import IterationRecord, Observer

STEPS_SHOWN = 48
"""Most steps of a picture; more boxes would have no room for their numbers."""

REQUESTS_MAX = 2_000
"""Most requests that are simulated for it."""


@dataclass(slots=True)
class StepKinds(Observer):
    """Records of each step whether it encodes, and its micro-batch."""

    kinds: dict[int, tuple[bool, int]] = field(default_factory=dict)  # by number of the step

    def iterated(self, record: IterationRecord) -> None:
        rows = record.batch.rows
        if rows:
            is_encode = any(row.is_of_prompt for row in rows)
            self.kinds[record.step] = (is_encode, rows[0].request.microbatch)


def timeline_of(candidate: Candidate, *, seed: int = 0) -> list[Box]:
    """Simulate a schedule under load and return boxes from the middle of the run.

    Under `iteration`, a step with prompts counts as encode, and steps have no micro-batches: they are numbered by the
    order in which they run, modulo the number of stages.
    """
    bounds, scenario = candidate.bounds, candidate.scenario
    in_flight = candidate.expected.throughput * candidate.expected.latency_s
    requests = min(int(4 * in_flight) + 64, REQUESTS_MAX)
    spec = TraceSpec.of_workload(scenario.workload, requests=requests, seed=seed)
    observer, times = StepKinds(), list[StageTime]()
    simulation_of(candidate, bounds).run(
        candidate.strategy.name, bounds.max_batch_size, generate(spec), observer, times
    )
    numbers = sorted({step for step, *_ in times})
    first = numbers[len(numbers) // 2]
    # A picture begins with an encode iteration where there is one.
    first = next((step for step in numbers if step >= first and observer.kinds.get(step, (False, 0))[0]), first)
    shown = {step for step in numbers if first <= step < first + STEPS_SHOWN}
    boxes = []
    for step, stage, start_us, end_us in times:
        if step in shown and step in observer.kinds:
            is_encode, microbatch = observer.kinds[step]
            number = microbatch if bounds.cycle is not None else (step - first) % scenario.stages
            boxes.append(
                Box(stage=stage, start_s=start_us / 1e6, end_s=end_us / 1e6, is_encode=is_encode, microbatch=number)
            )
    return boxes
