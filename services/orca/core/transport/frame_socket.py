"""Frames on a local stream socket (frame_stream.py) for threads: every call blocks."""

import contextlib
import socket
import threading
from typing import Generic

from orca.core.transport.frame_stream import K, take_frame

_READ_BYTES = 1 << 16
_LAST_S = 0.1
"""Longest time for which the last frame waits for a frame that is being written."""


class FrameSocket(Generic[K]):
    """One end of the socket: one thread reads, any thread writes whole frames."""

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
            kinds: the kinds of frames that may come.
            arrived: bytes that were read from the connection before.
            frame_bytes_max: longest payload that is accepted; None trusts the peer.
            takes_sockets: sockets may come with frames; otherwise the kernel drops them.
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
        """Return the next frame; None if the peer is gone. Raises: ValueError for an unknown kind or a long frame."""
        while (frame := take_frame(self._arrived, self._kinds, self._frame_bytes_max)) is None:
            try:
                data = self._receive()
            except OSError:
                return None  # the connection was reset, or closed here
            if not data:
                return None
            self._arrived += data
        return frame

    def take_socket(self) -> socket.socket:
        """Return the oldest socket that came with a frame (FrameStream.write_with_socket) and was not taken.

        Raises: OSError if there is none: this process had no descriptor left for it.
        """
        if not self._descriptors:
            raise OSError("a socket was sent, but this process has no file descriptor left for it")
        taken = socket.socket(fileno=self._descriptors.pop(0))
        taken.set_inheritable(False)
        return taken

    def write(self, frame: bytes) -> None:
        """Write one frame. Raises: OSError if the peer is gone."""
        with self._write_lock:
            self._connection.sendall(frame)

    def end(self, last: bytes = b"") -> None:
        """End both directions and every call that waits. Any thread may call this, repeatedly; close() has to follow.

        Args: last: a frame for the peer. It is sent unless the frame before it waits for the peer to read.
        """
        # A thread that has just written may hold the lock a moment longer.
        if last and self._write_lock.acquire(timeout=_LAST_S):
            with contextlib.suppress(OSError):  # gone, or full
                self._connection.send(last, socket.MSG_DONTWAIT)
            self._write_lock.release()
        with contextlib.suppress(OSError):  # closed before
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the reading thread may call this: its descriptor's number may be reused at once."""
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
