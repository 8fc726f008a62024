"""The Lease (coordination.k8s.io/v1) by which one of several operators acts: who may take it, and what to write: pure.

Its holder renews it. A waiting operator takes it when nobody holds it any more, or when it has not changed for as long
as its holder promised to renew it. The waiting machine measures that time, so no two clocks are ever compared.

    0                                 2/3 of the duration                     the duration
    |  its holder's last renewal      |  the holder begins no more writes     |  another takes it, at the earliest
    |  was sent                       |  writes begun before are given up     |

The fractions are those of Kubernetes' own controllers.
"""

from dataclasses import dataclass

from orca.operator.domain.resource import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The Lease that an operator takes, and for how long."""

    namespace: str
    name: str
    identity: str  # of this operator alone; a container that starts again keeps its own
    duration_s: int

    @property
    def writing_s(self) -> float:
        """Seconds after the last renewal in which a write may begin."""
        return self.duration_s * 2 / 3

    @property
    def retry_s(self) -> float:
        """Seconds between two tries to take or renew it."""
        return self.duration_s * 2 / 15

    @property
    def call_s(self) -> float:
        """Bound on one call, so that one call that hangs does not make a renewal late."""
        return self.duration_s / 5


def holder(lease: Json | None) -> str | None:
    """Return who holds a Lease; None if there is no Lease or it was released."""
    return ((lease or {}).get("spec") or {}).get("holderIdentity") or None


def may_take(lease: Json | None, terms: LeaseTerms, *, unchanged_s: float) -> bool:
    """Return whether to write one's own name into a Lease, or to renew it.

    Args:
        lease: as read; None if there is none.
        unchanged_s: since it was first seen as it is now.
    """
    if holder(lease) in (None, terms.identity):
        return True
    assert lease is not None
    return unchanged_s >= (lease["spec"].get("leaseDurationSeconds") or terms.duration_s)


def taken(lease: Json | None, terms: LeaseTerms, now: str) -> Json:
    """Return what to write to take or renew it. Args: now: for people to read; nothing computes with it."""
    old = (lease or {}).get("spec") or {}
    is_renewed = holder(lease) == terms.identity
    spec = {
        "holderIdentity": terms.identity,
        "leaseDurationSeconds": terms.duration_s,
        "acquireTime": old.get("acquireTime", now) if is_renewed else now,
        "renewTime": now,
        "leaseTransitions": old.get("leaseTransitions", 0) + (lease is not None and not is_renewed),
    }
    made = {"name": terms.name, "namespace": terms.namespace}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": made if lease is None else lease["metadata"],
        "spec": old | spec,
    }


def released(lease: Json) -> Json:
    """Return what its holder writes when it ends, so that the next operator need not wait."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": None}}
