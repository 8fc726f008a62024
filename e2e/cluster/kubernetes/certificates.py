"""The cluster's own certificate authority and its certificates, made by openssl."""

from dataclasses import dataclass
from pathlib import Path

from cluster.machine.commands import run
from cluster.machine.layout import API_SERVICE_ADDRESS, DNS_DOMAIN, Layout

_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")
_DAYS = "365"


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a certificate: in Kubernetes its common name is a user and its organization a group.

    Fields:
        hosts: names and addresses of a server in openssl's format (`DNS:...`, `IP:...`); none for a client.
    """

    file: str
    common_name: str
    organization: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return (f"/O={self.organization}" if self.organization else "") + f"/CN={self.common_name}"


def identities(layout: Layout) -> list[Identity]:
    """Return the API server and all its clients."""
    in_cluster = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DNS_DOMAIN}")
    addresses = ("127.0.0.1", layout.first_node.address, API_SERVICE_ADDRESS)
    hosts = (*(f"DNS:{name}" for name in in_cluster), *(f"IP:{address}" for address in addresses))
    return [
        Identity("apiserver", "kube-apiserver", hosts=hosts),
        Identity("admin", "admin", "system:masters"),
        Identity("kube-controller-manager", "system:kube-controller-manager"),
        Identity("kube-scheduler", "system:kube-scheduler"),
        Identity("kube-proxy", "system:kube-proxy", "system:node-proxier"),
        *(Identity(node.name, f"system:node:{node.name}", "system:nodes") for node in layout.nodes),
    ]


def make_certificates(layout: Layout) -> None:
    """Write `ca.crt`, `<file>.crt` and `<file>.key` for each identity (PEM), and `service-accounts.key` for tokens."""
    folder = layout.certificates
    folder.mkdir(mode=0o700)
    authority = ("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key")
    _sign(folder, Identity("ca", "orca-cluster"), ())
    for identity in identities(layout):
        _sign(folder, identity, (*authority, "-addext", "basicConstraints=critical,CA:FALSE"))
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", folder / "service-accounts.key")


def _sign(folder: Path, identity: Identity, authority: tuple[str | Path, ...]) -> None:
    names = ("-addext", f"subjectAltName={','.join(identity.hosts)}") if identity.hosts else ()
    files = ("-keyout", folder / f"{identity.file}.key", "-out", folder / f"{identity.file}.crt")
    words = ("openssl", "req", "-x509", *_EC_KEY, "-days", _DAYS, "-subj", identity.subject)
    run(*words, *names, *files, *authority)
