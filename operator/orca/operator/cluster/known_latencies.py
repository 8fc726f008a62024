"""The latencies that pools have told, for a while: a reconcile may come every two seconds, and a read is not free.

This is in memory and holds no truth: an operator that starts reads again.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

from orca.pool.latency_counts import LatencyCounts


@dataclass(frozen=True, slots=True)
class _Read:
    revision: str | None  # of the model in force
    counts: LatencyCounts
    at_s: float


class KnownLatencies:
    """The last reads of all resources. Reconciles of one resource never overlap; those of different ones may."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: clock: seconds; only differences count."""
        self._clock = clock
        self._reads: dict[str, _Read] = {}

    def is_fresh(self, uid: str, age_max_s: float) -> bool:
        """Return whether the last read is not older than so many seconds."""
        read = self._reads.get(uid)
        return read is not None and self._clock() - read.at_s < age_max_s

    def find(self, uid: str, revision: str | None) -> LatencyCounts | None:
        """Return what was read last; None if that was of another model, or nothing."""
        read = self._reads.get(uid)
        return None if read is None or read.revision != revision else read.counts

    def note(self, uid: str, revision: str | None, counts: LatencyCounts) -> None:
        """Note a read that has just been made."""
        self._reads[uid] = _Read(revision, counts, self._clock())

    def keep(self, uids: Set[str]) -> None:
        """Forget all other resources: they are gone."""
        for uid in self._reads.keys() - uids:
            self._reads.pop(uid, None)
