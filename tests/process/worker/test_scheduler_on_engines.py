"""The real scheduler loop on engines behind one seam: what comes out is what each request gets alone, without a loop.

The third engine, over gRPC, runs under the loop in test_pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orca.bench.parts.stage_processes import BLOCK_TOKENS
from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.engine import Engine, EngineShape
from orca.core.domain.request import End, FinishReason, Request
from orca.scheduler.engines.simulated_engine import SimulatedEngine, seeded_tokens
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy
from orca.worker.models.build import load_stage
from orca.worker.parallel.shard import Shard
from orca.worker.rank.local_engine import LocalEngine
from support.worker.scheduled import Scheduled, a_request, alone
from support.worker.stage_driver import generate

MakeEngine = Callable[[int, int], Engine]  # from stages and prefetch

LONG = a_request("request1", range(3, 12), 150)  # runs while the others come and go
SHORT = a_request("request2", (5,), 6)
STOPPED = a_request("request3", (40, 41, 42, 43, 44, 45), 40)
LATE = a_request("request4", range(20, 34), 20)


def local_engine(model: Path) -> MakeEngine:
    def make(stages: int, prefetch: int) -> Engine:
        models = [load_stage(model, Shard(stage=stage, stages=stages), packs=False) for stage in range(stages)]
        return LocalEngine(models, slots=512, block_tokens=BLOCK_TOKENS, prefetch=prefetch)

    return make


def simulated_engine(model: Path) -> MakeEngine:  # noqa: ARG001 - its tokens are its model
    def make(stages: int, prefetch: int) -> Engine:  # noqa: ARG001 - it has both kinds of rows
        shape = EngineShape(stages=stages, slots=512, block_tokens=BLOCK_TOKENS, max_model_len=256)
        return SimulatedEngine(shape, cost=LinearCost(step_us=1_000), tokens=seeded_tokens(7, vocab_size=97))

    return make


def stopping_at(request: Request, tokens: Sequence[int], index: int) -> tuple[Request, list[int]]:
    """The request with its token at `index` as a stop token. Returns: it, and its tokens now."""
    stop = tokens[index]
    stopped = a_request(request.parent, request.prompt, request.max_new_tokens, stop_token_ids=(stop,))
    return stopped, list(tokens[: tokens.index(stop) + 1])


async def outcomes_of(group: Scheduled, early: Sequence[Request], late: Request) -> dict[str, tuple[list[int], End]]:
    """Submit one more when the first of the others has a token. Returns: the log of each."""
    for request in early:
        await group.submit(request)
    await group.first_token_of(early[0])
    await group.submit(late)
    return {request.id: await group.outcome_of(request) for request in (*early, late)}


@pytest.mark.parametrize(("stages", "prefetch"), [(1, 0), (1, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("kind", [local_engine, simulated_engine])
@pytest.mark.parametrize("cycle", [None, CycleControls(encode_batch=3, decode_steps=4)])
async def test_requests_that_join_late_or_leave_early_get_the_tokens_they_get_alone(
    tiny_model: Path, kind: Callable[[Path], MakeEngine], stages: int, prefetch: int, cycle: CycleControls | None
) -> None:
    make = kind(tiny_model)
    expected = await alone(make(stages, 0), (LONG, SHORT, STOPPED, LATE))
    stopped, expected[STOPPED.id] = stopping_at(STOPPED, expected[STOPPED.id], 4)
    policy = None if cycle is None else RoundRobinPolicy()
    engine = make(stages, prefetch)
    async with Scheduled(engine, max_batch_size=4, prefetch=prefetch, policy=policy, cycle=cycle) as group:
        outcomes = await outcomes_of(group, (LONG, SHORT, stopped), LATE)
    assert {name: tokens for name, (tokens, _) in outcomes.items()} == expected
    reasons = {name: end.reason for name, (_, end) in outcomes.items()}
    assert reasons == dict.fromkeys(expected, FinishReason.LENGTH) | {STOPPED.id: FinishReason.STOP}
    steps = group.steps_of(LONG)
    assert steps[0] < group.steps_of(LATE)[0] < steps[-1], "it came in the middle"
    assert max(group.steps_of(SHORT)[-1], group.steps_of(stopped)[-1]) < steps[-1], "they did not wait for it"


async def test_a_cancelled_request_that_its_batch_still_computes_breaks_nothing(tiny_model: Path) -> None:
    """The request-level baseline runs it until the batch ends, and its newest token never came to the master."""
    gone, stays = a_request("gone", (5, 6), 30), a_request("stays", (7,), 40)
    engine, policy = local_engine(tiny_model)(1, 0), RequestLevelPolicy(habits=Habits.without(["holds_results"]))
    async with Scheduled(engine, max_batch_size=2, policy=policy) as group:
        for request in (stays, gone):
            await group.submit(request)
        await group.first_token_of(gone)
        await group.pool.cancel("gone")
        assert (await group.outcome_of(stays))[1] == End(FinishReason.LENGTH, 40)
        assert len({record.epoch for record in group.log.records}) == 1


async def test_targets_that_start_with_their_start_token_alone_are_those_of_generate(tmp_path: Path) -> None:
    """The request-level baseline runs the rest of a prefix token by token, in rows that draw nothing."""
    folder = tiny_checkpoint("bart", tmp_path)
    prefixes = ((2,), (2, 41, 7, 9), (2, 90, 5))
    requests = [
        replace(a_request(f"r{number}", range(5, 9 + 4 * number), 3 + 2 * number), decoder_prefix=prefix)
        for number, prefix in enumerate(prefixes)
    ]
    engine, policy = local_engine(folder)(2, 0), RequestLevelPolicy()
    async with Scheduled(engine, max_batch_size=3, policy=policy, is_encoder_decoder=True) as group:
        for request in requests:
            await group.submit(request)
        found = [(await group.outcome_of(request))[0] for request in requests]
    rows = [row for record in group.log.records for row in record.rows]
    assert rows
    model = reference_model(folder)
    assert found == [generate(model, each.prompt, each.max_new_tokens, each.decoder_prefix).tokens for each in requests]
