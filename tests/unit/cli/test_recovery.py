"""`orca up` reports that it serves again. The only process is a stage whose epoch the test sets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import grpc
import pytest

from orca.cli.up.recovery import Recovery
from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Child
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import engine_pb2_grpc as pb_grpc


class System(pb_grpc.StageServicer):
    """A stage, and as a child the process that it would be."""

    pid = 7

    def __init__(self) -> None:
        self.epoch = 1
        self.asked = asyncio.Event()
        self.told: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, log: Path) -> None:
        self.server = grpc.aio.server()
        pb_grpc.add_StageServicer_to_server(self, self.server)
        address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.spec = ProcessSpec(
            role=Role.WORKER, name="worker-0.0", command=(), address=address, log=log, scheduler="scheduler-0"
        )
        self.recovery = Recovery([cast(Child, self)], self.told.put_nowait)
        self.running = asyncio.create_task(self.recovery.run())

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:  # noqa: ARG002, N802
        self.asked.set()
        return pb.StatusReply(phase=pb.StatusReply.JOINED, epoch=pb.Epoch(number=self.epoch))

    async def sentence(self, limit_s: float = 60.0) -> str:
        return await asyncio.wait_for(self.told.get(), limit_s)


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = System()
    await system.serve(tmp_path / "log")
    yield system
    system.running.cancel()
    await system.server.stop(None)


async def test_a_group_that_broke_is_ready_again_in_its_next_epoch(system: System) -> None:
    system.recovery.record_break("scheduler-0", 1)
    with pytest.raises(TimeoutError):
        await system.sentence(0.5)
    system.epoch = 2
    assert (await system.sentence()).startswith("ready again after ")


async def test_a_restarted_part_is_reported_once_with_its_new_pid(system: System) -> None:
    for epoch, pid in ((1, 8), (2, 9)):
        system.recovery.record_death(system.spec)
        await system.asked.wait()
        system.epoch, system.pid = epoch + 1, pid
        assert (await system.sentence()).endswith(f" s, worker-0.0 is pid {pid}")
        system.asked.clear()
    system.recovery.record_break("scheduler-0", 3)
    await system.asked.wait()
    system.epoch = 4
    assert (await system.sentence()).endswith(" s")


async def test_a_break_noticed_after_the_next_epoch_has_formed_is_not_reported_again(system: System) -> None:
    system.recovery.record_death(system.spec)
    await system.asked.wait()
    system.epoch = 2
    assert (await system.sentence()).startswith("ready again after ")
    system.recovery.record_break("scheduler-0", 1)
    with pytest.raises(TimeoutError):
        await system.sentence(0.5)
