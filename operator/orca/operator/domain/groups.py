"""The groups of a deployment as they are in the cluster."""

from dataclasses import dataclass

from orca.operator.domain import group_pauses, names, problems
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.objects import Children, is_going, is_placed, label_map, seconds, unplaced_since_s
from orca.operator.domain.resource import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group as it is in the cluster."""

    name: str
    revision: str
    ordinal: int
    is_ready: bool = False  # formed: it serves
    is_placed: bool = True  # all of its pods have a node
    is_overdue: bool = False  # not placed, and its startup time is over or it has given way for that
    is_leaving: bool = False  # it drains and goes, whatever the spec wants now


def read_groups(children: Children, startup_s: float, now_s: float) -> tuple[Group, ...]:
    """Return the groups that exist, also those of which only a part exists, by name."""
    labels = map(label_map, children.of_kind("StatefulSet"))
    found = {name for each in labels if names.is_group(name := each.get(names.GROUP_LABEL, ""))}
    return tuple(_read_group(children, name, startup_s, now_s) for name in sorted(found))


def _read_group(children: Children, name: str, startup_s: float, now_s: float) -> Group:
    stages = children.get("StatefulSet", name)
    waits_since_s = None if stages is None else _waits_since_s(children, stages)
    pause = Pause() if stages is None else group_pauses.read(stages)
    is_away = pause.is_on and pause.reason in (problems.NO_CAPACITY, problems.FORBIDDEN)
    # Room is made only for a group whose time is over.
    is_late = waits_since_s is not None and (pause.room_s is not None or now_s - waits_since_s > startup_s)
    return Group(
        name=name,
        revision=names.revision(name),
        ordinal=names.ordinal(name),
        is_ready=children.has_ready_pod(names.SCHEDULER, name),
        is_placed=stages is not None and waits_since_s is None and not is_away,
        is_overdue=is_away or is_late,
        is_leaving=stages is not None and is_going(stages),
    )


def _waits_since_s(children: Children, stages: Json) -> float | None:
    """Return since when a pod of the group has had no node, for the pod that waits longest; None if all have one."""
    pods = children.pods(names.STAGE, group=stages["metadata"]["name"])
    waits = [unplaced_since_s(pod) for pod in pods if not is_placed(pod)]
    if len(pods) < int(stages["spec"]["replicas"]):
        # A pod that was never made, perhaps for want of quota, has no times. Take the last write of its StatefulSet.
        written = [each["time"] for each in stages["metadata"].get("managedFields") or [] if "time" in each]
        waits.append(max(map(seconds, [stages["metadata"]["creationTimestamp"], *written])))
    return min(waits, default=None)
