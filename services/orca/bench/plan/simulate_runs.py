"""Schedules of a real group of two stages with one thread each, beside their exact simulation from a profile.

Both run the same requests under the same policy, all of them submitted at once, and both are measured by their steps.
A machine is faster at one time than at another. So each round measures a profile and then runs every schedule once, a
ratio is formed within a round, and the median over the rounds counts. The speed of the machine is measured beside the
profile and beside each run. Simulated stages are as much slower or faster as the machine has become since; raw ratios
leave that out. The client shares the two processors, so the simulation counts its processor time with that of the host.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, product
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from time import process_time

from orca.bench.client import run_trace
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.plan.iteration_log import count_steps, read_answers
from orca.bench.plan.until_steady import until_steady
from orca.bench.system import running_system
from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import OrcaError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.domain.step import Step
from orca.core.even_parts import even_parts
from orca.planner.profile.profile import Profile
from orca.planner.profile.profile_cost import stage_costs
from orca.planner.simulate.exact import ExactFigures, measure_exact
from orca.planner.simulate.outcomes import percentile
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.simulate.steady_state import steady_figures
from orca.planner.workload.lengths import Range
from orca.planner.workload.tasks import task_workload
from orca.planner.workload.trace import Trace, TraceSpec, generate
from orca.scheduler.engines.step_cost import StepCost
from orca.scheduler.policy.cycle import CycleControls

STAGES = 2
TASKS = ("S", "T", "C1")
SCALE = 0.25
"""Lengths of the tasks are a quarter of the paper's, for models a thousand times smaller."""

WARM_UP_REQUESTS = 8

