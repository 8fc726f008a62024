"""Secrets that the operator makes: the pool's password, an API key if the spec names none, and the certificates.

It draws a password or an API key only if no Secret of that name exists. The rights of the pool's user follow the
release, and nothing else in those two changes. Whether a Secret goes with the resource is decided when it is made
(deletionPolicy).

Each deployment has a CA of its own, and one certificate that it signs. domain/certificates.py decides when to issue it.
"""

import base64
import hashlib
import secrets
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from orca.core.api_keys import ApiKey, key_digest, key_line, make_key
from orca.operator.domain import names
from orca.operator.domain.actions import IssueCertificate
from orca.operator.domain.certificates import CA, CA_KEY, CERTIFICATE, KEY, SKEW_S, server_name
from orca.operator.domain.objects import label_map
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.render import pool
from orca.operator.render.objects import metadata
from orca.pool.redis.access import acl_lines

LIFE = timedelta(days=90)
CA_LIFE = timedelta(days=3650)


def pool_secret(deployment: OrcaDeployment) -> Json:
    """Draw the pool's password. Returns: a Secret with it, and with the users file of Redis."""
    password = secrets.token_urlsafe(32)
    return _pool_secret(deployment, password, _user_lines(deployment, password))


def renewed_pool_secret(deployment: OrcaDeployment, secret: Json) -> Json | None:
    """Return the pool's Secret with the rights that this release's parts need.

    None means that its user has them all, or that no operator has made the Secret. Rights that exist stay: parts of
    another release may use them, during an upgrade or after a rollback, and operators of two releases do not undo each
    other's. Users that somebody has added stay too.
    """
    data = secret.get("data") or {}
    if names.HASH_LABEL not in label_map(secret) or "password" not in data:
        return None
    try:
        password, users = (base64.b64decode(data.get(key, "")).decode() for key in ("password", pool.USERS_FILE))
    except ValueError:
        # It holds something that is not text, so the pool cannot be polled. The status says so.
        return None
    lines, ours = users.splitlines(), ["user", pool.USER]
    *default, own = _user_lines(deployment, password)
    wanted, known = own.split(), [right for line in lines if line.split()[:2] == ours for right in line.split()]
    if set(wanted) <= set(known):
        return None
    more = [right for right in known if right.startswith("+") and right not in wanted]
    others = [line for line in lines if line.split()[:2] != ours] or default
    renewed = _pool_secret(deployment, password, [*others, " ".join([*wanted, *more])])
    # The uid names this very Secret: one that was made again meanwhile has another password.
    return {**renewed, "metadata": renewed["metadata"] | {"uid": secret["metadata"]["uid"]}}


def _user_lines(deployment: OrcaDeployment, password: str) -> list[str]:
    # Clients read the password from a file without the newline that editors add.
    hashed = "#" + hashlib.sha256(password.strip().encode()).hexdigest()
    return acl_lines(pool.key_prefix(deployment), pool.USER, hashed)


def _pool_secret(deployment: OrcaDeployment, password: str, users: list[str]) -> Json:
    texts = {"password": password, pool.USERS_FILE: _text(users)}
    return _secret(deployment, names.pool(deployment.name), names.POOL, **texts)


def api_key_secret(deployment: OrcaDeployment) -> Json:
    """Draw one API key without limits. Returns: a Secret with it, and with the line by which gateways recognise it."""
    key = make_key()
    texts = {"key": key, names.API_KEYS_FILE: _text([key_line(ApiKey("default", key_digest(key)))])}
    return _secret(deployment, names.api_key(deployment.name), names.GATEWAY, **texts)


def certificates_secret(deployment: OrcaDeployment, action: IssueCertificate, now_s: float) -> Json:
    """Draw the certificate that schedulers and stages show each other. Returns: its Secret."""
    drawn = issue(deployment.name, server_name(deployment), action.signer, now_s)
    texts = drawn | {CA: drawn[CA] + action.trusted, **action.kept}
    return _secret(deployment, names.certificates(deployment.name), names.SCHEDULER, **texts)


def _secret(deployment: OrcaDeployment, name: str, role: str, **texts: str) -> Json:
    marks = metadata(deployment, name, role)
    # Not stringData: after an apply, the managed fields would list keys that the Secret does not have.
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": marks, "type": "Opaque", "data": data}


def _text(lines: list[str]) -> str:
    return "\n".join([*lines, ""])


def issue(deployment: str, server_name: str, signer: ec.EllipticCurvePrivateKey | None, now_s: float) -> dict[str, str]:
    """Issue a certificate with a new key, for servers and clients, valid from now on.

    The CA's own certificate is made again each time, so it never comes near its end. Key and subject stay, so a part
    that trusts the old or the new one accepts everything that either has signed.

    Args:
        deployment: name of the OrcaDeployment, for people who look at certificates.
        server_name: DNS name in the certificate.
        signer: key of the CA; None draws one.
        now_s: seconds since 1970.
    Returns: the files of the Secret, PEM, by key.
    """
    signer = signer or ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.fromtimestamp(now_s, UTC)
    authority, subject = _name(f"{deployment} CA"), _name(deployment)
    ca = (
        _builder(authority, authority, signer.public_key(), now, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(signer, hashes.SHA256())
    )
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, authority, key.public_key(), now, LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return {
        CA: ca.public_bytes(Encoding.PEM).decode(),
        CA_KEY: _pem(signer),
        CERTIFICATE: certificate.public_bytes(Encoding.PEM).decode(),
        KEY: _pem(key),
    }


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=SKEW_S))
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
