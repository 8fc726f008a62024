"""Orca's own engine and policy in one process, without pool and HTTP, and the limit of its matrix products:

    python -m orca.cli.bench.peers.engine_peer DTYPE WORKLOAD ANSWER

The limit is what the products of the same steps take when nothing else is done, with the weights as the engine has laid
them out: as fast as this machine's libraries can be. It is measured right behind the run, in the same process.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from orca.cli.bench.peers.workload import Answer, Workload
from orca.cli.bench.trace import GREEDY
from orca.core.request import DEFAULT_BLOCK_TOKENS, Request, slots_needed
from orca.core.step import Claim, Epoch, Step
from orca.scheduler.iteration import Iteration
from orca.scheduler.policy import Limits, next_batch
from orca.scheduler.state import GroupState
from orca.worker.models.build import StageModel, load_stage
from orca.worker.stage import Stage


def main(arguments: list[str]) -> None:
    dtype, workload_file, answer_file = arguments
    workload = Workload.load(Path(workload_file))
    torch.set_num_threads(workload.threads)
    torch.set_grad_enabled(False)
    model = load_stage(workload.model, dtype=dtype)
    run(model, workload.head(2 * workload.batch_size))
    steps: list[Step] = []
    start_s = perf_counter()
    tokens = run(model, workload, steps.append)
    seconds = perf_counter() - start_s
    Answer(seconds=seconds, tokens=tokens, limit_seconds=time_products(model, steps)).save(Path(answer_file))


def run(
    model: StageModel,
    workload: Workload,
    on_step: Callable[[Step], None] = lambda _: None,
    *,
    max_batch_tokens: int | None = None,
) -> list[list[int]]:
    """Algorithm 1 over the whole workload, one step at a time.

    Args:
        on_step: called when a step's tokens are drawn.
        max_batch_tokens: of a step; prompts run in chunks. None runs them whole.
    Returns: the tokens of each request.
    """
    longest = max(len(prompt) + new for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True))
    limits = Limits(
        stages=1,
        max_batch_size=workload.batch_size,
        slots=workload.batch_size * slots_needed(longest, DEFAULT_BLOCK_TOKENS),
        block_tokens=DEFAULT_BLOCK_TOKENS,
        max_model_len=longest,
        max_batch_tokens=max_batch_tokens,
    )
    stage = Stage(model, slots=limits.slots, block_tokens=limits.block_tokens, eos_token_ids=(), feeds_tokens=False)
    state, policy, epoch = GroupState(), Iteration(), Epoch(1, "bench")
    answers = {_request(workload, number): list[int]() for number in range(len(workload.prompts))}
    for request in answers:
        state.add(request, Claim(1, "bench/1"))
    while (batch := next_batch(policy, state, limits)).picks:
        step = state.schedule(batch, epoch)
        plan = stage.begin(step)
        sampled = stage.sample(plan, stage.forward(plan))
        on_step(step)
        drawing = (pick for pick in state.read().picks if pick.sample)
        for pick, drawn in zip(drawing, sampled, strict=True):
            state.receive(pick.request, drawn.token.id)
            answers[pick.request.request].append(drawn.token.id)
    return list(answers.values())


def _request(workload: Workload, number: int) -> Request:
    return Request(
        parent="bench",
        choice=number,
        revision="bench",
        prompt=tuple(workload.prompts[number]),
        max_new_tokens=workload.new_tokens[number],
        sampling=GREEDY,
        arrival=number,
    )


def time_products(model: StageModel, steps: Sequence[Step]) -> float:
    """Seconds that the matrix products of these steps take alone: every layer's for all tokens, the head's for rows."""
    *linears, head = model.linears
    sizes = {linear.weight.shape[1] for linear in linears}
    inputs = {
        (tokens, size): torch.randn(tokens, size, dtype=model.dtype)
        for tokens in {step.tokens for step in steps}
        for size in sizes
    }
    rows = {
        count: torch.randn(count, head.weight.shape[1], dtype=model.dtype)
        for count in {len(step.rows) for step in steps}
    }
    start_s = perf_counter()
    for step in steps:
        for linear in linears:
            linear(inputs[step.tokens, linear.weight.shape[1]])
        head(rows[len(step.rows)])
    return perf_counter() - start_s


if __name__ == "__main__":
    main(sys.argv[1:])
