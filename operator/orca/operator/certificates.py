"""The certificate that scheduler and stages of a deployment show each other: whether it is as it should be, pure.

It is in a Secret: one that the resource names, which is only read, or one of the operator's own, which authority.py
fills. Its own is issued anew when a third of its life is left, when it is missing, and when somebody has spoiled it.
The key of its CA stays in the Secret, where no pod gets it.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from orca.operator import names
from orca.operator.observed import Observed
from orca.operator.resource import Deployment
from orca.operator.troubles import CERTIFICATE_EXPIRED, CERTIFICATE_EXPIRING, CERTIFICATE_UNFIT, Trouble, of_secret

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
FILES = (CA, CERTIFICATE, KEY)
"""Keys of the Secret that pods get as files; named as cert-manager names them."""
CA_KEY = "ca.key"

RENEWED_AT_SHARE_LEFT = 1 / 3
EXPIRING_S = 14 * 86_400.0
"""So long before its end a certificate is told that nobody has renewed."""

R = TypeVar("R")


class _Unfit(Exception):
    """What is wrong with the content of a Secret; the message is for people."""


@dataclass(frozen=True, slots=True)
class Due:
    """Why the certificate has to be issued."""

    reason: str
    signer: EllipticCurvePrivateKey | None = field(repr=False)  # key of the CA that stays; None where there is none


def server_name(deployment: Deployment) -> str:
    """Which all parts of a deployment look for in each other's certificate."""
    return f"{deployment.name}.{deployment.namespace}.svc"


def due(deployment: Deployment, observed: Observed, now_s: float) -> Due | None:
    """None while the operator's own certificate is as it should be, and where the resource names another."""
    if deployment.spec.certificates.secret_name is not None:
        return None
    secret = observed.get("Secret", names.certificates(deployment.name))
    if secret is None:
        return Due("it is missing", None)
    data, signer = secret.get("data") or {}, None
    try:
        signer = _ec_key(data)
        _check_own(data, signer, server_name(deployment), now_s)
    except _Unfit as problem:
        return Due(str(problem), signer)
    return None


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
        certificate = _certificate((secret or {}).get("data") or {}, CERTIFICATE)
        if named is not None:
            _check_name(certificate, server_name(deployment))
    except _Unfit as problem:
        return None if named is None else Trouble(CERTIFICATE_UNFIT, f"the Secret {named}: {problem}")
    left_s = certificate.not_valid_after_utc.timestamp() - now_s
    if left_s <= 0:
        said = f"the certificate in the Secret {name} ended on {_end(certificate)}: groups cannot form any more"
        return Trouble(CERTIFICATE_EXPIRED, said)
    if left_s < EXPIRING_S:
        said = f"the certificate in the Secret {name} ends on {_end(certificate)} and nobody has renewed it"
        return Trouble(CERTIFICATE_EXPIRING, said)
    return None


def _check_own(data: Mapping[str, str], signer: EllipticCurvePrivateKey, name: str, now_s: float) -> None:
    """Raises: _Unfit with what is wrong."""
    authority, certificate = _certificate(data, CA), _certificate(data, CERTIFICATE)
    if authority.public_key() != signer.public_key():
        raise _Unfit(f"{CA} is not of {CA_KEY}")
    if certificate.public_key() != _key(data, KEY).public_key():
        raise _Unfit(f"{CERTIFICATE} is not of {KEY}")
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise _Unfit(f"{CERTIFICATE} is not signed by {CA}") from error
    _check_name(certificate, name)
    begin_s, end_s = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    if now_s < begin_s:
        raise _Unfit(f"{CERTIFICATE} is not valid yet")
    sooner = min(certificate, authority, key=lambda each: each.not_valid_after_utc)
    if now_s >= sooner.not_valid_after_utc.timestamp() - (end_s - begin_s) * RENEWED_AT_SHARE_LEFT:
        raise _Unfit(f"it ends on {_end(sooner)}")


def _check_name(certificate: x509.Certificate, name: str) -> None:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError) as error:
        raise _Unfit(f"{CERTIFICATE} is not for {name}") from error
    wildcard = "*." + name.partition(".")[2]
    if not {name, wildcard} & set(found.get_values_for_type(x509.DNSName)):
        raise _Unfit(f"{CERTIFICATE} is not for {name}")


def _certificate(data: Mapping[str, str], key: str) -> x509.Certificate:
    """The first one in a file."""

    def load(content: bytes) -> x509.Certificate:
        found = x509.load_pem_x509_certificate(content)
        found.public_key()  # which may be of a kind that nobody knows
        return found

    return _read(data, key, load)


def _key(data: Mapping[str, str], key: str) -> PrivateKeyTypes:
    return _read(data, key, lambda content: load_pem_private_key(content, password=None))


def _ec_key(data: Mapping[str, str]) -> EllipticCurvePrivateKey:
    key = _key(data, CA_KEY)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise _Unfit(f"{CA_KEY} is no key of an elliptic curve")
    return key


def _read(data: Mapping[str, str], key: str, load: Callable[[bytes], R]) -> R:
    if not data.get(key):
        raise _Unfit(f"there is no {key}")
    try:
        return load(base64.b64decode(data[key]))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _Unfit(f"{key} cannot be read") from error


def _end(certificate: x509.Certificate) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d at %H:%M} UTC"
