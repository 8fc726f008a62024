"""A stage tells why its rank runs no more steps."""

import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from orca.core.transport import engine_pb2 as pb
from orca.worker.controller.controller import Controller
from support.worker.engine_builders import until
from support.worker.stage_client import StageClient

Start = Callable[..., Awaitable[list[Controller]]]


async def cause_told(client: StageClient) -> int:
    """Return the cause that the stage reports after its epoch has failed."""

    async def is_told() -> bool:
        return bool((await client.status()).cause)

    await until(is_told)
    return (await client.status()).cause


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGSEGV, pb.StatusReply.INSIDE),
        (signal.SIGKILL, pb.StatusReply.OUTSIDE),
        (signal.SIGTERM, pb.StatusReply.OUTSIDE),
    ],
    ids=["SIGSEGV", "SIGKILL", "SIGTERM"],
)
async def test_a_stage_reports_how_its_rank_died(start_controllers: Start, number: int, cause: int) -> None:
    [controller] = await start_controllers("plain")
    client = StageClient([controller])
    await client.loaded()
    await client.join(1)
    assert (await client.status()).cause == pb.StatusReply.CAUSE_UNSPECIFIED
    [pid] = controller.rank_pids
    assert pid is not None
    os.kill(pid, number)
    assert await cause_told(client) == cause
    await client.loaded()
    await client.join(2)
    assert (await client.status()).cause == pb.StatusReply.CAUSE_UNSPECIFIED
    await client.close()


@pytest.mark.parametrize(
    ("script", "cause"),
    [("broken", pb.StatusReply.LINK), ("raises", pb.StatusReply.INSIDE), ("hangs", pb.StatusReply.INSIDE)],
)
async def test_a_stage_reports_why_its_rank_runs_no_more_steps(
    start_controllers: Start, script: str, cause: int
) -> None:
    client = StageClient(await start_controllers(script, rank_silent_s=2.0))
    await client.loaded()
    await client.join(1)
    await client.run(1)
    assert await cause_told(client) == cause
    await client.close()
