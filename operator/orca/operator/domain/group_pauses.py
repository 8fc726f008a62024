"""When a group gives way and when it comes back: pure.

A group is all or nothing. One whose pods have not all found a node in their time holds what others may need, and one
whose containers end again and again may stand on a bad node. Either is taken down whole, stages and scheduler, and
comes back after a wait that doubles each time. Waits differ from group to group, so that two that were in each other's
way do not come back together.

What is to be known of it stands in an annotation of the stages' StatefulSet, and goes when the group serves.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.problems import CRASHING, NO_CAPACITY

WAIT_FIRST_S, WAIT_MAX_S = 30, 900
"""Each is lengthened by up to its own length."""

RESTARTS_MAX = 10
"""Of one container. A kubelet waits up to five minutes between them, so that is most of an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The default is that of a group which has not given way, or has served since."""

    times: int = 0  # that it has given way, in a row
    begun_s: int | None = None  # seconds since 1970; None when the group is back
    reason: str | None = None  # of the last time: a word of problems.py
    room_s: int | None = None  # seconds since 1970: when room was last being made for it

    @property
    def is_on(self) -> bool:
        return self.begun_s is not None

    @property
    def annotations(self) -> dict[str, str]:
        return {} if self == Pause() else {names.PAUSE_ANNOTATION: json.dumps(asdict(self))}

    @property
    def ended(self) -> "Pause":
        return Pause(times=self.times, reason=self.reason)

    def ends_s(self, group: str) -> int:
        """Of one that is on: seconds since 1970."""
        assert self.begun_s is not None
        wait_s = min(WAIT_MAX_S, WAIT_FIRST_S * 2 ** min(self.times - 1, 10))
        digest = hashlib.sha256(f"{group} {self.begun_s}".encode()).digest()
        return self.begun_s + wait_s + wait_s * digest[0] // 256

    def is_over(self, group: str, now_s: float) -> bool:
        """Of one that is on. A clock that went back since ends it: how long it has been is not known any more."""
        assert self.begun_s is not None
        return not self.begun_s <= now_s < self.ends_s(group)


def read(stages: Mapping[str, Any]) -> Pause:
    """From the StatefulSet of a group's stages. What another release or a person wrote there counts as nothing."""
    written = (stages["metadata"].get("annotations") or {}).get(names.PAUSE_ANNOTATION)
    try:
        found = Pause(**json.loads(written or "{}"))
    except (TypeError, ValueError):
        return Pause()
    counts = (found.times, found.begun_s or 0, found.room_s or 0)
    is_sound = all(isinstance(each, int) for each in counts) and found.reason in (None, NO_CAPACITY, CRASHING)
    return found if is_sound else Pause()


def following(pause: Pause, group: str, *, is_ready: bool, trouble: str | None, now_s: float) -> Pause:
    """What to write of a group.

    Args: trouble: why it has to give way; None when it has not to.
    """
    if pause.is_on:
        return pause.ended if pause.is_over(group, now_s) else pause
    # A scheduler may be called ready for a moment longer than its stages are there.
    if trouble is not None:
        return Pause(times=pause.times + 1, begun_s=int(now_s), reason=trouble)
    return Pause() if is_ready else pause


def with_room(pause: Pause, startup_s: float, now_s: float) -> Pause:
    """Of a group for which room is being made at this moment: it gets its startup time once more, from the end of that.
    Half of it may pass between two writes."""
    is_noted = pause.room_s is not None and now_s - pause.room_s < startup_s / 2
    return pause if is_noted or pause.is_on else replace(pause, room_s=int(now_s))


def has_had_its_time(pause: Pause, startup_s: float, now_s: float) -> bool:
    """Whether a group that is overdue has also used what it got since room was made."""
    return pause.room_s is None or now_s - pause.room_s > startup_s
