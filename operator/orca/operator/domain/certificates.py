"""The certificate that scheduler and stages of a deployment show each other, and whether it is as it should be: pure.

It is in a Secret: one that the resource names, which the operator only reads, or the operator's own, which
credentials.py fills. Both must pass what parts check in a handshake, except that each certificate of a path may sign
the next: the handshake itself checks that. The operator issues its own again when a third of its life is left, when it
is missing, and when somebody has damaged the files that pods get. The key of its CA stays in the Secret, where no pod
gets it.
"""

import base64
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from orca.operator.domain import names
from orca.operator.domain.actions import IssueCertificate
from orca.operator.domain.objects import Children, is_going
from orca.operator.domain.observation import Observation
from orca.operator.domain.problems import (
    CERTIFICATE_EXPIRED,
    CERTIFICATE_EXPIRING,
    CERTIFICATE_UNFIT,
    Problem,
    of_secret,
)
from orca.operator.domain.resource import Json, OrcaDeployment

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
FILES = (CA, CERTIFICATE, KEY)
"""Keys of the Secret that pods get as files, with the names that cert-manager uses."""
CA_KEY = "ca.key"

RENEWED_AT_SHARE_LEFT = 1 / 3
SKEW_S = 3600.0
"""Seconds by which the validity of a certificate begins earlier, since clocks of other machines may be behind."""
KNOWN_AFTER_S = 600.0
"""Seconds after which all pods have a changed Secret: kubelets bring it within two minutes."""
EXPIRING_S, EXPIRING_AT_SHARE_LEFT = 14 * 86_400.0, 1 / 6
"""Report a certificate that nobody has renewed when this much of its life is left. The smaller of the two counts. By
default cert-manager renews when a third is left.
"""

R = TypeVar("R")


class _Unfit(Exception):
    """The content of a Secret is of no use. The message says why, for people."""


def server_name(deployment: OrcaDeployment) -> str:
    """Return the name that all parts of a deployment expect in each other's certificate."""
    return f"{deployment.name}.{deployment.namespace}.svc"


def due(observation: Observation) -> IssueCertificate | None:
    """Return what to issue; None if the operator's own certificate is as it should be, or if nobody needs it.

    Nobody needs it if the resource names another Secret and no older group uses the operator's. The Secret that the
    resource names may have the name that the operator's would have.
    """
    name, named = names.certificates(observation.name), observation.spec.certificates.secret_name
    if named == name or (named is not None and not _is_mounted(observation.children, name)):
        return None
    secret = observation.children.get("Secret", name)
    if secret is None:
        return IssueCertificate("it is missing", None, is_new=True)
    return due_of(observation.deployment, secret, observation.now_s)


def _is_mounted(children: Children, name: str) -> bool:
    templates = [each["spec"]["template"] for each in children.of_kind("StatefulSet") if not is_going(each)]
    volumes = [volume for each in templates for volume in each["spec"].get("volumes") or []]
    return any(volume.get("secret", {}).get("secretName") == name for volume in volumes)


def due_of(deployment: OrcaDeployment, secret: Json, now_s: float) -> IssueCertificate | None:
    """Return what to issue for the operator's own Secret, as it is or as it came back from a write.

    If the key of the CA is lost, a certificate that is still valid stays: parts with the old files and parts with the
    new ones would refuse each other. Before it ends, a new CA comes into ca.crt. It signs once all parts trust it.
    """
    data = secret.get("data") or {}
    signer = _signer(data)
    try:
        leaf, *_, authority = path = _path(data, server_name(deployment), now_s)
    except _Unfit as error:
        return IssueCertificate(str(error), signer)
    soonest = min(path, key=_end_s)
    if now_s < _end_s(soonest) - _life_s(leaf) * RENEWED_AT_SHARE_LEFT:
        return None
    reason = f"it expires on {_end(soonest)}"
    if now_s >= _end_s(soonest) or _belongs_to(authority, signer):
        return IssueCertificate(reason, signer)
    before = authority.public_bytes(Encoding.PEM).decode()
    known = next((each for each in _certificates(data, CA) if _belongs_to(each, signer)), None)
    if known is None:
        # PEM is ASCII. Tools write names around it in any encoding.
        kept = {key: base64.b64decode(data[key]).decode("ascii", "ignore") for key in (CERTIFICATE, KEY)}
        reason += ", and the key of its CA is lost: a new CA is added to ca.crt"
        return IssueCertificate(reason, signer, trusted=before, kept=kept)
    if now_s < known.not_valid_before_utc.timestamp() + SKEW_S + KNOWN_AFTER_S:
        return None
    return IssueCertificate(reason, signer, trusted=before)


