"""worker.messages.inbox and epoch_steps: receives are posted before an earlier step computes, and orders keep their
place."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.errors import EngineError
from orca.core.domain.refusal import ModelBounds
from orca.core.domain.step import Epoch, Row, Step
from orca.core.transport import wire
from orca.core.transport.frame_socket import FrameSocket
from orca.worker.messages import frames
from orca.worker.messages.frames import RankFrameKind
from orca.worker.messages.inbox import Inbox
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.rank.epoch_steps import EpochSteps
from orca.worker.rank.executor import Executor
from orca.worker.stage.sampling import HostSample
from orca.worker.stage.screen import RequestScreen


class Link:
    """Plays both the data plane and the model of a rank, and notes in which order they were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.draws_later = False
        self.torn: set[int] = set()  # tokens of steps whose receive fails
        self.on_send: dict[int, Callable[[], None]] = {}
        self.on_poll: Callable[[], None] = lambda: None

    def receive_hidden(self, tokens: int) -> "Link":
        if tokens in self.torn:
            raise RuntimeError("the link is gone")
        self.calls.append(f"post {tokens}")
        return self

    def wait(self) -> torch.Tensor:
        return torch.empty(0)

    begins_targets = False

    def rows_in(self, step: Step) -> int:
        return step.tokens

    def begin(self, step: Step) -> Step:
        return step

    def forward(self, plan: Step, hidden: torch.Tensor | None) -> None:  # noqa: ARG002 - a stage's shape
        self.calls.append(f"compute {plan.tokens}")

    def sample(self, plan: Step, *_: object) -> Any:
        return DrawnLater(self, plan.number) if self.draws_later else HostSample()

    def send_device_tokens(self, tokens: object) -> None:
        pass


class DrawnLater:
    """Tokens of a device that works until it was polled some times, or waited for."""

    tokens: Sequence[int] = ()
    is_on_device = True

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number
        self._looks = 0

    @property
    def is_ready(self) -> bool:
        self._looks += 1
        self._link.on_poll()
        return self._looks > 50

    def read(self) -> list[Any]:
        self._link.calls.append(f"read {self._number}")
        return []


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def progress() -> RankProgress:
    return RankProgress()


@pytest.fixture
def steps(link: Link, inbox: Inbox, progress: RankProgress) -> EpochSteps:
    """Steps of epoch 1 on the last of two stages."""
    executor = Executor(
        Shard(stage=1, stages=2),
        link,  # type: ignore[arg-type]
        link,  # type: ignore[arg-type]
        screen=RequestScreen(ModelBounds(vocab_size=100)),
        feeds_tokens=False,
        progress=progress,
        iteration_log=None,
        delay_ms=0.0,
    )
    return EpochSteps(1, executor, inbox)


def step_of(tokens: int, epoch: int = 1) -> bytes:
    """The payload of a step with so many tokens, by which the test knows it again."""
    row = Row(handle=1, start=0, count=tokens, sample=True)
    step = Step(epoch=Epoch(epoch, "test"), number=tokens, new=(new_request(1, (5,), 2),), rows=(row,))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frames.encode_step(0, wire.step_to_wire(step).SerializeToString()))
        frame = FrameSocket(ours, RankFrameKind).read()
    assert frame is not None
    return frame[1]


def test_receives_of_all_arrived_steps_are_posted_before_the_oldest_computes(
    link: Link, inbox: Inbox, steps: EpochSteps
) -> None:
    steps.receive(step_of(1))
    inbox.put((RankFrameKind.STEP, step_of(2)))
    inbox.put((RankFrameKind.STEP, step_of(3)))
    while steps:
        list(steps.run_next())
    assert link.calls == ["post 1", "post 2", "post 3", "compute 1", "compute 2", "compute 3"]


def test_a_step_after_a_command_is_not_taken_before_the_command(link: Link, inbox: Inbox, steps: EpochSteps) -> None:
    steps.receive(step_of(1))
    for frame in ((RankFrameKind.STEP, step_of(2)), (RankFrameKind.STOP, b""), (RankFrameKind.STEP, step_of(3))):
        inbox.put(frame)
    list(steps.run_next())
    assert link.calls == ["post 1", "post 2", "compute 1"]
    list(steps.run_next())
    assert link.calls[3:] == ["compute 2"]
    assert [inbox.next()[0], inbox.next()[0]] == [RankFrameKind.STOP, RankFrameKind.STEP]


