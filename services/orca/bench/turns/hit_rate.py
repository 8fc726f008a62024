"""The hit rate of the prefix cache on a public trace (shared_trace.py), for some numbers of groups and cache sizes.

The real scheduler runs the trace on simulated stages and virtual time. Groups claim from one pool. Each has a cache of
its own, and chance decides which of them gets a request. The hit rate is the share of the prompt tokens that were found
in the cache of the group that ran the request.

The rates are lower than those of the service that recorded the trace, for two reasons. First, the prompt of a next turn
contains the answer before it, but no id says which part that is. Simulated stages draw other tokens. So an answer is
computed again, as a part of the next prompt, and its own blocks take memory that nobody asks for. Second, ids are of
whole blocks of 512 tokens, and prompts may share more than that.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.turns.shared_trace import SharedTrace
from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import OrcaError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed
from orca.planner.simulate.outcomes import RequestOutcome, percentile
from orca.planner.simulate.simulated_run import Simulation, process_of
from orca.planner.workload.trace import Trace
from orca.scheduler.engines.simulated_engine import StageTime
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.observer import IterationRecord, Observer

COST = LinearCost(step_us=2_000, token_us=250)
"""A step computes a prompt token in 0.25 ms. At lengths divided by 16, Mooncake's conversations keep one group without
a cache at work for seven tenths of the time."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRatePlan:
    """The runs to make: each number of groups with each cache size."""

    trace: SharedTrace
    groups: Sequence[int] = (1, 2)
    # KV slots of each group, as shares of the different prompt tokens of the trace. A group has at least the slots of
    # the longest request.
    shares: Sequence[float] = (1 / 64, 1 / 16, 1 / 4)
    cost: LinearCost = COST
    max_batch_size: int = 16
    max_batch_tokens: int | None = 512
    time_factor: float = 1.0  # multiplies the times of arrival: above 1 requests come more slowly
    seed: int = 0

    def shape(self, trace: Trace, share: float) -> EngineShape:
        """Return the engine of a group."""
        least = slots_needed(trace.max_total_tokens, DEFAULT_BLOCK_TOKENS)
        slots = slots_needed(round(share * self.trace.distinct_tokens), DEFAULT_BLOCK_TOKENS)
        return EngineShape(
            stages=1,
            slots=max(least, slots),
            block_tokens=DEFAULT_BLOCK_TOKENS,
            max_model_len=trace.max_total_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """The hits of one run."""

    groups: int
    share: float  # of the trace's different prompt tokens that a group has slots for
    slots: int  # of each group
    requests: Sequence[int]  # that each group ran
    looked_up: int  # tokens
    found: int  # tokens
    evicted: int  # blocks
    busy: float  # share of the time in which the stages of the groups computed, until the last request ended
    first_token_p50_s: float  # virtual time from arrival to first token
    first_token_p99_s: float
    most: float  # rate of one cache without bound, if each request ended before the next one came

    @property
    def rate(self) -> float:
        return self.found / self.looked_up


@dataclass(slots=True)
class HitCounter(Observer):
    """Counts what requests find at their first step."""

    looked_up: int = 0
    found: int = 0
    evicted: int = 0
    requests: Counter[str] = field(default_factory=Counter)  # by the scheduler process that ran them

    def iterated(self, record: IterationRecord) -> None:
        for admission in record.batch.admitted:
            self.looked_up += len(admission.request.known)
            self.found += admission.prefix_tokens
        self.requests[record.epoch.holder] += len(record.batch.admitted)
        self.evicted += record.evicted_blocks


def measure_hit_rates(plan: HitRatePlan, progress: Progress) -> list[HitRate]:
    """Make all runs. Raises: OrcaError if a request fails."""
    trace = plan.trace.trace(plan.time_factor)
    found = []
    for share in plan.shares:
        for groups in plan.groups:
            each = _measure(plan, trace, share, groups)
            progress(f"{_named(each)}: {100 * each.rate:.1f} % found, {100 * each.busy:.0f} % busy")
            found.append(each)
    return found


def _measure(plan: HitRatePlan, trace: Trace, share: float, groups: int) -> HitRate:
    shape = plan.shape(trace, share)
    simulation = Simulation(
        shape=shape,
        cost=plan.cost,
        max_batch_tokens=plan.max_batch_tokens,
        prefix_cache=True,
        groups=groups,
        seed=plan.seed,
    )
    counter, stage_times = HitCounter(), list[StageTime]()
    outcomes = simulation.run(
        "iteration",
        plan.max_batch_size,
        trace,
        observer=counter,
        stage_times=stage_times,
        prompts=lambda request: plan.trace.prompt(request.index),
    )
    first_s = _first_tokens_s(outcomes)
    busy_s = sum(end_us - start_us for _, _, start_us, end_us in stage_times) / 1e6
    return HitRate(
        groups=groups,
        share=share,
        slots=shape.slots,
        requests=[counter.requests[process_of(group)] for group in range(1, groups + 1)],
        looked_up=counter.looked_up,
        found=counter.found,
        evicted=counter.evicted,
        busy=busy_s / groups / max(each.end_s for each in outcomes),
        first_token_p50_s=percentile(first_s, 0.5),
        first_token_p99_s=percentile(first_s, 0.99),
        most=plan.trace.found_at_most(DEFAULT_BLOCK_TOKENS) / plan.trace.prompt_tokens,
    )


def _first_tokens_s(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Return the times to first token, sorted. Raises: OrcaError if a request failed."""
    for each in outcomes:
        if each.error is not None:
            raise OrcaError(f"request {each.index} of the trace failed: {each.error}")
    return sorted(each.token_s[0] - each.arrival_s for each in outcomes)


def _named(rate: HitRate) -> str:
    return f"{rate.groups} group{'' if rate.groups == 1 else 's'}, {rate.slots} slots"


def lines(rates: Sequence[HitRate]) -> list[str]:
    """Return a table for a terminal."""
    heads = ("slots", "of trace, %", "groups", "found, %", "against 1", "busy, %", "first token p50, p99", "requests")
    found = ["".join(f"{head:>{width}}" for head, width in zip(heads, _WIDTHS, strict=True))]
    for each in rates:
        against = _against_one(each, rates)
        cells = (
            str(each.slots),
            f"{100 * each.share:.2f}",
            str(each.groups),
            f"{100 * each.rate:.1f}",
            "-" if against is None else f"{against:.2f}",
            f"{100 * each.busy:.0f}",
            f"{each.first_token_p50_s:.2f} s, {each.first_token_p99_s:.2f} s",
            " + ".join(map(str, each.requests)),
        )
        found.append("".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)))
    if rates:
        found.append(f"one cache without bound would find {100 * rates[0].most:.1f} %")
    return found


_WIDTHS = (10, 13, 8, 10, 11, 9, 22, 16)


def _against_one(rate: HitRate, rates: Sequence[HitRate]) -> float | None:
    """Return a rate divided by that of one group with as many slots; None if that was not measured, or found none."""
    if rate.groups == 1:
        return None
    ones = [each.rate for each in rates if (each.groups, each.share) == (1, rate.share)]
    return rate.rate / ones[0] if ones and ones[0] else None


def to_json(rates: Sequence[HitRate]) -> list[dict[str, Any]]:
    """Return the rates as plain data."""
    return [asdict(each) | {"rate": each.rate} for each in rates]


def figures(rates: Sequence[HitRate], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the rates as figures for the benchmark pages."""
    found = []
    for each in rates:
        chosen = {**settings, "slots": each.slots, "groups": each.groups}
        found.append(measured("Prompt tokens found in the prefix cache", each.rate, "%", chosen, scale=100))
        if (against := _against_one(each, rates)) is not None:
            found.append(measured("Hit rate against one group", against, "x", chosen))
        found.append(measured("Time in which the stages compute", each.busy, "%", chosen, scale=100))
    if rates:
        most = "Prompt tokens that one cache without bound would find"
        found.append(measured(most, rates[0].most, "%", settings, scale=100))
    return found
