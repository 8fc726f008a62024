"""The steps of iteration-level scheduling: some with prompts, some without, on their way through the pipeline."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, sqrt
from random import Random
from statistics import NormalDist, fmean

from orca.planner.profile.step_shape import LikeRows, StepShape
from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.expected_steps import expected_step, stage_times, whole_prompts
from orca.planner.simulate.pipeline import Job, PipelineTimes, StageTimes, run_pipeline
from orca.planner.simulate.queues.arrivals import length_points
from orca.planner.simulate.queues.prompt_queue import BatchMembers
from orca.planner.workload.percentiles import weighted_percentile

QUANTILES = 96
"""Numbers of entering requests that represent a binomial distribution."""

ORDERS = 2
"""Random orders in which steps with these numbers run one after the other."""

STEPS = QUANTILES * ORDERS

RARE = 0.05
"""Share of the steps that have a prompt; if there are fewer, the sample would hold too few of them."""


NORMAL_ABOVE = 24
"""Mean above which a Poisson distribution is taken for a normal one."""

NORMAL_POINTS = 15
"""Quantiles that represent it then."""


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Times in microseconds."""

    batches: int  # in flight
    period: float  # between two steps of the group
    first: float  # from the submission of a request's first step to its result
    first_high: float  # the percentile of the same
    rotation: float  # from step to step of a request that decodes
    deviation: float  # the standard deviation of the same
    busy: float  # of the slowest stage in a period


def mixed_steps(scenario: Scenario, members: BatchMembers, batches: int) -> MixedSteps:
    """Return the times of the steps of so many batches in flight."""
    times = _TimesByPrompts(scenario, members)
    busy = max(times.at(members.entering))
    enters = _entering(members)
    if members.entering * members.chunks < RARE or not any(enters):
        return _rare(scenario, members, batches, times, busy)
    loads = _loads(scenario, members, enters, batches)
    run = _run(scenario, [times.at(load) for load in loads], batches)
    start = 2 * scenario.stages
    numbers = range(start, STEPS)
    # A request sees the steps that it is in: those with its prompt, and those in which it decodes.
    prompts = [enters[n] if members.room is None else loads[n] * members.chunks for n in numbers]
    decoding = [max(members.members - rows, 0.0) for rows in prompts]
    rotations = [run.returned[n] - run.returned[n - batches] for n in numbers]
    durations = [run.returned[n] - run.submitted[n] for n in numbers]
    period = (run.returned[-1] - run.returned[start - 1]) / len(numbers)
    if not sum(decoding):
        decoding = [1.0 for _ in numbers]
    rotation = _mean(rotations, decoding)
    first = _mean(durations, prompts)
    # Its way through the stages, and the time that it waits for other steps.
    way = _mean([sum(times.at(loads[n])) for n in numbers], prompts)
    high = _way_percentile(scenario, members, times)
    variance = _mean([(each - rotation) ** 2 for each in rotations], decoding)
    return MixedSteps(
        batches=batches,
        period=period,
        first=first,
        first_high=first + max(high - way, 0.0),
        rotation=rotation,
        deviation=sqrt(variance),
        busy=busy,
    )


def _way_percentile(scenario: Scenario, members: BatchMembers, times: "_TimesByPrompts") -> float:
    """Return the percentile of the time of a request's first step on all stages, over all requests.

    The step has its own prompt and those of the others that enter with it. Their numbers are Poisson distributed.
    """
    prompts = scenario.workload.prompts
    spread = prompts.deviation / prompts.mean
    mean = members.entering * max(1 - 1 / members.members, 0.0)
    points: list[tuple[float, float]] = []
    for others, chance in _poisson_points(mean):
        deviations = (-1.2, 0.0, 1.2) if others else (0.0,)
        for length, share in length_points(prompts, 8):
            for deviation in deviations:
                load = length / prompts.mean + max(others + deviation * spread * sqrt(others), 0.1 * others)
                points.append((sum(times.at(load)), chance * share / len(deviations)))
    return weighted_percentile(points, scenario.percent)