def test_a_step_of_another_epoch_is_ignored(link: Link, steps: EpochSteps) -> None:
    steps.receive(step_of(1, epoch=2))
    assert not steps
    assert link.calls == []


def test_a_repeated_step_is_ignored_and_one_after_a_gap_refused(link: Link, steps: EpochSteps) -> None:
    for number in (1, 2, 1, 2):
        steps.receive(step_of(number))
    assert link.calls == ["post 1", "post 2"]
    with pytest.raises(EngineError, match="step 4 came after step 2"):
        steps.receive(step_of(4))


def test_a_receive_that_cannot_be_posted_raises_before_anything_computes(
    link: Link, inbox: Inbox, steps: EpochSteps
) -> None:
    link.torn = {2}
    steps.receive(step_of(1))
    inbox.put((RankFrameKind.STEP, step_of(2)))
    with pytest.raises(RuntimeError, match="the link is gone"):
        list(steps.run_next())
    assert link.calls == ["post 1"]


def test_the_next_step_is_launched_on_a_device_before_the_tokens_of_this_one_are_read(
    link: Link, inbox: Inbox, steps: EpochSteps
) -> None:
    link.draws_later = True
    steps.receive(step_of(1))
    inbox.put((RankFrameKind.STEP, step_of(2)))
    inbox.put((RankFrameKind.STEP, step_of(3)))
    assert run_all(link, steps) == [
        *("compute 1", "compute 2", "read 1", "send 1"),
        *("compute 3", "read 2", "send 2", "read 3", "send 3"),
    ]


def test_a_step_that_arrives_while_a_device_computes_is_launched_at_once(
    link: Link, inbox: Inbox, steps: EpochSteps
) -> None:
    """This is the load behind one stage: two steps are in flight, and each result brings the next one."""
    link.draws_later = True
    link.on_send = {
        1: lambda: inbox.put((RankFrameKind.STEP, step_of(3))),
        2: lambda: inbox.put((RankFrameKind.STEP, step_of(4))),
    }
    steps.receive(step_of(1))
    inbox.put((RankFrameKind.STEP, step_of(2)))
    assert run_all(link, steps) == [
        *("compute 1", "compute 2", "read 1", "send 1"),
        *("compute 3", "read 2", "send 2"),
        *("compute 4", "read 3", "send 3", "read 4", "send 4"),
    ]


def test_a_rank_is_working_until_the_tokens_of_its_device_have_arrived(
    link: Link, steps: EpochSteps, progress: RankProgress
) -> None:
    link.draws_later = True
    link.on_poll = lambda: seen.append((progress.doing, progress.is_waiting))
    seen: list[tuple[str, bool]] = []
    steps.receive(step_of(1))
    list(steps.run_next())
    assert seen[-1] == ("step 1: computes", False)
    assert (progress.doing, progress.is_waiting) == ("step 1: done", True)


def test_a_command_ends_the_wait_for_another_step(link: Link, inbox: Inbox, steps: EpochSteps) -> None:
    link.draws_later = True
    steps.receive(step_of(1))
    inbox.put((RankFrameKind.STOP, b""))
    assert run_all(link, steps) == ["compute 1", "read 1", "send 1"]
    assert inbox.next()[0] is RankFrameKind.STOP


def run_all(link: Link, steps: EpochSteps) -> list[str]:
    """All that was done, but for what was posted."""
    while steps:
        for result in steps.run_next():
            link.calls.append(f"send {result.number}")
            link.on_send.get(result.number, lambda: None)()
    return [call for call in link.calls if not call.startswith("post")]


def test_tokens_sampled_on_the_host_do_not_wait_for_the_next_step(link: Link, inbox: Inbox, steps: EpochSteps) -> None:
    steps.receive(step_of(1))
    inbox.put((RankFrameKind.STEP, step_of(2)))
    assert [result.number for result in steps.run_next()] == [1]
    assert [result.number for result in steps.run_next()] == [2]
    assert link.calls == ["post 1", "post 2", "compute 1", "compute 2"]
