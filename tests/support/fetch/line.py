"""A line to a server on loopback: counts what comes down it, and falls silent when it is told."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Line:
    """Each connection of a client becomes one to the server."""

    def __init__(self, port: int) -> None:
        """Args: port: of the server."""
        self._server_port = port
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.bytes_down = 0
        self.silent_after: int | None = None  # bytes down; what comes behind them is lost

    def accept(self) -> None:
        """Accept connections until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def close(self) -> None:
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _carry(self, source: socket.socket, target: socket.socket, is_down: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if is_down and not self._count(len(piece)):
                    continue
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def _count(self, count: int) -> bool:
        """Count the bytes of a piece. Returns: whether the piece is carried on."""
        with self._lock:
            if self.silent_after is not None and self.bytes_down >= self.silent_after:
                return False
            self.bytes_down += count
            return True


@contextmanager
def line_to(port: int) -> Iterator[Line]:
    """Run a line to a local port, until the block ends."""
    line = Line(port)
    thread = threading.Thread(target=line.accept, daemon=True)
    thread.start()
    yield line
    line.close()
    thread.join(10)
