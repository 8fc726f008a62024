"""Frames on a local stream socket (frame_stream.py), as a thread reads and writes them: every call waits."""

import contextlib
import enum
import socket
import threading
from typing import Generic, TypeVar

from orca.core.frame_stream import FRAME_BYTES_MAX, HEADER

_READ_BYTES = 1 << 16
_LAST_S = 0.1
"""How long the last frame waits for one that is being written."""

K = TypeVar("K", bound=enum.IntEnum)


class FrameSocket(Generic[K]):
    """One end: reads by one thread, whole-frame writes by any."""

    def __init__(self, connection: socket.socket, kinds: type[K], arrived: bytes = b"") -> None:
        """
        Args:
            connection: closed by close().
            kinds: what the frames that come may be.
            arrived: what was read of it before.
        """
        connection.setblocking(True)
        self._connection = connection
        self._kinds = kinds
        self._arrived = bytearray(arrived)
        self._descriptors: list[int] = []
        self._write_lock = threading.Lock()

    def read(self) -> tuple[K, bytes] | None:
        """The next frame; None when the peer is gone. Raises: ValueError for an unknown kind or a frame too long."""
        header = self._take(HEADER.size)
        if header is None:
            return None
        size, kind = HEADER.unpack(header)
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes, {FRAME_BYTES_MAX} are allowed")
        payload = self._take(size)
        return None if payload is None else (self._kinds(kind), payload)

    def take_socket(self) -> socket.socket:
        """The socket that came with the frame which was read last (FrameStream.hand_over)."""
        return socket.socket(fileno=self._descriptors.pop(0))

    def write(self, frame: bytes) -> None:
        """Raises: OSError when the peer is gone."""
        with self._write_lock:
            self._connection.sendall(frame)

    def close(self, last: bytes = b"") -> None:
        """End both ways, and every call that waits. Safe from any thread, and more than once.

        Args: last: a frame for the peer, which goes out unless the one before it waits for the peer to read.
        """
        # Whoever has just written may hold the lock a moment longer.
        if last and self._write_lock.acquire(timeout=_LAST_S):
            with contextlib.suppress(OSError):  # gone, or full
                self._connection.send(last, socket.MSG_DONTWAIT)
            self._write_lock.release()
        with contextlib.suppress(OSError):  # it was closed before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _take(self, size: int) -> bytes | None:
        """The next bytes; None when the peer is gone before they are all there."""
        while len(self._arrived) < size:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._connection, _READ_BYTES, 1)
            except OSError:
                return None  # it was reset, or closed here
            self._descriptors += descriptors
            if not data:
                return None
            self._arrived += data
        taken = bytes(self._arrived[:size])
        del self._arrived[:size]
        return taken