def find_problem(observation: Observation) -> Problem | None:
    """Return what keeps the certificate from being used, now or soon.

    For the operator's own that is only its end: the next reconcile repairs everything else.
    """
    named, now_s = observation.spec.certificates.secret_name, observation.now_s
    if named is None:
        secret = observation.children.get("Secret", names.certificates(observation.name))
    else:
        secret = observation.named_certificates
        if missing := of_secret(named, secret, FILES, field="certificates.secretName", names_keys=False):
            return missing
    name = names.certificates(observation.name) if named is None else named
    try:
        path = _path((secret or {}).get("data") or {}, server_name(observation.deployment), now_s)
    except _Unfit as error:
        return None if named is None else Problem(CERTIFICATE_UNFIT, f"the Secret {named}: {error}")
    soonest = min((each for each in path if _is_expiring(each, now_s)), key=_end_s, default=None)
    if soonest is None:
        return None
    what = f"{CA if soonest is path[-1] else CERTIFICATE} in the Secret {name}"
    if now_s >= _end_s(soonest):
        return Problem(CERTIFICATE_EXPIRED, f"{what} expired on {_end(soonest)}: groups can no longer form")
    return Problem(CERTIFICATE_EXPIRING, f"{what} expires on {_end(soonest)} and nobody has renewed it")


def _is_expiring(certificate: x509.Certificate, now_s: float) -> bool:
    return now_s > _end_s(certificate) - min(EXPIRING_S, _life_s(certificate) * EXPIRING_AT_SHARE_LEFT)


def _path(data: Mapping[str, str], name: str, now_s: float) -> list[x509.Certificate]:
    """Return the certificate, those between, and its CA: what parts present, and what makes others trust it.

    Raises: _Unfit with what is wrong. A certificate that has ended is not wrong here.
    """
    authorities, (leaf, *between) = _certificates(data, CA), _certificates(data, CERTIFICATE)
    if leaf.public_key() != _key(data, KEY).public_key():
        raise _Unfit(f"{CERTIFICATE} does not belong to {KEY}")
    path = [leaf]
    # Take the first of several certificates of the same CA, as the TLS libraries do.
    while (authority := _issuer(path[-1], authorities)) is None:
        above = _issuer(path[-1], [each for each in between if each not in path])
        if above is None:
            raise _Unfit(f"{CERTIFICATE} is not signed by {CA}")
        path.append(above)
    path.append(authority)
    _check_name(leaf, name)
    _check_usage(leaf)
    for each in path:
        if now_s < each.not_valid_before_utc.timestamp():
            begin = _minute(each.not_valid_before_utc)
            raise _Unfit(f"{CA if each is path[-1] else CERTIFICATE} is not valid before {begin}")
    return path


def _issuer(certificate: x509.Certificate, candidates: Iterable[x509.Certificate]) -> x509.Certificate | None:
    return next((each for each in candidates if _vouches(each, certificate)), None)


def _vouches(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Return whether a part that trusts the issuer trusts the certificate. The two may be the same."""
    if issuer == certificate:
        return True
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _check_name(certificate: x509.Certificate, name: str) -> None:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError) as error:
        raise _Unfit(f"{CERTIFICATE} is not for {name}") from error
    wildcard = "*." + name.partition(".")[2]
    if not {name, wildcard} & set(found.get_values_for_type(x509.DNSName)):
        raise _Unfit(f"{CERTIFICATE} is not for {name}")


def _check_usage(certificate: x509.Certificate) -> None:
    """Check both usages: each part shows the same certificate as a server and as a client."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    except ValueError as error:
        raise _Unfit(f"{CERTIFICATE} cannot be read") from error
    for usage, word in ((ExtendedKeyUsageOID.SERVER_AUTH, "servers"), (ExtendedKeyUsageOID.CLIENT_AUTH, "clients")):
        if usage not in found:
            raise _Unfit(
                f"{CERTIFICATE} is not for {word} by its extended key usage, but each part is server and client"
            )


def _certificates(data: Mapping[str, str], key: str) -> list[x509.Certificate]:
    """Return all certificates in a file: one or more."""

    def load(content: bytes) -> list[x509.Certificate]:
        found = x509.load_pem_x509_certificates(content)
        found[0].public_key()  # raises for an unknown kind of key
        return found

    return _read(data, key, load)


def _key(data: Mapping[str, str], key: str) -> PrivateKeyTypes:
    return _read(data, key, lambda content: load_pem_private_key(content, password=None))


def _signer(data: Mapping[str, str]) -> EllipticCurvePrivateKey | None:
    """Return the key of the CA; None if there is none, or if it cannot sign."""
    try:
        key = _key(data, CA_KEY)
    except _Unfit:
        return None
    return key if isinstance(key, EllipticCurvePrivateKey) else None


def _belongs_to(authority: x509.Certificate, signer: EllipticCurvePrivateKey | None) -> bool:
    return signer is not None and authority.public_key() == signer.public_key()


def _read(data: Mapping[str, str], key: str, load: Callable[[bytes], R]) -> R:
    if not data.get(key):
        raise _Unfit(f"there is no {key}")
    try:
        return load(base64.b64decode(data[key]))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _Unfit(f"{key} cannot be read") from error


def _end_s(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def _life_s(certificate: x509.Certificate) -> float:
    return _end_s(certificate) - certificate.not_valid_before_utc.timestamp()


def _end(certificate: x509.Certificate) -> str:
    return _minute(certificate.not_valid_after_utc)


def _minute(time: datetime) -> str:
    return f"{time:%Y-%m-%d at %H:%M} UTC"
