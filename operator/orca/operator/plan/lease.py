"""A Lease (coordination.k8s.io/v1) by which one of several operators acts: what it says, and what is written: pure.

Who holds it renews it; who waits takes it when nobody holds it any more, or when it has not changed for as long as its
holder promised to renew it. That time passes on the waiting machine, so no two clocks are ever compared.

    0                                 2/3 of the duration                    the duration
    |  its holder's last renewal      |  the holder begins no write any more |  another takes it, at the earliest
    |  was sent                       |  writes begun before are given up    |

The parts are those of Kubernetes' own controllers.
"""

from dataclasses import dataclass

from orca.operator.domain.resource import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an operator wants of the Lease."""

    namespace: str
    name: str
    identity: str  # no two operators that run have the same; a container that starts again keeps its own
    duration_s: int

    @property
    def writing_s(self) -> float:
        """Since the last renewal; later no write begins."""
        return self.duration_s * 2 / 3

    @property
    def retry_s(self) -> float:
        """Between two tries to take or renew it."""
        return self.duration_s * 2 / 15

    @property
    def call_s(self) -> float:
        """Bound on one call, so that a renewal in time survives one that hangs."""
        return self.duration_s / 5


def holder(lease: Json | None) -> str | None:
    """None of a Lease that is not there, or that was released."""
    return ((lease or {}).get("spec") or {}).get("holderIdentity") or None


def may_take(lease: Json | None, terms: Terms, *, unchanged_s: float) -> bool:
    """Whether to write one's own name into it, or to renew it.

    Args:
        lease: as read; None when there is none.
        unchanged_s: since it was first seen as it is now.
    """
    if holder(lease) in (None, terms.identity):
        return True
    assert lease is not None
    return unchanged_s >= (lease["spec"].get("leaseDurationSeconds") or terms.duration_s)


def taken(lease: Json | None, terms: Terms, now: str) -> Json:
    """What to write to take or renew it. Args: now: for people who read it; nobody reckons with it."""
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
    """What its holder writes, so that the next one need not wait."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": None}}
