"""Writes log lines into a pipe without ever making the caller wait, even if nobody reads the pipe.

A write to a full pipe blocks, and in a service it would block the event loop: one stuck log collector would freeze
streams, heartbeats and leases. So a thread writes from a bounded queue. Lines that do not fit are counted. The count is
logged as soon as the pipe takes bytes again.
"""

import collections
import logging
import os
import select
import threading

QUEUE_BYTES_MAX = 1 << 20
"""Bound on the lines that wait to be written: some thousands."""

FLUSH_SECONDS = 1.0
"""A process that ends waits this long for its last lines to be written."""


class PipeHandler(logging.Handler):
    """Writes lines to a file descriptor from a thread of its own."""

    def __init__(self, descriptor: int, *, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._queue_bytes_max = queue_bytes_max
        self._lines: collections.deque[bytes] = collections.deque()
        self._queued_bytes = 0
        self._lost = 0
        self._is_writing = False
        self._changed = threading.Condition()
        # A daemon: a write that never returns must not hold up the end of the process.
        threading.Thread(target=self._write_all, name="log-pipe", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._queued_bytes + len(line) > self._queue_bytes_max:
                self._lost += 1
            else:
                self._lines.append(line)
                self._queued_bytes += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, FLUSH_SECONDS at most."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._has_work() or self._is_writing), FLUSH_SECONDS)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work)
                self._is_writing = True
                batch, lost = b"".join(self._lines), self._lost
                self._lines.clear()
                self._queued_bytes = self._lost = 0
            self._write(batch)
            if lost:
                # After the lines that filled the queue, where the lost lines would have been.
                self._write(self._format_lost(lost))

    def _has_work(self) -> bool:
        return bool(self._lines or self._lost)

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        try:
            # Bypass the stream's own buffer: its lock, held by a write that never returns, would abort the interpreter.
            while rest:
                rest = rest[self._write_some(rest) :]
        except OSError:
            # Nobody will ever read these lines, and there is no other place to report that.
            return

    def _write_some(self, content: memoryview) -> int:
        """Write at least one byte. Returns: the number of bytes. Raises: OSError if nobody will ever read."""
        while True:
            try:
                return os.write(self._descriptor, content)
            except BlockingIOError:
                # Another process that shares the pipe made it non-blocking. This thread waits all the same.
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        room.poll()

    def _format_lost(self, lost: int) -> bytes:
        record = logging.LogRecord(
            __name__, logging.WARNING, __file__, 0, "%d log lines lost: nobody read them in time", (lost,), None
        )
        record.lines_lost = lost
        return self.format(record).encode() + b"\n"
