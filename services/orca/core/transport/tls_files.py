"""TLS files by which scheduler and stages of a group prove their identity to each other.

Both ends of each gRPC link show a certificate that the CA has signed, and check the other's, including its host name.
So the CA should sign for one deployment only: every holder of a certificate may send steps to a stage. If hosts come
and go, all processes show one certificate, and each has the name in it as a setting. The rendezvous of the ranks is one
of these links. Gloo and NCCL, by which ranks send each other activations and sampled tokens, cannot encrypt: keep that
network to the group (a network policy, or an encrypting network below). If scheduler and stage share a machine, steps
and results never leave it, and are not encrypted either (core.transport.local_link).

The files may be replaced at any time. Open connections go on. A server shows the new files at each handshake, and a
client with its next epoch, for which it opens new channels.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orca.core.domain.errors import EngineError, SettingError
from orca.core.process.settings import setting

_FIELDS = ("tls_ca_file", "tls_certificate_file", "tls_key_file")


def tls_ca_setting() -> Any:
    text = "CA file (PEM) of the deployment: encrypts the gRPC links of scheduler and stages, not the tensors of ranks"
    return setting(None, f"{text}; needs tls_certificate_file and tls_key_file; unset means no encryption")


def tls_certificate_setting() -> Any:
    return setting(
        None, "certificate file (PEM) for the host by which others reach this process; servers and clients show it"
    )


def tls_key_setting() -> Any:
    return setting(None, "private key file (PEM) of tls_certificate_file")


def tls_server_name_setting() -> Any:
    text = "DNS name in the certificates of all other processes; unset means the host by which each is reached"
    return setting(None, f"{text}; needs the tls files")


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
    """The paths of the files. A server reads them at each handshake, a client when it opens a channel."""

    ca: Path
    certificate: Path
    key: Path
    server_name: str | None = None  # DNS name in others' certificates; None: the host by which each is reached

    @classmethod
    def of(cls, settings: _TlsSettings) -> "TlsFiles | None":
        """Return the files of the settings; None if none is set. Raises: SettingError if only some are set."""
        ca, certificate, key = settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file
        if ca and certificate and key:
            return cls(Path(ca), Path(certificate), Path(key), settings.tls_server_name or None)
        missing = [name for name in _FIELDS if not getattr(settings, name)]
        if len(missing) < len(_FIELDS):
            raise SettingError(f"setting {missing[0]}: set all of {', '.join(_FIELDS)}, or none")
        if settings.tls_server_name:
            raise SettingError(f"setting tls_server_name: it needs {', '.join(_FIELDS)}")
        return None

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Read CA, certificate and key that belong together. Raises: EngineError naming a file that cannot be read."""
        found = self._read()
        # A kubelet replaces all three at once. Between two of these reads, they would not fit together.
        while (again := self._read()) != found:
            found = again
        return found

    def _read(self) -> tuple[bytes, bytes, bytes]:
        try:
            return self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes()
        except OSError as error:
            raise EngineError(f"certificate file {error.filename}: {error.strerror}") from error
