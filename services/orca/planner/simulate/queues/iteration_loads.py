"""The requests in flight under `iteration` at an arrival rate, and what a request sees of them.

Requests arrive as a Poisson process. With n in flight, L(n) is the mean time that one of them stays, so n / L(n) of
them end per second. In such a network n has the probability

    p(n) = p(0) * product over k = 1..n of rate * L(k) / k

whatever the distribution of lengths (a symmetric queue). L(n) is computed for a few n and is a line between them.
Beyond the places of all batches, requests queue, and p falls by the same factor from one number to the next.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp, sqrt

from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.iteration_times import IterationTimes, iteration_times
from orca.planner.simulate.queues.arrivals import Case, Waiting

GROUPS = 5
"""Groups of arriving requests, of equal share, by the number that they find in flight."""


DEVIATIONS = (-1.22, 0.0, 1.22)
"""Three equal shares of a normal distribution."""


@dataclass(frozen=True, slots=True)
class LoadsAtRate:
    """The numbers in flight that arriving requests find, and the times for some of them."""

    scenario: Scenario
    knots: tuple[int, ...]  # numbers in flight
    times: tuple[IterationTimes, ...]  # for each of them
    found: tuple[tuple[float, float], ...]  # numbers in flight that requests find, and their shares; without the queue
    queued: Waiting | None  # of the requests that find no place
    queued_share: float
    mean: float  # requests in flight
    load: float  # arrival rate by the most that can be served

    @property
    def mean_times(self) -> IterationTimes:
        """The times for the number in flight nearest to that which a request sees on average."""
        return self.times[min(range(len(self.knots)), key=lambda place: abs(self.knots[place] - self.mean - 1))]

    def latencies(self) -> list[Case]:
        """Return the requests by what they find and by the steps that they see, with the time to their last token."""
        return [
            case for deviation in DEVIATIONS for case in self._cases(partial(_latency, deviation), 1 / len(DEVIATIONS))
        ]

    def first_tokens(self) -> list[Case]:
        """Return the requests by what they find, with the percentile of the time to their first token."""
        return self._cases(lambda times, _: times.prompt_high_us, 1.0)

    def _cases(self, time: Callable[[IterationTimes, int], float], part: float) -> list[Case]:
        places = self.knots[-1]
        cases = [
            Case(share * part, self._seen(time, min(number + 1, places)), self._turn(number))
            for number, share in self.found
        ]
        if self.queued is not None:
            cases.append(Case(self.queued_share * part, self._seen(time, places), self.queued))
        return cases

    def _turn(self, number: float) -> Waiting:
        """Return the time until a step returns, and until a prompt gets tokens; none if a stage is idle."""
        times = self.mean_times
        skipped_us = (times.members.prompt_steps - times.members.chunks) * times.steps.rotation
        is_idle = number < self.scenario.stages
        return Waiting((0.0 if is_idle else times.steps.period) + 2 * skipped_us, 1.0)

    def _seen(self, time: Callable[[IterationTimes, int], float], number: float) -> Callable[[int], float]:
        """Return the time by output tokens of a request that makes it `number` in flight.

        The number returns to its mean, so a long answer sees less of what it found.
        """
        mean_stay = self._at(lambda times: times.stay(self.scenario.workload.outputs.mean), self.mean + 1)
        memory = mean_stay / (1 - self.load)

        def seen(output: int) -> float:
            mean = self._at(lambda times: time(times, output), self.mean + 1)
            own = self._at(lambda times: time(times, output), number)
            part = mean / memory
            return mean + (own - mean) * ((1 - exp(-part)) / part if part > 1e-6 else 1.0)

        return seen

    def _at(self, value: Callable[[IterationTimes], float], number: float) -> float:
        return _line(self.knots, [value(times) for times in self.times], number)


def loads_at_rate(
    scenario: Scenario, places: int, batch_tokens: int | None, rate: float, full: IterationTimes
) -> LoadsAtRate:
    """Return the numbers in flight at an arrival rate below what can be served.

    Args:
        places: requests that may be in flight: those of all batches.
        full: the times with all places taken.
    """
    knots = tuple(sorted({1, round(places ** (1 / 3)), round(places ** (2 / 3)), places}))
    times = (*(iteration_times(scenario, number, batch_tokens) for number in knots[:-1]), full)
    mean_output = scenario.workload.outputs.mean
    stays = [each.stay(mean_output) / 1e6 for each in times]
    load = min(rate / full.throughput, 0.9999)
    weights = [1.0]
    for number in range(1, places + 1):
        weights.append(weights[-1] * rate * _line(knots, stays, number) / number)
        if weights[-1] > 1e200:
            weights = [weight * 1e-200 for weight in weights]
    # Requests that wait are not in flight; the places are all taken then.
    queue = weights[-1] / (1 - load)
    total = sum(weights[:-1]) + queue
    shares = [weight / total for weight in weights]
    mean = sum(number * share for number, share in enumerate(shares[:-1])) + places * queue / total
    outputs = scenario.workload.outputs
    # Answers that are alike leave places at more even times: less of them wait for each other.
    evenness = (1 + (outputs.deviation / outputs.mean) ** 2) / 2
    queued_us = 1e6 / full.throughput / (1 - load) * evenness
    queued_share = queue / total
    return LoadsAtRate(
        scenario=scenario,
        knots=knots,
        times=times,
        found=_groups(shares[:-1]),
        queued=Waiting(0.0, 0.0, queued_us, 1.0) if queued_share > 1e-6 else None,
        queued_share=queued_share,
        mean=mean,
        load=load,
    )


def _latency(deviation: float, times: IterationTimes, output: int) -> float:
    """Return the time to the last token, if the steps are longer by so many standard deviations of their sum."""
    return times.latency(output) + deviation * sqrt(output - 1) * times.steps.deviation


def _groups(shares: list[float]) -> tuple[tuple[float, float], ...]:
    """Return the mean numbers of groups of about equal share, and their shares. Args: shares: by number, from 0."""
    wanted = sum(shares) / GROUPS
    found: list[tuple[float, float]] = []
    share = weighted = 0.0
    for number, each in enumerate(shares):
        share += each
        weighted += number * each
        if share >= wanted or (number == len(shares) - 1 and share > 0):
            found.append((weighted / share, share))
            share = weighted = 0.0
    return tuple(found)


def _line(knots: tuple[int, ...], values: list[float], number: float) -> float:
    """Return a value between those at the knots."""
    if len(knots) == 1 or number <= knots[0]:
        return values[0]
    place = min(bisect_left(knots, number), len(knots) - 1)
    share = (number - knots[place - 1]) / (knots[place] - knots[place - 1])
    return values[place - 1] + (values[place] - values[place - 1]) * share
