"""The CA of each deployment, and the one certificate that it signs: drawn here, decided upon in certificates.py."""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from orca.operator.domain.certificates import CA, CA_KEY, CERTIFICATE, KEY, SKEW_S

LIFE = timedelta(days=90)
CA_LIFE = timedelta(days=3650)


def issue(deployment: str, server_name: str, signer: ec.EllipticCurvePrivateKey | None, now_s: float) -> dict[str, str]:
    """A certificate with a new key, for servers and clients, valid from now on.

    The CA's own certificate is made anew each time, so it never comes near its end. With the same key and subject as
    before, what either of the two has signed is good for whoever knows the other.

    Args:
        deployment: name of the OrcaDeployment, for people who look at certificates.
        server_name: DNS name that it is for.
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
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, authority, key.public_key(), now, LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return {
        CA: ca.public_bytes(Encoding.PEM).decode(),
        CA_KEY: _text(signer),
        CERTIFICATE: certificate.public_bytes(Encoding.PEM).decode(),
        KEY: _text(key),
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


def _text(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
