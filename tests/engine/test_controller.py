"""worker.controller over real gRPC, with scripted ranks: joins, steps, results, and ranks that fail."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import grpc
import pytest
from engine_builders import new_request, until
from grpc import aio

from orca.core import engine_pb2 as pb
from orca.core import links, wire
from orca.core.errors import EngineError, ModelError, OrcaError
from orca.core.step import Epoch, Row, Step
from orca.worker.controller import Controller

Start = Callable[..., Awaitable[list[Controller]]]
Phase = pb.StatusReply


class Client:
    """What master and neighbour stages call."""

    def __init__(self, controllers: list[Controller]) -> None:
        self._addresses = [controller.address for controller in controllers]
        self._channels = [links.open_channel(address) for address in self._addresses]
        self.stubs = [links.stage_stub(channel) for channel in self._channels]

    async def status(self, stage: int = 0) -> pb.StatusReply:
        return await self.stubs[stage].Status(pb.StatusRequest(), timeout=5)

    async def loaded(self) -> None:
        for stage in range(len(self.stubs)):
            await until(lambda stage=stage: self._is_loaded(stage))

    async def join(self, number: int, *, timeout_ms: int = 20_000) -> None:
        epoch = pb.Epoch(number=number, holder="test")
        request = pb.JoinRequest(epoch=epoch, stages=self._addresses, timeout_ms=timeout_ms)
        await asyncio.gather(*(stub.Join(request, timeout=30) for stub in self.stubs))

    async def run(self, number: int, *, epoch: int = 1, deadline_s: float = 10) -> int:
        step = Step(
            epoch=Epoch(epoch, "test"),
            number=number,
            new=(new_request(number, (1,), 2),),
            rows=(Row(handle=number, start=0, count=1, sample=True),),
        )
        return (await self.stubs[0].Run(wire.step_to_wire(step), timeout=deadline_s)).verdict

    def results(self, *, epoch: int = 1, after: int = 0, stage: int = -1) -> aio.UnaryStreamCall:
        request = pb.ResultsRequest(epoch=pb.Epoch(number=epoch, holder="test"), after=after)
        return self.stubs[stage].Results(request, timeout=30)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _is_loaded(self, stage: int) -> bool:
        return (await self.status(stage)).phase != Phase.LOADING


@pytest.fixture
async def joined(start_controllers: Start) -> Callable[..., Awaitable[Client]]:
    async def start(*scripts: str, **settings: object) -> Client:
        client = Client(await start_controllers(*scripts, **settings))
        await client.loaded()
        await client.join(1)
        return client

    return start


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 30)
    return caught.value.code()


async def numbers_of(stream: aio.UnaryStreamCall, count: int) -> list[int]:
    numbers = [(await asyncio.wait_for(stream.read(), 20)).number for _ in range(count)]
    stream.cancel()
    return numbers


async def test_a_stage_tells_what_it_holds_and_runs_nothing_before_its_first_join(start_controllers: Start) -> None:
    client = Client(await start_controllers("plain", tensor=2))
    await client.loaded()
    status = await client.status()
    assert (status.phase, status.epoch.number, status.weight_bytes, status.slots_possible) == (Phase.IDLE, 0, 20, 40)
    assert await client.run(1, epoch=0) == pb.RunReply.WRONG_EPOCH
    await client.close()


async def test_a_step_passes_through_all_stages_and_comes_back_from_the_last(joined: Start) -> None:
    client = await joined("plain", "plain", "plain")
    stream = client.results()
    assert [await client.run(number) for number in (1, 2, 3)] == [pb.RunReply.ACCEPTED] * 3
    assert await numbers_of(stream, 3) == [1, 2, 3]
    assert [(await client.status(stage)).last_step for stage in range(3)] == [3, 3, 3]
    await client.close()


async def test_overtaking_and_repeated_calls_give_each_step_once_and_in_order(joined: Start) -> None:
    client = await joined("plain", "plain")
    verdicts = await asyncio.gather(*(client.run(number) for number in (3, 2, 3, 1, 2)))
    assert sorted(verdicts) == [pb.RunReply.ACCEPTED] * 3 + [pb.RunReply.ALREADY_DONE] * 2
    assert await numbers_of(client.results(), 3) == [1, 2, 3]
    await client.close()


async def test_a_step_behind_a_gap_is_refused_at_its_deadline(joined: Start) -> None:
    client = await joined("plain")
    assert await code_of(client.run(2, deadline_s=0.2)) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await client.run(1) == pb.RunReply.ACCEPTED
    await client.close()


async def test_steps_of_an_epoch_that_was_left_are_refused(joined: Start) -> None:
    client = await joined("plain")
    await client.join(2)
    assert await client.run(1, epoch=1) == pb.RunReply.WRONG_EPOCH
    assert await client.run(1, epoch=2) == pb.RunReply.ACCEPTED
    await client.close()


@pytest.mark.parametrize("number", [1, 0])
async def test_a_stage_joins_only_epochs_above_its_last(joined: Start, number: int) -> None:
    client = await joined("plain")
    assert await code_of(client.join(number)) is grpc.StatusCode.FAILED_PRECONDITION
    assert (await client.status()).phase == Phase.JOINED
    await client.close()


async def test_results_are_read_again_from_where_a_broken_stream_stopped(joined: Start) -> None:
    client = await joined("plain")
    for number in (1, 2, 3):
        await client.run(number)
    assert await numbers_of(client.results(), 2) == [1, 2]
    assert await numbers_of(client.results(after=1), 2) == [2, 3]
    await client.close()


async def test_readers_of_an_old_epoch_are_told_that_a_new_one_begins(joined: Start) -> None:
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
    client = Client([controller])
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
    client = Client([controller])
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
    client = Client([controller])
    await client.loaded()

    async def full(*_: object, **__: object) -> None:
        raise BlockingIOError("no process can be made")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    os.kill(controller.rank_pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="no process can be made"):
        await asyncio.wait_for(controller.run(asyncio.Event()), 10)
    await client.close()


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


async def test_a_stage_whose_next_stage_is_gone_ends_the_epoch(start_controllers: Start) -> None:
    controllers = await start_controllers("plain", "plain")
    client = Client(controllers)
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
