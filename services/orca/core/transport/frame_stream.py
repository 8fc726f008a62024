"""Frames on a local stream socket for an event loop.

Layout of a frame, little endian: u32 number of bytes that follow the header, u8 kind, payload. Each socket defines its
own kinds.
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
"""Reads in a row, before the loop turns to others."""
FRAME_BYTES_MAX = 1 << 30
"""The same bound as for a gRPC message (core.transport.grpc_links): no peer can make this process hold more."""

K = TypeVar("K", bound=enum.IntEnum)


def encode(kind: enum.IntEnum, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def take_frame(arrived: bytearray, kinds: type[K], frame_bytes_max: int | None) -> tuple[K, bytes] | None:
    """Cut the first frame off what has arrived; return None while it is incomplete.

    Args: frame_bytes_max: longest payload that is accepted; None accepts any.
    Raises: ValueError for an unknown kind or a frame that is too long.
    """
    if len(arrived) < HEADER.size:
        return None
    size, kind = HEADER.unpack_from(arrived)
    if frame_bytes_max is not None and size > frame_bytes_max:
        raise ValueError(f"a frame of {size} bytes is too long: {frame_bytes_max} are allowed")
    end = HEADER.size + size
    if len(arrived) < end:
        return None
    payload = bytes(arrived[HEADER.size : end])
    del arrived[:end]
    return kinds(kind), payload


class FrameStream(Generic[K]):
    """One end of the socket: reads frames as they come, and writes without waiting.

    If a write finds the peer gone or the socket is reset, asyncio's own streams drop what has arrived and was not read
    yet. A peer's last frame says why it ends, so here reading is independent of writing.
    """

    def __init__(self, connection: socket.socket, kinds: type[K], frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        """
        Args:
            connection: closed by close().
            kinds: the kinds of frames that may come.
            frame_bytes_max: longest payload that is accepted; may be changed at any time.
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
        """Yield frames until the peer is gone. Raises: ValueError for an unknown kind or a frame that is too long."""
        # One reader for all frames: the loop's sock_recv would register the socket again for each frame.
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
        """Send a frame, at once if the socket takes it. For a peer that is gone this does nothing."""
        if self._unsent:
            self._unsent += frame
        elif (sent := self._send(frame)) < len(frame):
            self._send_later(frame[sent:])

    async def write_with_socket(self, frame: bytes, connection: socket.socket) -> None:
        """Send a frame after all that is unsent, and a copy of a socket with it (FrameSocket.take_socket).

        Raises: OSError if the peer is gone.
        """
        while True:
            await self.flush()
            try:
                sent = socket.send_fds(self._connection, [frame], [connection.fileno()])
                break
            except BlockingIOError:
                self._send_later(b"")  # the unsent bytes have just filled the socket
                await self._is_sent.wait()
        if sent < len(frame):
            self._send_later(frame[sent:])

    def stop(self) -> tuple[socket.socket, bytes]:
        """Stop reading. Returns: the socket, still to be closed by close(), and the bytes that were not taken."""
        self._stop_reading()
        return self._connection, bytes(self._arrived)

    async def flush(self) -> None:
        """Wait until all is sent, or the peer is gone."""
        while self._unsent:
            self._is_sent.clear()
            await self._is_sent.wait()

    def close(self) -> None:
        """Close, and drop what was not sent. A task that waits for frames would wait for ever: cancel it first."""
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
        """Read all there is: uvloop calls back only once for a socket that was reset, even if bytes are left in it.

        For a peer that sends faster than it is read, this calls itself again. It may fill twice the longest frame.
        """
        if self._is_at_end:
            return
        self._has_news.set()
        for _ in range(_READS):
            if len(self._arrived) > 2 * (self.frame_bytes_max + HEADER.size):
                self._loop.call_soon(self._receive)  # after frames were taken
                return
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # The peer left frames unread. The kernel reports that only after all that the peer had sent.
                data = b""
            self._arrived += data
            if not data:
                self._stop_reading()
                return
        self._loop.call_soon(self._receive)

    def _take_frame(self) -> tuple[K, bytes] | None:
        return take_frame(self._arrived, self._kinds, self.frame_bytes_max)

    def _send_later(self, rest: bytes) -> None:
        """Send when the socket has room; `_is_sent` is set when all is sent."""
        self._unsent += rest
        self._is_sent.clear()
        self._loop.add_writer(self._connection, self._send_rest)

    def _send_rest(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._connection)
            self._is_sent.set()

    def _send(self, data: bytes | bytearray) -> int:
        """Send what the socket takes. Returns: the number of bytes that need not be sent any more."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)
