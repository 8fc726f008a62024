"""Steps and results in frames on one machine: who is listened to, how a link ends, and when gRPC is taken instead."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from orca.core.domain.step import Epoch, Row, Step
from orca.core.transport import engine_pb2 as pb
from orca.core.transport.frame_stream import encode
from orca.core.transport.local_link import LinkFrameKind, LocalLink, open_link
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.worker.controller.controller import Controller
from orca.worker.controller.local_masters import LocalMasters
from orca.worker.controller.step_order import ResultLog, StepVerdict
from support.worker.engine_builders import error_of, next_result, until
from support.worker.stage_client import StageClient

EPOCH = pb.Epoch(number=1, holder="test")
StartControllers = Callable[..., Awaitable[list[Controller]]]
StartEngine = Callable[..., GrpcEngine]


def step(number: int, epoch: int = 1) -> pb.StepMessage:
    row = pb.Row(handle=1, start=number, count=1, sample=True)
    return pb.StepMessage(epoch=pb.Epoch(number=epoch, holder="test"), number=number, rows=[row])


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
async def stage(start_controllers: StartControllers, request: pytest.FixtureRequest) -> AsyncIterator[StageClient]:
    """A stage that has joined epoch 1. A single rank serves masters by itself; for several the controller does."""
    client = StageClient(await start_controllers("plain", tensor=request.param))
    await client.loaded()
    await client.join(1)
    yield client
    await client.close()


@pytest.fixture
async def open_to(stage: StageClient) -> AsyncIterator[Callable[..., Awaitable[LocalLink]]]:
    """Opens links to the stage as a master does; `key` instead of the stage's own."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_(epoch: pb.Epoch = EPOCH, key: str | None = None) -> LocalLink:
            address = (await stage.status()).local
            address.key = address.key if key is None else key
            link = open_link(address, epoch)
            assert link is not None
            stack.callback(link.close)
            return link

        yield open_


Open = Callable[..., Awaitable[LocalLink]]


def send(link: LocalLink, message: pb.StepMessage) -> None:
    link.write(encode(LinkFrameKind.STEP, message.SerializeToString()))


async def heard(link: LocalLink) -> list[tuple[LinkFrameKind, bytes]]:
    """All frames until the stage hangs up."""
    async with asyncio.timeout(20):
        return [frame async for frame in link.frames()]


async def test_a_step_is_answered_by_its_result(open_to: Open) -> None:
    await _assert_that_steps_are_answered(await open_to())


async def _assert_that_steps_are_answered(link: LocalLink) -> None:
    """The first two of the epoch: the tokens of a scripted rank say how many it has taken."""
    send(link, step(1))
    send(link, step(2))
    frames = link.frames()
    results = [pb.ResultMessage.FromString((await anext(frames))[1]) for _ in range(2)]
    assert [(result.number, result.sampled[0].token) for result in results] == [(1, 1), (2, 2)]


async def test_a_client_without_the_key_is_disconnected_and_none_of_its_steps_run(
    stage: StageClient, open_to: Open
) -> None:
    link = await open_to(key="guessed")
    send(link, step(1))
    assert await heard(link) == []
    assert (await stage.status()).last_step == 0
    await _assert_that_steps_are_answered(await open_to())


async def test_a_step_before_the_first_frame_is_not_taken(stage: StageClient, open_to: Open) -> None:
    reader, writer = await _connected((await stage.status()).local)
    writer.write(encode(LinkFrameKind.STEP, step(1).SerializeToString()))
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    assert (await stage.status()).last_step == 0
    await _assert_that_steps_are_answered(await open_to())


async def test_a_link_for_another_epoch_is_refused_with_the_current_one(open_to: Open) -> None:
    [(kind, payload)] = await heard(await open_to(pb.Epoch(number=7, holder="test")))
    assert (kind, payload) == (LinkFrameKind.OVER, b"this stage is in epoch 1, not 7")


