"""An epoch as its master sees it, against one scripted stage: lost and long steps, broken links, restarted stages."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch, Step, StepResult
from orca.core.transport import engine_pb2 as pb
from orca.scheduler.engines.engine_epoch import EngineEpoch, mending_pause_s
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.scheduler.engines.stage_links import StageLoading
from orca.scheduler.engines.stage_probe import JoinedStage
from orca.scheduler.engines.step_timeout import StepTimeout
from support.scheduler.fake_stage import FakeStage, serve, until

EPOCH = Epoch(1, "test")


@pytest.fixture
def stage() -> FakeStage:
    return FakeStage()


@pytest.fixture(autouse=True)
async def server(stage: FakeStage) -> AsyncIterator[aio.Server]:
    server = await serve(stage)
    yield server
    await server.stop(grace=None)


@pytest.fixture
async def engine(stage: FakeStage) -> AsyncIterator[GrpcEngine]:
    engine = an_engine(stage)
    yield engine
    await engine.close()


def an_engine(*stages: FakeStage, told: list[StageLoading] | None = None) -> GrpcEngine:
    """Its steps are lost after 0.4 s in which nothing moves."""
    return GrpcEngine(
        [stage.address for stage in stages],
        listen="127.0.0.1:0",
        slots=None,
        block_tokens=16,
        prefetch=0,
        step_timeout_s=0.4,
        join_timeout_s=30.0,
        on_loading=None if told is None else told.append,
    )


async def first_result(engine: GrpcEngine) -> StepResult:
    return await asyncio.wait_for(anext(engine.results()), 30)


async def test_a_step_may_exceed_its_bound_while_a_stage_makes_progress(stage: FakeStage, engine: GrpcEngine) -> None:
    asked = 0

    def answer_late() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:  # once for each bound that passed
            stage.answer(1)

    await engine.form(EPOCH)
    stage.on_status = answer_late
    await engine.submit(Step(epoch=EPOCH, number=1))
    assert (await first_result(engine)).number == 1
    assert asked >= 3  # again while the answer was on its way, where the machine is slow


async def test_a_stage_of_another_release_forms_no_group_and_is_not_asked_to_join(
    stage: FakeStage, engine: GrpcEngine
) -> None:
    stage.status.contract = 99
    with pytest.raises(EngineError, match="stage 0 is of another release: it has contract 99"):
        await engine.form(EPOCH)
    assert stage.joins == []


async def test_a_step_is_lost_when_no_stage_has_made_progress_for_its_bound(
    stage: FakeStage, engine: GrpcEngine
) -> None:
    await engine.form(EPOCH)
    stage.status.still_ms = 400
    await engine.submit(Step(epoch=EPOCH, number=1))
    with pytest.raises(EngineError, match=r"step 1 did not come back within 0\.4 s, and no stage is at work"):
        await first_result(engine)


def test_the_bound_of_a_step_starts_at_its_submit_or_at_the_last_progress() -> None:
    bound = StepTimeout(1_000)
    bound.submit(1, now_us=5_000)
    assert bound.left_us(now_us=5_300, still_us=9_000) == 700
    assert bound.left_us(now_us=9_000, still_us=300) == 700
    assert bound.left_us(now_us=9_000, still_us=1_000) == 0


def test_after_a_result_the_bound_is_that_of_the_next_step() -> None:
    bound = StepTimeout(1_000)
    bound.submit(1, now_us=0)
    bound.submit(2, now_us=800)
    bound.take()
    assert (bound.oldest, bound.left_us(now_us=1_000, still_us=1_000)) == (2, 800)
    bound.take()
    assert bound.oldest is None


async def test_a_stream_that_keeps_breaking_is_reopened_with_growing_pauses(
    stage: FakeStage, engine: GrpcEngine
) -> None:
    stage.breaks_streams = True
    await engine.form(EPOCH)
    await until(lambda: len(stage.reads) == 5)
    # Each pause is at least half of its bound: 0.1, 0.2, 0.4 and 0.8 s.
    assert stage.reads[4] - stage.reads[0] > 0.7


def test_the_pause_before_a_stream_is_reopened_is_bounded_and_partly_random() -> None:
    assert [mending_pause_s(broken, 1.0) for broken in (0, 1, 2, 5, 6, 10**6)] == [0.05, 0.1, 0.2, 1.6, 2.0, 2.0]
    assert mending_pause_s(3, 0.0) == mending_pause_s(3, 1.0) / 2


async def test_a_reopened_stream_continues_after_the_last_result(stage: FakeStage, engine: GrpcEngine) -> None:
    stage.breaks_streams = True
    await engine.form(EPOCH)
    await engine.submit(Step(epoch=EPOCH, number=1))
    await until(lambda: len(stage.reads) >= 2)
    stage.breaks_streams = False
    stage.answer(1)
    assert (await first_result(engine)).number == 1


async def test_a_stage_with_another_process_id_has_restarted_and_ends_the_epoch(
    stage: FakeStage, engine: GrpcEngine
) -> None:
    await engine.form(EPOCH)
    await until(lambda: len(stage.reads) == 1)
    await engine.submit(Step(epoch=EPOCH, number=1))
    stage.status.process = "second"
    with pytest.raises(EngineError, match="stage 0 has restarted"):
        await first_result(engine)


async def test_a_malformed_result_ends_the_epoch(
    stage: FakeStage, engine: GrpcEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.form(EPOCH)
    told = pb.Sampled(handle=1, logprob=pb.Logprob(token=1, top_tokens=[1, 2], top_logprobs=[-0.1]))
    stage.results.put_nowait(pb.ResultMessage(epoch=stage.status.epoch, number=1, sampled=[told]))
    with pytest.raises(EngineError, match="epoch 1: ValueError"):
        await first_result(engine)
    assert "a task of the epoch failed" in caplog.messages


async def test_the_epoch_ends_even_if_the_cause_cannot_be_determined() -> None:
    class Unusable:
        """A client of a stage whose result stream ends at once, and whose status nobody can ask for."""

        def Results(self, request: pb.ResultsRequest) -> "EmptyStream":  # noqa: N802, ARG002
            return EmptyStream()

        async def Status(self, request: pb.StatusRequest, **options: object) -> pb.StatusReply:  # noqa: N802, ARG002
            raise aio.UsageError("Channel is closed.")

    life = EngineEpoch(EPOCH, [JoinedStage(Unusable(), "first")], step_timeout_s=30.0)
    with pytest.raises(EngineError, match="epoch 1: UsageError"):
        await asyncio.wait_for(anext(life.results()), 30)
    await life.end(None)


class EmptyStream:
    """A stream of results that has none."""

    def __aiter__(self) -> "EmptyStream":
        return self

    async def __anext__(self) -> pb.ResultMessage:
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


async def test_a_failed_wait_for_stages_polls_none_of_them_any_more(stage: FakeStage) -> None:
    other = FakeStage()
    server = await serve(other)
    for place, each in enumerate((stage, other)):
        each.status.stages, each.status.stage = 2, place
    stage.status.phase = pb.StatusReply.LOADING
    engine = an_engine(stage, other)
    before = asyncio.all_tasks()
    for _ in range(3):
        other.status.stage = 7
        with pytest.raises(EngineError, match="stage 1"):
            await engine.wait_loaded()
    assert {task.get_coro().__name__ for task in asyncio.all_tasks() - before} & {"_wait_loaded"} == set()
    await engine.close()
    await server.stop(grace=None)


async def test_a_join_names_the_process_that_it_is_meant_for(stage: FakeStage, engine: GrpcEngine) -> None:
    await engine.form(EPOCH)
    assert list(stage.joins[0].processes) == ["first"]


async def test_a_second_process_of_a_stage_is_refused_while_the_first_one_answers(
    stage: FakeStage, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def take_turns() -> None:
        asked.append(stage.status.process)
        stage.status.process = ("first", "second")[len(asked) % 2]

    told: list[StageLoading] = []
    engine = an_engine(stage, told=told)
    await engine.wait_loaded()
    stage.on_status = take_turns
    stage.status.process = "second"
    statuses = await engine.wait_loaded()
    await engine.close()
    assert [status.process for status in statuses] == ["first"]
    assert "a second process answers for a stage and is refused" in caplog.text
    assert told[0].detail == "a second process answers while the first lives"


async def test_a_process_replaces_one_that_no_longer_answers(
    stage: FakeStage, server: aio.Server, engine: GrpcEngine
) -> None:
    await engine.form(EPOCH)
    await server.stop(grace=None)
    second = FakeStage("second")
    second_server = await serve(second, stage.address)
    await engine.form(Epoch(2, "test"))
    assert list(second.joins[0].processes) == ["second"]
    await second_server.stop(grace=None)


async def failure_told(stage: FakeStage, engine: GrpcEngine, *causes: "pb.StatusReply.Cause") -> EngineError:
    """The error of an epoch whose result stream was aborted, while the stage tells these causes one after another."""
    told = iter(causes)

    def tell() -> None:
        stage.status.cause = next(told, stage.status.cause)

    stage.aborts_streams = True
    await engine.form(EPOCH)
    stage.on_status = tell
    with pytest.raises(EngineError) as caught:
        await first_result(engine)
    return caught.value


async def test_a_failure_has_an_internal_cause_when_a_stage_reports_one(stage: FakeStage, engine: GrpcEngine) -> None:
    assert (await failure_told(stage, engine, pb.StatusReply.INSIDE)).is_from_inside


async def test_the_cause_is_waited_for_when_a_neighbour_first_reports_a_lost_link(
    stage: FakeStage, engine: GrpcEngine
) -> None:
    lost = pb.StatusReply.LINK
    assert (await failure_told(stage, engine, lost, lost, pb.StatusReply.INSIDE)).is_from_inside


@pytest.mark.parametrize("cause", [pb.StatusReply.OUTSIDE, pb.StatusReply.LINK, pb.StatusReply.CAUSE_UNSPECIFIED])
async def test_a_kill_and_an_unexplained_failure_have_an_external_cause(
    stage: FakeStage, engine: GrpcEngine, cause: "pb.StatusReply.Cause"
) -> None:
    assert not (await failure_told(stage, engine, cause)).is_from_inside


async def test_a_lost_step_has_an_internal_cause_while_all_stages_answer(stage: FakeStage, engine: GrpcEngine) -> None:
    await engine.form(EPOCH)
    stage.status.still_ms = 400
    await engine.submit(Step(epoch=EPOCH, number=1))
    with pytest.raises(EngineError) as caught:
        await first_result(engine)
    assert caught.value.is_from_inside


async def test_a_restarted_stage_has_an_external_cause(stage: FakeStage, engine: GrpcEngine) -> None:
    await engine.form(EPOCH)
    await engine.submit(Step(epoch=EPOCH, number=1))
    stage.status.process = "second"
    with pytest.raises(EngineError) as caught:
        await first_result(engine)
    assert not caught.value.is_from_inside


async def test_a_step_submitted_while_the_cause_is_determined_is_refused_with_that_cause(
    stage: FakeStage, engine: GrpcEngine
) -> None:
    stage.aborts_streams = True
    await engine.form(EPOCH)
    await until(lambda: len(stage.reads) == 1)
    stage.status.cause = pb.StatusReply.INSIDE
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(submit_for_ever(engine), 30)
    assert caught.value.is_from_inside


async def submit_for_ever(engine: GrpcEngine) -> None:
    for number in count(1):
        await engine.submit(Step(epoch=EPOCH, number=number))
        await asyncio.sleep(0.01)
