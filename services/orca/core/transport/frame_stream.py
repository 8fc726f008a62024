"""Frames on a local stream socket, as an event loop reads and writes them.

Layout of a frame, little endian: u32 bytes that follow the header, u8 kind, payload. What the kinds are is each
socket's own business.
"""

import asyncio
import enum
import socket
import struct
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

HEADER = struct.Struct("<IB")
_READ_BYTES = 1 << 16
_READS = 16
"""In a row, before the loop turns to others."""
FRAME_BYTES_MAX = 64 << 20
"""As for a message of gRPC (core.transport.grpc_links): nobody makes this process hold more."""

K = TypeVar("K", bound=enum.IntEnum)


def encode(kind: enum.IntEnum, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def take_frame(arrived: bytearray, kinds: type[K], frame_bytes_max: int | None) -> tuple[K, bytes] | None:
    """Cut the first frame off what has arrived; None while it is not whole.

    Args: frame_bytes_max: payload of the longest that is taken; None takes any.
    Raises: ValueError for an unknown kind or a frame that is too long.
    """
    if len(arrived) < HEADER.size:
        return None
    size, kind = HEADER.unpack_from(arrived)
    if frame_bytes_max is not None and size > frame_bytes_max:
        raise ValueError(f"a frame of {size} bytes, {frame_bytes_max} are allowed")
    end = HEADER.size + size
    if len(arrived) < end:
        return None
    payload = bytes(arrived[HEADER.size : end])
    del arrived[:end]
    return kinds(kind), payload


class FrameStream(Generic[K]):
    """One end: reads as they come, writes that never wait.

    asyncio's own streams drop what has arrived and was not read yet when a write finds the peer gone or the socket is
    reset. A peer's last frame is the one that says why it ends, so here reading knows nothing of writing.
    """

    def __init__(self, connection: socket.socket, kinds: type[K], frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        """
        Args:
            connection: closed by close().
            kinds: what the frames that come may be.
            frame_bytes_max: payload of the longest that is taken; may be changed at any time.
        """
        self.frame_bytes_max = frame_bytes_max
        connection.setblocking(False)
        self._connection = connection
        self._kinds = kinds
        self._loop = asyncio.get_running_loop()
        self._arrived = bytearray()
        self._is_at_end = False
        self._has_news = asyncio.Event()
        self._unsent = bytearray()
        self._is_sent = asyncio.Event()

    async def frames(self) -> AsyncGenerator[tuple[K, bytes], None]:
        """Frames until the peer is gone. Raises: ValueError for an unknown kind or a frame that is too long."""
        # A reader that stays: the loop's sock_recv would be told of the socket anew for each frame.
        self._loop.add_reader(self._connection, self._receive)
        try:
            while not self._is_at_end:
                await self._has_news.wait()
                self._has_news.clear()
                while (frame := self._take_frame()) is not None:
                    yield frame
        finally:
            self._stop_reading()

    def write(self, frame: bytes) -> None:
        """Hand a frame over, at once if the socket takes it. A peer that is gone gets none."""
        if self._unsent:
            self._unsent += frame
        elif (sent := self._send(frame)) < len(frame):
            self._send_later(frame[sent:])

    async def write_with_socket(self, frame: bytes, connection: socket.socket) -> None:
        """Send a frame behind all that is unsent, and a copy of a socket with it (FrameSocket.take_socket).

        Raises: OSError when the peer is gone.
        """
        while True:
            await self.flush()
            try:
                sent = socket.send_fds(self._connection, [frame], [connection.fileno()])
                break
            except BlockingIOError:
                self._send_later(b"")  # what was unsent has just filled the socket
                await self._is_sent.wait()
        if sent < len(frame):
            self._send_later(frame[sent:])

    def stop(self) -> tuple[socket.socket, bytes]:
        """Read no more. Returns: the socket, still to be closed by close(), and what has arrived and was not taken."""
        self._stop_reading()
        return self._connection, bytes(self._arrived)

    async def flush(self) -> None:
        """Wait until all is sent, or the peer gone."""
        while self._unsent:
            self._is_sent.clear()
            await self._is_sent.wait()

    def close(self) -> None:
        """Drop what was not sent. Who waits for frames waits for ever: cancel it first."""
        if self._connection.fileno() >= 0:
            self._stop_reading()
            self._loop.remove_writer(self._connection)
        self._connection.close()
        self._unsent.clear()
        self._is_sent.set()

    def _stop_reading(self) -> None:
        self._is_at_end = True
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)

    def _receive(self) -> None:
        """Read all there is: uvloop tells of a socket that was reset, with bytes in it or not, no second time.

        A peer that sends faster than it is read has its turn again and again, and may fill twice the longest frame.
        """
        if self._is_at_end:
            return
        self._has_news.set()
        for _ in range(_READS):
            if len(self._arrived) > 2 * (self.frame_bytes_max + HEADER.size):
                self._loop.call_soon(self._receive)  # once frames were taken
                return
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # The peer left frames unread. The kernel says so only behind all that it had sent.
                data = b""
            self._arrived += data
            if not data:
                self._stop_reading()
                return
        self._loop.call_soon(self._receive)

    def _take_frame(self) -> tuple[K, bytes] | None:
        return take_frame(self._arrived, self._kinds, self.frame_bytes_max)

    def _send_later(self, rest: bytes) -> None:
        """Once the socket has room; `_is_sent` tells when that and all else is sent."""
        self._unsent += rest
        self._is_sent.clear()
        self._loop.add_writer(self._connection, self._send_rest)

    def _send_rest(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._connection)
            self._is_sent.set()

    def _send(self, data: bytes | bytearray) -> int:
        """Returns: how many of the bytes need not be sent any more."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)
