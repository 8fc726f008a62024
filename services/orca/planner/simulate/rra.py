"""Expected values of round-robin allocation (ExeGPT, sections 4.1 and 6).

    k(s)        decode phases of an answer of s tokens
    B_D         B_E * E[k]                                 decode batch at the start of a phase (Little's law)
    cycle       T_E(B_E) + sum over u = 1..N_D of T_D(requests left in iteration u)
    throughput  B_E / cycle
    latency(s)  (k(s) - 1) * cycle + the encode iteration + the iterations of the last phase up to its own

T_E and T_D hold every bubble: an iteration runs in as many disjoint micro-batches as stages. The paper rounds the last
phase up to a whole cycle.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, sqrt
from statistics import NormalDist, fmean

from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.expected_steps import expected_step, stage_times, whole_prompts
from orca.planner.simulate.pipeline import Job, StageTimes, run_pipeline, steady_period
from orca.planner.simulate.queues.arrivals import Case, Waiting, latency_at_rate, length_points
from orca.planner.simulate.reserved import rra_need
from orca.planner.simulate.rra_phases import DecodePhases, decode_phases, paper_phases
from orca.planner.workload.percentiles import weighted_percentile

FORMULAS = ("orca", "paper")

KNOTS = 7
"""Decode iterations of a phase whose step is computed; the others lie between two of them."""

EDGE = 2
"""Decode iterations at the begin and at the end of a phase that run beside encode iterations in the recursion."""

SAMPLES = (-0.5, 0.9, -1.4, 0.2, 1.4, -0.9, 0.5, -0.2)
"""Deviations of the work of successive encode micro-batches, in standard deviations: normal quantiles, mixed."""

DEVIATIONS = (-1.22, 0.0, 1.22)
"""Three equal shares of a normal distribution."""

LARGEST_OF = (0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424)
"""Expected largest of so many normally distributed numbers, in standard deviations."""


@dataclass(frozen=True, slots=True)
class CycleTimes:
    """The times of one cycle in microseconds."""

    cycle: float
    seen: float  # of a cycle in which a given request decodes: it has no empty iterations
    encode: float  # from the submission of a request's encode step to its result
    deviation: float  # the standard deviation of the same
    offsets: tuple[float, ...]  # from the same submission to the result of each decode iteration of that phase
    busy: float  # of the slowest stage
    phases: DecodePhases

    def latency(self, output: int) -> float:
        """Return the time from the first step to the last token of an answer of so many tokens."""
        phases = self.phases.phases(output)
        if not phases:
            return self.encode
        last = min(self.phases.last_iteration(output), len(self.offsets))
        return (phases - 1) * self.seen + self.offsets[last - 1]

    def encode_percentile(self, percent: float) -> float:
        """Return the percentile over all requests of the time to the first token."""
        return self.encode + max(NormalDist().inv_cdf(percent / 100), 0.0) * self.deviation

    def latency_percentile(self, scenario: Scenario) -> float:
        """Return the percentile over all answers. The prompts of its cycles make an answer faster or slower."""
        return weighted_percentile(
            (
                (self.latency(length) + deviation * sqrt(max(self.phases.phases(length), 1)) * self.deviation, share)
                for length, share in length_points(scenario.workload.outputs, 96)
                for deviation in DEVIATIONS
            ),
            scenario.percent,
        )


def estimate_rra(
    scenario: Scenario,
    encode_batch: int,
    decode_steps: int,
    *,
    rate: float | None = None,
    formula: str = "orca",
) -> Estimate:
    """Return the expected values of one pair of controls.

    Args:
        encode_batch: B_E, requests that enter with each encode iteration.
        decode_steps: N_D, decode iterations between two encode iterations.
        rate: requests per second that arrive; latencies begin with the submission then. None: as many as can be
            served, and latencies begin with the first step.
        formula: `paper` computes decode batch and latency as the paper does.
    """
    assert formula in FORMULAS, formula
    times = cycle_times(scenario, encode_batch, decode_steps, formula=formula)
    capacity = encode_batch / times.cycle * 1e6
    entering, full = float(encode_batch), times
    if rate is not None and rate < capacity:
        entering, times = _at_rate(scenario, encode_batch, decode_steps, rate, full, formula)
    throughput = capacity if rate is None else min(rate, capacity)
    batch = entering * times.phases.mean_phases
    if formula == "paper":
        latency, first = -(-scenario.length // decode_steps) * times.cycle, times.encode
    elif rate is None:
        latency, first = times.latency_percentile(scenario), times.encode_percentile(scenario.percent)
    elif rate >= capacity:
        latency = first = inf
    else:
        loads = _loads(times, full, entering, encode_batch, rate)
        latency = latency_at_rate(scenario, [Case(load.share, load.latency, load.waiting) for load in loads])
        first = latency_at_rate(scenario, [Case(load.share, load.encode, load.waiting) for load in loads])
    needed = rra_need(scenario, decode_steps).of(batch + entering * _first_only(scenario))
    return Estimate(
        throughput=throughput,
        capacity=capacity,
        tokens_per_s=throughput * scenario.workload.outputs.mean,
        latency_s=latency / 1e6,
        ttft_s=first / 1e6,
        tpot_s=_token_time(scenario, times) / 1e6,
        decode_batch=batch,
        cycle_s=times.cycle / 1e6,
        bubbles=max(1 - times.busy / times.cycle, 0.0),
        slots_needed=needed,
        fits=needed <= scenario.capacity.slots,
        details={"encode_batch": entering, "encode_s": times.encode / 1e6, "phases": times.phases.mean_phases},
    )


def cycle_times(scenario: Scenario, entering: float, decode_steps: int, *, formula: str = "orca") -> CycleTimes:
    """Return the times of a cycle in which so many requests enter, which may be an expected value."""
    find = paper_phases if formula == "paper" else decode_phases
    phases = find(scenario.workload, decode_steps)
    microbatches = min(scenario.stages, max(round(entering * max(phases.mean_phases, 1.0)), 1))
    decodes = _DecodeIterations(scenario, entering, phases, microbatches)
    encodes, spread = _encode_jobs(scenario, entering, phases)
    count = len(phases.requests)
    edge = tuple(range(count)) if count <= 2 * EDGE else (*range(EDGE), *range(count - EDGE, count))
    jobs: list[Job] = []
    firsts: list[int] = []  # job number of each cycle's first encode step
    heads: list[list[tuple[int, int]]] = []  # of each cycle: encode step, and the first decode step of its requests
    cycles = len(SAMPLES) if scenario.stages > 1 else 2
    last: list[int | None] = [None] * microbatches  # the newest job of each micro-batch
    for cycle in range(cycles + 1):
        firsts.append(len(jobs))
        places = [(cycle * len(encodes) + number) % microbatches for number in range(len(encodes))]
        heads.append([(len(jobs) + number, len(jobs) + len(encodes) + place) for number, place in enumerate(places)])
        for number, encode in enumerate(encodes):
            factor = max(1 + spread * SAMPLES[(cycle * len(encodes) + number) % len(SAMPLES)], 0.2)
            alike = scenario.stages == 1  # then only the mean counts
            jobs.append(Job(encode if alike else [time * factor for time in encode], scenario.host_us))
        for number, place in enumerate(places):
            last[place] = firsts[-1] + number
        for iteration in edge:
            step = decodes.steps[iteration]
            for place in range(microbatches):
                jobs.append(Job(step.times, step.there * scenario.host_us, last[place]))
                last[place] = len(jobs) - 1
    run = run_pipeline(jobs, window=scenario.stages, prefetch=scenario.prefetch)
    # The first cycle begins with an empty pipeline.
    ends = [run.returned[first - 1] for first in (*firsts[1:], len(jobs))]
    rotations = [step.rotation for step in decodes.steps]
    in_edges = sum(decodes.steps[iteration].steady for iteration in edge)
    cycle_us = (ends[-1] - ends[0]) / cycles + sum(rotations) - in_edges
    seen = [step.seen for step in decodes.steps]
    counted = [pair for pairs in heads[1:] for pair in pairs]
    encode_us = fmean(run.returned[encode] - run.submitted[encode] for encode, _ in counted)
    offsets: tuple[float, ...] = ()
    if count:
        first_us = fmean(run.returned[decode] - run.submitted[encode] for encode, decode in counted)
        offsets = tuple(accumulate(seen[1:], initial=first_us + seen[0] - rotations[0]))
    waited_us = cycle_us + sum(seen) - sum(rotations)
    busy = max(
        sum(times[stage] for times in encodes) + sum(step.times[stage] for step in decodes.steps) * microbatches
        for stage in range(scenario.stages)
    )
    deviation_us = spread * sum(encodes[0])
    return CycleTimes(cycle_us, waited_us, encode_us, deviation_us, offsets, busy, phases)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The step of one micro-batch in a decode iteration, and the time of the whole iteration."""

    times: StageTimes  # mean times on each stage, 0 if the micro-batch is empty
    there: float  # probability that it has a request
    rotation: float  # the time of the iteration
    steady: float  # the same if all micro-batches had the same size
    seen: float  # the same for a request that is in it

    def towards(self, other: "DecodeStep", share: float) -> "DecodeStep":
        """Return a step between this one and another."""
        return DecodeStep(
            tuple(a + (b - a) * share for a, b in zip(self.times, other.times, strict=True)),
            self.there + (other.there - self.there) * share,
            self.rotation + (other.rotation - self.rotation) * share,
            self.steady + (other.steady - self.steady) * share,
            self.seen + (other.seen - self.seen) * share,
        )


