"""worker.messages.frames: both ends of the socket between a controller and a rank."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orca.core.transport.frame_socket import FrameSocket
from orca.core.transport.frame_stream import FrameStream, encode
from orca.worker.messages.frames import RankFrame, RankFrameKind

REFUSED = encode(RankFrameKind.REFUSED, b"config.json says so")
STOP = encode(RankFrameKind.STOP, b"")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The controller's end and the rank's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


async def heard(stream: FrameStream[RankFrameKind]) -> list[RankFrame]:
    """All frames up to the end of the rank."""
    async with asyncio.timeout(20):
        return [frame async for frame in stream.frames()]


def test_frames_of_a_rank_that_ended_with_unread_input_are_received(run: Callable[..., Any], pair: Pair) -> None:
    ours, theirs = pair

    async def session() -> list[RankFrame]:
        stream = FrameStream(ours, RankFrameKind)
        stream.write(STOP)  # never read, so the kernel resets the link
        theirs.sendall(REFUSED)
        theirs.close()
        return await heard(stream)

    assert run(session()) == [(RankFrameKind.REFUSED, b"config.json says so")]


def test_frames_of_an_ended_rank_are_received_even_after_a_write_failed(run: Callable[..., Any], pair: Pair) -> None:
    ours, theirs = pair

    async def session() -> list[RankFrame]:
        stream = FrameStream(ours, RankFrameKind)
        theirs.sendall(REFUSED)
        theirs.close()
        stream.write(STOP)
        stream.write(STOP)
        await asyncio.sleep(0)
        return await heard(stream)

    assert run(session()) == [(RankFrameKind.REFUSED, b"config.json says so")]


def test_frames_are_reassembled_from_any_chunks_and_a_truncated_one_is_dropped(
    run: Callable[..., Any], pair: Pair
) -> None:
    ours, theirs = pair

    async def session() -> list[RankFrame]:
        hearing = asyncio.create_task(heard(FrameStream(ours, RankFrameKind)))
        for byte in REFUSED + STOP + REFUSED[:-1]:
            theirs.send(bytes([byte]))
            await asyncio.sleep(0)
        theirs.close()
        return await hearing

    assert run(session()) == [(RankFrameKind.REFUSED, b"config.json says so"), (RankFrameKind.STOP, b"")]


def test_more_than_the_socket_holds_is_delivered_in_order_as_the_rank_reads(
    run: Callable[..., Any], pair: Pair
) -> None:
    ours, theirs = pair
    payloads = [bytes([number]) * 100_000 for number in range(50)]

    async def session() -> list[RankFrame | None]:
        stream = FrameStream(ours, RankFrameKind)
        for payload in payloads:
            stream.write(encode(RankFrameKind.STEP, payload))
        rank = FrameSocket(theirs, RankFrameKind)
        return [await asyncio.to_thread(rank.read) for _ in payloads]

    assert run(session()) == [(RankFrameKind.STEP, payload) for payload in payloads]


def test_frames_written_after_the_end_of_the_link_are_dropped(run: Callable[..., Any], pair: Pair) -> None:
    ours, theirs = pair

    async def session() -> None:
        stream = FrameStream(ours, RankFrameKind)
        stream.write(encode(RankFrameKind.STEP, bytes(5_000_000)))  # more than the socket holds
        theirs.close()
        stream.write(STOP)
        assert await heard(stream) == []
        stream.close()
        stream.write(STOP)

    run(session())


def test_a_frame_of_an_unknown_kind_is_an_error(run: Callable[..., Any], pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(bytes([0, 0, 0, 0, 99]))

    async def session() -> None:
        with pytest.raises(ValueError, match="99 is not a valid RankFrameKind"):
            await heard(FrameStream(ours, RankFrameKind))

    run(session())


@pytest.mark.parametrize("unsent_bytes", [0, 100_000, 200_000, 300_000, 5_000_000])
def test_a_socket_is_passed_with_its_frame_after_all_unsent_ones(
    run: Callable[..., Any], pair: Pair, unsent_bytes: int
) -> None:
    ours, theirs = pair
    one, other = socket.socketpair()
    rank = FrameSocket(theirs, RankFrameKind, takes_sockets=True)

    async def session() -> None:
        stream = FrameStream(ours, RankFrameKind)
        stream.write(encode(RankFrameKind.STEP, bytes(unsent_bytes)))
        reading = asyncio.create_task(asyncio.to_thread(lambda: [rank.read(), rank.read()]))
        try:
            await asyncio.wait_for(stream.write_with_socket(encode(RankFrameKind.LINK, b"a link"), one), 20)
            one.close()
            assert (await reading)[1] == (RankFrameKind.LINK, b"a link")
        finally:
            rank.end()  # wakes who reads

    with one, other:
        run(session())
        with rank.take_socket() as taken:
            other.sendall(b"hello")
            assert taken.recv(5) == b"hello"
            assert not taken.get_inheritable()
        with pytest.raises(OSError, match="no file descriptor left"):
            rank.take_socket()


def test_a_socket_waits_until_the_buffer_has_room(run: Callable[..., Any], pair: Pair) -> None:
    ours, theirs = pair
    rank = FrameSocket(theirs, RankFrameKind, takes_sockets=True)

    async def session() -> None:
        stream = FrameStream(ours, RankFrameKind)
        while True:  # until the socket is full, behind the stream's back
            try:
                ours.send(STOP)
            except BlockingIOError:
                break
        giving = asyncio.create_task(stream.write_with_socket(encode(RankFrameKind.LINK, b"a link"), ours))
        await asyncio.sleep(0)
        assert not giving.done()
        reading = asyncio.create_task(asyncio.to_thread(_read_to_link, rank))
        try:
            await asyncio.wait_for(giving, 20)
            assert await asyncio.wait_for(reading, 20) == (RankFrameKind.LINK, b"a link")
        finally:
            rank.end()

    run(session())
    rank.take_socket().close()


def _read_to_link(rank: FrameSocket[RankFrameKind]) -> RankFrame | None:
    while (frame := rank.read()) is not None and frame[0] is not RankFrameKind.LINK:
        pass
    return frame


def test_received_bytes_are_not_lost_when_the_link_is_handed_over(run: Callable[..., Any], pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(STOP + REFUSED + REFUSED[:7])

    async def first() -> bytes:
        stream = FrameStream(ours, RankFrameKind)
        assert await anext(stream.frames()) == (RankFrameKind.STOP, b"")
        return stream.stop()[1]

    reader = FrameSocket(ours, RankFrameKind, arrived=run(first()))
    theirs.sendall(REFUSED[7:])
    assert [reader.read(), reader.read()] == [(RankFrameKind.REFUSED, b"config.json says so")] * 2
    theirs.close()
    assert reader.read() is None


def test_a_reader_refuses_a_frame_that_is_too_long(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(b"\xff\xff\xff\xff\x03")
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        FrameSocket(ours, RankFrameKind, frame_bytes_max=1 << 20).read()


def test_a_writer_blocked_by_a_slow_peer_is_woken_by_the_end(run: Callable[..., Any], pair: Pair) -> None:
    ours, theirs = pair

    async def session() -> None:
        stream = FrameStream(ours, RankFrameKind)
        stream.write(encode(RankFrameKind.STEP, bytes(5_000_000)))
        handing = asyncio.create_task(stream.write_with_socket(STOP, theirs))
        await asyncio.sleep(0)
        stream.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            await asyncio.wait_for(handing, 20)

    run(session())
