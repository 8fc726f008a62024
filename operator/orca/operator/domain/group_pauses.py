"""Pauses of groups: rules for when a group gives way and when it comes back. Pure.

A group is all or nothing. If not all of its pods find a node in time, or if the API server refuses some of them, the
others hold what other groups may need. If
its containers end again and again, it may be on a bad node. In both cases the whole group is taken down, stages and
scheduler, and comes back after a wait that doubles each time. Waits differ from group to group, so that two groups that
were in each other's way do not come back together.

The state of this is in an annotation of the stages' StatefulSet until the group serves.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.objects import annotations
from orca.operator.domain.problems import CRASHING, FORBIDDEN, NO_CAPACITY

WAIT_FIRST_S, WAIT_MAX_S = 30, 900
"""Each wait is lengthened by up to its own length."""

RESTARTS_MAX = 10
"""Restarts of one container. A kubelet waits up to five minutes between them, so this is most of an hour."""


NUMBER_MAX = 2**53
"""Greatest number in a pause that the operator has written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The default is the pause of a group that never gave way, or has served since."""

    times: int = 0  # that it has given way, in a row
    begun_s: int | None = None  # seconds since 1970; None while the group is there
    reason: str | None = None  # of the last time: a reason of problems.py
    room_s: int | None = None  # seconds since 1970: when others last made room for it
    cause: str | None = None  # message of the pod that kept crashing: while the pause is on, no pod is there to say it

    @property
    def is_on(self) -> bool:
        return self.begun_s is not None

    @property
    def annotations(self) -> dict[str, str]:
        if self == Pause():
            return {}
        written = asdict(self)
        if self.cause is None:
            del written["cause"]  # releases before this one read no other names
        return {names.PAUSE_ANNOTATION: json.dumps(written)}

    @property
    def ended(self) -> "Pause":
        return Pause(times=self.times, reason=self.reason)

    def ends_s(self, group: str) -> int:
        """Return when a pause that is on ends, in seconds since 1970."""
        assert self.begun_s is not None
        wait_s = int(min(WAIT_MAX_S, WAIT_FIRST_S * 2 ** min(self.times - 1, 10)))
        digest = hashlib.sha256(f"{group} {self.begun_s}".encode()).digest()
        return self.begun_s + wait_s + wait_s * digest[0] // 256

    def is_over(self, group: str, now_s: float) -> bool:
        """Return whether the time of a pause that is on is over.

        A clock that went back meanwhile ends the pause, since nobody knows any more how long it has lasted.
        """
        assert self.begun_s is not None
        return not self.begun_s <= now_s < self.ends_s(group)


def read(stages: Mapping[str, Any]) -> Pause:
    """Read the pause on the StatefulSet of a group's stages. An annotation that is not ours counts as none."""
    written = annotations(stages["metadata"]).get(names.PAUSE_ANNOTATION)
    try:
        found = Pause(**json.loads(written or "{}"))
    except (TypeError, ValueError, RecursionError):
        return Pause()
    counts = [each for each in (found.times, found.begun_s, found.room_s) if each is not None]
    is_sound = all(isinstance(each, int) and 0 <= each <= NUMBER_MAX for each in counts) and found.times is not None
    is_sound = is_sound and (found.cause is None or isinstance(found.cause, str))
    return found if is_sound and found.reason in (None, NO_CAPACITY, CRASHING, FORBIDDEN) else Pause()


def next_pause(
    pause: Pause, group: str, *, is_ready: bool, problem: str | None, now_s: float, cause: str | None = None
) -> Pause:
    """Return the pause to write on a group.

    Args:
        problem: reason why it must give way; None if it need not.
        cause: what a pod of it says about the problem; None if none says anything.
    """
    if pause.is_on:
        return pause.ended if pause.is_over(group, now_s) else pause
    # A scheduler may stay ready for a moment after its stages are gone, so readiness keeps no group.
    if problem is not None:
        return Pause(times=pause.times + 1, begun_s=int(now_s), reason=problem, cause=cause)
    return Pause() if is_ready else pause


def with_room(pause: Pause, startup_s: float, now_s: float) -> Pause:
    """Return the pause of a group for which others make room right now.

    The group gets its startup time once more, counted from the end of that. Writes are startup_s / 2 apart or more.
    """
    is_recent = pause.room_s is not None and now_s - pause.room_s < startup_s / 2
    return pause if is_recent or pause.is_on else replace(pause, room_s=int(now_s))


def has_had_its_time(pause: Pause, startup_s: float, now_s: float) -> bool:
    """Return whether an overdue group has also used up the time that it got when others made room for it."""
    return pause.room_s is None or now_s - pause.room_s > startup_s
