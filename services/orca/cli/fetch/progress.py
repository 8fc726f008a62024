"""How far a fetch is: written by its threads, read by the internal port and the log."""

import threading

from orca.core.fetch_report import FetchProgress, progress_body
from orca.core.process.internal_port import Page


class Progress:
    """Counts of one fetch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0
        self._problem: str | None = None

    @property
    def figures(self) -> FetchProgress:
        with self._lock:
            return FetchProgress(self._done, self._total, self._problem)

    def page(self) -> Page:
        """What the internal port answers."""
        return Page(progress_body(self.figures))

    def begin(self, *, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total, self._problem = done, total, None

    def add(self, count: int) -> None:
        """Bytes that came; fewer than none when what came has to be thrown away."""
        with self._lock:
            self._done += count
            self._problem = None

    def fail(self, problem: str) -> None:
        with self._lock:
            self._problem = problem
