"""Certificates as the operator and as others make them, and handshakes with them as scheduler and stages make them."""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from orca.core.transport import grpc_links
from orca.core.transport.tls_files import TlsFiles
from orca.operator.cluster import credentials
from orca.operator.domain.certificates import CA, CERTIFICATE, FILES, KEY
from orca.operator.domain.resource import Json
from support.operator.clusters import BORN_S
from support.worker import answering_stage

NAME = "shop.ns.svc"
BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)

Files = dict[str, str]


def issue(name: str = NAME, signer: ec.EllipticCurvePrivateKey | None = None, issued_s: float = BORN_S) -> Files:
    """Issue certificate files as the operator does."""
    return credentials.issue("shop", name, signer, issued_s)


def a_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def secret(files: Mapping[str, str]) -> Json:
    """Return the Secret that holds these files."""
    return {"data": {key: base64.b64encode(text.encode()).decode() for key, text in files.items()}}


def by_some_ca(
    *,
    leaf_days: float = 90,
    ca_days: float = 300,
    begins_s: float = BORN_S,
    usages: Sequence[x509.ObjectIdentifier] = BOTH,
    has_ca_between: bool = False,
) -> Files:
    """Return files as another tool makes them: the intermediate CA is beside the certificate, and TLS sends both."""
    root, between, key = a_key(), a_key(), a_key()
    ca = _signed("root", root, "root", root, begins_s, ca_days)
    middle = _signed("between", between, "root", root, begins_s, ca_days)
    issuer, signer = ("between", between) if has_ca_between else ("root", root)
    extensions: list[x509.ExtensionType] = [x509.SubjectAlternativeName([x509.DNSName(NAME)])]
    extensions += [x509.ExtendedKeyUsage(usages)] if usages else []
    leaf = _signed("leaf", key, issuer, signer, begins_s, leaf_days, *extensions)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return {CA: ca, CERTIFICATE: leaf + middle if has_ca_between else leaf, KEY: text}


def _signed(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    begins_s: float,
    days: float,
    *extensions: x509.ExtensionType,
) -> str:
    begin, is_ca = datetime.fromtimestamp(begins_s, UTC), subject != "leaf"
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    for each in extensions:
        builder = builder.add_extension(each, critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def shown(files: Files, folder: Path) -> TlsFiles:
    """Puts files where a pod has them. Args: folder: of the test."""
    here = folder / str(len(list(folder.iterdir())))
    here.mkdir()
    for key in FILES:
        (here / key).write_text(files[key])
    return TlsFiles(here / CA, here / CERTIFICATE, here / KEY, NAME)


async def ask(server: TlsFiles, client: TlsFiles) -> str:
    """Returns: "here". Raises: AioRpcError when one of the two refuses the other."""
    async with answering_stage.serving(server) as address:
        return await answering_stage.ask(grpc_links.open_channel(address, client), limit_s=30)
