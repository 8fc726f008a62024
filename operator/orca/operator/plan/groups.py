"""The groups of a resource as they are in the cluster, and which of them have to give way."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from orca.operator.domain import group_pauses, names, problems
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.observed import (
    Observed,
    condition_of,
    is_going,
    is_placed,
    is_pod_ready,
    label_map,
    seconds,
)
from orca.operator.domain.problems import Trouble
from orca.operator.domain.resource import Deployment, Json
from orca.operator.plan.rollout import Group, Step
from orca.operator.render.group import SCHEDULER, STAGE


def find_groups(deployment: Deployment, observed: Observed, now_s: float) -> tuple[Group, ...]:
    """The groups that exist, also those of which only a part does."""
    found: dict[str, str] = {}
    for child in observed.of_kind("StatefulSet"):
        labels = label_map(child)
        if names.GROUP_LABEL in labels:
            found[labels[names.GROUP_LABEL]] = labels[names.REVISION_LABEL]
    return tuple(_group(deployment, observed, name, revision, now_s) for name, revision in sorted(found.items()))


def _group(deployment: Deployment, observed: Observed, name: str, revision: str, now_s: float) -> Group:
    stages = observed.get("StatefulSet", name)
    waits_since_s = None if stages is None else _waits_since_s(observed, stages)
    pause = Pause() if stages is None else group_pauses.read(stages)
    is_away = pause.is_on and pause.reason == problems.NO_CAPACITY
    # Room is only made for one that has had its time.
    is_late = waits_since_s is not None and (
        pause.room_s is not None or now_s - waits_since_s > deployment.spec.startup_seconds
    )
    return Group(
        name=name,
        revision=revision,
        ordinal=names.ordinal(name),
        is_ready=any(map(is_pod_ready, observed.pods(SCHEDULER, group=name))),
        is_placed=stages is not None and waits_since_s is None and not is_away,
        is_overdue=is_away or is_late,
        is_leaving=stages is not None and is_going(stages),
    )


def _waits_since_s(observed: Observed, stages: Json) -> float | None:
    """Since when a pod of the group has been without a node, the longest of all; None when all have one."""
    pods = observed.pods(STAGE, group=stages["metadata"]["name"])
    waits = [_unplaced_since_s(pod) for pod in pods if not is_placed(pod)]
    if len(pods) < int(stages["spec"]["replicas"]):
        # A pod that nobody has made, for a quota perhaps, tells nothing: what makes it was last written then.
        written = [each["time"] for each in stages["metadata"].get("managedFields") or [] if "time" in each]
        waits.append(max(map(seconds, [stages["metadata"]["creationTimestamp"], *written])))
    return min(waits, default=None)


def _unplaced_since_s(pod: Json) -> float:
    told = condition_of(pod, "PodScheduled").get("lastTransitionTime")
    return seconds(told or pod["metadata"]["creationTimestamp"])


def following_pauses(
    observed: Observed,
    groups: Sequence[Group],
    staying: Sequence[str],
    next_step: Step,
    *,
    startup_s: float,
    now_s: float,
) -> dict[str, Pause]:
    """What to write of each group that stays."""
    known = {each.name: each for each in groups}
    makes_room = bool(next_step.remove) or _somebody_leaves(observed, groups)
    found = {}
    for name in staying:
        stages = observed.get("StatefulSet", name)
        if stages is None:
            found[name] = Pause()
            continue
        pause = group_pauses.read(stages)
        is_ready, is_overdue = known[name].is_ready, known[name].is_overdue
        if is_overdue and makes_room:
            pause = group_pauses.with_room(pause, startup_s, now_s)
        trouble = None
        if is_overdue and not makes_room and group_pauses.has_had_its_time(pause, startup_s, now_s):
            trouble = problems.NO_CAPACITY
        elif any(map(_ends_again_and_again, _pods(observed, name))):
            trouble = problems.CRASHING
        found[name] = group_pauses.following(pause, name, is_ready=is_ready, trouble=trouble, now_s=now_s)
    return found


def _somebody_leaves(observed: Observed, groups: Sequence[Group]) -> bool:
    """Whether a group goes; its pods end later than what made them."""
    known = {each.name for each in groups}
    pods = observed.pods(STAGE)
    # A pod without the label is one that somebody has taken out of its group, to look at it: it stays.
    is_ending = any(is_going(pod) or label_map(pod).get(names.GROUP_LABEL) not in {*known, None} for pod in pods)
    return is_ending or any(each.is_leaving for each in groups)


def _pods(observed: Observed, group: str) -> list[Json]:
    return [*observed.pods(STAGE, group=group), *observed.pods(SCHEDULER, group=group)]


def _ends_again_and_again(pod: Json) -> bool:
    for container in pod.get("status", {}).get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") == "CrashLoopBackOff" and container["restartCount"] >= group_pauses.RESTARTS_MAX:
            return True
    return False


def pause_trouble(of: Mapping[str, Pause]) -> Trouble | None:
    """What to say of the groups that have given way; None when none has."""
    for name, pause in of.items():
        if pause.is_on and pause.reason is not None:
            ends = datetime.fromtimestamp(pause.ends_s(name), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            why = {
                problems.NO_CAPACITY: "not all of its pods found a node",
                problems.CRASHING: "a container of it ended again and again",
            }[pause.reason]
            said = f"group {name} has given way for the {pause.times}. time, since {why}; it comes back at {ends}"
            return Trouble(pause.reason, said)
    return None
