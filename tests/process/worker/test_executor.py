"""worker.rank.executor: fed tokens come in order and when needed, a long step moves its mark, its line tells when it
ran."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.refusal import ModelBounds
from orca.core.domain.step import Epoch, Row, StageTiming, Step
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.rank.device_tokens import DeviceTokenQueue
from orca.worker.rank.executor import Executor
from orca.worker.rank.stage_log import StageLog
from orca.worker.stage.sampling import HostSample
from orca.worker.stage.screen import RequestScreen

EPOCH = Epoch(1, "test")


class FedStage:
    """A stage that only notes what it is fed."""

    def __init__(self) -> None:
        self.fed: list[tuple[tuple[int, ...], list[int]]] = []

    def put_device_tokens(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        self.fed.append((tuple(handles), list(tokens)))


def asks(*handles: int, token: int | None = None) -> Step:
    rows = tuple(Row(handle=handle, start=5, count=1, sample=True, token=token) for handle in handles)
    return Step(epoch=EPOCH, number=1, rows=rows)


def settle(fed: DeviceTokenQueue, step: Step) -> Any:
    stage = FedStage()
    fed.deliver(stage, step)  # type: ignore[arg-type]
    return stage.fed


def test_a_step_receives_all_tokens_up_to_the_last_one_it_needs() -> None:
    fed = DeviceTokenQueue()
    for number, handles in enumerate([(1, 2), (3,), (4,)]):
        fed.expect(handles, [number] * len(handles))
    assert settle(fed, asks(3)) == [((1, 2), [0, 0]), ((3,), [1])]
    assert settle(fed, asks(3)) == []
    assert settle(fed, asks(4)) == [((4,), [2])]


def test_rows_with_a_token_known_to_the_master_wait_for_nothing() -> None:
    fed = DeviceTokenQueue()
    fed.expect((1,), [9])
    assert settle(fed, asks(1, token=9)) == []


def test_a_prompt_row_of_another_request_waits_for_nothing() -> None:
    fed = DeviceTokenQueue()
    fed.expect((1,), [9])
    assert settle(fed, asks(2)) == []


def test_tokens_that_no_step_reads_are_dropped() -> None:
    fed = DeviceTokenQueue()
    for handle in range(70):
        fed.expect((handle,), [handle])
    assert [handles for handles, _ in settle(fed, asks(1000))] == [(handle,) for handle in range(6)]


def test_a_line_of_the_iteration_log_has_the_requests_and_times_of_a_step(tmp_path: Path) -> None:
    log = StageLog(tmp_path / "log.jsonl")
    step = Step(
        epoch=EPOCH,
        number=7,
        freed=(4,),
        kept=(3,),
        new=(new_request(6, (1, 2), 3),),
        rows=(Row(handle=5, start=9, count=1, sample=True, token=3), Row(handle=6, start=0, count=2, sample=True)),
    )
    log.write(step, StageTiming(stage=2, received_ns=10, start_ns=20, end_ns=30))
    log.close()
    [line] = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "stage": 2,
        "epoch": 1,
        "step": 7,
        "handles": [5, 6],
        "new": ["request6.0"],
        "freed": [4],
        "kept": [3],
        "tokens": 3,
        "received_ns": 10,
        "start_ns": 20,
        "end_ns": 30,
    }


class MarkWatcher(FedStage):
    """A stage without a model that notes the progress as it is while each part of a step runs."""

    def __init__(self, progress: RankProgress) -> None:
        super().__init__()
        self.progress = progress
        self.seen: list[tuple[str, bool]] = []
        self.mark_after_compute = 0

    begins_targets = True

    def rows_in(self, step: Step) -> int:  # noqa: ARG002 - a stage's shape
        return 0

    def begin(self, step: Step) -> Step:
        self.seen.append((self.progress.doing, self.progress.is_waiting))
        return step

    def forward(self, *_: object) -> None:
        self.seen.append((self.progress.doing, self.progress.is_waiting))
        self.mark_after_compute = self.progress.mark

    def sample(self, *_: object) -> HostSample:
        self.seen.append(("samples", self.progress.mark > self.mark_after_compute + 1))
        return HostSample()


def test_a_step_is_working_while_it_computes_reports_progress_and_waits_when_done() -> None:
    progress = RankProgress()
    stage = MarkWatcher(progress)
    executor = Executor(
        Shard(),
        stage,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        screen=RequestScreen(ModelBounds(vocab_size=100)),
        feeds_tokens=False,
        progress=progress,
        iteration_log=None,
        delay_ms=600.0,
    )
    executor.run(executor.receive(asks(1, token=3), received_ns=0))
    assert stage.seen == [("step 1: state", False), ("step 1: computes", False), ("samples", True)]
    assert (progress.doing, progress.is_waiting) == ("step 1: done", True)
