"""scheduler.engines.grpc_engine against controllers with scripted ranks: forming, submitting, and every way to fail."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError, SettingError
from orca.core.domain.step import Epoch, Row, Step
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.scheduler.engines.stage_links import StageLoading
from orca.worker.controller.controller import Controller
from support.worker.engine_builders import error_of, next_result

StartControllers = Callable[..., Awaitable[list[Controller]]]
StartEngine = Callable[..., GrpcEngine]


def step(number: int, epoch: int = 1) -> Step:
    row = Row(handle=1, start=number, count=1, sample=True, token=1)
    return Step(epoch=Epoch(epoch, "test"), number=number, rows=(row,))


@pytest.fixture(params=[True, False], ids=["local", "grpc"])
def formed(
    request: pytest.FixtureRequest, start_controllers: StartControllers, start_engine: StartEngine
) -> Callable[..., Awaitable[GrpcEngine]]:
    async def form(*scripts: str, **choices: object) -> GrpcEngine:
        controllers = await start_controllers(*scripts)
        addresses = [controller.address for controller in controllers]
        engine = start_engine(addresses, uses_local_links=request.param, **choices)
        await engine.form(Epoch(1, "test"))
        return engine

    return form


async def test_the_shape_is_what_the_stages_allow_in_whole_blocks(
    start_controllers: StartControllers, start_engine: StartEngine
) -> None:
    controllers = await start_controllers("plain", "plain")
    engine = start_engine([controller.address for controller in controllers], block_tokens=16)
    assert await engine.form(Epoch(1, "test")) == EngineShape(stages=2, slots=32, block_tokens=16, max_model_len=64)


async def test_results_come_in_step_order_while_several_steps_are_in_flight(formed: StartEngine) -> None:
    engine = await formed("plain", "plain")
    for number in range(1, 6):
        await engine.submit(step(number))
    results = [await next_result(engine) for _ in range(5)]
    assert [result.number for result in results] == [1, 2, 3, 4, 5]
    assert [result.sampled[0].token.id for result in results] == [1, 2, 3, 4, 5]


async def test_more_slots_than_the_smallest_stage_has_are_refused(
    start_controllers: StartControllers, start_engine: StartEngine
) -> None:
    [controller] = await start_controllers("plain")
    with pytest.raises(SettingError, match="slots: 44 are wanted, stage 0 has room for 40"):
        await start_engine([controller.address], slots=44).form(Epoch(1, "test"))


async def test_slots_that_are_less_than_a_block_are_refused(
    start_controllers: StartControllers, start_engine: StartEngine
) -> None:
    [controller] = await start_controllers("plain")
    with pytest.raises(SettingError, match="slots: 7 are less than a block of 16"):
        await start_engine([controller.address], slots=7, block_tokens=16).form(Epoch(1, "test"))


async def test_stages_of_different_revisions_form_no_group(
    start_controllers: StartControllers, start_engine: StartEngine
) -> None:
    [first] = await start_controllers("plain", stages=2, stage=0, dtype="float32")
    [second] = await start_controllers("plain", stages=2, stage=1, dtype="float16")
    error = await error_of(start_engine([first.address, second.address]).form(Epoch(1, "test")))
    assert "stage 1 holds revision float16" in str(error)


async def test_an_address_that_serves_another_stage_is_refused(
    start_controllers: StartControllers, start_engine: StartEngine
) -> None:
    first, second = await start_controllers("plain", "plain")
    error = await error_of(start_engine([second.address, first.address]).form(Epoch(1, "test")))
    assert "serves stage" in str(error)


async def test_a_stage_that_nobody_serves_is_an_error_after_the_bound(start_engine: StartEngine) -> None:
    told: list[StageLoading] = []
    engine = start_engine(["127.0.0.1:1"], join_timeout_s=0.5, on_loading=told.append)
    error = await error_of(engine.form(Epoch(1, "test")))
    assert "stage 0 at 127.0.0.1:1 does not answer" in str(error)
    assert told[0].permille is None


async def test_an_epoch_not_above_the_stages_last_one_is_refused_with_that_number(formed: StartEngine) -> None:
    engine = await formed("plain")
    error = await error_of(engine.form(Epoch(1, "other")))
    assert error.reported_epoch == 1


async def test_a_step_that_does_not_come_back_within_its_bound_ends_the_epoch(formed: StartEngine) -> None:
    engine = await formed("plain", "mute", step_timeout_s=0.3)
    await engine.submit(step(1))
    assert "step 1 did not come back within 0.3 s" in str(await error_of(next_result(engine)))
    with pytest.raises(EngineError, match="epoch 1 is over"):
        await engine.submit(step(2))


async def test_a_stage_that_stops_is_an_engine_error_at_once(
    start_controllers: StartControllers, start_engine: StartEngine
) -> None:
    controllers = await start_controllers("plain", "plain", "plain")
    engine = start_engine([controller.address for controller in controllers])
    await engine.form(Epoch(1, "test"))
    reading = asyncio.ensure_future(next_result(engine))
    await controllers[1].close()
    assert "stage 1" in str(await error_of(reading, limit_s=5))


async def test_a_broken_rank_is_an_engine_error_after_the_earlier_results(formed: StartEngine) -> None:
    engine = await formed("broken")
    await engine.submit(step(1))
    assert (await next_result(engine)).number == 1
    assert "the link tore" in str(await error_of(next_result(engine)))


async def test_a_new_epoch_ends_the_reading_of_the_old_one(formed: StartEngine) -> None:
    engine = await formed("plain")
    reading = asyncio.ensure_future(next_result(engine))
    await asyncio.sleep(0)
    await engine.form(Epoch(2, "test"))
    await error_of(reading)
    with pytest.raises(EngineError, match="epoch 1 is over"):
        await engine.submit(step(1))
    await engine.submit(step(1, epoch=2))
    assert (await next_result(engine)).epoch == Epoch(2, "test")


async def test_closing_ends_the_results_without_an_error(formed: StartEngine) -> None:
    engine = await formed("plain")
    results = engine.results()
    await engine.close()
    assert [result async for result in results] == []
