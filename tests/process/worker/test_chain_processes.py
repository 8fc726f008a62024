"""The chain model on real stages and ranks: gRPC, Gloo and prefetch in between, and still the tokens of the oracle."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from checker.oracles.chain_model import load_chain_model, make_chain_model
from checker.oracles.chain_oracle import expected_tokens
from orca.bench.parts.stage_processes import Stages, new_request
from orca.scheduler.engines.grpc_engine import GrpcEngine
from support.worker.engine_builders import generate

StartEngine = Callable[..., GrpcEngine]

NEW_TOKENS = 12


@pytest.mark.parametrize(("stages", "tensor"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.prove)])
async def test_real_stages_give_the_tokens_of_the_oracle_also_after_a_restart(
    tmp_path: Path, start_engine: StartEngine, stages: int, tensor: int
) -> None:
    make_chain_model(tmp_path)
    group = Stages(tmp_path, stages=stages, tensor=tensor, log_folder=tmp_path)
    try:
        for prefetch, chunk, logged in ((0, None, 0), (1, 4, 0), (0, 4, 5), (1, None, 5)):
            engine = start_engine(group.addresses, prefetch=prefetch)
            await check_one_epoch(group, engine, tmp_path, prefetch=prefetch, chunk=chunk, logged=logged)
    finally:
        group.stop()


async def check_one_epoch(
    group: Stages, engine: GrpcEngine, folder: Path, *, prefetch: int, chunk: int | None, logged: int
) -> None:
    """20 requests in an epoch of their own, begun again with `logged` tokens of their output."""
    model, draw = load_chain_model(folder), random.Random(logged)
    prompts = [[draw.randrange(model.vocab_size) for _ in range(draw.randint(1, 20))] for _ in range(20)]
    expected = {
        handle: expected_tokens(model, prompt, NEW_TOKENS, seed=handle, temperature=handle % 2)
        for handle, prompt in enumerate(prompts, start=1)
    }
    requests = [
        new_request(handle, prompt, NEW_TOKENS, log=expected[handle][:logged], temperature=handle % 2, seed=handle)
        for handle, prompt in enumerate(prompts, start=1)
    ]
    epoch = group.next_epoch()
    await engine.form(epoch)
    wanted = [NEW_TOKENS - logged] * len(requests)
    tokens = await generate(
        engine, epoch, requests, wanted, stages=group.stages, prefetch=prefetch, chunk=chunk, batch=6
    )
    await engine.close()
    assert tokens == {handle: output[logged:] for handle, output in expected.items()}
