"""worker.controller.controller and ranks that freeze, hang or take long: noticed within a bound, and never by a step's
age."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest

from orca.core.domain.errors import EngineError
from orca.core.transport import engine_pb2 as pb
from orca.worker.controller.controller import Controller
from support.worker.engine_builders import until
from support.worker.stage_client import Phase, StageClient, code_of

Start = Callable[..., Awaitable[list[Controller]]]
# A scripted rank beats twenty times a second: two seconds of silence are a freeze even where the machine is busy.
SILENT_S = 2.0
NOTICED_S = 60.0


@pytest.fixture
async def start(start_controllers: Start) -> Callable[..., Awaitable[tuple[Controller, StageClient]]]:
    async def start_one(script: str, **settings: object) -> tuple[Controller, StageClient]:
        [controller] = await start_controllers(script, **({"rank_silent_s": SILENT_S} | settings))
        return controller, StageClient([controller])

    return start_one


StartOne = Callable[..., Awaitable[tuple[Controller, StageClient]]]


async def test_a_frozen_rank_ends_the_epoch_within_the_bound_and_is_started_again(start: StartOne) -> None:
    controller, client = await start("plain")
    await client.loaded()
    await client.join(1)
    stream = client.results()
    [frozen] = controller.rank_pids
    assert frozen is not None
    started = time.monotonic()
    os.kill(frozen, signal.SIGSTOP)
    assert await code_of(stream.read()) is grpc.StatusCode.ABORTED
    assert time.monotonic() - started < NOTICED_S
    # Its mark may have moved for the last time a beat before its last word: then it is that which is overdue first.
    detail = (await client.status()).detail
    assert "sent nothing for" in detail or "stood still for" in detail
    await client.loaded()
    assert controller.rank_pids != [frozen]
    await client.join(2)
    assert await client.run(1, epoch=2) == pb.RunReply.ACCEPTED
    await client.close()


async def test_a_rank_without_progress_is_killed_even_if_it_sends_heartbeats(start: StartOne) -> None:
    controller, client = await start("hangs")
    await client.loaded()
    await client.join(1)
    hung = controller.rank_pids
    stream = client.results()
    await client.run(1)
    assert await code_of(stream.read()) is grpc.StatusCode.ABORTED
    assert "rank 0 stood still for" in (await client.status()).detail
    await client.loaded()
    assert controller.rank_pids != hung
    await client.close()


async def test_a_step_longer_than_the_bound_is_no_hang_while_it_makes_progress(start: StartOne) -> None:
    controller, client = await start("long")
    await client.loaded()
    await client.join(1)
    ranks = controller.rank_pids
    stream = client.results()
    started = time.monotonic()
    await client.run(1)
    # From here on it is at work, as its master would see it; how long it was idle before counts for nothing.
    await until(lambda: _is_at_work(client))
    result = asyncio.ensure_future(stream.read())
    while not result.done():
        assert (await client.status()).still_ms < 1000 * SILENT_S
        await asyncio.sleep(0.05)
    assert result.result().number == 1
    assert time.monotonic() - started > 2 * SILENT_S  # it had its chance to be taken for a hang
    assert controller.rank_pids == ranks
    await client.close()


async def _is_at_work(client: StageClient) -> bool:
    return (await client.status()).still_ms == 0


async def test_a_stage_whose_ranks_all_wait_reports_for_how_long(start: StartOne) -> None:
    controller, client = await start("mute")
    await client.loaded()
    await client.join(1)
    ranks = controller.rank_pids
    await client.run(1)
    await until(lambda: _still_ms_is_over(client, int(1500 * SILENT_S)))
    assert (await client.status()).phase == Phase.JOINED
    assert controller.rank_pids == ranks
    await client.close()


async def _still_ms_is_over(client: StageClient, least: int) -> bool:
    return (await client.status()).still_ms > least


async def test_loading_may_take_longer_than_its_bound_while_it_makes_progress(start: StartOne) -> None:
    controller, client = await start("loads", loading_silent_s=6.0)
    ranks = controller.rank_pids
    await client.loaded()
    assert controller.rank_pids == ranks
    await client.close()


async def test_a_rank_that_is_frozen_while_it_loads_is_started_again(start: StartOne) -> None:
    controller, client = await start("plain", loading_silent_s=6.0)
    [frozen] = controller.rank_pids
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    await until(lambda: _has_another_rank(controller, frozen))
    await client.loaded()
    await client.close()


async def _has_another_rank(controller: Controller, old: int) -> bool:
    return len(controller.rank_pids) == 1 and controller.rank_pids != [old]


async def test_a_rank_whose_loading_makes_no_progress_is_tried_three_times_with_growing_pauses(
    start: StartOne, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "orca.worker.controller.stage_ranks")
    controller, client = await start("freezes", loading_silent_s=1.0)
    with pytest.raises(EngineError, match=r"3 times in a row .* rank 0 loads, and read nothing for"):
        await asyncio.wait_for(controller.run(asyncio.Event()), 60)
    killed = [record.created for record in caplog.records if record.message == "a rank is killed"]
    assert len(killed) == 3
    assert killed[2] - killed[1] > 1.5  # its bound, less the grain of the watch, and the pause of a second
    assert (await client.status()).phase == Phase.LOADING
    await client.close()
