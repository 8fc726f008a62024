"""Reads the certificate that a server shows on an encrypted link."""

import socket
import ssl

from orca.core.transport.tls_files import TlsFiles


def shown_certificate(address: str, own: TlsFiles) -> str:
    """Return the present certificate of a gRPC server (PEM).

    Args:
        address: host:port.
        own: certificate to show to the server. The server's certificate must be of the same CA, and for
            `own.server_name`, or the host if this is None.
    Raises: OSError, which includes ssl.SSLError.
    """
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(own.ca))
    context.load_cert_chain(own.certificate, own.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=10) as link,
        context.wrap_socket(link, server_hostname=own.server_name or host) as encrypted,
    ):
        shown = encrypted.getpeercert(binary_form=True)
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown)
