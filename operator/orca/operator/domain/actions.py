"""What a plan may ask for: each action with its reason, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from orca.operator.domain.resource import Json


@dataclass(frozen=True, slots=True)
class Apply:
    manifest: Json
    reason: str
    is_new: bool = False
    is_mending: bool = False  # what we had written already, and somebody has changed


@dataclass(frozen=True, slots=True)
class Delete:
    """Of the very object that was seen: another one that has taken its name meanwhile is left alone."""

    kind: str
    name: str
    uid: str
    reason: str
    is_forced: bool = False  # without waiting for a kubelet that is gone


@dataclass(frozen=True, slots=True)
class Nudge:
    """Make the kubelet bring a changed ConfigMap to a pod at once."""

    pod: str
    uid: str
    annotations: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True)
class Issue:
    """Draw the certificate of schedulers and stages, and write its Secret."""

    reason: str
    # Key of the CA that stays; None draws one. Read anew for each plan, so it is equal to none of another.
    signer: EllipticCurvePrivateKey | None = field(repr=False, compare=False)
    is_new: bool = False  # there is no Secret yet
    trusted: str = ""  # CA (PEM) that stays in ca.crt beside the signer's
    kept: Mapping[str, str] = field(default_factory=dict, repr=False)  # files (PEM) that stay in place of drawn ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Tell the pool what its door promises to any one request of a model."""

    revision: str  # as the pool calls it
    slots: int
    expected: int  # that was promised when the pool was looked at: nothing is told where it is another by now
    reason: str


Action = Apply | Delete | Nudge | Issue | Promise
