"""Run times that a scheduler measures for the order of claims: of a token, and of prompt tokens in a step."""

from collections import deque
from collections.abc import Iterable

from orca.core.domain.step import Epoch
from orca.scheduler.observer import IterationRecord, Observer
from orca.scheduler.policy.batch import BatchRow, GroupRequest

WINDOW = 64
"""Latest values that an average is of."""

TRIMMED = 8
"""Share of a window, one in so many, that is left out at each end. So a stall or two results at once change nothing."""

LEAST_OF = 32
"""Intervals of which one shortest time is taken, but for the trimmed ones."""

FORGOTTEN_AFTER = 64
"""Steps in a row without the watched request after which another one is watched."""


class RunTimes(Observer):
    """Averages over the latest steps, in milliseconds; 0 until something was measured.

    The time between two tokens is that of a request in the steps. Prompts of others and steps of other micro-batches
    are part of it, as they are for any request. One request is watched at a time, so a step costs no more.
    """

    def __init__(self) -> None:
        self._plain_ms: deque[float] = deque(maxlen=WINDOW)  # steps without prompts, from submit to return
        self._rows: deque[int] = deque(maxlen=WINDOW)  # of these steps
        self._prompt_token_ms: deque[float] = deque(maxlen=WINDOW)
        self._intervals_ms: deque[float] = deque(maxlen=WINDOW)  # between two tokens of the watched request
        self._newest_ms: list[float] = []  # the intervals since the last shortest one was taken
        self._least_ms = 0.0
        self._watched: GroupRequest | None = None
        self._watched_ns = 0  # its last step returned
        self._absent = 0  # steps since then

    @property
    def token_ms(self) -> float:
        """Return the time between two tokens of a request."""
        return _trimmed_mean(self._intervals_ms)

    @property
    def prompt_token_ms(self) -> float:
        """Return the time by which a prompt token makes its step longer."""
        return _trimmed_mean(self._prompt_token_ms)

    @property
    def least_token_ms(self) -> float:
        """Return the shortest time between two tokens that was seen more than once; 0 while few were measured."""
        return self._least_ms

    @property
    def prompt_cost(self) -> float:
        """Return the cost of a prompt token, in output tokens, at most 1; it is 1 until all is measured.

        A prompt token makes a step longer for all of its rows. An output token takes one row of a step.
        """
        if not self.token_ms or not self.prompt_token_ms:
            return 1.0
        return min(1.0, self.prompt_token_ms * _trimmed_mean(self._rows) / self.token_ms)

    def broke(self, epoch: Epoch, reason: str) -> None:  # noqa: ARG002 - shape of an observer
        self._watched = None

    def iterated(self, record: IterationRecord) -> None:
        rows = record.batch.rows
        prompt_tokens = record.batch.source_tokens + sum(row.count for row in rows if row.is_of_prompt)
        step_ms = (record.returned_ns - record.submitted_ns) / 1e6
        if not prompt_tokens:
            self._plain_ms.append(step_ms)
            self._rows.append(len(rows))
        elif self._plain_ms:
            self._prompt_token_ms.append(max(0.0, step_ms - _trimmed_mean(self._plain_ms)) / prompt_tokens)
        self._watch(rows, record.returned_ns)

    def _watch(self, rows: tuple[BatchRow, ...], returned_ns: int) -> None:
        watched = self._watched
        row = next((row for row in rows if row.request is watched), None)
        is_elsewhere = row is None and watched is not None and not watched.is_over
        if is_elsewhere and self._absent < FORGOTTEN_AFTER:  # the step is of another micro-batch
            self._absent += 1
            return
        if row is not None and not row.is_of_prompt:
            self._add((returned_ns - self._watched_ns) / 1e6)
        if row is None or row.request.is_over:
            # The youngest of the step stays longest.
            row = next((row for row in reversed(rows) if row.sample and not row.request.is_over), None)
        self._watched, self._watched_ns = (None if row is None else row.request), returned_ns
        self._absent = 0

    def _add(self, interval_ms: float) -> None:
        self._intervals_ms.append(interval_ms)
        self._newest_ms.append(interval_ms)
        if len(self._newest_ms) == LEAST_OF:
            least_ms = sorted(self._newest_ms)[LEAST_OF // TRIMMED]
            self._least_ms = min(self._least_ms or least_ms, least_ms)
            self._newest_ms.clear()


def _trimmed_mean(values: Iterable[float]) -> float:
    """Return the mean without the smallest and the largest values; 0 if there are none."""
    ordered = sorted(values)
    cut = len(ordered) // TRIMMED
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept) if kept else 0.0
