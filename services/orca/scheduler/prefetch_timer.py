"""When a prefetched step is to go out: in time for the stage that waits for it, and so late that a request which comes
meanwhile is in it.

Prefetch hides what it takes to get a step to a stage and its result back, one or two milliseconds. A step that went out
as soon as its predecessor had would be chosen a whole step too early: who comes then waited for two steps, not one.
"""

from orca.scheduler.policy.state import StepInFlight

_WAY_NS = 2e6
"""To a stage and back, until it was measured."""
_CLOSE, _FAR = 1 / 2, 1 / 16
"""How fast an estimate follows what makes a step go out earlier, and what would make it go out later: too early, and
somebody may have to wait; too late, and the stage does."""


class PrefetchTimer:
    """How long the steps of a group of one stage take, which runs one after the other."""

    def __init__(self) -> None:
        self._way_ns = _WAY_NS  # of a step that computes nothing
        self._step_ns: float | None = None  # of one with a token of each request
        self._token_ns: float | None = None  # of each token more, of prompts
        self._read_ns = 0  # when the last one was read

    def read(self, step: StepInFlight, now_ns: int) -> None:
        """A step has come back."""
        taken_ns, more = now_ns - self._began_ns(step), _more_tokens(step)
        self._read_ns = now_ns
        if not step.rows:
            self._way_ns = _followed(self._way_ns, taken_ns, is_earlier=taken_ns > self._way_ns)
        elif not more:
            self._step_ns = _lowered(self._step_ns, taken_ns)
        elif self._step_ns is not None:
            self._token_ns = _lowered(self._token_ns, max(0.0, taken_ns - self._step_ns) / more)

    def due_ns(self, step: StepInFlight) -> int:
        """When the step behind this one, the oldest in flight, is to go out.

        In the past where this one computes nothing, and where nothing is known yet.
        """
        more = _more_tokens(step)
        if not step.rows or self._step_ns is None or (more and self._token_ns is None):
            return 0
        taken_ns = self._step_ns + more * (self._token_ns or 0.0)
        return self._began_ns(step) + int(taken_ns - self._way_ns)

    def _began_ns(self, step: StepInFlight) -> int:
        return max(step.submitted_ns, self._read_ns)


def _more_tokens(step: StepInFlight) -> int:
    """Than one of each request."""
    return sum(row.count for row in step.rows) - len(step.rows)


def _lowered(before: float | None, now: float) -> float:
    """An estimate near the lowest of late."""
    return now if before is None else _followed(before, now, is_earlier=now < before)


def _followed(before: float, now: float, *, is_earlier: bool) -> float:
    """An estimate that follows. Args: is_earlier: it makes the next step go out earlier."""
    return before + (now - before) * (_CLOSE if is_earlier else _FAR)