def _poisson_points(mean: float) -> list[tuple[float, float]]:
    """Return numbers that represent a Poisson distribution, with their shares. A large mean is nearly normal."""
    if mean > NORMAL_ABOVE:
        quantiles = [NormalDist().inv_cdf((number + 0.5) / NORMAL_POINTS) for number in range(NORMAL_POINTS)]
        return [(mean + quantile * sqrt(mean), 1 / NORMAL_POINTS) for quantile in quantiles]
    points, chance, number, left = [], exp(-mean), 0, 1.0
    while left > 0.003 and number < 4 * NORMAL_ABOVE:
        if chance > 0.002:
            points.append((float(number), chance))
        left -= chance
        number += 1
        chance *= mean / number
    return points


def _rare(scenario: Scenario, members: BatchMembers, batches: int, times: "_TimesByPrompts", busy: float) -> MixedSteps:
    """Return the times where few steps have a prompt: what one such step costs the others, times how often it comes."""
    middle, last = 3 * scenario.stages, 7 * scenario.stages
    without = _run(scenario, [times.at(0.0)] * (last + 1), batches)
    one = [times.at(1 / members.chunks if number == middle else 0.0) for number in range(last + 1)]
    with_one = _run(scenario, one, batches)
    first = with_one.returned[middle] - with_one.submitted[middle]
    # A longer prompt, on all stages one after the other.
    high = scenario.workload.prompts.percentile(scenario.percent) / scenario.workload.prompts.mean / members.chunks
    longer = sum(times.at(max(high, 1 / members.chunks))) - sum(times.at(1 / members.chunks))
    step = without.period(0)
    cost = (with_one.period(0) - step) * last
    in_flight = members.members * batches
    share = members.entering * members.chunks
    others = share * max(in_flight - 1, 0.0) / in_flight
    return MixedSteps(
        batches=batches,
        period=step + share * cost,
        first=first,
        first_high=first + longer,
        rotation=batches * (step + others * cost),
        deviation=sqrt(batches * others) * cost,
        busy=busy,
    )


def _run(scenario: Scenario, steps: Sequence[StageTimes], batches: int) -> PipelineTimes:
    jobs = [
        Job(times, scenario.host_us, number - batches if number >= batches else None)
        for number, times in enumerate(steps)
    ]
    return run_pipeline(jobs, window=scenario.stages, prefetch=scenario.prefetch)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * value for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _entering(members: BatchMembers) -> list[int]:
    """Return how many requests enter with each step: binomial quantiles in mixed order.

    A step's members end independently of each other, since their answers are not equally long.
    """
    trials = max(round(members.members), 1)
    share = min(members.entering / trials, 1.0)
    found: list[int] = []
    count, chance = 0, (1 - share) ** trials
    below = chance
    for step in range(QUANTILES):
        while below < (step + 0.5) / QUANTILES and count < trials:
            chance *= (trials - count) / (count + 1) * share / (1 - share) if share < 1 else 1.0
            count += 1
            below = below + chance if count < trials else 1.0
        found.append(count)
    return [found[step] for step in _orders(1)]


def _loads(scenario: Scenario, members: BatchMembers, enters: Sequence[int], batches: int) -> list[float]:
    """Return the prompt tokens of each step, in mean prompts.

    With chunks, what a step has no room for waits for the next step of its batch.
    """
    prompts = scenario.workload.prompts
    spread = prompts.deviation / prompts.mean
    loads = [
        min(max(count + spread * sqrt(count) * deviation, 0.1 * count), count * prompts.high / prompts.mean)
        for count, deviation in zip(enters, _deviations(), strict=True)
    ]
    room = inf
    if members.room is not None and not scenario.is_encoder_decoder:
        room = members.room / prompts.mean
        loads = _within_room(_scaled(loads, members.entering), enters, room, batches)
    for _ in range(3):
        loads = [min(load, room) for load in _scaled(loads, members.entering)]
    return loads


