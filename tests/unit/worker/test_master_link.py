"""worker.messages.master_link: what a rank that is a whole stage hears from its master, and how either of them goes."""

import socket
import threading
from collections.abc import Iterator

import pytest

from orca.core.transport import engine_pb2 as pb
from orca.core.transport.frame_socket import FrameSocket
from orca.core.transport.frame_stream import encode
from orca.core.transport.local_link import LinkFrameKind
from orca.worker.messages import frames
from orca.worker.messages.frames import RankFrameKind
from orca.worker.messages.inbox import Inbox
from orca.worker.messages.master_link import MasterLink

STEP = pb.StepMessage(epoch=pb.Epoch(number=1, holder="test"), number=1).SerializeToString()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def ends(inbox: Inbox) -> Iterator[tuple[FrameSocket[LinkFrameKind], MasterLink]]:
    """The master's and the rank's."""
    ours, theirs = socket.socketpair()
    link = MasterLink(theirs, 1, b"", inbox)
    link.start()
    master = FrameSocket(ours, LinkFrameKind)
    yield master, link
    link.end()
    master.close()


Ends = tuple[FrameSocket[LinkFrameKind], MasterLink]


def test_steps_arrive_with_their_time_and_results_are_sent_back(ends: Ends, inbox: Inbox) -> None:
    master, link = ends
    master.write(encode(LinkFrameKind.STEP, STEP))
    kind, payload = inbox.next()
    received_ns, message = frames.decode_step(payload)
    assert (kind, message) == (RankFrameKind.STEP, STEP)
    assert received_ns > 0
    link.send(b"a result")
    assert master.read() == (LinkFrameKind.RESULT, b"a result")


def test_frames_read_before_the_handover_are_received_first(inbox: Inbox) -> None:
    ours, theirs = socket.socketpair()
    whole = encode(LinkFrameKind.STEP, STEP)
    link = MasterLink(theirs, 1, whole[:9], inbox)
    link.start()
    with ours:
        ours.sendall(whole[9:])
        assert frames.decode_step(inbox.next()[1])[1] == STEP
        link.end()


def test_a_writer_blocked_by_a_slow_master_is_woken_by_the_end(ends: Ends) -> None:
    _, link = ends
    sending = threading.Thread(target=link.send, args=(bytes(50_000_000),))
    sending.start()
    sending.join(0.2)
    assert sending.is_alive()
    link.end("epoch 2 begins")
    sending.join(20)
    assert not sending.is_alive()


def test_only_the_first_end_is_sent_and_later_results_are_dropped(ends: Ends) -> None:
    master, link = ends
    link.send(b"a result")
    link.end("epoch 2 begins")
    link.end("epoch 3 begins")
    link.send(b"another result")
    heard = [(LinkFrameKind.RESULT, b"a result"), (LinkFrameKind.OVER, b"epoch 2 begins"), None]
    assert [master.read(), master.read(), master.read()] == heard


def test_a_link_without_its_master_closes_its_socket_and_drops_results(inbox: Inbox) -> None:
    ours, theirs = socket.socketpair()
    link = MasterLink(theirs, 1, b"", inbox)
    link.start()
    ours.close()
    for thread in threading.enumerate():
        if thread.name == "master-link":
            thread.join(20)
    assert theirs.fileno() == -1
    link.send(b"a result")
