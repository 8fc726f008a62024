"""worker.controller.controller over real gRPC, with scripted ranks: joins, steps, results, and ranks that fail."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from orca.core.domain.errors import EngineError, ModelError, OrcaError
from orca.core.transport import engine_pb2 as pb
from orca.worker.controller.controller import Controller
from support.worker.engine_builders import until
from support.worker.stage_client import Phase, StageClient, code_of

Start = Callable[..., Awaitable[list[Controller]]]


@pytest.fixture
async def joined(start_controllers: Start) -> Callable[..., Awaitable[StageClient]]:
    async def start(*scripts: str, **settings: object) -> StageClient:
        client = StageClient(await start_controllers(*scripts, **settings))
        await client.loaded()
        await client.join(1)
        return client

    return start


async def numbers_of(stream: aio.UnaryStreamCall, count: int) -> list[int]:
    numbers = [(await asyncio.wait_for(stream.read(), 20)).number for _ in range(count)]
    stream.cancel()
    return numbers


async def test_a_stage_reports_what_it_holds_and_runs_nothing_before_its_first_join(start_controllers: Start) -> None:
    client = StageClient(await start_controllers("plain", tensor=2))
    await client.loaded()
    status = await client.status()
    assert (status.phase, status.epoch.number, status.weight_bytes, status.slots_possible) == (Phase.IDLE, 0, 20, 40)
    assert await client.run(1, epoch=0) == pb.RunReply.WRONG_EPOCH
    await client.close()


async def test_a_scheduler_of_another_release_is_refused_with_a_sentence(start_controllers: Start) -> None:
    client = StageClient(await start_controllers("plain"))
    await client.loaded()
    request = pb.JoinRequest(epoch=pb.Epoch(number=1, holder="test"), contract=99)
    with pytest.raises(aio.AioRpcError, match="the scheduler is of another release: it has contract 99"):
        await client.stubs[0].Join(request, timeout=30)
    assert (await client.status()).epoch.number == 0
    await client.close()


async def test_a_step_passes_through_all_stages_and_comes_back_from_the_last(joined: Start) -> None:
    client = await joined("plain", "plain", "plain")
    stream = client.results()
    assert [await client.run(number) for number in (1, 2, 3)] == [pb.RunReply.ACCEPTED] * 3
    assert await numbers_of(stream, 3) == [1, 2, 3]
    assert [(await client.status(stage)).last_step for stage in range(3)] == [3, 3, 3]
    await client.close()


async def test_reordered_and_repeated_calls_give_each_step_once_and_in_order(joined: Start) -> None:
    client = await joined("plain", "plain")
    verdicts = await asyncio.gather(*(client.run(number) for number in (3, 2, 3, 1, 2)))
    assert sorted(verdicts) == [pb.RunReply.ACCEPTED] * 3 + [pb.RunReply.ALREADY_DONE] * 2
    assert await numbers_of(client.results(), 3) == [1, 2, 3]
    await client.close()


async def test_a_step_after_a_gap_is_refused_at_its_deadline(joined: Start) -> None:
    client = await joined("plain")
    assert await code_of(client.run(2, deadline_s=0.2)) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await client.run(1) == pb.RunReply.ACCEPTED
    await client.close()


async def test_steps_of_a_left_epoch_are_refused_with_the_current_one(
    joined: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client = await joined("plain")
    await client.join(2)
    assert await client.run(1, epoch=1) == pb.RunReply.WRONG_EPOCH
    assert await client.run(1, epoch=2) == pb.RunReply.ACCEPTED
    [told] = [vars(record) for record in caplog.records if record.message == "step refused"]
    assert (told["verdict"], told["epoch"], told["joined"], told["step"]) == ("wrong epoch", 1, 2, 1)
    await client.close()


@pytest.mark.parametrize("number", [1, 0])
async def test_a_stage_joins_only_epochs_above_its_last(joined: Start, number: int) -> None:
    client = await joined("plain")
    assert await code_of(client.join(number)) is grpc.StatusCode.FAILED_PRECONDITION
    assert (await client.status()).phase == Phase.JOINED
    await client.close()


async def test_a_join_meant_for_another_process_is_refused(joined: Start) -> None:
    client = await joined("plain", "plain")
    words = [(await client.status(stage)).process for stage in range(2)]
    assert words[0] != words[1]
    assert await code_of(client.join(2, processes=[words[0], "another"])) is grpc.StatusCode.FAILED_PRECONDITION
    status = await client.status(1)
    assert (status.phase, status.epoch.number) == (Phase.JOINED, 1)
    assert await code_of(client.join(3, processes=words[:1])) is grpc.StatusCode.FAILED_PRECONDITION
    await client.join(4, processes=words)
    await client.close()


async def test_results_are_read_again_from_where_a_broken_stream_stopped(joined: Start) -> None:
    client = await joined("plain")
    for number in (1, 2, 3):
        await client.run(number)
    assert await numbers_of(client.results(), 2) == [1, 2]
    assert await numbers_of(client.results(after=1), 2) == [2, 3]
    await client.close()


async def test_readers_of_an_old_epoch_fail_when_a_new_one_begins(joined: Start) -> None:
    client = await joined("plain", "plain")
    streams = [client.results(stage=stage) for stage in (0, 1)]
    await client.run(1)
    await streams[1].read()
    await client.join(2)
    assert [await code_of(stream.read()) for stream in streams] == [grpc.StatusCode.ABORTED] * 2
    await client.close()


async def test_a_killed_rank_ends_the_epoch_at_once_and_is_started_again(
    start_controllers: Start,
) -> None:
    [controller] = await start_controllers("plain")
    client = StageClient([controller])
    await client.loaded()
    await client.join(1)
    stream = client.results()
    os.kill(controller.rank_pids[0], signal.SIGKILL)
    assert await code_of(stream.read()) is grpc.StatusCode.ABORTED
    await client.loaded()
    await client.join(2)
    assert await client.run(1, epoch=2) == pb.RunReply.ACCEPTED
    await client.close()


async def test_ranks_that_die_together_are_all_started_again_in_their_order(start_controllers: Start) -> None:
    [controller] = await start_controllers("plain", tensor=3)
    client = StageClient([controller])
    await client.loaded()
    dead = controller.rank_pids
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: _are_new(controller, dead))
    await client.loaded()
    await client.join(1)
    assert (await client.status()).phase == Phase.JOINED
    await client.close()


async def _are_new(controller: Controller, dead: list[int | None]) -> bool:
    pids = controller.rank_pids
    return len(pids) == len(dead) and not set(pids) & set(dead)


async def test_a_stage_that_cannot_start_a_rank_again_ends_with_the_reason(
    start_controllers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    [controller] = await start_controllers("plain")
    client = StageClient([controller])
    await client.loaded()

    async def full(*_: object, **__: object) -> None:
        raise BlockingIOError("no process can be made")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    os.kill(controller.rank_pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="no process can be made"):
        await asyncio.wait_for(controller.run(asyncio.Event()), 30)
    await client.close()


async def test_a_stage_that_cannot_replace_a_rank_after_an_unexpected_error_ends_with_the_reason(
    start_controllers: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [controller] = await start_controllers("plain")
    client = StageClient([controller])
    await client.loaded()

    async def fails(*_: object, **__: object) -> None:
        raise ValueError("embedded null byte")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)
    os.kill(controller.rank_pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="the controller failed: ValueError: embedded null byte"):
        await asyncio.wait_for(controller.run(asyncio.Event()), 30)
    assert "a task of the controller failed" in caplog.messages
    await client.close()


async def test_a_stage_that_can_no_longer_watch_its_ranks_ends_its_epoch_and_itself(start_controllers: Start) -> None:
    # A bound that nothing can be compared with, in the place of a mistake in the watch.
    [controller] = await start_controllers("plain", rank_silent_s=None)
    client = StageClient([controller])
    with pytest.raises(EngineError, match="the controller failed: TypeError"):
        await asyncio.wait_for(controller.run(asyncio.Event()), 30)
    assert "the controller failed" in (await client.status()).detail
    await client.close()


async def test_restarted_ranks_that_die_at_once_are_started_again(
    start_controllers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With NCCL each epoch has new processes. The first one dies while the second one is being made.
    [controller] = await start_controllers("plain", tensor=2, device="cuda")
    client = StageClient([controller])
    await client.loaded()
    await client.join(1)
    make = asyncio.create_subprocess_exec
    made: list[asyncio.subprocess.Process] = []

    async def kill_the_one_before(*args: str, **options: Any) -> asyncio.subprocess.Process:
        if len(made) == 1:
            made[0].kill()
            await made[0].wait()
            await asyncio.sleep(0.3)  # its controller hears of it
        made.append(await make(*args, **options))
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", kill_the_one_before)
    assert await code_of(client.join(2)) is grpc.StatusCode.ABORTED
    await client.loaded()
    assert len(made) == 3
    await client.join(3)
    await client.close()


async def test_an_outdated_join_kills_no_rank_of_the_newer_epoch(joined: Start) -> None:
    client = await joined("slow")
    # A rank that takes 2 s to leave is too slow for this one, and fast enough for the next.
    overtaken = asyncio.ensure_future(client.join(2, timeout_ms=3_000))
    await until(lambda: _knows_epoch(client, 2))
    await client.join(3, timeout_ms=60_000)
    assert await code_of(overtaken) is grpc.StatusCode.ABORTED
    assert await client.run(1, epoch=3) == pb.RunReply.ACCEPTED
    await client.close()


async def _knows_epoch(client: StageClient, number: int) -> bool:
    return (await client.status()).epoch.number == number


async def test_a_rank_that_cannot_leave_its_group_is_killed_and_the_next_join_succeeds(joined: Start) -> None:
    client = await joined("stuck")
    assert await code_of(client.join(2, timeout_ms=1000)) is grpc.StatusCode.ABORTED
    await client.loaded()
    await client.join(3)
    assert (await client.status()).phase == Phase.JOINED
    await client.close()


async def test_a_rank_whose_link_broke_fails_the_stage_but_keeps_its_process(joined: Start) -> None:
    client = await joined("broken")
    process = (await client.status()).process
    stream = client.results()
    await client.run(1)
    await stream.read()
    assert await code_of(stream.read()) is grpc.StatusCode.ABORTED
    status = await client.status()
    assert (status.phase, status.process) == (Phase.FAILED, process)
    assert "the link tore" in status.detail
    await client.join(2)
    await client.close()


async def test_a_rank_that_sends_malformed_frames_is_killed_and_started_again(
    joined: Start, caplog: pytest.LogCaptureFixture
) -> None:
    client = await joined("garbles")
    stream = client.results()
    await client.run(1)
    with pytest.raises(aio.AioRpcError, match="rank 0 sent a frame that could not be handled: DecodeError"):
        await asyncio.wait_for(stream.read(), 20)
    assert "a frame of a rank could not be handled" in caplog.messages
    await client.loaded()
    await client.join(2)
    await client.close()


async def test_a_stage_whose_next_stage_is_gone_ends_the_epoch(start_controllers: Start) -> None:
    controllers = await start_controllers("plain", "plain")
    client = StageClient(controllers)
    await client.loaded()
    await client.join(1)
    stream = client.results(stage=0)
    await controllers[1].close()
    await client.run(1)
    assert await code_of(stream.read()) is grpc.StatusCode.ABORTED
    await client.close()


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [("refuse", ModelError, "config.json says so"), ("dies", EngineError, "3 times in a row")],
)
async def test_a_stage_that_can_never_serve_ends_with_the_reason(
    start_controllers: Start, script: str, kind: type[OrcaError], reason: str
) -> None:
    [controller] = await start_controllers(script)
    with pytest.raises(kind, match=reason):
        await asyncio.wait_for(controller.run(asyncio.Event()), 30)
