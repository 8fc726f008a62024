"""The progress of a fetch: its threads write it, the internal port and the log read it."""

import threading

from orca.core.fetch_report import FetchProgress, progress_body
from orca.core.process.internal_port import Page


class ProgressCounter:
    """The counts of one fetch."""

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
        """Return the answer of the internal port."""
        return Page(progress_body(self.figures))

    def begin(self, *, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total, self._problem = done, total, None

    def add(self, count: int) -> None:
        """Add received bytes; a negative count takes back bytes that were discarded."""
        with self._lock:
            self._done += count
            self._problem = None

    def fail(self, problem: str) -> None:
        with self._lock:
            self._problem = problem
