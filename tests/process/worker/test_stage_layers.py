"""Stages with any number of layers compute the same tokens, and stages that divide the layers differently do not form
a group."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from orca.bench.parts.stage_processes import BLOCK_TOKENS, Stages, new_request
from orca.bench.parts.tiny_model import write_tiny_model
from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.worker.models.build import StageModel, load_stage
from orca.worker.parallel.shard import Shard
from orca.worker.rank.local_engine import LocalEngine
from orca.worker.rank.rank_epoch import require_same_layers
from support.worker.engine_builders import error_of, generate

StartStages = Callable[..., Stages]
StartEngine = Callable[..., GrpcEngine]
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (5,), (3, 5, 8, 9, 7))
WANTED = (6, 9, 4)


def load_divided(model: Path, counts: Sequence[int]) -> list[StageModel]:
    places = (Shard(stage=at, stages=len(counts), layer_counts=tuple(counts)) for at in range(len(counts)))
    return [load_stage(model, shard, packs=False) for shard in places]


async def tokens_of(engine: LocalEngine | GrpcEngine, epoch: Epoch, stages: int, prefetch: int) -> dict[int, list[int]]:
    await engine.form(epoch)
    requests = [
        new_request(handle, prompt, wanted)
        for handle, (prompt, wanted) in enumerate(zip(PROMPTS, WANTED, strict=True), start=1)
    ]
    return await generate(engine, epoch, requests, WANTED, stages=stages, prefetch=prefetch)


async def local_tokens(models: list[StageModel], *, prefetch: int = 0) -> dict[int, list[int]]:
    engine = LocalEngine(models, slots=256, block_tokens=BLOCK_TOKENS, prefetch=prefetch)
    tokens = await tokens_of(engine, Epoch(1, "test"), len(models), prefetch)
    await engine.close()
    return tokens


async def test_every_division_over_two_and_three_stages_gives_the_tokens_of_one_stage(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = write_tiny_model(tmp_path / "model", layers=5)
    expected = await local_tokens([load_stage(model, packs=False)])
    assert [len(tokens) for tokens in expected.values()] == list(WANTED)
    even = [load_stage(model, Shard(stage=stage, stages=3), packs=False) for stage in range(3)]
    assert await local_tokens(even) == expected
    divisions = [(first, 5 - first) for first in range(1, 5)]
    divisions += [(first, second, 5 - first - second) for first in range(1, 4) for second in range(1, 5 - first)]
    for counts in divisions:
        divided = load_divided(model, counts)
        assert [len(stage.layers) for stage in divided] == list(counts)
        assert await local_tokens(divided, prefetch=len(counts) % 2) == expected, f"layers {counts}"


async def test_stages_with_other_layers_than_their_neighbours_form_no_group(
    start_stages: StartStages, start_engine: StartEngine, tiny_model: Path
) -> None:
    expected = await local_tokens([load_stage(tiny_model, packs=False)])
    few, many = (start_stages(2, 1, "--layers", layers) for layers in ("1,2", "2,1"))
    numbers = itertools.count(1)
    for addresses in ([few.addresses[0], many.addresses[1]], [many.addresses[0], few.addresses[1]]):
        error = str(await error_of(start_engine(addresses).form(Epoch(next(numbers), "test")), limit_s=120))
        # The slower one of the two stages finds the difference.
        assert "divides the layers as" in error
        assert "1,2" in error
        assert "2,1" in error
        assert "start all stages of the group with the same --layers" in error
    for group, prefetch in ((few, 0), (many, 1)):  # the same processes, in groups that agree
        engine = start_engine(group.addresses, prefetch=prefetch)
        assert await tokens_of(engine, Epoch(next(numbers), "test"), 2, prefetch) == expected


def test_divisions_are_compared_by_their_numbers_and_not_by_how_they_were_asked_for() -> None:
    store = HashStore()
    require_same_layers(store, "1/", Shard(stage=1, stages=2), 3)
    require_same_layers(store, "1/", Shard(stage=0, stages=2, layer_counts=(2, 1)), 3)
    with pytest.raises(EngineError, match="stage 0 divides the layers as 1,2, but stage 1 as 2,1"):
        require_same_layers(store, "1/", Shard(stage=0, stages=2, layer_counts=(1, 2)), 3)
    require_same_layers(store, "2/", Shard(stage=0, stages=2, layer_counts=(1, 2)), 3)  # another epoch


def test_a_stage_whose_layers_are_no_division_ends_with_status_2(tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--stage", "1", "--stages", "2", "--layers", "2,2", "--threads", "1"]
    command = [sys.executable, "-m", "orca.worker.service", *flags, "--log-format", "json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    rule = "divide the model's 3 layers over 2 stages, at least one for each"
    # The status of an OrcaDeployment shows the last line.
    last = json.loads(ended.stderr.splitlines()[-1])
    assert last["message"] == f"the model cannot be served: setting --layers: '2,2' adds up to 4: {rule}"
