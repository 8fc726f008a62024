"""Expected values of iteration-level scheduling under load (the policy `iteration`); ExeGPT has no formulas for it.

Requests never run out, so each of the batches in flight, one per stage, has b = `max_batch_size` members. A request of
s tokens is a member for W + s - 1 steps: W until its prompt has run, which draws the first token, then one for each
further token. By Little's law so many requests enter with a step:

    X = b / (E[s] - 1 + W)

Without `max_batch_tokens` W is 1. With it, prompts share what the d = X * (E[s] - 1) decoding rows of a step leave, C =
max_batch_tokens - d tokens, first come, first served (prompt_queue.py).

Steps with prompts are longer than steps without. With one stage only their mean counts. With several, each stage also
waits for longer steps of other batches. So steps that represent all of them, in mixed order, pass through the recursion
of the pipeline (step_mix.py).
"""

from dataclasses import dataclass
from math import exp, sqrt

from orca.planner.simulate.arrivals import Case, Waiting, latency_at_rate, length_points, weighted_percentile
from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.prompt_queue import BatchMembers, batch_members
from orca.planner.simulate.reserved import iteration_need
from orca.planner.simulate.step_mix import MixedSteps, mixed_steps

DEVIATIONS = (-1.465, -0.792, -0.366, 0.0, 0.366, 0.792, 1.465)
"""Normal quantiles of seven equal shares."""


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """The times of one batch size in microseconds."""

    members: BatchMembers
    steps: MixedSteps

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.members.entering / self.steps.period * 1e6

    @property
    def prompt_us(self) -> float:
        """The time from a request's first step to its first token."""
        return self.steps.first * self.members.chunks

    @property
    def prompt_high_us(self) -> float:
        """The percentile of the same: of a long prompt, whose chunks fill their steps but for the last one."""
        chunks = self.members.chunks_high - 1
        return max(self.steps.first_high, self.steps.first + self.steps.first_high * chunks)

    def latency(self, output: int) -> float:
        """Return the time from the first step to the last token of an answer of so many tokens."""
        return self.prompt_us + (output - 1) * self.steps.rotation

    def latency_percentile(self, scenario: Scenario) -> float:
        """Return the percentile over all answers. Steps differ, so answers of the same length do, too."""
        return weighted_percentile(
            (
                (self.latency(length) + deviation * sqrt(length - 1) * self.steps.deviation, share)
                for length, share in length_points(scenario.workload.outputs)
                for deviation in DEVIATIONS
            ),
            scenario.percent,
        )

    def token_percentile(self, scenario: Scenario) -> float:
        """Return the percentile, over all answers, of an answer's mean time between two tokens."""
        points = [
            (self.steps.rotation + deviation * self.steps.deviation / sqrt(length - 1), share)
            for length, share in length_points(scenario.workload.outputs)
            if length > 1
            for deviation in DEVIATIONS
        ]
        return weighted_percentile(points, scenario.percent) if points else 0.0


def estimate_iteration(
    scenario: Scenario, batch_size: int, batch_tokens: int | None = None, *, rate: float | None = None
) -> Estimate:
    """Return the expected values of one pair of bounds.

    Args:
        batch_size: `max_batch_size`, requests in a step.
        batch_tokens: `max_batch_tokens`, tokens in a step; None: prompts run whole.
        rate: requests per second that arrive; latencies begin with the submission then. None: as many as can be
            served, and latencies begin with the first step.
    """
    assert batch_size >= 1, "a batch has at least one request"
    assert batch_tokens is None or batch_tokens > batch_size, "no token would be left for prompts"
    full = _times(scenario, scenario.stages * batch_size, batch_tokens)
    times, waiting = full, None
    if rate is not None:
        if rate >= full.throughput:
            waiting = Waiting.overload()
        else:
            in_flight, times = _at_rate(scenario, batch_size, batch_tokens, rate, full)
            waiting = _waiting(scenario, batch_size, in_flight, times)
    throughput = full.throughput if rate is None else min(rate, full.throughput)
    requests = times.members.members * times.steps.batches
    needed = iteration_need(scenario).of(requests)
    if waiting is None:
        latency, first = times.latency_percentile(scenario), times.prompt_high_us
    else:
        latency = latency_at_rate(scenario, [Case(1.0, times.latency, waiting)])
        first = latency_at_rate(scenario, [Case(1.0, lambda _: times.prompt_high_us, waiting)])
    return Estimate(
        throughput=throughput,
        capacity=full.throughput,
        tokens_per_s=throughput * scenario.workload.outputs.mean,
        latency_s=latency / 1e6,
        ttft_s=first / 1e6,
        tpot_s=times.token_percentile(scenario) / 1e6,
        decode_batch=times.members.decoding,
        cycle_s=times.steps.rotation / 1e6,
        bubbles=max(1 - times.steps.busy / times.steps.period, 0.0),
        slots_needed=needed,
        fits=needed <= scenario.capacity.slots,
        details={"entering": times.members.entering, "prompt_steps": times.members.prompt_steps},
    )


def _times(scenario: Scenario, in_flight: float, batch_tokens: int | None) -> IterationTimes:
    """Return the times with so many requests in flight: fewer than stages leave some of them without a batch."""
    batches = max(min(scenario.stages, round(in_flight)), 1)
    members = batch_members(scenario, in_flight / batches, batch_tokens)
    return IterationTimes(members, mixed_steps(scenario, members, batches))


def _at_rate(
    scenario: Scenario, batch_size: int, batch_tokens: int | None, rate: float, full: IterationTimes
) -> tuple[float, IterationTimes]:
    """Return the requests in flight at an arrival rate, and the times that one of them sees.

    A fixed point: n = rate * latency (Little's law), where a request sees n others. The mean over all answers counts.
    """
    mean = scenario.workload.outputs.mean

    def seen(in_flight: float) -> IterationTimes:
        return _times(scenario, min(in_flight + 1, places), batch_tokens)

    def stay(times: IterationTimes) -> float:
        waits = times.members.prompt_steps - times.members.chunks
        return (times.prompt_us + (mean - 1 + waits) * times.steps.rotation) / 1e6

    places = float(scenario.stages * batch_size)
    low, high = 0.0, places
    low_miss, high_miss = -rate * stay(seen(0.0)), max(places - rate * stay(full), 1e-6)
    in_flight, times = high, full
    for _ in range(4):
        in_flight = low + (high - low) * low_miss / (low_miss - high_miss)
        times = seen(in_flight)
        miss = in_flight - rate * stay(times)
        if abs(miss) < 0.01 * in_flight:
            break
        if miss < 0:
            low, low_miss = in_flight, miss
        else:
            high, high_miss = in_flight, miss
    return in_flight, times


def _waiting(scenario: Scenario, batch_size: int, in_flight: float, times: IterationTimes) -> Waiting:
    """Return the time before the first step: until a step returns, and until a place is free (Erlang's C formula)."""
    places = scenario.stages * batch_size
    load = min(in_flight / places, 0.999)
    blocked = 1.0  # the inverse of Erlang's B, by its recursion
    for number in range(1, places + 1):
        blocked = 1 + number / in_flight * blocked if in_flight > 1e-9 else float("inf")
        if blocked > 1e12:
            break
    share = 1 / (1 + (blocked - 1) * (1 - load))
    stay_us = times.latency(round(scenario.workload.outputs.mean))
    queued_us = stay_us / (places * (1 - load))
    skipped_us = (times.members.prompt_steps - times.members.chunks) * times.steps.rotation
    busy = 1 - exp(-in_flight / scenario.stages)
    return Waiting(times.steps.period + 2 * skipped_us, busy, queued_us, share)
