"""Hostile grammars from HTTP to the rank: each is refused, or ends its own request; neighbours get their tokens."""

import asyncio
import random
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest

from orca.bench.parts.hostile_grammars import hostile, words_of
from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.model import load_model_info
from orca.core.domain.request import FinishReason, SamplingParams
from orca.core.domain.text import Tokenizer
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import FakeScheduler, Rig, WallClock, recording, rig
from support.system.running_group import GREEDY, RunningGroup, Work

pytestmark = pytest.mark.timeout(3000)

TOGETHER = 500
"""Requests of one scheduler's life: fewer than the queue holds."""
GROWTH_MAX_MIB = 200
"""Memory that matchers of all kinds may leave in the process: caches, and what the allocator keeps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=128)


async def accepted_grammars(folder: Path, count: int, seed: int) -> list[str]:
    """Send calls with hostile grammars to a gateway. Returns: the grammars that it accepted."""
    info = load_model_info(folder)
    settings = GatewaySettings(model=str(folder), grammar_seconds_max=30.0)
    served, found = ServedModel.of(info, Tokenizer.from_folder(folder), settings), list[Any]()

    def scheduler(pool: MemoryPool) -> FakeScheduler:
        return FakeScheduler(pool, revision=info.revision, answer=recording(found), tokenizer=served.tokenizer)

    async with rig(
        model=info, newest=served, settings=settings, pool=MemoryPool(WallClock()), make_scheduler=scheduler
    ) as one:
        gate = asyncio.Semaphore(2)

        async def call(structured: dict[str, Any]) -> None:
            async with gate:
                answer = await send(one, structured)
            assert answer.status_code in (200, 400), (answer.status_code, answer.text, words_of(structured))
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["param"].startswith("structured_outputs"), error
                assert "Traceback" not in error["message"]

        await asyncio.gather(*map(call, hostile(count, seed)))
    return [request.sampling.grammar for request in found]


async def send(one: Rig, structured: dict[str, Any]) -> httpx.Response:
    return await one.post("/v1/completions", prompt="a", max_tokens=3, structured_outputs=structured)


async def run(folder: Path, count: int, seed: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grammars = await accepted_grammars(folder, count, seed)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert count // 10 < len(grammars) < count, "some are refused, and some run"
    chance = random.Random(seed)
    works = []
    for number, grammar in enumerate(grammars):
        sampling = SamplingParams(temperature=2.0, seed=number, grammar=grammar)
        works.append(Work(prompt=(5, 6), max_new_tokens=chance.randint(1, 30), sampling=sampling))
    neighbours = [Work(prompt=(7 + number, 8), max_new_tokens=60, sampling=GREEDY) for number in range(8)]
    with RunningGroup(folder, slots_max=1 << 14) as group:
        alone = await group.serve(neighbours, max_batch_size=32, prefetch=1)
        ends = []
        for first in range(0, len(works), TOGETHER):
            some = works[first : first + TOGETHER]
            outputs = await group.serve([*some, *neighbours], max_batch_size=32, prefetch=1, limit_s=1500.0)
            assert outputs[len(some) :] == alone, "neighbours get their own tokens"
            ends += [output.end for output in outputs[: len(some)]]
    assert {end.reason for end in ends} <= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REFUSED}
    refused = [end.detail for end in ends if end.reason is FinishReason.REFUSED]
    assert all(detail is not None and ("grammar" in detail) for detail in refused)
    bad = count - len(grammars)
    print(f"{count} grammars: {bad} got 400, {len(refused)} ended with an error; {grown_mib:.0f} MiB more")
    assert grown_mib < GROWTH_MAX_MIB


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2])
async def test_hostile_grammars_hurt_nobody_else(folder: Path, seed: int) -> None:
    await run(folder, 150, seed)


@pytest.mark.prove
async def test_three_thousand_hostile_grammars_hurt_nobody_else(folder: Path) -> None:
    await run(folder, 3_000, 9)