async def test_a_step_of_another_epoch_ends_the_link(open_to: Open) -> None:
    link = await open_to()
    send(link, step(1, epoch=7))
    [(kind, payload)] = await heard(link)
    assert kind is LinkFrameKind.OVER
    assert b"did not take step 1: epoch 7 is over here" in payload


@pytest.mark.parametrize(
    "said",
    [
        encode(LinkFrameKind.STEP, b"\xff"),
        encode(LinkFrameKind.OVER, b""),
        bytes([0, 0, 0, 0, 99]),
        b"\xff\xff\xff\xff\x02",
    ],
    ids=["garbled step", "wrong direction", "unknown kind", "endless frame"],
)
async def test_a_client_that_sends_malformed_frames_is_disconnected_and_the_stage_continues(
    open_to: Open, said: bytes
) -> None:
    link = await open_to()
    link.write(said)
    assert await heard(link) == []
    other = await open_to()
    send(other, step(1))
    assert (await anext(other.frames()))[0] is LinkFrameKind.RESULT


async def test_a_link_to_a_dead_rank_gets_its_cause(start_controllers: StartControllers) -> None:
    [controller] = await start_controllers("plain")
    client = StageClient([controller])
    await client.loaded()
    await client.join(1)
    [pid] = controller.rank_pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: _has_failed(client))
    link = open_link((await client.status()).local, EPOCH)
    assert link is not None
    [(kind, reason)] = await heard(link)
    assert kind is LinkFrameKind.OVER
    assert b"rank 0 ended with status -9" in reason
    link.close()
    await client.close()


async def _has_failed(stage: StageClient) -> bool:
    return bool("ended with status" in (await stage.status()).detail)


async def test_a_newer_epoch_ends_the_links_of_the_one_before(stage: StageClient, open_to: Open) -> None:
    link = await open_to()
    send(link, step(1))
    frames = link.frames()
    assert (await anext(frames))[0] is LinkFrameKind.RESULT
    await stage.join(2)
    assert await anext(frames) == (LinkFrameKind.OVER, b"epoch 2 begins")
    other = await open_to(pb.Epoch(number=2, holder="test"))
    send(other, step(1, epoch=2))
    assert (await anext(other.frames()))[0] is LinkFrameKind.RESULT


@pytest.mark.parametrize("stage", [2], indirect=True)
async def test_results_before_the_end_of_the_epoch_are_received_before_its_reason(
    stage: StageClient, open_to: Open
) -> None:
    link = await open_to()
    send(link, step(1))
    await until(lambda: _has_result(stage))
    await stage.join(2)
    (first, result), (last, reason) = await _two(link)
    assert (first, last) == (LinkFrameKind.RESULT, LinkFrameKind.OVER)
    assert pb.ResultMessage.FromString(result).number == 1
    assert reason == b"epoch 2 begins"


async def _has_result(stage: StageClient) -> bool:
    return (await anext(aiter(stage.results()))).number == 1


async def _two(link: LocalLink) -> list[tuple[LinkFrameKind, bytes]]:
    async with asyncio.timeout(20):
        frames = link.frames()
        return [await anext(frames), await anext(frames)]


