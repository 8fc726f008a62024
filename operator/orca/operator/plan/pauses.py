"""Decisions on which groups give way and which come back, by the rules of group_pauses.py: pure."""

from collections.abc import Mapping, Sequence

from orca.operator.domain import cluster_events, group_pauses, names, problems
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.objects import is_going, label_map, timestamp
from orca.operator.domain.observation import Observation
from orca.operator.domain.problems import Problem
from orca.operator.domain.resource import Json
from orca.operator.plan.rollout import RolloutMove


def next_pauses(observation: Observation, staying: Sequence[str], move: RolloutMove) -> dict[str, Pause]:
    """Return the pause to write on each group that stays. Args: staying: their names. move: of the rollout."""
    known = {each.name: each for each in observation.groups}
    makes_room = bool(move.remove) or _is_some_group_leaving(observation)
    startup_s, now_s = observation.spec.startup_seconds, observation.now_s
    found = {}
    for name in staying:
        stages = observation.children.get("StatefulSet", name)
        if stages is None:
            found[name] = Pause()
            continue
        pause = group_pauses.read(stages)
        is_ready, is_overdue = known[name].is_ready, known[name].is_overdue
        if is_overdue and makes_room:
            pause = group_pauses.with_room(pause, startup_s, now_s)
        problem, cause = None, None
        if is_overdue and not makes_room and group_pauses.has_had_its_time(pause, startup_s, now_s):
            problem = problems.NO_CAPACITY if _refusal(observation, name) is None else problems.FORBIDDEN
        elif crashing := list(filter(_keeps_crashing, _pods(observation, name))):
            said = problems.worst(crashing)
            problem, cause = problems.CRASHING, None if said is None else said.message
        found[name] = group_pauses.next_pause(pause, name, is_ready=is_ready, problem=problem, now_s=now_s, cause=cause)
    return found


def _is_some_group_leaving(observation: Observation) -> bool:
    """Return whether a group goes. Its pods end after the objects that made them."""
    known = {each.name for each in observation.groups}
    pods = observation.children.pods(names.STAGE)
    # Somebody has taken a pod without the label out of its group, to look at it: it stays.
    is_ending = any(is_going(pod) or label_map(pod).get(names.GROUP_LABEL) not in {*known, None} for pod in pods)
    return is_ending or any(each.is_leaving for each in observation.groups)


def _pods(observation: Observation, group: str) -> list[Json]:
    return [pod for role in (names.STAGE, names.SCHEDULER) for pod in observation.children.pods(role, group=group)]


def _keeps_crashing(pod: Json) -> bool:
    for container in pod.get("status", {}).get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") == "CrashLoopBackOff" and container["restartCount"] >= group_pauses.RESTARTS_MAX:
            return True
    return False


def _refusal(observation: Observation, group: str) -> Problem | None:
    """Return why the API server refuses pods of a group; None if it does not."""
    makers = [observation.children.get("StatefulSet", name) for name in (group, names.scheduler(group))]
    found = [each for each in makers if each is not None]
    return cluster_events.why_no_pods(observation.children, observation.events, found)


def find_problem(observation: Observation, pauses: Mapping[str, Pause]) -> Problem | None:
    """Return the problem of a group that has given way; None if none has. Args: pauses: by group."""
    for name, pause in pauses.items():
        if pause.is_on and pause.reason is not None:
            ends = timestamp(pause.ends_s(name))
            times = "once" if pause.times == 1 else f"{pause.times} times in a row"
            why = _why(observation, name, pause)
            return Problem(pause.reason, f"group {name} has given way {times}, since {why}; it comes back at {ends}")
    return None


def _why(observation: Observation, group: str, pause: Pause) -> str:
    if pause.reason == problems.NO_CAPACITY:
        return "not all of its pods found a node"
    if pause.reason == problems.CRASHING:
        return "one of its containers kept crashing" + ("" if pause.cause is None else f" ({pause.cause})")
    makers = [observation.children.get("StatefulSet", name) for name in (group, names.scheduler(group))]
    said = [cluster_events.last_refusal(observation.events, each) for each in makers if each is not None]
    words = next((each for each in said if each is not None), None)
    return "the API server refuses some of its pods" + ("" if words is None else f" ({words})")
