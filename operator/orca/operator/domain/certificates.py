"""The certificate that scheduler and stages of a deployment show each other: whether it is as it should be, pure.

It is in a Secret: one that the resource names, which is only read, or one of the operator's own, which authority.py
fills. Of both it is asked what parts ask of each other in a handshake; that each certificate of a path is allowed to
sign the next is left to the handshake. The operator's own is issued anew when a third of its life is left, when it is
missing, and when somebody has spoiled what pods get of it. The key of its CA stays in the Secret, where no pod gets it.
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
from orca.operator.domain.actions import Issue
from orca.operator.domain.observed import Observed, is_going
from orca.operator.domain.problems import (
    CERTIFICATE_EXPIRED,
    CERTIFICATE_EXPIRING,
    CERTIFICATE_UNFIT,
    Trouble,
    of_secret,
)
from orca.operator.domain.resource import Deployment, Json

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
FILES = (CA, CERTIFICATE, KEY)
"""Keys of the Secret that pods get as files; named as cert-manager names them."""
CA_KEY = "ca.key"

RENEWED_AT_SHARE_LEFT = 1 / 3
SKEW_S = 3600.0
"""By which other machines' clocks may be behind: so long before it is made, a certificate begins."""
KNOWN_AFTER_S = 600.0
"""After which all pods have a changed Secret: kubelets bring one within two minutes."""
EXPIRING_S, EXPIRING_AT_SHARE_LEFT = 14 * 86_400.0, 1 / 6
"""A certificate that nobody has renewed is told when so much is left, of a short life a share: cert-manager renews when
a third is left, unless told otherwise."""

R = TypeVar("R")


class _Unfit(Exception):
    """What is wrong with the content of a Secret; the message is for people."""


def server_name(deployment: Deployment) -> str:
    """Which all parts of a deployment look for in each other's certificate."""
    return f"{deployment.name}.{deployment.namespace}.svc"


def due(deployment: Deployment, observed: Observed, now_s: float) -> Issue | None:
    """None while the operator's own certificate is as it should be, and where nobody needs it: the resource names
    another, which may be called as our own would be, and no group of before is left."""
    name, named = names.certificates(deployment.name), deployment.spec.certificates.secret_name
    if named == name or (named is not None and not _is_mounted(observed, name)):
        return None
    secret = observed.get("Secret", name)
    return Issue("it is missing", None, is_new=True) if secret is None else due_of(deployment, secret, now_s)


def _is_mounted(observed: Observed, name: str) -> bool:
    templates = [each["spec"]["template"] for each in observed.of_kind("StatefulSet") if not is_going(each)]
    volumes = [volume for each in templates for volume in each["spec"].get("volumes") or []]
    return any(volume.get("secret", {}).get("secretName") == name for volume in volumes)


def due_of(deployment: Deployment, secret: Json, now_s: float) -> Issue | None:
    """Of the operator's own Secret as it is, or as it came back from a write.

    What still holds is not replaced for a CA whose key is lost: parts with the files of before and of after would
    refuse each other. In time for its end, another CA comes into ca.crt first, and signs when all parts trust it.
    """
    data = secret.get("data") or {}
    signer = _signer(data)
    try:
        leaf, *_, authority = path = _path(data, server_name(deployment), now_s)
    except _Unfit as problem:
        return Issue(str(problem), signer)
    soonest = min(path, key=_end_s)
    if now_s < _end_s(soonest) - _life_s(leaf) * RENEWED_AT_SHARE_LEFT:
        return None
    reason = f"it ends on {_end(soonest)}"
    if now_s >= _end_s(soonest) or _is_of(authority, signer):
        return Issue(reason, signer)
    before = authority.public_bytes(Encoding.PEM).decode()
    known = next((each for each in _certificates(data, CA) if _is_of(each, signer)), None)
    if known is None:
        # PEM is ASCII; around it, tools write names in any encoding.
        kept = {key: base64.b64decode(data[key]).decode("ascii", "ignore") for key in (CERTIFICATE, KEY)}
        reason += ", and the key of its CA is lost: another CA is made known"
        return Issue(reason, signer, trusted=before, kept=kept)
    if now_s < known.not_valid_before_utc.timestamp() + SKEW_S + KNOWN_AFTER_S:
        return None
    return Issue(reason, signer, trusted=before)


