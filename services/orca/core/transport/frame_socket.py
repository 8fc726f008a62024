"""Frames on a local stream socket (frame_stream.py), as a thread reads and writes them: every call waits."""

import contextlib
import socket
import threading
from typing import Generic

from orca.core.transport.frame_stream import K, take_frame

_READ_BYTES = 1 << 16
_LAST_S = 0.1
"""How long the last frame waits for one that is being written."""


class FrameSocket(Generic[K]):
    """One end: reads by one thread, whole-frame writes by any."""

    def __init__(
        self,
        connection: socket.socket,
        kinds: type[K],
        *,
        arrived: bytes = b"",
        frame_bytes_max: int | None = None,
        takes_sockets: bool = False,
    ) -> None:
        """
        Args:
            connection: closed by close().
            kinds: what the frames that come may be.
            arrived: what was read of it before.
            frame_bytes_max: payload of the longest that is taken; None trusts the peer.
            takes_sockets: they may come with frames; elsewhere the kernel drops them.
        """
        connection.setblocking(True)
        self._connection = connection
        self._kinds = kinds
        self._arrived = bytearray(arrived)
        self._frame_bytes_max = frame_bytes_max
        self._takes_sockets = takes_sockets
        self._descriptors: list[int] = []
        self._write_lock = threading.Lock()

    def read(self) -> tuple[K, bytes] | None:
        """The next frame; None when the peer is gone. Raises: ValueError for an unknown kind or a frame too long."""
        while (frame := take_frame(self._arrived, self._kinds, self._frame_bytes_max)) is None:
            try:
                data = self._receive()
            except OSError:
                return None  # it was reset, or closed here
            if not data:
                return None
            self._arrived += data
        return frame

    def take_socket(self) -> socket.socket:
        """The oldest socket that came with a frame (FrameStream.write_with_socket) and was not taken.

        Raises: OSError when there is none: this process had no descriptor left for it.
        """
        if not self._descriptors:
            raise OSError("a socket was sent, and this process has no descriptor left for it")
        taken = socket.socket(fileno=self._descriptors.pop(0))
        taken.set_inheritable(False)
        return taken

    def write(self, frame: bytes) -> None:
        """Raises: OSError when the peer is gone."""
        with self._write_lock:
            self._connection.sendall(frame)

    def end(self, last: bytes = b"") -> None:
        """End both ways, and every call that waits; close() is still to follow. From any thread, more than once.

        Args: last: a frame for the peer, which goes out unless the one before it waits for the peer to read.
        """
        # Whoever has just written may hold the lock a moment longer.
        if last and self._write_lock.acquire(timeout=_LAST_S):
            with contextlib.suppress(OSError):  # gone, or full
                self._connection.send(last, socket.MSG_DONTWAIT)
            self._write_lock.release()
        with contextlib.suppress(OSError):  # it was closed before
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket. For the thread that reads: what has its number next is nothing for it to read."""
        with self._write_lock:
            self._connection.close()
        while self._descriptors:
            self.take_socket().close()

    def _receive(self) -> bytes:
        if not self._takes_sockets:
            return self._connection.recv(_READ_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self._connection, _READ_BYTES, 1)
        self._descriptors += descriptors
        return data
