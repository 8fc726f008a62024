"""The liveness of ranks: which rank has been silent, or has made no progress at work, for too long.

These are decisions only, without processes or tasks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orca.worker.settings import WorkerSettings

_STRIDE_MAX_S = 1.0


@dataclass(slots=True)
class AwakeClock:
    """Seconds in which the controller itself was awake: each call adds the time since the last one, at most a second.

    So a controller that was stopped with its machine or container finds no rank silent when it wakes.
    """

    seconds: float = 0.0
    _last: float | None = None

    def advance(self, now: float) -> None:
        """Count the time up to now. Args: now: of any monotonic clock, in seconds."""
        if self._last is not None:
            self.seconds += min(now - self._last, _STRIDE_MAX_S)
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLiveness:
    """A rank's signs of life, as its controller sees them."""

    is_loaded: bool
    silent_s: float  # since any frame from it
    still_s: float  # since its progress mark moved or, while it loads, since it used the processor
    is_waiting: bool  # for another rank or for orders
    units: int  # time limits that a piece of its present work may take
    doing: str


def liveness_failure(rank: RankLiveness, settings: WorkerSettings) -> str | None:
    """Return why a rank must be killed; None if it may live.

    While a rank loads, only progress counts: loading may take hours, but no single tensor may. Later its heartbeat must
    arrive, and while it is at work it must also make progress.
    """
    if not rank.is_loaded:
        is_over = rank.still_s > settings.loading_silent_s
        return f"loads, and read nothing for {rank.still_s:.1f} s ({rank.doing})" if is_over else None
    if rank.silent_s > settings.rank_silent_s:
        return f"sent nothing for {rank.silent_s:.1f} s ({rank.doing})"
    if not rank.is_waiting and rank.still_s > settings.rank_silent_s * rank.units:
        return f"stood still for {rank.still_s:.1f} s ({rank.doing})"
    return None


def stage_still_s(ranks: Iterable[RankLiveness]) -> float:
    """Return for how long all ranks of a stage have only waited, without progress; 0 if one is at work.

    Work has its time limit here; a wait that nobody will end has its limit at the master. A wait that may last many
    time limits, as for long tensors or in a first step, counts for a part of its time only.
    """
    return min(
        (rank.still_s / rank.units if rank.is_loaded and rank.is_waiting else 0.0 for rank in ranks), default=0.0
    )
