"""The engines that `orca bench deadlines` compares orders on: simulated stages, or a whole Orca on this machine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from orca.bench.client import run_trace
from orca.bench.deadlines.choices import OrderChoice
from orca.bench.system import running_system
from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceSpec, generate

WARM_UP_REQUESTS = 40
"""Requests before the first trace of a real run. The scheduler learns the times of its steps from them."""


class OrderedRuns(Protocol):
    """Runs traces under an order of claims."""

    def run(self, choice: OrderChoice, traces: Sequence[Trace]) -> list[list[RequestOutcome]]:
        """Return the outcomes of each trace. Every trace starts on an idle system."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedRuns:
    """The real scheduler on simulated stages and virtual time."""

    simulation: Simulation
    max_batch_size: int

    def run(self, choice: OrderChoice, traces: Sequence[Trace]) -> list[list[RequestOutcome]]:
        simulation = replace(self.simulation, rules=choice.rules)
        return [simulation.run("iteration", self.max_batch_size, trace) for trace in traces]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaRuns:
    """`orca up` on this machine: one system for the traces of one call of `run`."""

    model: Path
    vocab_size: int
    max_batch_size: int
    up_options: Sequence[str] = field(default=())

    def run(self, choice: OrderChoice, traces: Sequence[Trace]) -> list[list[RequestOutcome]]:
        """Raises: ServerFailed."""
        with TemporaryDirectory(prefix="orca-bench-") as folder:
            return asyncio.run(self._run(choice, traces, Path(folder)))

    async def _run(self, choice: OrderChoice, traces: Sequence[Trace], folder: Path) -> list[list[RequestOutcome]]:
        options = [*choice.words, "--max-batch-size", str(self.max_batch_size), *self.up_options]
        async with running_system(str(self.model), options, folder, vocab_size=self.vocab_size) as target:
            await run_trace(target, _warm_up())
            return [await run_trace(target, trace) for trace in traces]


def _warm_up() -> Trace:
    return generate(
        TraceSpec(requests=WARM_UP_REQUESTS, prompt_tokens=Range(8, 64), new_tokens=Range(8, 32), seed=1_000_003)
    )