def trouble(deployment: Deployment, observed: Observed, now_s: float) -> Trouble | None:
    """What keeps the certificate from being used, now or soon. Of the operator's own only that it ends: all else is
    mended with the next look."""
    named = deployment.spec.certificates.secret_name
    if named is None:
        secret = observed.get("Secret", names.certificates(deployment.name))
    else:
        secret = observed.named_certificates
        if missing := of_secret(named, secret, FILES, field="certificates.secretName", names_keys=False):
            return missing
    name = names.certificates(deployment.name) if named is None else named
    try:
        path = _path((secret or {}).get("data") or {}, server_name(deployment), now_s)
    except _Unfit as problem:
        return None if named is None else Trouble(CERTIFICATE_UNFIT, f"the Secret {named}: {problem}")
    soonest = min((each for each in path if _is_expiring(each, now_s)), key=_end_s, default=None)
    if soonest is None:
        return None
    what = f"{CA if soonest is path[-1] else CERTIFICATE} in the Secret {name}"
    if now_s >= _end_s(soonest):
        return Trouble(CERTIFICATE_EXPIRED, f"{what} ended on {_end(soonest)}: groups cannot form any more")
    return Trouble(CERTIFICATE_EXPIRING, f"{what} ends on {_end(soonest)} and nobody has renewed it")


def _is_expiring(certificate: x509.Certificate, now_s: float) -> bool:
    return now_s > _end_s(certificate) - min(EXPIRING_S, _life_s(certificate) * EXPIRING_AT_SHARE_LEFT)


def _path(data: Mapping[str, str], name: str, now_s: float) -> list[x509.Certificate]:
    """What others get to see, and what makes them believe it: the certificate, those between, and its CA.

    Raises: _Unfit with what is wrong, whatever else than that one of them has ended.
    """
    authorities, (leaf, *between) = _certificates(data, CA), _certificates(data, CERTIFICATE)
    if leaf.public_key() != _key(data, KEY).public_key():
        raise _Unfit(f"{CERTIFICATE} is not of {KEY}")
    path = [leaf]
    # Of several certificates of the same CA, the libraries take the first too.
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


def _issuer(certificate: x509.Certificate, among: Iterable[x509.Certificate]) -> x509.Certificate | None:
    return next((each for each in among if _vouches(each, certificate)), None)


def _vouches(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether whoever trusts the one believes the other: also where they are the same."""
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
    """All parts show the same one, as servers and as clients."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    except ValueError as error:
        raise _Unfit(f"{CERTIFICATE} cannot be read") from error
    for usage, word in ((ExtendedKeyUsageOID.SERVER_AUTH, "servers"), (ExtendedKeyUsageOID.CLIENT_AUTH, "clients")):
        if usage not in found:
            raise _Unfit(f"{CERTIFICATE} is not for {word} by its extended key usage, and each part shows it as both")


def _certificates(data: Mapping[str, str], key: str) -> list[x509.Certificate]:
    """All in a file: one or more."""

    def load(content: bytes) -> list[x509.Certificate]:
        found = x509.load_pem_x509_certificates(content)
        found[0].public_key()  # which may be of a kind that nobody knows
        return found

    return _read(data, key, load)


def _key(data: Mapping[str, str], key: str) -> PrivateKeyTypes:
    return _read(data, key, lambda content: load_pem_private_key(content, password=None))


def _signer(data: Mapping[str, str]) -> EllipticCurvePrivateKey | None:
    """The key of the CA; None where there is none, or none that signs."""
    try:
        key = _key(data, CA_KEY)
    except _Unfit:
        return None
    return key if isinstance(key, EllipticCurvePrivateKey) else None


def _is_of(authority: x509.Certificate, signer: EllipticCurvePrivateKey | None) -> bool:
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


def _minute(at: datetime) -> str:
    return f"{at:%Y-%m-%d at %H:%M} UTC"