def _counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the steps that come by gRPC."""
    calls: list[int] = []
    run = Controller.Run

    async def counted(self: Controller, request: pb.StepMessage, context: object) -> pb.RunReply:
        calls.append(request.number)
        return await run(self, request, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Controller, "Run", counted)
    return calls


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_masters_steps_take_the_configured_transport(
    start_controllers: StartControllers, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    calls = _counted_calls(monkeypatch)
    [controller] = await start_controllers("plain")
    engine = start_engine([controller.address], uses_local_links=is_local)
    await engine.form(Epoch(1, "test"))
    await engine.submit(_core_step())
    assert (await next_result(engine)).number == 1
    assert calls == ([] if is_local else [1])


async def test_a_stage_without_a_reachable_local_socket_gets_its_steps_by_grpc(
    start_controllers: StartControllers, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Controller.Status

    async def elsewhere(self: Controller, request: pb.StatusRequest, context: object) -> pb.StatusReply:
        reply = await status(self, request, context)  # type: ignore[arg-type]
        reply.local.name = "orca-in-another-network-namespace"
        return reply

    monkeypatch.setattr(Controller, "Status", elsewhere)
    calls = _counted_calls(monkeypatch)
    [controller] = await start_controllers("plain")
    engine = start_engine([controller.address])
    await engine.form(Epoch(1, "test"))
    await engine.submit(_core_step())
    assert (await next_result(engine)).number == 1
    assert calls == [1]


async def test_a_link_that_ends_without_a_reason_ends_the_epoch(
    start_controllers: StartControllers, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[LocalLink] = []

    async def hang_up(self: object, link: LocalLink) -> None:  # noqa: ARG001
        links.append(link)

    monkeypatch.setattr("orca.worker.controller.local_masters.LocalMasters._attend", hang_up)
    [controller] = await start_controllers("plain")
    engine = start_engine([controller.address])
    await engine.form(Epoch(1, "test"))
    assert "stage 0: its local link ended" in str(await error_of(next_result(engine)))
    assert links


async def test_a_killed_rank_ends_the_epoch_with_its_controllers_reason(
    start_controllers: StartControllers, start_engine: StartEngine
) -> None:
    [controller] = await start_controllers("mute")
    engine = start_engine([controller.address])
    await engine.form(Epoch(1, "test"))
    await engine.submit(_core_step())
    [pid] = controller.rank_pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert "rank 0 ended with status -9" in str(await error_of(next_result(engine)))


def test_results_beyond_the_socket_buffer_are_received_before_the_end(run: Callable[..., Any]) -> None:
    async def session() -> list[LinkFrameKind]:
        results = ResultLog()
        masters = LocalMasters(_never, lambda _: results)
        link = open_link(masters.address, EPOCH)
        assert link is not None
        for number in range(1, 4):
            many = pb.Logprob(top_tokens=range(300_000))
            results.append(pb.ResultMessage(epoch=EPOCH, number=number, sampled=[pb.Sampled(logprob=many)]))
        results.end("a rank ended")
        kinds = [kind for kind, _ in await heard(link)]
        link.close()
        await masters.close()
        return kinds

    assert run(session()) == [LinkFrameKind.RESULT, LinkFrameKind.RESULT, LinkFrameKind.RESULT, LinkFrameKind.OVER]


def test_a_client_that_sends_nothing_or_too_much_before_the_key_is_disconnected(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca.worker.controller.local_masters._HELLO_S", 0.2)

    async def session() -> None:
        masters = LocalMasters(_never, lambda _: ResultLog())
        silent, silent_writer = await _connected(masters.address)
        loud, loud_writer = await _connected(masters.address)
        loud_writer.write(b"\0\0\1\0\1" + bytes(65536))
        for reader, writer in ((silent, silent_writer), (loud, loud_writer)):
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        await masters.close()

    run(session())


def test_links_without_a_key_are_limited_in_number(run: Callable[..., Any]) -> None:
    async def session() -> None:
        masters = LocalMasters(_never, lambda _: ResultLog())
        silent = [await _connected(masters.address) for _ in range(16)]
        reader, writer = await _connected(masters.address)
        assert await asyncio.wait_for(reader.read(), 2) == b""
        for _, each in (*silent, (reader, writer)):
            each.close()
        await masters.close()

    run(session())


async def _connected(address: pb.LocalAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as another user's process that has found the name."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(b"\0" + address.name.encode())
    return await asyncio.open_unix_connection(sock=connection)


async def _never(*_: object) -> StepVerdict:
    raise AssertionError("no step was sent")


def _core_step() -> Step:
    return Step(epoch=Epoch(1, "test"), number=1, rows=(Row(handle=1, start=1, count=1, sample=True, token=1),))
