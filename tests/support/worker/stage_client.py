"""The calls that a master and the neighbour stages make to controllers, for tests."""

import asyncio
from collections.abc import Awaitable, Sequence

import grpc
import pytest
from grpc import aio

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.step import Epoch, Row, Step
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links, wire
from orca.worker.controller.controller import Controller
from support.worker.engine_builders import until

Phase = pb.StatusReply


class StageClient:
    """A client of stages that makes the calls of master and neighbour stages."""

    def __init__(self, controllers: list[Controller]) -> None:
        self._addresses = [controller.address for controller in controllers]
        self._channels = [grpc_links.open_channel(address) for address in self._addresses]
        self.stubs = [grpc_links.stage_stub(channel) for channel in self._channels]

    async def status(self, stage: int = 0) -> pb.StatusReply:
        return await self.stubs[stage].Status(pb.StatusRequest(), timeout=5)

    async def loaded(self) -> None:
        for stage in range(len(self.stubs)):
            await until(lambda stage=stage: self._is_loaded(stage))

    async def join(self, number: int, *, timeout_ms: int = 20_000, processes: Sequence[str] = ()) -> None:
        epoch = pb.Epoch(number=number, holder="test")
        request = pb.JoinRequest(
            epoch=epoch,
            stages=self._addresses,
            timeout_ms=timeout_ms,
            processes=processes,
            contract=wire.CONTRACT,
        )
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
        # A controller that has just begun to listen may be slow to take its first connection.
        reply = await self.stubs[stage].Status(pb.StatusRequest(), timeout=30, wait_for_ready=True)
        return reply.phase != Phase.LOADING


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    """Return the gRPC status with which the call fails."""
    with pytest.raises(aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 30)
    return caught.value.code()
