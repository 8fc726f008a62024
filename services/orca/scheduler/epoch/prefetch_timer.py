"""The time at which a prefetched step goes out: soon enough for the stage that waits for it, and late enough to include
a request that arrives meanwhile.

Prefetch hides the time that a step needs to reach a stage and its result to return, one or two milliseconds. A step
sent right after its predecessor would be chosen a whole step too early: a request that arrives then would wait for two
steps, not one.
"""

from orca.scheduler.policy.state import StepInFlight

_ROUND_TRIP_NS = 2e6
"""Time to a stage and back, until it was measured."""
_FAST, _SLOW = 1 / 2, 1 / 16
"""Weights of a new measurement: fast if it makes the next step go out earlier, slow if later. Too early may make a
request wait; too late makes the stage wait."""


class PrefetchTimer:
    """Estimates how long steps take in a group of one stage, which runs one step after the other."""

    def __init__(self) -> None:
        self._round_trip_ns = _ROUND_TRIP_NS  # of a step that computes nothing
        self._step_ns: float | None = None  # of a step with one token of each request
        self._token_ns: float | None = None  # of each further token, of prompts and sources
        self._read_ns = 0  # time at which the last step was read

    def read(self, step: StepInFlight, now_ns: int) -> None:
        """Learn from a step that has returned."""
        measured_ns, further = now_ns - self._start_ns(step), _further_tokens(step)
        self._read_ns = now_ns
        if not step.rows:
            is_earlier = measured_ns > self._round_trip_ns
            self._round_trip_ns = _smoothed(self._round_trip_ns, measured_ns, is_earlier=is_earlier)
        elif not further:
            self._step_ns = _near_lowest(self._step_ns, measured_ns)
        elif self._step_ns is not None:
            self._token_ns = _near_lowest(self._token_ns, max(0.0, measured_ns - self._step_ns) / further)

    def due_ns(self, step: StepInFlight) -> int:
        """Return the time at which the step after this one, the oldest in flight, is to go out.

        It is in the past if this step computes nothing, or if nothing has been measured yet.
        """
        further = _further_tokens(step)
        if not step.rows or self._step_ns is None or (further and self._token_ns is None):
            return 0
        expected_ns = self._step_ns + further * (self._token_ns or 0.0)
        return self._start_ns(step) + int(expected_ns - self._round_trip_ns)

    def _start_ns(self, step: StepInFlight) -> int:
        return max(step.submitted_ns, self._read_ns)


def _further_tokens(step: StepInFlight) -> int:
    """Return the tokens of a step beyond one of each request."""
    return sum(row.count for row in step.rows) - len(step.rows) + step.batch.source_tokens


def _near_lowest(before: float | None, now: float) -> float:
    """Return an estimate near the lowest recent measurement."""
    return now if before is None else _smoothed(before, now, is_earlier=now < before)


def _smoothed(before: float, now: float, *, is_earlier: bool) -> float:
    """Return the estimate after a measurement. Args: is_earlier: the next step goes out earlier for it."""
    return before + (now - before) * (_FAST if is_earlier else _SLOW)
