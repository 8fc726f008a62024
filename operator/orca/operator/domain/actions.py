"""Actions that a plan may ask for, each with its reason, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from orca.operator.domain.resource import Json


@dataclass(frozen=True, slots=True)
class Apply:
    """Write an object by server-side apply."""

    manifest: Json
    reason: str
    is_new: bool = False
    is_mending: bool = False  # the operator wrote the same before, and somebody has changed it


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the very object that was seen. Another one that has taken its name meanwhile stays."""

    kind: str
    name: str
    uid: str
    reason: str
    is_forced: bool = False  # without waiting for a kubelet that is gone


@dataclass(frozen=True, slots=True)
class HandOver:
    """Write an object's number of pods under another field manager (names.REPLICAS_MANAGER).

    The next apply leaves the number out. A field that no manager has any more gets its default, which is 1.
    """

    manifest: Json
    reason: str


@dataclass(frozen=True, slots=True)
class Annotate:
    """Give an object annotations, and write nothing else of it.

    A pod is annotated so that its kubelet brings it a changed ConfigMap at once. A volume claim is annotated with the
    model that is complete in it.
    """

    kind: str
    name: str
    uid: str
    annotations: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True)
class IssueCertificate:
    """Draw the certificate of schedulers and stages, and write its Secret."""

    reason: str
    # Key of the CA that stays; None draws a new one. Each plan reads it from the Secret, so no two plans' are equal.
    signer: EllipticCurvePrivateKey | None = field(repr=False, compare=False)
    is_new: bool = False  # there is no Secret yet
    trusted: str = ""  # CA (PEM) that stays in ca.crt beside the signer's
    kept: Mapping[str, str] = field(default_factory=dict, repr=False)  # files (PEM) that stay in place of drawn ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseSlots:
    """Set how many slots the pool promises to any one request of a model. It refuses requests that need more."""

    revision: str  # as the pool names it
    slots: int
    expected: int  # the promise that the plan saw; if it is another by now, the pool changes nothing
    reason: str


Action = Apply | Delete | HandOver | Annotate | IssueCertificate | PromiseSlots
