"""A refusal by the stages ends that request alone: the real loop on real stages, in one or more processes.

The neighbours are compared with an undisturbed run of the same loop: their tokens, and the steps that hold them. A
neighbour that waited for anything would leave a step out, so no time is measured.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca.bench.parts.stage_processes import BLOCK_TOKENS, Stages
from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.bench.parts.tiny_model import VOCAB, write_tiny_model
from orca.core.domain.engine import Engine
from orca.core.domain.request import End, FinishReason, Request
from orca.pool.memory.pool import MemoryPool
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.scheduler.engines.virtual_time import VirtualClock
from orca.worker.models.build import load_stage
from orca.worker.parallel.shard import Shard
from orca.worker.rank.local_engine import LocalEngine
from support.worker.engine_builders import until
from support.worker.paced_engine import PacedEngine
from support.worker.scheduled import REVISION, Scheduled, a_request

NOT_A_NUMBER = VOCAB - 1
"""The token whose embedding is not a number, in the model of these tests: it plays an overflow on one input."""

NOT_DRAWN = ((NOT_A_NUMBER, -100.0),)
NEIGHBOURS = [
    a_request("n0", range(3, 12), 40, logit_bias=NOT_DRAWN),
    a_request("n1", (5,), 40, logit_bias=NOT_DRAWN, seed=3, temperature=1.0),
]

AT_ITS_FIRST_STEP = [
    a_request("unknown", (5, VOCAB, 6), 10),
    a_request("nan", (5,), 10, temperature=math.nan),
    a_request("cold", (5,), 10, temperature=-1.0),
    a_request("top-p", (5,), 10, temperature=1.0, top_p=1.5),
    a_request("bias", (5,), 10, logit_bias=((VOCAB, 1.0),)),
    a_request("stop", (5,), 10, stop_token_ids=(VOCAB + 3,), min_tokens=2),
    a_request("all", (5,), 10, stop_token_ids=tuple(range(VOCAB)), min_tokens=2),
    a_request("long", (7, VOCAB) * 20, 10, prompt_logprobs=1),
]
"""Each is refused when it comes: by every rank of every stage, before its first row runs."""

WHEN_IT_DRAWS = [
    (a_request("overflow", (5, NOT_A_NUMBER), 10), 0),
    (a_request("overflow-warm", (5, NOT_A_NUMBER), 10, temperature=1.0, top_p=0.9, seed=4), 0),
    (a_request("overflow-scored", (5, NOT_A_NUMBER), 10, logprobs=2, prompt_logprobs=2), 0),
    # The bias makes it draw the bad token twice more than its model would: its own next token is the one that fails.
    (a_request("later", (5, 6), 10, logit_bias=((NOT_A_NUMBER, 100.0),)), 1),
]
"""Each is refused by the rank that samples, after so many tokens: no other rank can know."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("overflowing"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][NOT_A_NUMBER] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def local(folder: Path, stages: int, prefetch: int) -> LocalEngine:
    models = [load_stage(folder, Shard(stage=stage, stages=stages), packs=False) for stage in range(stages)]
    return LocalEngine(models, slots=1024, block_tokens=BLOCK_TOKENS, prefetch=prefetch)


async def outcomes(
    engine: Engine, prefetch: int, bad: Sequence[Request]
) -> tuple[dict[str, tuple[list[int], End]], dict[str, list[int]]]:
    """Run the neighbours, and the bad requests beside them. Returns: the log and the steps of each."""
    paced = PacedEngine(engine)
    async with Scheduled(paced, max_batch_size=6, prefetch=prefetch) as group:
        try:
            for request in NEIGHBOURS:
                await group.submit(request)
            # The bad requests come while the neighbours run, however long their submission takes.
            paced.allow(2)
            await group.first_token_of(NEIGHBOURS[0])
            for request in bad:
                await group.submit(request)
        finally:
            paced.set_free()
        found = {request.id: await group.outcome_of(request) for request in (*bad, *NEIGHBOURS)}
        assert len({record.epoch for record in group.log.records}) == 1
        if isinstance(engine, LocalEngine):
            await until(lambda: not engine.slots_in_use)
        return found, {request.id: group.steps_of(request) for request in (*NEIGHBOURS, *bad)}


async def check_refusals(make_engine: Callable[[], Engine], stages: int, prefetch: int) -> None:
    alone, _ = await outcomes(make_engine(), prefetch, ())
    bad = [*AT_ITS_FIRST_STEP, *(request for request, _ in WHEN_IT_DRAWS)]
    found, steps = await outcomes(make_engine(), prefetch, bad)
    for request in NEIGHBOURS:
        assert found[request.id] == alone[request.id]
        assert found[request.id][1] == End(FinishReason.LENGTH, 40)
        assert steps[request.id][-1] > max(steps[other.id][-1] for other in bad), "it ran all the time"
        if stages == 1:
            assert {after - before for before, after in pairwise(steps[request.id])} == {1}
    for request in AT_ITS_FIRST_STEP:
        tokens, end = found[request.id]
        assert (tokens, end.reason, end.count) == ([], FinishReason.REFUSED, 0), request.id
        assert end.detail
    for request, drawn in WHEN_IT_DRAWS:
        tokens, end = found[request.id]
        assert tokens == [NOT_A_NUMBER] * drawn
        assert end == End(FinishReason.REFUSED, drawn, detail=end.detail), request.id
        assert f"no finite number for token {drawn} of the output" in str(end.detail)


@pytest.mark.parametrize(("stages", "prefetch"), [(1, 0), (1, 1), (3, 1)])
async def test_in_one_process_each_is_refused_with_its_reason_and_the_neighbours_run_on(
    model: Path, stages: int, prefetch: int
) -> None:
    await check_refusals(lambda: local(model, stages, prefetch), stages, prefetch)


async def has_freed_everything(engine: GrpcEngine) -> bool:
    return [status.slots_in_use for status in await engine.wait_loaded()] == [0, 0]


async def test_all_ranks_of_a_pipeline_with_tensor_parallel_stages_leave_out_the_same_requests(
    model: Path, tmp_path: Path, start_engine: Callable[..., GrpcEngine]
) -> None:
    """Another decision of one rank would leave its neighbours waiting for a tensor of another size."""
    group = Stages(model, stages=2, tensor=2, log_folder=tmp_path)
    try:
        for prefetch in (0, 1):
            await check_refusals(lambda p=prefetch: start_engine(group.addresses, prefetch=p), 2, prefetch)  # type: ignore[misc]
            engine = start_engine(group.addresses)
            await until(lambda engine=engine: has_freed_everything(engine))  # type: ignore[misc]
    finally:
        assert group.stop() == [0, 0]


async def test_positions_that_the_model_has_not_learned_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("gpt2", tmp_path)
    positions = json.loads((folder / "config.json").read_text())["n_positions"]
    too_long, fits = a_request("long", (5,) * 9, positions - 8), a_request("fits", (5,) * 9, positions - 9)
    pool = MemoryPool(VirtualClock())
    await pool.promise_slots(REVISION, 1000)  # by another group of the revision
    async with Scheduled(local(folder, 2, 0), max_batch_size=4, pool=pool) as group:
        for request in (too_long, fits):
            await group.submit(request)
        tokens, end = await group.outcome_of(too_long)
        assert (tokens, end.reason) == ([], FinishReason.REFUSED)
        assert f"have {positions + 1} tokens, and the model has {positions} positions" in str(end.detail)
        assert (await group.outcome_of(fits))[1] == End(FinishReason.LENGTH, positions - 9)