class _DecodeIterations:
    """The steps of one decode phase."""

    def __init__(self, scenario: Scenario, entering: float, phases: DecodePhases, microbatches: int) -> None:
        self._scenario, self._phases, self._microbatches = scenario, phases, microbatches
        self._batch = entering * phases.requests[0] if phases.requests else 0.0
        count = len(phases.requests)
        knots = sorted({round(place * (count - 1) / (KNOTS - 1)) for place in range(KNOTS)}) if count else []
        found = {knot: self._step(knot) for knot in knots}
        self.steps: list[DecodeStep] = []
        for iteration in range(count):
            after = bisect_left(knots, iteration)
            right = knots[after]
            if right == iteration:
                self.steps.append(found[right])
            else:
                left = knots[after - 1]
                self.steps.append(found[left].towards(found[right], self._share(iteration, left, right)))

    def _share(self, iteration: int, left: int, right: int) -> float:
        """Return how far an iteration lies between two knots: by its batch, which may fall in steps."""
        requests = self._phases.requests
        fall = requests[left] - requests[right]
        if fall > 1e-9:
            return (requests[left] - requests[iteration]) / fall
        return (iteration - left) / (right - left)

    def _step(self, iteration: int) -> DecodeStep:
        scenario, phases, microbatches = self._scenario, self._phases, self._microbatches
        start = self._batch / microbatches
        left = phases.requests[iteration] / phases.requests[0]
        mean = start * left
        # Each request of the phase is still there with the probability `left`.
        there = 1 - (1 - left) ** start if start >= 1 else mean
        any_there = min(self._batch, 1.0) * (1 - (1 - left) ** max(self._batch, 1.0))
        there, any_there = max(there, 1e-9), max(any_there, 1e-9)
        times = self._times(mean / there, iteration)
        spread = sqrt(max(mean * (1 - left), 0.0))
        largest = min(mean + LARGEST_OF[min(microbatches, len(LARGEST_OF) - 1)] * spread, max(start, mean))
        slow = self._times(largest / there, iteration) if microbatches > 1 and spread > 0.01 * mean else times
        period = steady_period(times, window=microbatches, host_us=scenario.host_us, prefetch=scenario.prefetch)
        steady = microbatches * there * period
        hidden = 0.0 if scenario.prefetch else scenario.host_us
        rotation = max(any_there * (sum(slow) + hidden), steady)
        # A request that is still there, and those that are with it.
        own = self._times(max(1 + max(start - 1, 0.0) * left, largest if microbatches > 1 else 0.0), iteration)
        seen = max(sum(own) + hidden, max(own) + (microbatches - 1) * there * max(times), rotation)
        return DecodeStep(tuple(time * there for time in times), there, rotation, steady, seen)

    def _times(self, requests: float, iteration: int) -> tuple[float, ...]:
        step = expected_step(
            self._scenario,
            increments=requests,
            generated=self._phases.generated[iteration],
            read_prompt=self._phases.prompts[iteration],
        )
        return stage_times(self._scenario.costs, step)


