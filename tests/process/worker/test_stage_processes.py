"""Real controllers and ranks as processes on loopback: the tokens of the in-process engine, epoch after epoch."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orca.bench.parts.stage_processes import BLOCK_TOKENS, Stages, new_request
from orca.core.domain.step import Epoch, NewRequest, Row, Step
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.worker.models.build import StageModel, load_stage
from orca.worker.parallel.shard import Shard
from orca.worker.rank.local_engine import LocalEngine
from support.worker.engine_builders import error_of, generate, next_result, until

StartStages = Callable[..., Stages]
StartEngine = Callable[..., GrpcEngine]
LENGTHS = (9, 1, 6, 14, 2)  # of prompts: on, under and over a block, and a single token
WANTED = (6, 9, 1, 4, 7)


def requests() -> list[NewRequest]:
    random = torch.Generator().manual_seed(5)
    return [
        new_request(handle, torch.randint(0, 97, (length,), generator=random).tolist(), wanted)
        for handle, (length, wanted) in enumerate(zip(LENGTHS, WANTED, strict=True), start=1)
    ]


@pytest.fixture(scope="module")
def whole_model(tiny_model: Path) -> StageModel:
    torch.set_num_threads(1)
    return load_stage(tiny_model, packs=False)


async def local_tokens(
    models: list[StageModel], *, prefetch: int = 0, chunk: int | None = None
) -> dict[int, list[int]]:
    engine = LocalEngine(models, slots=256, block_tokens=BLOCK_TOKENS, prefetch=prefetch)
    await engine.form(Epoch(1, "test"))
    tokens = await generate(
        engine, Epoch(1, "test"), requests(), WANTED, stages=len(models), prefetch=prefetch, chunk=chunk
    )
    await engine.close()
    return tokens


@pytest.mark.parametrize(
    ("stages", "tensor"),
    [
        (2, 1),
        (1, 2),
        pytest.param(1, 1, marks=pytest.mark.prove),
        pytest.param(3, 1, marks=pytest.mark.prove),
        pytest.param(2, 2, marks=pytest.mark.prove),
    ],
)
async def test_stages_and_ranks_give_the_tokens_of_one_process_with_and_without_prefetch(
    start_stages: StartStages, start_engine: StartEngine, whole_model: StageModel, stages: int, tensor: int
) -> None:
    expected = await local_tokens([whole_model])
    assert [len(expected[handle]) for handle in (1, 2, 3, 4, 5)] == list(WANTED)
    group = start_stages(stages, tensor)
    for prefetch, chunk in ((0, None), (1, None), (1, 4)):
        engine = start_engine(group.addresses, prefetch=prefetch)
        epoch = group.next_epoch()
        shape = await engine.form(epoch)
        assert (shape.stages, shape.slots, shape.max_model_len) == (stages, 1024, 256)
        tokens = await generate(engine, epoch, requests(), WANTED, stages=stages, prefetch=prefetch, chunk=chunk)
        assert tokens == expected, f"prefetch {prefetch}, chunk {chunk}"


async def test_the_in_process_engine_gives_the_same_tokens_for_any_stages_and_prefetch(
    whole_model: StageModel, tiny_model: Path
) -> None:
    expected = await local_tokens([whole_model])
    three = [load_stage(tiny_model, Shard(stage=stage, stages=3), packs=False) for stage in range(3)]
    assert await local_tokens(three) == expected
    assert await local_tokens(three, prefetch=1, chunk=4) == expected


async def test_a_step_without_rows_frees_slots_and_returns_in_order(
    start_stages: StartStages, start_engine: StartEngine
) -> None:
    group = start_stages(2, 1)
    engine = start_engine(group.addresses)
    epoch = group.next_epoch()
    await engine.form(epoch)
    new = new_request(1, (3, 4, 5), 2)
    row = Row(handle=1, start=0, count=3, sample=True)
    await engine.submit(Step(epoch=epoch, number=1, new=(new,), rows=(row,)))
    await engine.submit(Step(epoch=epoch, number=2, freed=(1,)))
    results = [await next_result(engine), await next_result(engine)]
    assert [(result.number, len(result.sampled)) for result in results] == [(1, 1), (2, 0)]
    await until(lambda: _slots_in_use_are(group, 0))


async def test_a_step_that_no_stage_can_run_ends_the_epoch_and_the_next_one_runs(
    start_stages: StartStages, start_engine: StartEngine
) -> None:
    group = start_stages(2, 1)
    engine = start_engine(group.addresses)
    epoch = group.next_epoch()
    await engine.form(epoch)
    await engine.submit(Step(epoch=epoch, number=1, rows=(Row(handle=9, start=0, count=1, sample=True),)))
    error = await error_of(next_result(engine))
    # Said by the stage itself, or first by its neighbour, whose link broke by that.
    assert "request 9 is not on this stage" in str(error) or "closed by peer" in str(error)
    epoch = group.next_epoch()
    await engine.form(epoch)
    assert await generate(engine, epoch, requests()[:1], WANTED[:1], stages=2)


async def _slots_in_use_are(group: Stages, slots: int) -> bool:
    async with grpc_links.open_channel(group.addresses[-1]) as channel:
        status = await grpc_links.stage_stub(channel).Status(pb.StatusRequest(), timeout=5)
    return bool(status.slots_in_use == slots)


# The tests below kill processes of the shared stages. They come last, and each leaves the group whole.


async def test_a_killed_rank_is_an_engine_error_at_once_and_its_peers_live_on(
    start_stages: StartStages, start_engine: StartEngine
) -> None:
    group = start_stages(2, 1)
    engine = start_engine(group.addresses)
    await engine.form(group.next_epoch())
    [survivor] = group.rank_pids(1)
    [victim] = group.rank_pids(0)
    os.kill(victim, signal.SIGKILL)
    error = await error_of(next_result(engine))
    assert "sent nothing" not in str(error), "its death is noticed, not its silence"
    assert "stage 0" in str(error)
    epoch = group.next_epoch()
    await engine.form(epoch)  # waits until the new rank has loaded
    assert group.rank_pids(1) == [survivor]
    assert await generate(engine, epoch, requests()[:2], WANTED[:2], stages=2)


async def test_the_neighbour_of_a_killed_rank_logs_one_line(
    tiny_model: Path, tmp_path: Path, start_engine: StartEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--log-level", "info", "--log-format", "json")
    group = Stages(tiny_model, stages=2, tensor=1, log_folder=tmp_path, flags=flags)
    engine = start_engine(group.addresses)
    epoch = group.next_epoch()
    await engine.form(epoch)
    [victim] = group.rank_pids(0)
    os.kill(victim, signal.SIGSTOP)  # its neighbour is to wait for it
    new = new_request(1, (3,), 1)
    await engine.submit(Step(epoch=epoch, number=1, new=(new,), rows=(Row(handle=1, start=0, count=1, sample=True),)))
    await until(lambda: _is_waiting(group.addresses[1]))
    os.kill(victim, signal.SIGKILL)
    await error_of(next_result(engine))
    await asyncio.to_thread(group.stop)
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    [said] = [line for line in logged if line["service"] == "worker-1-rank-0" and line["level"] != "info"]
    assert (said["level"], said["message"]) == ("warning", "another rank is gone, the group forms again")
    assert said["doing"] == "step 1: waits for activations"
    assert "\n" not in said["reason"]


async def _is_waiting(address: str) -> bool:
    """Return whether the only rank of the stage at an address waits for the rank before it, within its first step."""
    async with grpc_links.open_channel(address) as channel:
        status = await grpc_links.stage_stub(channel).Status(pb.StatusRequest(), timeout=10)
    return "step 1: waits for activations" in status.detail


async def test_a_frozen_rank_ends_the_epoch_before_any_bound_of_a_step_and_is_replaced(
    start_stages: StartStages, start_engine: StartEngine
) -> None:
    group = start_stages(2, 1)
    engine = start_engine(group.addresses)
    epoch = group.next_epoch()
    await engine.form(epoch)
    [frozen] = group.rank_pids(0)
    os.kill(frozen, signal.SIGSTOP)
    new = new_request(1, (3,), 1)
    await engine.submit(Step(epoch=epoch, number=1, new=(new,), rows=(Row(handle=1, start=0, count=1, sample=True),)))
    error = await error_of(next_result(engine), limit_s=30)
    assert re.search(r"stage 0: (.* )?rank 0 (sent nothing|stood still) for [5-9]", str(error))
    epoch = group.next_epoch()
    await engine.form(epoch)
    assert frozen not in group.rank_pids(0)
    assert await generate(engine, epoch, requests()[:1], WANTED[:1], stages=2)


async def test_ranks_die_with_their_controller(tiny_model: Path, tmp_path: Path) -> None:
    group = Stages(tiny_model, stages=1, tensor=1, log_folder=tmp_path)
    await until(lambda: _has_ranks(group))
    [rank] = group.rank_pids(0)
    group.processes[0].kill()
    group.processes[0].wait()
    await until(lambda: _is_gone(rank))


async def test_a_second_signal_ends_a_stage_at_once_and_its_ranks_with_it(tiny_model: Path, tmp_path: Path) -> None:
    group = Stages(tiny_model, stages=1, tensor=1, log_folder=tmp_path)
    await until(lambda: _has_ranks(group))
    [rank] = group.rank_pids(0)
    await until(lambda: _is_leashed(rank))
    os.kill(rank, signal.SIGSTOP)  # the first signal alone waits for it, and then ends well
    await until(lambda: _has_ended_when_signalled_again(group))
    assert group.processes[0].returncode == 1
    await until(lambda: _is_gone(rank))


async def _is_leashed(pid: int) -> bool:
    """Return whether the rank's own command runs. Its leash and a copy of its parent come before it."""
    words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    return b"orca.worker.rank.rank" in words and not any(word.endswith(b"parent_death.py") for word in words)


async def _has_ended_when_signalled_again(group: Stages) -> bool:
    group.processes[0].send_signal(signal.SIGTERM)
    return group.processes[0].poll() is not None


async def test_a_stage_leaves_cleanly_on_sigterm(tiny_model: Path, tmp_path: Path) -> None:
    group = Stages(tiny_model, stages=1, tensor=1, log_folder=tmp_path)
    await until(lambda: _has_ranks(group))
    [rank] = group.rank_pids(0)
    assert await asyncio.to_thread(group.stop) == [0]
    await until(lambda: _is_gone(rank))


async def _has_ranks(group: Stages) -> bool:
    return len(group.rank_pids(0)) == group.tensor


async def _is_gone(pid: int) -> bool:
    """Return whether a process has ended; it may still wait for its new parent to notice."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
