"""worker.controller.step_order: steps run in the order of their numbers, results are read in it, whatever the calls
do."""

import asyncio
import random

import pytest

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.worker.controller.step_order import ResultLog, StepOrder, StepVerdict

EPOCH = Epoch(3, "scheduler-a")


def opened() -> StepOrder:
    order = StepOrder(EPOCH)
    order.open()
    return order


async def test_a_repeated_step_runs_once() -> None:
    order = opened()
    verdicts = [await order.admit(EPOCH, 1, 1.0) for _ in range(3)]
    assert verdicts == [StepVerdict.ACCEPTED, StepVerdict.ALREADY_DONE, StepVerdict.ALREADY_DONE]


async def test_the_seat_holder_is_part_of_the_epoch() -> None:
    assert await opened().admit(Epoch(3, "scheduler-b"), 1, 1.0) is StepVerdict.WRONG_EPOCH


@pytest.mark.parametrize("seed", range(5))
async def test_reordered_and_repeated_calls_run_in_the_order_of_their_numbers(seed: int) -> None:
    order = opened()
    ran: list[int] = []

    async def call(number: int) -> None:
        if await order.admit(EPOCH, number, 5.0) is StepVerdict.ACCEPTED:
            ran.append(number)

    numbers = [*range(1, 30), *range(1, 30, 3)]
    random.Random(seed).shuffle(numbers)
    await asyncio.gather(*(call(number) for number in numbers))
    assert ran == list(range(1, 30))


async def test_a_gap_that_is_not_filled_ends_the_call_at_its_deadline() -> None:
    order = opened()
    with pytest.raises(TimeoutError):
        await order.admit(EPOCH, 2, 0.01)
    assert order.last == 0


async def test_calls_that_wait_for_a_gap_fail_when_the_epoch_ends() -> None:
    order = opened()
    waiting = asyncio.ensure_future(order.admit(EPOCH, 2, 5.0))
    await asyncio.sleep(0)
    order.close()
    assert await waiting is StepVerdict.WRONG_EPOCH


async def test_no_step_runs_before_the_epoch_is_formed_and_none_after_it_is_over() -> None:
    order = StepOrder(EPOCH)
    assert await order.admit(EPOCH, 1, 1.0) is StepVerdict.WRONG_EPOCH
    order.open()
    order.close()
    assert await order.admit(EPOCH, 1, 1.0) is StepVerdict.WRONG_EPOCH


def result(number: int) -> pb.ResultMessage:
    return pb.ResultMessage(number=number)


async def read(log: ResultLog, after: int, count: int) -> list[int]:
    numbers = []
    async for message in log.read(after):
        numbers.append(message.number)
        if len(numbers) == count:
            break
    return numbers


async def test_a_reader_that_reconnects_continues_where_it_stopped() -> None:
    log = ResultLog()
    for number in (1, 2, 3):
        log.append(result(number))
    assert await read(log, 0, 2) == [1, 2]
    assert await read(log, 2, 1) == [3]


async def test_a_reader_waits_for_results_that_have_not_arrived() -> None:
    log = ResultLog()
    reading = asyncio.ensure_future(read(log, 0, 2))
    for number in (1, 2):
        await asyncio.sleep(0)
        log.append(result(number))
    assert await asyncio.wait_for(reading, 30) == [1, 2]


async def test_a_reader_gets_existing_results_before_the_end_of_the_epoch() -> None:
    log = ResultLog()
    log.append(result(1))
    log.end("rank 0 died")
    log.end("and then its stage stopped")
    messages = log.read(0)
    assert (await anext(messages)).number == 1
    with pytest.raises(EngineError, match="rank 0 died"):
        await anext(messages)


async def test_a_result_that_is_no_longer_kept_is_an_error_and_not_a_gap() -> None:
    log = ResultLog(kept=2)
    for number in (1, 2, 3):
        log.append(result(number))
    with pytest.raises(EngineError, match="oldest kept is 2"):
        await read(log, 0, 1)


def test_a_result_out_of_order_is_refused() -> None:
    log = ResultLog()
    with pytest.raises(EngineError, match="result 2 came after result 0"):
        log.append(result(2))