def _encode_jobs(scenario: Scenario, entering: float, phases: DecodePhases) -> tuple[Sequence[StageTimes], float]:
    """Return the steps of an encode iteration, and the relative standard deviation of their work."""
    count = max(min(scenario.stages, round(entering)), 1)
    requests = entering / count
    whole = _encode_times(scenario, requests)
    jobs = [whole] * count
    prompts = scenario.workload.prompts
    slowest = max(range(scenario.stages), key=lambda stage: whole[stage])
    longer = _encode_times(scenario, requests, 1.25)[slowest]
    more = _encode_times(scenario, requests * 1.25)[slowest]
    by_length = 4 * (longer / whole[slowest] - 1) * prompts.deviation / prompts.mean / sqrt(max(requests, 1.0))
    by_requests = 4 * (more / whole[slowest] - 1)
    # Each micro-batch is filled up, so it gets as many requests as ended in it.
    ended = requests * (1 - 1 / max(phases.mean_phases, 1.0)) * (1 - 1 / scenario.stages)
    return jobs, sqrt(by_length**2 + by_requests**2 * ended / max(requests, 1.0) ** 2)


def _encode_times(scenario: Scenario, requests: float, scale: float = 1.0) -> tuple[float, ...]:
    """Return the stage times of a micro-batch of an encode iteration. Args: scale: factor of the prompts' lengths."""
    entering = whole_prompts(scenario, requests, scale)
    return stage_times(scenario.costs, expected_step(scenario, entering=entering, first_tokens=requests))


