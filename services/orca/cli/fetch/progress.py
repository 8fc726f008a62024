"""How far a fetch is: written by its threads, read by the internal port and the log."""

import json
import threading
from dataclasses import asdict, dataclass

from orca.core.internal_port import Page


@dataclass(frozen=True, slots=True)
class Figures:
    bytes_done: int = 0  # on the volume, those of earlier starts too
    bytes_total: int = 0  # 0 until the files are listed
    problem: str | None = None  # what the last try met, REASON: SENTENCE, until bytes come again


class Progress:
    """Counts of one fetch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0
        self._problem: str | None = None

    @property
    def figures(self) -> Figures:
        with self._lock:
            return Figures(self._done, self._total, self._problem)

    def page(self) -> Page:
        """`/progress`."""
        return Page(json.dumps(asdict(self.figures)).encode())

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
