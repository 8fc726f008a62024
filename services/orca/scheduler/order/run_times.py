"""Run times that a scheduler measures for the order of claims: of a token, and of prompt tokens in a step."""

from orca.core.domain.step import Epoch
from orca.scheduler.observer import IterationRecord, Observer
from orca.scheduler.policy.state import BatchRow, GroupRequest

SHARE = 1 / 32
"""Weight of the newest step in an average."""

TRUSTED_STEPS = 32
"""Intervals between tokens after which the shortest one counts: the first steps of an engine are odd."""


class RunTimes(Observer):
    """Averages over the latest steps, in milliseconds; 0 until something was measured.

    The time between two tokens is that of a request in the steps. Prompts of others and steps of other micro-batches
    are part of it, as they are for any request. One request is watched at a time, so a step costs no more.
    """

    def __init__(self) -> None:
        self.token_ms = 0.0  # between two tokens of a request
        self.prompt_token_ms = 0.0  # by which a prompt token makes its step longer
        self._plain_ms = 0.0  # a step without prompts, from submit to return
        self._rows = 0.0  # of a step without prompts
        self._watched: GroupRequest | None = None
        self._watched_ns = 0  # its last step returned
        self._intervals = 0
        self._least_ms = 0.0

    @property
    def least_token_ms(self) -> float:
        """Return the shortest time between two tokens; 0 while few were measured."""
        return self._least_ms if self._intervals >= TRUSTED_STEPS else 0.0

    @property
    def prompt_cost(self) -> float:
        """Return the cost of a prompt token, in output tokens, at most 1; it is 1 until all is measured.

        A prompt token makes a step longer for all of its rows. An output token takes one row of a step.
        """
        if not self.token_ms or not self.prompt_token_ms:
            return 1.0
        return min(1.0, self.prompt_token_ms * self._rows / self.token_ms)

    def broke(self, epoch: Epoch, reason: str) -> None:  # noqa: ARG002 - shape of an observer
        self._watched = None

    def iterated(self, record: IterationRecord) -> None:
        rows = record.batch.rows
        prompt_tokens = record.batch.source_tokens + sum(row.count for row in rows if row.is_of_prompt)
        step_ms = (record.returned_ns - record.submitted_ns) / 1e6
        if not prompt_tokens:
            self._plain_ms = _moved(self._plain_ms, step_ms)
            self._rows = _moved(self._rows, len(rows))
        elif self._plain_ms:
            self.prompt_token_ms = _moved(self.prompt_token_ms, max(0.0, step_ms - self._plain_ms) / prompt_tokens)
        self._watch(rows, record.returned_ns)

    def _watch(self, rows: tuple[BatchRow, ...], returned_ns: int) -> None:
        watched = self._watched
        row = next((row for row in rows if row.request is watched), None)
        if row is None and watched is not None and not watched.is_over:
            # The step is of another micro-batch.
            return
        if row is not None and not row.is_of_prompt:
            interval_ms = (returned_ns - self._watched_ns) / 1e6
            self.token_ms = _moved(self.token_ms, interval_ms)
            self._intervals += 1
            self._least_ms = min(self._least_ms or interval_ms, interval_ms)
        if row is None or row.request.is_over:
            # The youngest of the step stays longest.
            row = next((row for row in reversed(rows) if row.sample and not row.request.is_over), None)
        self._watched, self._watched_ns = (None if row is None else row.request), returned_ns


def _moved(average: float, value: float) -> float:
    return value if not average else average + SHARE * (value - average)
