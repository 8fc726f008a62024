"""A simulation of round-robin allocation that shares no code with the formulas: requests, micro-batches and stages.

It knows neither scheduler nor pool. Without a rate requests never run out. It plays the policy's rules: an encode
iteration of up to B_E requests, then N_D decode iterations, each in as many micro-batches as stages. A request stays in
its micro-batch, and new ones go to the smallest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from orca.planner.profile.step_shape import LikeRows, ShapeCost, StepShape
from orca.planner.workload.workload import Workload


@dataclass(slots=True)
class PlayedRequest:
    """A request in flight."""

    prompt: int
    output: int
    start_us: float  # its first step was sent, or it arrived if there is an arrival rate
    drawn: int = 1


@dataclass(slots=True)
class PlayedRun:
    """The measurements of a run after its warm-up."""

    seconds: float = 0.0
    finished: int = 0
    cycles: int = 0
    decode_batches: list[int] = field(default_factory=list)  # requests at the start of each decode phase
    latencies_s: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        return self.finished / self.seconds

    def percentile(self, percent: float) -> float:
        return sorted(self.latencies_s)[int(percent / 100 * len(self.latencies_s))]


def play_rra(
    workload: Workload,
    costs: Sequence[ShapeCost],
    encode_batch: int,
    decode_steps: int,
    *,
    requests: int,
    seed: int = 0,
    host_us: float = 0.0,
    is_encoder_decoder: bool = False,
    rate: float | None = None,
) -> PlayedRun:
    """Run until so many requests have finished after the warm-up. Args: rate: requests per second that arrive."""
    numbers, stages, run = Random(seed), len(costs), PlayedRun()
    groups: list[list[PlayedRequest]] = [[] for _ in costs]
    free, returns = [0.0] * stages, [0.0] * stages  # of stages; of the jobs in flight, oldest first
    last = [0.0] * stages  # return of each micro-batch's last step
    warm_up = max(workload.outputs.high // decode_steps + 1, 4) * 2
    start_us = due_us = 0.0  # of the measured part; the next arrival
    arrived: list[float] = []

    def arrivals(now_us: float) -> list[float]:
        """Return when each request of the next encode iteration arrived; its first step is sent now."""
        nonlocal due_us
        if rate is None:
            return [-1.0] * encode_batch
        if not any(groups) and not arrived:
            now_us = max(now_us, due_us)
            returns[:] = [max(time, due_us) for time in returns]
        while due_us <= now_us:
            arrived.append(due_us)
            due_us += numbers.expovariate(rate) * 1e6
        entering = arrived[:encode_batch]
        del arrived[:encode_batch]
        return entering

    def send(number: int, shape: StepShape, after_us: float = 0.0) -> tuple[float, float]:
        sent = end = max(returns.pop(0), after_us)
        for stage, cost in enumerate(costs):
            end = free[stage] = max(end, free[stage]) + cost.shape_us(shape)
        returns.append(end + host_us)
        last[number] = max(last[number], end + host_us)
        return sent, end + host_us

    def finish(request: PlayedRequest, end_us: float) -> None:
        if run.cycles >= warm_up:
            run.finished += 1
            run.latencies_s.append((end_us - request.start_us) / 1e6)

    while run.finished < requests:
        if run.cycles == warm_up:
            start_us = max(returns)
        new: list[list[PlayedRequest]] = [[] for _ in costs]
        for arrival_us in arrivals(returns[0]):
            smallest = min(range(stages), key=lambda number: len(groups[number]) + len(new[number]))
            new[smallest].append(PlayedRequest(*workload.sample(numbers), arrival_us))
        for number, entering in enumerate(new):
            if entering:
                sent, end = send(number, _encode(entering, is_encoder_decoder))
                for request in entering:
                    request.start_us = sent if request.start_us < 0 else request.start_us
                    if request.output == 1:
                        finish(request, end)
                    else:
                        groups[number].append(request)
        if run.cycles >= warm_up:
            run.decode_batches.append(sum(map(len, groups)))
        for _ in range(decode_steps):
            for number, group in enumerate(groups):
                if group:
                    _, end = send(number, _decode(group, is_encoder_decoder), last[number])
                    for request in group:
                        request.drawn += 1
                        if request.drawn == request.output:
                            finish(request, end)
                    groups[number] = [request for request in group if request.drawn < request.output]
            if not any(groups):
                break
        run.cycles += 1
    run.seconds = (max(returns) - start_us) / 1e6
    return run


def _encode(entering: Sequence[PlayedRequest], is_encoder_decoder: bool) -> StepShape:
    rows, count = tuple(LikeRows(1, request.prompt) for request in entering), len(entering)
    if not is_encoder_decoder:
        return StepShape(prompts=rows, sampled=count)
    read = sum(request.prompt for request in entering) / count
    return StepShape(increments=count, context=1, sampled=count, sources=rows, source_context=read)


def _decode(group: Sequence[PlayedRequest], is_encoder_decoder: bool) -> StepShape:
    count = len(group)
    prompts, drawn = sum(request.prompt for request in group) / count, sum(request.drawn for request in group) / count
    if not is_encoder_decoder:
        return StepShape(increments=count, context=prompts + drawn, sampled=count)
    return StepShape(increments=count, context=drawn + 1, sampled=count, source_context=prompts)


def count_decode_batches(
    workload: Workload, encode_batch: int, decode_steps: int, *, requests: int, seed: int
) -> float:
    """Return the mean decode batch at the start of a phase in a run of so many requests, without any times.

    Requests in the batch are counted by the phases that they have left.
    """
    numbers, draw = Random(seed), _outputs(workload)
    cycles = requests // encode_batch
    warm_up = workload.outputs.high // decode_steps + 1
    leaving = [0] * (warm_up + 2)  # a ring: requests whose last phase is so many cycles ahead
    batch = total = 0
    for cycle in range(cycles + warm_up):
        batch -= leaving[cycle % len(leaving)]
        leaving[cycle % len(leaving)] = 0
        for output in draw(numbers, encode_batch):
            phases = -(-(output - 1) // decode_steps)
            if phases:
                batch += 1
                leaving[(cycle + phases) % len(leaving)] += 1
        if cycle >= warm_up:
            total += batch
    return total / cycles


def _outputs(workload: Workload) -> Callable[[Random, int], list[int]]:
    lengths, cumulative = workload.outputs.lengths, list(workload.outputs.cumulative)
    return lambda numbers, count: numbers.choices(lengths, cum_weights=cumulative, k=count)