SPARE = 1.25
"""Requests of a real run for each one that its simulation needs: no two runs of real processes are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSchedule:
    """One setting of the scheduler, and the task that it serves."""

    task: str
    policy: str
    max_batch_size: int
    max_batch_tokens: int | None = None
    encode_batch: int | None = None
    decode_steps: int | None = None

    @property
    def cycle(self) -> CycleControls | None:
        if self.encode_batch is None or self.decode_steps is None:
            return None
        return CycleControls(encode_batch=self.encode_batch, decode_steps=self.decode_steps)

    def flags(self) -> list[str]:
        """Return the options of `orca up`."""
        chosen = {
            "--policy": self.policy,
            "--max-batch-size": self.max_batch_size,
            "--encode-batch": self.encode_batch,
            "--decode-steps": self.decode_steps,
        }
        words = [word for flag, value in chosen.items() if value is not None for word in (flag, str(value))]
        return [*words, "--max-batch-tokens", str(self.max_batch_tokens or 0)] if self.policy == "iteration" else words

    def describe(self) -> str:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """The simulated figures of one schedule as ratios to the real ones."""

    schedule: RealSchedule
    model: str
    throughput: float  # real, requests per second, median of the rounds
    latency_s: float  # real, the 99th percentile from first step to last token, median of the rounds
    spread: float  # of the real throughput: half the distance from the least to the most, over the median
    throughput_ratio: float  # median of the rounds
    latency_ratio: float  # median of the rounds
    raw_throughput_ratio: float  # the same with the speed of the machine as it was when the profile was measured
    raw_latency_ratio: float
    drift: float  # share by which the machine was slower or faster than beside the profile, median of the rounds


def schedules(count: int, seed: int) -> list[RealSchedule]:
    """Return so many settings, half of each strategy, the same ones for a seed.

    None repeats before all others of its task and strategy have had their turn.
    """
    numbers = Random(seed)
    turns = {
        (task, policy): cycle(numbers.sample(found, len(found)))
        for task in TASKS
        for policy, found in (("iteration", _of_iteration(task)), ("rra", _of_rra(task)))
    }
    return [
        next(turns[TASKS[number // 2 % len(TASKS)], "rra" if number % 2 else "iteration"]) for number in range(count)
    ]


def _of_iteration(task: str) -> list[RealSchedule]:
    return [
        RealSchedule(
            task=task,
            policy="iteration",
            max_batch_size=size,
            max_batch_tokens=None if chunk is None else size + chunk,
        )
        for size, chunk in product((2, 4, 8, 12, 16), (None, 32, 64, 128))
    ]


def _of_rra(task: str) -> list[RealSchedule]:
    return [
        RealSchedule(task=task, policy="rra", max_batch_size=64, encode_batch=encode, decode_steps=steps)
        for encode, steps in product((2, 4, 6, 8), (2, 4, 8, 16))
    ]


@dataclass(frozen=True, slots=True)
class RealRun:
    """One run of a schedule, and its simulation as ratios."""

    throughput: float  # requests per second
    latency_s: float  # 99th percentile
    throughput_ratio: float  # simulated over real
    latency_ratio: float
    raw_throughput_ratio: float  # without the change of the machine's speed
    raw_latency_ratio: float
    speed: float  # of the machine, over that beside the profile


@dataclass(frozen=True, slots=True)
class SlowedCost:
    """A cost on a machine that has become slower or faster."""

    cost: StepCost
    speed: float  # now over before

    def stage_us(self, step: Step) -> int:
        return round(self.cost.stage_us(step) / self.speed)


def compare(
    model: Path,
    measure: Callable[[], Profile],
    chosen: Sequence[RealSchedule],
    *,
    requests: int,
    rounds: int,
    folder: Path,
    report: Callable[[str], None],
    measure_speed: Callable[[], float],
) -> list[PredictionError]:
    """Run and simulate each schedule.

    Args:
        measure: returns a profile of now.
        requests: of each run, at least; its steady state may need more.
        measure_speed: returns the speed of the machine now, in any unit.
    Raises: OrcaError if a request of a run fails, or no number of requests brings a steady state.
    """
    found: list[list[RealRun]] = [[] for _ in chosen]
    for turn in range(rounds):
        before = measure_speed()
        profile = measure()
        profile_speed = (before + measure_speed()) / 2
        for number, (schedule, runs) in enumerate(zip(chosen, found, strict=True)):
            logs = folder / f"logs-{turn}-{number}"
            run = run_both(model, profile, schedule, requests, logs, measure_speed, profile_speed)
            runs.append(run)
            where = f"{model.name}, round {turn + 1} of {rounds}"
            report(
                f"{where}, {schedule.describe()}: {run.throughput:.3g} requests/s, {run.latency_s:.3g} s;"
                f" simulated {run.throughput_ratio:.3f} and {run.latency_ratio:.3f} of that, raw"
                f" {run.raw_throughput_ratio:.3f} and {run.raw_latency_ratio:.3f}, speed {run.speed:.3f}"
            )
    errors = []
    for schedule, runs in zip(chosen, found, strict=True):
        error = _error(model, schedule, runs)
        errors.append(error)
        report(
            f"{model.name}, {schedule.describe()}: {error.throughput:.3g} requests/s +- {error.spread:.0%},"
            f" {error.latency_s:.3g} s; simulated {error.throughput_ratio:.3f} and {error.latency_ratio:.3f} of that"
        )
    return errors


def run_both(
    model: Path,
    profile: Profile,
    schedule: RealSchedule,
    requests: int,
    logs: Path,
    measure_speed: Callable[[], float],
    profile_speed: float,
) -> RealRun:
    """Run a schedule in real processes and in simulation, with as many requests as their steady state needs.

    Args:
        requests: at least.
        logs: with what the folder of the scheduler's log begins.
        measure_speed: returns the speed of the machine now.
        profile_speed: that beside the profile.
    Raises: OrcaError if a request fails; NoSteadyState.
    """

    def simulate(profile: Profile, requests: int, *, speed: float = 1.0) -> ExactFigures:
        trace, slots = _trace(schedule, requests)
        simulation = _simulation(profile, schedule, slots, speed)
        return measure_exact(simulation, schedule.policy, schedule.max_batch_size, trace)

    def run(requests: int) -> RealRun:
        trace, slots = _trace(schedule, requests)
        folder = logs.with_name(f"{logs.name}-{requests}")
        before = measure_speed()
        log, client_s = asyncio.run(_serve(model, profile, schedule, trace, slots, folder))
        speed = (before + measure_speed()) / 2 / profile_speed
        real = steady_figures(read_answers(log, skip=WARM_UP_REQUESTS))
        loaded = _with_client(profile, 1e6 * client_s / count_steps(log))
        raw, simulated = simulate(loaded, requests), simulate(loaded, requests, speed=speed)
        return RealRun(
            throughput=real.throughput,
            latency_s=real.sequence_s,
            throughput_ratio=simulated.throughput / real.throughput,
            latency_ratio=simulated.sequence_s / real.sequence_s,
            raw_throughput_ratio=raw.throughput / real.throughput,
            raw_latency_ratio=raw.sequence_s / real.sequence_s,
            speed=speed,
        )

    enough, _ = until_steady(partial(simulate, profile), requests)
    return until_steady(run, ceil(SPARE * enough))[1]


def _simulation(profile: Profile, schedule: RealSchedule, slots: int, speed: float) -> Simulation:
    costs = stage_costs(profile, even_parts(profile.key.num_layers, STAGES), 1)
    return Simulation(
        shape=EngineShape(
            stages=STAGES, slots=slots, block_tokens=DEFAULT_BLOCK_TOKENS, max_model_len=profile.key.max_model_len
        ),
        cost=[SlowedCost(cost, speed) for cost in costs],
        prefetch=1,
        max_batch_tokens=schedule.max_batch_tokens,
        cycle=schedule.cycle,
        is_encoder_decoder=len(profile.key.stacks) > 1,
    )


def _error(model: Path, schedule: RealSchedule, runs: Sequence[RealRun]) -> PredictionError:
    """Return the medians of the rounds."""
    throughputs = [run.throughput for run in runs]
    throughput = median(throughputs)
    return PredictionError(
        schedule=schedule,
        model=model.name,
        throughput=throughput,
        latency_s=median(run.latency_s for run in runs),
        spread=(max(throughputs) - min(throughputs)) / 2 / throughput,
        throughput_ratio=median(run.throughput_ratio for run in runs),
        latency_ratio=median(run.latency_ratio for run in runs),
        raw_throughput_ratio=median(run.raw_throughput_ratio for run in runs),
        raw_latency_ratio=median(run.raw_latency_ratio for run in runs),
        drift=median(abs(run.speed - 1) for run in runs),
    )


def _trace(schedule: RealSchedule, requests: int) -> tuple[Trace, int]:
    """Return the requests of a task, and KV slots for the largest batches."""
    workload = task_workload(schedule.task, SCALE)
    slots = (workload.longest // DEFAULT_BLOCK_TOKENS + 3) * DEFAULT_BLOCK_TOKENS * 128
    return generate(TraceSpec.of_workload(workload, requests=requests, seed=1)), slots


async def _serve(
    model: Path, profile: Profile, schedule: RealSchedule, trace: Trace, slots: int, logs: Path
) -> tuple[Path, float]:
    """Serve the trace. Returns: the iteration log of the scheduler, and the seconds of processor time of the client."""
    options = [
        *schedule.flags(),
        *("--stages", str(STAGES), "--threads", "1", "--slots", str(slots), "--prefetch", "1"),
        *("--iteration-log", str(logs)),
    ]
    vocab_size = profile.key.vocab_size
    async with running_system(str(model), options, logs.parent, vocab_size=vocab_size) as target:
        warm_up = TraceSpec(requests=WARM_UP_REQUESTS, prompt_tokens=Range(16, 16), new_tokens=Range(8, 8), seed=2)
        begin_s = process_time()
        outcomes = await run_trace(target, generate(warm_up)) + await run_trace(target, trace)
        client_s = process_time() - begin_s
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    if failed:
        raise OrcaError(f"{len(failed)} requests failed: {failed[0]}")
    return logs / "scheduler-0.jsonl", client_s


def _with_client(profile: Profile, step_us: float) -> Profile:
    """Return the profile of a machine on which the client runs, too. Args: step_us: processor time of it for a step."""
    load = profile.host
    if load is None:
        return profile
    service = replace(load.service, step_us=load.service.step_us + step_us)
    return replace(profile, host=replace(load, service=service))


def lines(errors: Sequence[PredictionError]) -> list[str]:
    """Return the table: for each model and strategy the median and the largest error."""
    columns = ("throughput p50", "max", "latency p50", "max", "within 10 %", "rounds differ", "machine drifts")
    rows = [f"{'model':<14}{'strategy':<12}{'settings':>9}" + "".join(f"{column:>16}" for column in columns)]
    for model, policy, group in _groups(errors):
        throughput, latency = _shares(group, "throughput_ratio"), _shares(group, "latency_ratio")
        within = sum(max(pair) <= 0.1 for pair in zip(throughput, latency, strict=True))
        differ, drift = median(each.spread for each in group), median(each.drift for each in group)
        shares = (
            median(throughput),
            max(throughput),
            median(latency),
            max(latency),
            within / len(group),
            differ,
            drift,
        )
        rows.append(f"{model:<14}{policy:<12}{len(group):>9}" + "".join(f"{share:>16.1%}" for share in shares))
    return rows


def figures(errors: Sequence[PredictionError]) -> list[Measured]:
    """Return the errors as records, by model and strategy."""
    found = []
    for model, policy, group in _groups(errors):
        settings: dict[str, Setting] = {"model": model, "policy": policy, "stages": STAGES, "settings": len(group)}
        for what, field in (
            ("Spread of real throughput, median", "spread"),
            ("Drift of the machine's speed, median", "drift"),
        ):
            found.append(measured(what, median(getattr(each, field) for each in group), "%", settings, scale=100))
        for speed, prefix in (("of the run", ""), ("of the profile", "raw_")):
            found += _errors_of(group, prefix, settings | {"speed": speed})
    return found


def _errors_of(group: Sequence[PredictionError], prefix: str, settings: Mapping[str, Setting]) -> list[Measured]:
    """Return the errors of one group of settings. Args: prefix: of the fields with the ratios."""
    found = []
    for name, field in (("throughput", "throughput_ratio"), ("p99 latency", "latency_ratio")):
        shares = sorted(_shares(group, prefix + field))
        within = sum(share <= 0.1 for share in shares) / len(shares)
        for what, value in (
            (f"Error of simulated {name}, median", median(shares)),
            (f"Error of simulated {name}, p90", percentile(shares, 0.9)),
            (f"Simulated {name} within 10 %", within),
        ):
            found.append(measured(what, value, "%", settings, scale=100))
    return found


def to_json(errors: Sequence[PredictionError]) -> list[dict[str, object]]:
    """Return the errors as plain data."""
    return [asdict(error) for error in errors]


def _groups(errors: Sequence[PredictionError]) -> list[tuple[str, str, list[PredictionError]]]:
    keys = dict.fromkeys((error.model, error.schedule.policy) for error in errors)
    return [
        (model, policy, [each for each in errors if (each.model, each.schedule.policy) == (model, policy)])
        for model, policy in keys
    ]


def _shares(errors: Sequence[PredictionError], field: str) -> list[float]:
    """Return how far each ratio is from 1."""
    return [abs(getattr(error, field) - 1) for error in errors]
