"""The one operator that serves a resource, where several could: pure.

The status names the operator that serves a resource, as NAMESPACE/NAME of its Lease. That name is the same for all pods
and releases of one installation of the chart. An operator writes it in the version that it has read, before it writes
anything else. So of two that start together, one is refused. The other one leaves the resource alone.

A person may choose the operator with an annotation. The former one then takes its name away, and the chosen one writes
its own. An operator that has no Lease has no name: it serves what nobody else serves.

    annotation   status    this operator
    another      this      releases the resource
    another      any       leaves it alone
    none, this   this      serves it
    none, this   none      takes it
    this         another   takes it when the other has released it, or after HANDOVER_S
    none         another   takes it when the other has been gone for HANDOVER_S
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.objects import annotations
from orca.operator.domain.resource import Json

HANDOVER_S = 60.0
"""Longer than an operator that is told to end, or to release a resource, may still write."""


class OwnerStep(Enum):
    """A step that an operator takes with a resource."""

    SERVE = auto()
    TAKE = auto()
    RELEASE = auto()
    LEAVE = auto()
    WAIT = auto()  # leave it alone, and take it after its operator has gone


@dataclass(frozen=True, slots=True)
class Ownership:
    """The operator that serves a resource, and the one that a person chose for it; None if there is none."""

    owner: str | None
    chosen: str | None

    @property
    def is_as_chosen(self) -> bool:
        """True if the operator that somebody chose serves the resource."""
        return self.chosen is not None and self.chosen == self.owner


def read_ownership(body: Mapping[str, Any]) -> Ownership:
    """Read who serves a resource."""
    owner = (body.get("status") or {}).get(names.OPERATOR_FIELD)
    return Ownership(owner, annotations(body["metadata"]).get(names.OPERATOR_ANNOTATION))


def without_owner(body: Json) -> Json:
    """Return a resource whose status is as the reconcile writes it: without the name of the operator."""
    status = {key: value for key, value in (body.get("status") or {}).items() if key != names.OPERATOR_FIELD}
    return {**body, "status": status}


def find_step(found: Ownership, identity: str | None) -> OwnerStep:
    """Decide what to do with a resource. Args: identity: name of this operator; None if it has no Lease."""
    is_mine = identity is not None and found.owner == identity
    if found.chosen not in (None, identity):
        return OwnerStep.RELEASE if is_mine else OwnerStep.LEAVE
    if found.owner == identity:
        return OwnerStep.SERVE
    if identity is None:
        return OwnerStep.LEAVE
    return OwnerStep.TAKE if found.owner is None else OwnerStep.WAIT


def explain(found: Ownership, identity: str | None) -> str:
    """Return a sentence for people: why this operator leaves a resource alone."""
    me = "an operator without a Lease" if identity is None else f"the operator {identity}"
    if found.chosen not in (None, identity):
        return f"{me} leaves this resource alone, since its annotation {names.OPERATOR_ANNOTATION} names {found.chosen}"
    if found.chosen is not None:
        return f"{me} waits until {found.owner} has released this resource, for {HANDOVER_S:.0f} s at most"
    reason = f"{me} leaves this resource alone, since the operator {found.owner} serves it"
    if identity is None:
        return reason
    return f"{reason}; to hand it over, set its annotation {names.OPERATOR_ANNOTATION} to {identity}"
