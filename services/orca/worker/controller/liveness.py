"""When a rank has been silent, or has stood still at work, for too long: the decision, without processes or tasks."""

from collections.abc import Iterable
from dataclasses import dataclass

from orca.worker.settings import WorkerSettings

_STRIDE_MAX_S = 1.0


@dataclass(slots=True)
class AwakeClock:
    """Seconds in which the controller itself was awake: each look adds the time since the last one, one second at most.

    So a controller that was stopped with its machine or container finds no rank silent when it wakes.
    """

    seconds: float = 0.0
    _last: float | None = None

    def advance(self, now: float) -> None:
        """now: of any monotonic clock, in seconds."""
        if self._last is not None:
            self.seconds += min(now - self._last, _STRIDE_MAX_S)
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """A rank's signs of life, as its controller has them."""

    is_loaded: bool
    silent_s: float  # since any word of it
    still_s: float  # since its mark moved; while it loads, or since it computed
    is_waiting: bool  # for another rank or for orders
    units: int  # times the bound that a piece of its present work may take
    doing: str


def overdue(signs: Signs, settings: WorkerSettings) -> str | None:
    """Why the rank has to be killed; None while it may live.

    While it loads only getting on counts: it may take hours, but no single tensor may. Later it must be heard, and
    while it is at work it must also move.
    """
    if not signs.is_loaded:
        is_over = signs.still_s > settings.loading_silent_s
        return f"loads, and read nothing for {signs.still_s:.1f} s ({signs.doing})" if is_over else None
    if signs.silent_s > settings.rank_silent_s:
        return f"was not heard for {signs.silent_s:.1f} s ({signs.doing})"
    if not signs.is_waiting and signs.still_s > settings.rank_silent_s * signs.units:
        return f"stood still for {signs.still_s:.1f} s ({signs.doing})"
    return None


def stage_still_s(ranks: Iterable[Signs]) -> float:
    """For how long no rank of a stage has moved or been at work: work is bounded here, a lost wait by the master.

    Of a wait that may last many times the bound, as that for long tensors or in a first step, so many parts count once.
    """
    return min(
        (signs.still_s / signs.units if signs.is_loaded and signs.is_waiting else 0.0 for signs in ranks), default=0.0
    )
