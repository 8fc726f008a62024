"""Each resource is served by one operator: take it, release it, or leave it alone (plan/ownership.py decides).

This keeps in memory since when another operator has been gone, and when an Event was recorded. It holds no truth: an
operator that starts waits once more, and records one more Event.
"""

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass

from orca.operator.cluster import operators
from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Cluster
from orca.operator.domain.objects import Subject, subject, timestamp
from orca.operator.domain.resource import Json
from orca.operator.plan.ownership import (
    HANDOVER_S,
    Ownership,
    OwnerStep,
    explain,
    find_step,
    read_ownership,
    without_owner,
)

log = logging.getLogger("orca.operator")

EVENT_EVERY_S = 1800.0
"""API servers keep Events for an hour by default, so one is always there."""
AGAIN_S = 5.0
"""Seconds until the next reconcile of a resource whose operator seems to go."""
CONFLICT = 409
CONFLICT_S = 0.5
"""Seconds until the next reconcile of a resource that has changed while it was taken or released."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The resource to reconcile; None if it is to be left alone."""

    body: Json | None
    again_s: float | None = None  # until the next reconcile; None leaves that to events and regular lists


@dataclass(frozen=True, slots=True)
class _Absence:
    """Another operator that seems to be gone."""

    trace: str
    since_s: float


@dataclass(frozen=True, slots=True)
class _Notice:
    """An Event that says who serves a resource."""

    found: Ownership
    at_s: float


class Owners:
    """The operators of all resources. Reconciles of one resource never overlap; those of different ones may."""

    def __init__(self, identity: str | None, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """
        Args:
            identity: name of this operator; None if it has no Lease.
            clock: seconds; only differences count.
            wall_clock: seconds since 1970, for Events.
        """
        self._identity = identity
        self._clock = clock
        self._wall_clock = wall_clock
        # By uid of the resource.
        self._left: dict[str, Ownership] = {}
        self._notices: dict[str, _Notice] = {}
        self._absences: dict[str, _Absence] = {}

    @property
    def left(self) -> int:
        """Number of resources that are left to another operator."""
        return len(self._left)

    def keep(self, uids: Set[str]) -> None:
        """Forget all other resources: they are gone."""
        for known in (self._left, self._notices, self._absences):
            for uid in known.keys() - uids:
                known.pop(uid, None)

    def settle(self, cluster: Cluster, body: Json) -> Settled:
        """Find out whether to reconcile a resource, and take or release it if necessary.

        Raises: ApiServerError; BadSpec if the CRD is older than this operator.
        """
        found, about = read_ownership(body), subject(body)
        step, wait_s = find_step(found, self._identity), None
        if step is OwnerStep.WAIT:
            wait_s = self._wait_s(cluster, about, found)
            step = OwnerStep.TAKE if wait_s == 0 else OwnerStep.LEAVE
        else:
            self._absences.pop(about.uid, None)
        if step is OwnerStep.LEAVE:
            self._leave(cluster, about, found)
            return Settled(None, None if wait_s is None else min(wait_s, AGAIN_S))
        if step is OwnerStep.SERVE:
            self._left.pop(about.uid, None)
            return Settled(without_owner(body))
        try:
            written = operators.write_owner(cluster.calls, body, self._identity if step is OwnerStep.TAKE else None)
        except ApiServerError as error:
            if error.status != CONFLICT:
                raise
            # Somebody has changed the resource, perhaps another operator that has taken it.
            return Settled(None, CONFLICT_S)
        if step is OwnerStep.RELEASE:
            self._note_released(cluster, about, found)
            return Settled(None)
        self._note_taken(cluster, about, found)
        return Settled(without_owner(written))

    def _wait_s(self, cluster: Cluster, about: Subject, found: Ownership) -> float | None:
        """Return the seconds until this operator may take a resource of another; None while the other one is there."""
        assert found.owner is not None
        is_chosen = found.chosen is not None
        trace = found.owner if is_chosen else operators.trace_of_absent(cluster.calls, found.owner)
        if trace is None:
            self._absences.pop(about.uid, None)
            return None
        absence, now_s = self._absences.get(about.uid), self._clock()
        if absence is None or absence.trace != trace:
            absence = self._absences[about.uid] = _Absence(trace, now_s)
        return max(0.0, HANDOVER_S - (now_s - absence.since_s))

    def _note_taken(self, cluster: Cluster, about: Subject, found: Ownership) -> None:
        self._left.pop(about.uid, None)
        self._absences.pop(about.uid, None)
        log.info("takes the resource", extra={**about.context, "former": found.owner})
        if found.owner is not None:
            message = f"the operator {self._identity} serves this resource from now on, in place of {found.owner}"
            self._record(cluster, about, "TakenOver", message)

    def _note_released(self, cluster: Cluster, about: Subject, found: Ownership) -> None:
        self._left[about.uid] = found
        log.info("releases the resource", extra={**about.context, "chosen": found.chosen})
        message = f"the operator {self._identity} has released this resource, since its annotation names {found.chosen}"
        self._record(cluster, about, "Released", message)

    def _leave(self, cluster: Cluster, about: Subject, found: Ownership) -> None:
        """Leave a resource alone. Unless it is as somebody chose it, record an Event on it."""
        message, notice = explain(found, self._identity), self._notices.get(about.uid)
        if self._left.get(about.uid) != found:
            log.warning(message, extra=about.context)
        self._left[about.uid] = found
        is_known = notice is not None and notice.found == found and self._clock() - notice.at_s < EVENT_EVERY_S
        if not (found.is_as_chosen or is_known):
            self._record(cluster, about, "ServedByAnother", message, is_warning=True)
            self._notices[about.uid] = _Notice(found, self._clock())

    def _record(self, cluster: Cluster, about: Subject, reason: str, message: str, *, is_warning: bool = False) -> None:
        cluster.record_event(about, reason, message, is_warning=is_warning, now=timestamp(self._wall_clock()))