def _scaled(loads: Sequence[float], mean: float) -> list[float]:
    factor = mean / max(fmean(loads), 1e-9)
    return [load * factor for load in loads]


def _within_room(loads: Sequence[float], enters: Sequence[int], room: float, batches: int) -> list[float]:
    """Return the loads of steps that have room for so much.

    A step takes the prompts that wait, oldest first, until it is full. A prompt that it has begun stays with its batch.
    The steps run twice, to fill the queues.
    """
    waiting: deque[float] = deque()
    begun = [0.0] * batches
    found: list[float] = []
    for number in range(2 * len(loads)):
        batch, step = number % batches, number % len(loads)
        waiting += [loads[step] / enters[step]] * enters[step] if enters[step] else ()
        while waiting and begun[batch] < room:
            begun[batch] += waiting.popleft()
        found.append(min(begun[batch], room))
        begun[batch] -= found[-1]
    return found[len(loads) :]


@lru_cache(maxsize=1)
def _deviations() -> tuple[float, ...]:
    """Return normal quantiles in mixed order."""
    quantiles = [NormalDist().inv_cdf((step + 0.5) / QUANTILES) for step in range(QUANTILES)]
    return tuple(quantiles[step] for step in _orders(2))


@lru_cache(maxsize=2)
def _orders(seed: int) -> tuple[int, ...]:
    """Return ORDERS random orders of the quantiles, one after the other; the same ones at every call."""
    numbers = Random(seed)
    return tuple(step for _ in range(ORDERS) for step in numbers.sample(range(QUANTILES), QUANTILES))


class _TimesByPrompts:
    """The time of a step on each stage by its prompt tokens, in mean prompts; interpolated between five numbers."""

    def __init__(self, scenario: Scenario, members: BatchMembers) -> None:
        self._scenario, self._members = scenario, members
        most = members.entering + 4 * sqrt(members.entering) + 2
        self.most = inf  # prompt tokens of a full step
        if members.room is not None and not scenario.is_encoder_decoder:
            self.most = members.room / scenario.workload.prompts.mean
            most = min(most, self.most)
        self._knots = [0.0, most / 8, most / 4, most / 2, most]
        self._are_alike = len(set(map(id, scenario.costs))) == 1
        self._times = [stage_times(scenario.costs, self._step(knot)) for knot in self._knots]

    def at(self, prompts: float) -> tuple[float, ...]:
        """Return the microseconds on each stage. Beyond the last one the line goes on."""
        place = min(max(bisect_right(self._knots, prompts), 1), len(self._knots) - 1)
        low = self._knots[place - 1]
        share = (prompts - low) / (self._knots[place] - low)
        before, after = self._times[place - 1], self._times[place]
        if self._are_alike:
            return (before[0] + (after[0] - before[0]) * share,) * len(before)
        return tuple([a + (b - a) * share for a, b in zip(before, after, strict=True)])

    def _step(self, prompts: float) -> StepShape:
        scenario, members = self._scenario, self._members
        # Without chunks a prompt takes the place of a decoding row.
        decoding = members.decoding if members.room is not None else max(members.members - prompts, 0.0)
        is_cut = members.room is not None and not scenario.is_encoder_decoder
        return expected_step(
            scenario,
            increments=decoding,
            generated=members.generated,
            read_prompt=members.read_prompt,
            entering=self._chunks(prompts) if is_cut else whole_prompts(scenario, prompts),
            first_tokens=prompts,
        )

    def _chunks(self, prompts: float) -> tuple[LikeRows, ...]:
        """Return the rows of chunks with the tokens of so many prompts."""
        mean, chunks = self._scenario.workload.prompts.mean, self._members.chunks
        # Long prompts have more chunks, and a chunk begins after half of the other tokens of its prompt on average.
        deviation = self._scenario.workload.prompts.deviation
        start = (mean + deviation**2 / mean) * (1 - 1 / chunks) / 2
        return (LikeRows(prompts * chunks, mean / chunks, start),) if prompts else ()
