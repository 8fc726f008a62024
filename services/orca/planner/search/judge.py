"""Judges schedules by the exact simulation: the real scheduler on simulated stages, in its steady state."""

from dataclasses import dataclass
from math import ceil, inf

from orca.core.domain.engine import EngineShape
from orca.planner.search.goal import PlanGoal
from orca.planner.search.planner import Candidate
from orca.planner.simulate.exact import ExactFigures, measure_exact
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.simulate.steady_state import NoSteadyState
from orca.planner.workload.trace import TraceSpec, generate
from orca.scheduler.policy.policy import BatchBounds

ANSWERS = 400
"""Answers of the steady state that a percentile is taken over, at least."""

CONFIRMED_ANSWERS = 2_000
"""Answers that confirm the best schedule. With 400 of them, chance decides which schedules seem to meet a bound."""

STRATUM = 500
"""Requests in a row whose lengths are spread evenly over the workload: rare long ones come as often as they should.

Of 100 requests the 99th is anywhere between the percentiles 98 and 99, which are far apart if a few requests are long.
And the sums of a batch would hardly vary from one batch to the next. At an arrival rate lengths are drawn freely: a
queue grows by requests that happen to be long one after the other."""

RATE_FACTOR = 3
"""Answers at an arrival rate for each one without a rate: percentiles vary more where lengths are drawn freely."""

OVERLOAD = 0.98
"""Share of the capacity of a schedule: at a higher arrival rate, the queue grows without end for all purposes."""

IN_FLIGHT_MAX = 20_000
"""Most requests in flight that are simulated: more would take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFigures:
    """The figures of a schedule in simulation (planner.ScheduleFigures), latencies at the percentile of the goal."""

    throughput: float  # requests per second
    latency_s: float
    ttft_s: float
    tpot_s: float
    requests: int  # that the figures are of


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationJudge:
    """Simulates candidates for one goal. The same seed gives each of them the same requests.

    Args:
        answers: the steady state without an arrival rate has at least so many of them.
    """

    goal: PlanGoal
    seed: int = 0
    answers: int = ANSWERS

    def __call__(self, candidate: Candidate) -> SimulatedFigures | None:
        """Simulate one schedule. Returns: None if too few requests would finish in its steady state."""
        if self.goal.rate is not None and self.goal.rate > OVERLOAD * candidate.expected.capacity:
            return _endless(candidate.expected.capacity)
        # A steady state takes as many requests as are in flight to begin, as many to end, and as many in between.
        in_flight = ceil(candidate.expected.throughput * max(candidate.expected.latency_s, 0.0))
        answers = self.answers * (1 if self.goal.rate is None else RATE_FACTOR)
        requests = answers + 3 * min(in_flight, IN_FLIGHT_MAX)
        try:
            figures = self._run(candidate, requests)
        except NoSteadyState:
            return None
        is_queueing = self.goal.kind == "requests"
        return SimulatedFigures(
            throughput=figures.throughput,
            latency_s=figures.request_s if is_queueing else figures.sequence_s,
            ttft_s=figures.request_first_token_s if is_queueing else figures.first_token_s,
            tpot_s=figures.token_s,
            requests=figures.requests,
        )

    @staticmethod
    def confirming(goal: PlanGoal, seed: int = 0) -> "SimulationJudge":
        """Return the judge that confirms what another one has chosen by the same seed.

        Its requests are others: a schedule that only chance made the best would be the best on the same ones again.
        """
        return SimulationJudge(goal=goal, seed=seed + 1, answers=CONFIRMED_ANSWERS)

    def _run(self, candidate: Candidate, requests: int) -> ExactFigures:
        rate = self.goal.rate
        stratum = STRATUM if rate is None else None
        if stratum is not None:
            requests = ceil(requests / stratum) * stratum
        spec = TraceSpec.of_workload(
            candidate.scenario.workload, requests=requests, rate=rate, seed=self.seed, stratum=stratum
        )
        bounds = candidate.bounds
        return measure_exact(
            simulation_of(candidate, bounds),
            candidate.strategy.name,
            bounds.max_batch_size,
            generate(spec),
            percent=self.goal.percentile,
        )


def simulation_of(candidate: Candidate, bounds: BatchBounds) -> Simulation:
    """Return the group of a candidate on simulated stages."""
    scenario = candidate.scenario
    capacity = scenario.capacity
    return Simulation(
        shape=EngineShape(
            stages=scenario.stages,
            slots=capacity.slots // capacity.block_tokens * capacity.block_tokens,
            block_tokens=capacity.block_tokens,
            max_model_len=capacity.max_model_len,
        ),
        cost=scenario.costs,
        host_us=round(scenario.host_us),
        prefetch=scenario.prefetch,
        max_batch_tokens=bounds.max_batch_tokens,
        cycle=bounds.cycle,
        is_encoder_decoder=scenario.is_encoder_decoder,
    )


def _endless(capacity: float) -> SimulatedFigures:
    return SimulatedFigures(throughput=capacity, latency_s=inf, ttft_s=inf, tpot_s=inf, requests=0)
