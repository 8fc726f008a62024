"""Orca's own engine and policy in one process, without pool and HTTP, and the limit of its matrix products:

    python -m orca.bench.peers.engine_peer DTYPE|int8 WORKLOAD ANSWER

`int8` is weights of 8 bits and float32 for the rest.

The limit is the time of the matrix products of the same steps alone, with the weights in the engine's layout: the best
speed of this machine's libraries. It is measured directly after the run, in the same process. There is none for an
encoder-decoder model, whose products have rows of sources, of targets, or of both.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from orca.bench.peers.arrivals import Arrivals
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.domain.model import QUANTIZATIONS
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, Request, SamplingParams
from orca.core.domain.step import Claim, Epoch, Sampled, Step
from orca.core.process.gc_freeze import freeze_all
from orca.planner.workload.trace import GREEDY
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, next_batch
from orca.scheduler.policy.state import GroupState
from orca.worker.models.build import StageModel, load_stage
from orca.worker.stage.stage import Stage
from orca.worker.weights.linear import Linear, PanelLinear

_FOR_DRAWN = 4
"""Linears at the end of a model: attention's output, the two of the MLP, and the head."""


def main(arguments: list[str]) -> None:
    dtype, workload_file, answer_file = arguments
    workload = PeerWorkload.load(Path(workload_file))
    torch.set_num_threads(workload.threads)
    torch.set_grad_enabled(False)
    is_quantized = dtype in QUANTIZATIONS
    model = load_stage(
        workload.model, dtype="float32" if is_quantized else dtype, quantization=dtype if is_quantized else None
    )
    run(model, workload.head(2 * workload.batch_size))
    steps: list[Step] = []
    freeze_all()
    start_s = perf_counter()
    engine_run = run(model, workload, steps.append)
    seconds = perf_counter() - start_s
    # With pauses between the requests, the limit would mean nothing.
    has_limit = workload.arrivals_s is None and model.info.encoder_decoder is None
    limit_seconds = time_products(model, steps) if has_limit else None
    PeerAnswer(
        seconds=seconds,
        tokens=engine_run.tokens,
        limit_seconds=limit_seconds,
        first_s=engine_run.first_s,
        last_s=engine_run.last_s,
    ).save(Path(answer_file))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The tokens and times of each request; times are seconds after its arrival."""

    tokens: list[list[int]]
    first_s: list[float]
    last_s: list[float]


def run(
    model: StageModel,
    workload: PeerWorkload,
    on_step: Callable[[Step], None] = lambda _: None,
    *,
    max_batch_tokens: int | None = None,
    sampling: SamplingParams = GREEDY,
    eos_token_ids: Sequence[int] = (),
) -> EngineRun:
    """Run Algorithm 1 over the whole workload, one step at a time; a request joins after the step when it arrives.

    Args:
        on_step: called when a step's tokens are drawn.
        max_batch_tokens: bound of a step; prompts run in chunks. None runs whole prompts.
        sampling: of all requests.
        eos_token_ids: they end no request here.
    """
    arrivals = Arrivals(workload)
    kind = model.info.encoder_decoder
    beginning = () if kind is None else kind.beginning()
    requests = [_request(workload, number, beginning, sampling) for number in range(len(workload.prompts))]
    limits = BatchLimits(
        stages=1,
        max_batch_size=workload.batch_size,
        slots=workload.batch_size * max(request.slots(DEFAULT_BLOCK_TOKENS) for request in requests),
        block_tokens=DEFAULT_BLOCK_TOKENS,
        max_model_len=max(request.max_total_tokens for request in requests),
        max_batch_tokens=max_batch_tokens,
        is_encoder_decoder=kind is not None,
        shares_prefixes=workload.is_shared and model.info.no_prefix_cache is None,
    )
    stage = Stage(
        model,
        slots=limits.slots,
        block_tokens=limits.block_tokens,
        eos_token_ids=eos_token_ids,
        feeds_tokens=False,
    )
    state, policy, epoch = GroupState(prefixes=limits.make_prefixes()), IterationPolicy(), Epoch(1, "bench")
    answers: list[list[int]] = [[] for _ in workload.prompts]
    while True:
        for number in arrivals.take():
            state.add(requests[number], Claim(1, "bench/1"))
        batch = next_batch(policy, state, limits)
        if not batch.rows:
            if not arrivals.has_more:
                return EngineRun(tokens=answers, first_s=arrivals.first_s, last_s=arrivals.last_s)
            arrivals.wait()
            continue
        step = state.schedule(batch, epoch)
        prepared = stage.begin(step)
        drawn_or_refused = stage.sample(prepared, stage.forward(prepared)).read()
        sampled = [each for each in drawn_or_refused if isinstance(each, Sampled)]
        on_step(step)
        drawing = [pick.request for pick in state.read().rows if pick.sample]
        for entry, drawn in zip(drawing, sampled, strict=True):
            state.receive(entry, drawn.token.id)
            answers[entry.request.choice].append(drawn.token.id)
        arrivals.record_tokens([entry.request.choice for entry in drawing])


def _request(workload: PeerWorkload, number: int, decoder_prefix: tuple[int, ...], sampling: SamplingParams) -> Request:
    return Request(
        parent="bench",
        choice=number,
        revision="bench",
        prompt=tuple(workload.prompts[number]),
        max_new_tokens=workload.new_tokens[number],
        sampling=sampling,
        decoder_prefix=decoder_prefix,
        arrival=number,
    )


def time_products(model: StageModel, steps: Sequence[Step]) -> float:
    """Return the seconds that the matrix products of these steps take alone.

    After its keys and values, the last layer computes only the tokens that are sampled from, and so does the head.
    """
    every, drawn = model.linears[:-_FOR_DRAWN], model.linears[-_FOR_DRAWN:]
    counts = [(step.tokens, sum(row.sample for row in step.rows)) for step in steps]
    sizes = {linear.inputs for linear in model.linears}
    inputs = {
        (rows, size): torch.randn(rows, size, dtype=model.dtype) for rows in set(chain(*counts)) for size in sizes
    }
    runs = {
        (tokens, draws): products(
            [
                *((linear, inputs[tokens, linear.inputs]) for linear in every),
                *((linear, inputs[draws, linear.inputs]) for linear in drawn),
            ]
        )
        for tokens, draws in set(counts)
    }
    start_s = perf_counter()
    for count in counts:
        runs[count]()
    return perf_counter() - start_s


def products(pairs: Sequence[tuple[Linear, Tensor]]) -> Callable[[], None]:
    """Return the products of a step, launched like in the engine: all at once if every weight is packed.

    Launched one by one, each takes about 15 us more, which would make the limit too low.
    """

    def run() -> None:
        for linear, x in pairs:
            linear(x)

    if not all(isinstance(linear, PanelLinear) for linear, _ in pairs):
        return run
    # The benchmark for GPUs imports this module on machines without Numba.
    from orca.kernels.cpu.team.team import record_calls

    with record_calls() as recording:
        run()

    def replay(_kept: Sequence[tuple[Linear, Tensor]] = pairs) -> None:
        """Run the recording. It reads the memory of the inputs, which live as long as this function."""
        recording.run()

    return replay


if __name__ == "__main__":
    main(sys.argv[1:])
