"""A stage without ranks behind a real gRPC server: it says and does what the test sets."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio

from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links, wire
from support import waiting


class FakeStage:
    """The only stage of a group; loaded, and in no epoch until it is told to join one."""

    def __init__(self, process: str = "first") -> None:
        self.status = pb.StatusReply(
            phase=pb.StatusReply.IDLE, stages=1, tensor=1, revision="r1", slots_possible=64, max_model_len=64
        )
        self.status.process, self.status.contract = process, wire.CONTRACT
        self.on_status: Callable[[], None] = lambda: None  # called before each answer
        self.joins: list[pb.JoinRequest] = []
        self.steps: list[int] = []
        self.refusals: list[grpc.StatusCode] = []  # what the next calls of Run end with
        self.reads: list[float] = []  # loop time at which each result stream was opened
        self.breaks_streams = False
        self.aborts_streams = False  # says that its epoch is over
        self.results: asyncio.Queue[pb.ResultMessage] = asyncio.Queue()
        self.address = ""

    # The methods of the service; grpc gives them their names.

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802, ARG002
        self.on_status()
        return self.status

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:  # noqa: N802, ARG002
        self.joins.append(request)
        self.status.phase = pb.StatusReply.JOINED
        self.status.epoch.CopyFrom(request.epoch)
        return pb.JoinReply(epoch=request.epoch)

    async def Run(self, request: pb.StepMessage, context: Any) -> pb.RunReply:  # noqa: N802
        if self.refusals:
            await context.abort(self.refusals.pop(0), "as the test wants it")
        if self.status.epoch != request.epoch:
            return pb.RunReply(verdict=pb.RunReply.WRONG_EPOCH, epoch=self.status.epoch)
        self.steps.append(request.number)
        return pb.RunReply(verdict=pb.RunReply.ACCEPTED, epoch=request.epoch)

    async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultMessage]:  # noqa: N802, ARG002
        self.reads.append(asyncio.get_running_loop().time())
        if self.breaks_streams:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link broke")
        if self.aborts_streams:
            await context.abort(grpc.StatusCode.ABORTED, "a rank ended")
        while True:
            yield await self.results.get()

    def answer(self, number: int) -> None:
        """Send the result of a step that draws nothing."""
        self.results.put_nowait(pb.ResultMessage(epoch=self.status.epoch, number=number))


async def serve(stage: FakeStage, address: str = "127.0.0.1:0") -> aio.Server:
    """Serve, by default on a free port of loopback; the caller stops the server."""
    server = grpc_links.new_server()
    grpc_links.serve_stage(server, stage)
    stage.address = f"127.0.0.1:{server.add_insecure_port(address)}"
    await server.start()
    return server


until = functools.partial(waiting.until, limit_s=30.0)
