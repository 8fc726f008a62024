"""How the parts of a group prove to each other who they are: three files, the same settings on scheduler and stages.

Both ends of each gRPC link show a certificate that the CA has signed, and check the other's, its host name included. So
the CA should sign for one deployment only: whoever it signs for may give orders to a stage. Where parts come and go
under hosts of their own, all show one certificate, and each is told the name in it. The rendezvous of the ranks is one
of these links. What the ranks then send each other, activations and sampled tokens by Gloo or NCCL, cannot be encrypted
by these libraries: keep that network to the group (a network policy, or an encrypting one below). Where scheduler and
stage are one machine's, steps and results never leave it, and are not encrypted either (core.transport.local_link).

The files may be replaced at any time. What is connected goes on; each handshake of a server shows the new ones, and so
does each client with its next epoch, for which it opens its channels anew.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orca.core.domain.errors import EngineError, SettingError
from orca.core.process.settings import setting

_FIELDS = ("tls_ca_file", "tls_certificate_file", "tls_key_file")


def tls_ca_setting() -> Any:
    text = "CA (PEM) of the deployment, encrypts the gRPC links of scheduler and stages; not what ranks send each other"
    return setting(None, f"{text}; goes with tls_certificate_file and tls_key_file; unset encrypts nothing")


def tls_certificate_setting() -> Any:
    return setting(None, "certificate (PEM) for the host that others reach this part by, shown in both directions")


def tls_key_setting() -> Any:
    return setting(None, "private key (PEM) of tls_certificate_file")


def tls_server_name_setting() -> Any:
    text = (
        "DNS name that the certificates of all other parts are for; unset: each is for the host that it is reached by"
    )
    return setting(None, f"{text}. Goes with the tls files")


class _TlsSettings(Protocol):
    @property
    def tls_ca_file(self) -> str | None: ...

    @property
    def tls_certificate_file(self) -> str | None: ...

    @property
    def tls_key_file(self) -> str | None: ...

    @property
    def tls_server_name(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the files are. A server reads them at each handshake, a client when it opens a channel."""

    ca: Path
    certificate: Path
    key: Path
    server_name: str | None = None  # that others' certificates are for; None: each for the host it is reached by

    @classmethod
    def of(cls, settings: _TlsSettings) -> "TlsFiles | None":
        """None when nothing is set. Raises: SettingError when some are set and some are not."""
        ca, certificate, key = settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file
        if ca and certificate and key:
            return cls(Path(ca), Path(certificate), Path(key), settings.tls_server_name or None)
        missing = [name for name in _FIELDS if not getattr(settings, name)]
        if len(missing) < len(_FIELDS):
            raise SettingError(f"setting {missing[0]}: {', '.join(_FIELDS)} go together")
        if settings.tls_server_name:
            raise SettingError(f"setting tls_server_name: it goes with {', '.join(_FIELDS)}")
        return None

    def read(self) -> tuple[bytes, bytes, bytes]:
        """CA, certificate, key, of one piece. Raises: EngineError naming the file that cannot be read."""
        found = self._read()
        # A kubelet exchanges all three at once, perhaps between two of these reads: they would not fit together.
        while (again := self._read()) != found:
            found = again
        return found

    def _read(self) -> tuple[bytes, bytes, bytes]:
        try:
            return self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes()
        except OSError as error:
            raise EngineError(f"certificate file {error.filename}: {error.strerror}") from error