def _first_only(scenario: Scenario) -> float:
    """Return the share of answers that end with their encode iteration."""
    outputs = scenario.workload.outputs
    return outputs.shares[0] if outputs.low == 1 else 0.0


def _token_time(scenario: Scenario, times: CycleTimes) -> float:
    """Return the percentile, over all answers, of an answer's mean time between two tokens."""
    outputs = scenario.workload.outputs
    step = max(len(outputs.lengths) // 256, 1)
    found = sorted(
        ((times.latency(length) - times.encode) / (length - 1), sum(outputs.shares[place : place + step]))
        for place, length in list(enumerate(outputs.lengths))[::step]
        if length > 1
    )
    if not found:
        return 0.0
    wanted = scenario.percent / 100 * sum(share for _, share in found)
    places = list(accumulate(share for _, share in found))
    return found[min(bisect_left(places, wanted - 1e-12), len(found) - 1)][0]


def _at_rate(
    scenario: Scenario, encode_batch: int, decode_steps: int, rate: float, full: CycleTimes, formula: str
) -> tuple[float, CycleTimes]:
    """Return the requests that enter per cycle at an arrival rate, and the times of that cycle.

    A fixed point: a shorter cycle lets fewer requests enter, and so is shorter. The cycle is nearly linear in them.
    """
    low, low_miss = 0.0, 1.0
    high, times = float(encode_batch), full
    high_miss = rate * full.cycle / 1e6 - encode_batch
    low_miss = max(rate * cycle_times(scenario, 1e-3, decode_steps, formula=formula).cycle / 1e6, 1e-6)
    entering = high
    for _ in range(4):
        entering = low + (high - low) * low_miss / (low_miss - high_miss)
        times = cycle_times(scenario, max(entering, 1e-3), decode_steps, formula=formula)
        miss = rate * times.cycle / 1e6 - entering
        if abs(miss) < 0.005 * entering:
            break
        if miss > 0:
            low, low_miss = entering, miss
        else:
            high, high_miss = entering, miss
    return entering, times


@dataclass(frozen=True, slots=True)
class _Load:
    """Cycles of one length at an arrival rate: between those of the mean and those of a full encode batch."""

    share: float  # of the requests that find it
    place: float  # 0: the mean cycle, 1: a full one
    growth: float  # how much of a cycle's deviation from the mean is left in the next cycle
    mean: CycleTimes
    full: CycleTimes
    waiting: Waiting

    def latency(self, output: int) -> float:
        mean = self.mean.latency(output)
        phases = max(self.mean.phases.phases(output), 1)
        lasting = (1 - self.growth**phases) / (1 - self.growth) / phases
        return max(mean + (self.full.latency(output) - mean) * self.place * lasting, 0.0)

    def encode(self, output: int) -> float:  # noqa: ARG002 - the same for all lengths
        mean = self.mean.encode
        return max(mean + (self.full.encode - mean) * self.place, 0.0)


def _loads(mean: CycleTimes, full: CycleTimes, entering: float, encode_batch: int, rate: float) -> list[_Load]:
    """Return the cycles that arriving requests find.

    Long cycles let more requests arrive, and so make the next one long, too. More requests arrive in a long cycle than
    in a short one. So a request finds longer cycles than the mean one, and they vary by more than their arrivals.
    """
    spare = max(encode_batch - entering, 1e-9)
    growth = min(max(rate * (full.cycle - mean.cycle) / 1e6 / spare, 0.0), 0.95)
    variance = entering / (1 - growth**2)
    found = entering + growth**2 * variance / max(entering, 1e-9) + max(1 - entering, 0.0)
    loads = []
    for deviations, share in ((-1.22, 1 / 3), (0.0, 1 / 3), (1.22, 1 / 3)):
        requests = min(max(found + deviations * sqrt(variance), min(1.0, entering)), encode_batch)
        place = (requests - entering) / spare
        cycle = mean.cycle + (full.cycle - mean.cycle) * place
        waiting = Waiting.for_cycle(cycle, entering=entering, variance=variance, places=encode_batch)
        loads.append(_Load(share, place, growth, mean, full, waiting))
    return loads
