"""core.transport.step_delivery: a step reaches a stage by a bad link once, and a stage that refuses it says so."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch, Step
from orca.core.transport import grpc_links, wire
from orca.core.transport.step_delivery import StepDelivery
from support.scheduler.fake_stage import FakeStage, serve

STEP = wire.step_to_wire(Step(epoch=Epoch(1, "test"), number=1))


@pytest.fixture
def stage() -> FakeStage:
    stage = FakeStage()
    stage.status.epoch.CopyFrom(STEP.epoch)
    return stage


@pytest.fixture
async def channel(stage: FakeStage) -> AsyncIterator[aio.Channel]:
    server = await serve(stage)
    async with grpc_links.open_channel(stage.address) as channel:
        yield channel
    await server.stop(grace=None)


async def test_a_call_lost_on_a_broken_link_is_repeated(stage: FakeStage, channel: aio.Channel) -> None:
    stage.refusals = [grpc.StatusCode.UNAVAILABLE] * 3
    await StepDelivery(grpc_links.stage_stub(channel), STEP).wait_until_taken()
    assert stage.steps == [1]
    assert stage.refusals == []


async def test_a_step_that_a_stage_refuses_is_sent_once(stage: FakeStage, channel: aio.Channel) -> None:
    stage.refusals = [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
    with pytest.raises(EngineError, match="did not take step 1: DEADLINE_EXCEEDED"):
        await StepDelivery(grpc_links.stage_stub(channel), STEP).wait_until_taken()
    assert len(stage.refusals) == 1


async def test_a_stage_in_another_epoch_reports_which_one(stage: FakeStage, channel: aio.Channel) -> None:
    stage.status.epoch.number = 7
    with pytest.raises(EngineError, match="is in epoch 7, not 1"):
        await StepDelivery(grpc_links.stage_stub(channel), STEP).wait_until_taken()
