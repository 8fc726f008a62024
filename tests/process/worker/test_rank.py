"""worker.rank.rank: a real rank process, and the frames that its controller might send it."""

import dataclasses
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.step import Epoch, Row, Step
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.core.transport.frame_socket import FrameSocket
from orca.core.transport.frame_stream import encode
from orca.core.transport.local_link import LinkFrameKind
from orca.worker.controller.rank_process import RANK_COMMAND
from orca.worker.messages import frames
from orca.worker.messages.frames import JoinOrder, RankFrameKind
from orca.worker.settings import WorkerSettings

BLOCK_TOKENS = 4


@contextmanager
def loaded_rank(settings: WorkerSettings, log: Path) -> Iterator[FrameSocket[RankFrameKind]]:
    """The controller's end of the only rank of a group, which has loaded its weights."""
    ours, theirs = socket.socketpair()
    with theirs, log.open("wb") as output:
        command = [*RANK_COMMAND, str(theirs.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment, stderr=output)
    link = FrameSocket(ours, RankFrameKind)
    link.write(frames.encode_json(RankFrameKind.START, settings=dataclasses.asdict(settings), rank=0))
    try:
        assert said(link)[0] is RankFrameKind.LOADED, log.read_text()
        yield link
        link.write(encode(RankFrameKind.STOP, b""))
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        ours.close()


@pytest.fixture
def rank(tiny_model: Path, tmp_path: Path) -> Iterator[FrameSocket[RankFrameKind]]:
    with loaded_rank(WorkerSettings(model=str(tiny_model), threads=1), tmp_path / "rank.log") as link:
        yield link


def said(link: FrameSocket[RankFrameKind]) -> tuple[RankFrameKind, Any]:
    """The rank's next frame that is no heartbeat."""
    while True:
        frame = link.read()
        assert frame is not None
        kind, payload = frame
        if kind is RankFrameKind.RESULT:
            return kind, pb.ResultMessage.FromString(payload)
        if kind is not RankFrameKind.HEARTBEAT:
            return kind, orjson.loads(payload)


def joined(link: FrameSocket[RankFrameKind], epoch: int) -> None:
    join(link, epoch)
    assert [said(link), said(link)] == [
        (RankFrameKind.LEFT, {"epoch": epoch}),
        (RankFrameKind.JOINED, {"epoch": epoch}),
    ]


def join(link: FrameSocket[RankFrameKind], epoch: int) -> None:
    order = JoinOrder(
        epoch=epoch,
        prefix=f"{epoch}/",
        rendezvous="127.0.0.1:1",  # a rank alone meets nobody
        slots=64,
        block_tokens=BLOCK_TOKENS,
        feeds_tokens=False,
        timeout_s=30.0,
    )
    link.write(frames.encode_record(RankFrameKind.JOIN, order))


def run(link: FrameSocket[RankFrameKind], epoch: int) -> None:
    link.write(frames.encode_step(0, step_of(epoch, handle=1)))


def step_of(epoch: int, handle: int) -> bytes:
    """The first step of an epoch, which brings request 1 and runs this one."""
    row = Row(handle=handle, start=0, count=3, sample=True)
    step = Step(epoch=Epoch(epoch, "test"), number=1, new=(new_request(1, (5, 6, 7), 2),), rows=(row,))
    return wire.step_to_wire(step).SerializeToString()


@contextmanager
def master_of(link: FrameSocket[RankFrameKind], epoch: int) -> Iterator[FrameSocket[LinkFrameKind]]:
    """A master whose link is handed to the rank."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            # The controller's end of this link is a FrameSocket here, which hands nothing over.
            socket.send_fds(link._connection, [frames.encode_link(epoch, b"")], [theirs.fileno()])
        yield FrameSocket(ours, LinkFrameKind)


def test_a_late_command_to_join_is_ignored(rank: FrameSocket[RankFrameKind]) -> None:
    joined(rank, 2)
    join(rank, 1)
    run(rank, epoch=2)
    kind, result = said(rank)
    assert (kind, result.epoch.number, len(result.sampled)) == (RankFrameKind.RESULT, 2, 1)


def test_a_rank_answers_the_master_of_its_link_until_another_epoch_begins(
    rank: FrameSocket[RankFrameKind],
) -> None:
    joined(rank, 1)
    with master_of(rank, epoch=1) as master:
        master.write(encode(LinkFrameKind.STEP, step_of(1, handle=1)))
        kind, result = heard_by(master)
        assert kind is LinkFrameKind.RESULT
        assert len(pb.ResultMessage.FromString(result).sampled) == 1
        join(rank, 2)
        assert heard_by(master) == (LinkFrameKind.OVER, b"epoch 2 begins")
        assert master.read() is None
    with master_of(rank, epoch=1) as late:
        assert late.read() is None
    assert [said(rank)[0], said(rank)[0]] == [RankFrameKind.LEFT, RankFrameKind.JOINED]
    with master_of(rank, epoch=2) as first, master_of(rank, epoch=2) as second:
        assert second.read() is None
        first.write(encode(LinkFrameKind.STEP, step_of(2, handle=1)))
        assert heard_by(first)[0] is LinkFrameKind.RESULT


def test_a_rank_reports_a_broken_epoch_to_its_controller_and_then_to_its_master(
    rank: FrameSocket[RankFrameKind],
) -> None:
    joined(rank, 1)
    with master_of(rank, epoch=1) as master:
        master.write(encode(LinkFrameKind.STEP, step_of(1, handle=7)))
        kind, reason = heard_by(master)
    assert kind is LinkFrameKind.OVER
    assert b"rank 0: step 1" in reason
    rank._connection.setblocking(False)  # it is here by now
    assert said(rank)[0] is RankFrameKind.BROKEN
    rank._connection.setblocking(True)


def heard_by(master: FrameSocket[LinkFrameKind]) -> tuple[LinkFrameKind, bytes]:
    frame = master.read()
    assert frame is not None
    return frame


@pytest.mark.slow
@pytest.mark.timeout(300)  # compiling all of them takes 35 s of a Zen 3 that does nothing else
@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.prove)])
def test_a_restarted_rank_finds_its_compiled_kernels(
    quantization: str | None, kept_kernels: Path, tiny_model: Path
) -> None:
    settings = WorkerSettings(model=str(tiny_model), threads=1, dtype="bfloat16", quantization=quantization)
    logs = []
    for life in range(2):
        log = kept_kernels / f"{life}.log"
        with loaded_rank(settings, log) as link:
            joined(link, 1)
            before = kept(kept_kernels)
            run(link, epoch=1)
            assert said(link)[0] is RankFrameKind.RESULT
        assert kept(kept_kernels) == before
        logs.append(log.read_text())
    # Larger models than this one run products of ours too, on several threads.
    kernels = {file.relative_to(kept_kernels / "orca" / "kernels").parts[1] for file in before}
    assert {"call_team", "help_team"} <= kernels
    [product] = [kernel for kernel in kernels if "product" in kernel]
    assert ("torch.int8" in product) is (quantization is not None)
    assert ["starts again" in log for log in logs] == [True, False]
    assert logs[0].count("starts again") == 1


def kept(folder: Path) -> dict[Path, int]:
    """The files of code, and when each was written."""
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.nbc")}
