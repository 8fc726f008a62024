"""worker.controller.stage_epoch: what ends an epoch on a stage, and what its end leaves alone."""

import asyncio
from typing import Any

import pytest

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.worker.controller.failure_cause import FailureCause
from orca.worker.controller.stage_epoch import StageEpoch

EPOCH = Epoch(3, "scheduler-a")


class NextStage:
    """A channel to a stage whose answer, or failure, is the test's."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[pb.RunReply] = asyncio.get_running_loop().create_future()
        self.is_closed = False

    def get_state(self, try_to_connect: bool) -> None: ...

    def unary_unary(self, *_: object, **__: object) -> Any:
        return lambda *_, **__: self.answer

    unary_stream = unary_unary

    async def close(self) -> None:
        self.is_closed = True


def joined() -> tuple[StageEpoch, NextStage]:
    epoch, following = StageEpoch(EPOCH), NextStage()
    epoch.link(following)  # type: ignore[arg-type]
    epoch.open()
    return epoch, following


async def failure(epoch: StageEpoch) -> str:
    """Return the error that a reader of the epoch's results gets."""
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(anext(epoch.results.read(0)), 30)
    return str(caught.value)


async def test_a_step_that_the_next_stage_refuses_ends_the_epoch_as_a_broken_link() -> None:
    epoch, following = joined()
    epoch.forward(pb.StepMessage(number=1, epoch=pb.Epoch(number=3)))
    following.answer.set_result(pb.RunReply(verdict=pb.RunReply.WRONG_EPOCH, epoch=pb.Epoch(number=4)))
    assert await failure(epoch) == "the next stage is in epoch 4, not 3"
    assert epoch.cause is FailureCause.LINK


async def test_an_unexpected_error_while_passing_a_step_on_ends_the_epoch(caplog: pytest.LogCaptureFixture) -> None:
    epoch, following = joined()
    epoch.forward(pb.StepMessage(number=1))
    following.answer.set_exception(ValueError("no message"))
    assert await failure(epoch) == "a step was not forwarded: ValueError: no message"
    assert "forwarding a step failed" in caplog.messages


async def test_an_ended_epoch_waits_for_no_step_in_flight() -> None:
    epoch, following = joined()
    epoch.forward(pb.StepMessage(number=1))
    await asyncio.sleep(0)
    epoch.end("a rank died", FailureCause.OUTSIDE)
    await asyncio.sleep(0)
    assert following.answer.cancelled()
    assert (epoch.failure, epoch.cause, epoch.order.is_open) == ("a rank died", FailureCause.OUTSIDE, False)
    await epoch.close()
    assert following.is_closed


async def test_an_epoch_that_breaks_while_it_forms_reports_the_error() -> None:
    epoch = StageEpoch(EPOCH)
    epoch.require_alive()
    epoch.end("epoch 4 begins", FailureCause.OUTSIDE)
    with pytest.raises(EngineError, match="epoch 4 begins"):
        epoch.require_alive()
