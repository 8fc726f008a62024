"""gRPC channels and servers of the control plane, with the same options on both ends, and access to the generated code.

A frozen peer is noticed in about seven seconds. Keepalive alone takes 65 s, so the HTTP/2 ping has its own timeout.
Servers must allow pings that often, or they hang up on the client that sends them.
"""

import os
from typing import Any

import grpc
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.transport import engine_pb2_grpc
from orca.core.transport.tls_files import TlsFiles

# gRPC's core reads these when it first runs. Otherwise it writes a line to stderr for each connection that ends
# normally and for each process that we start. We start processes by exec, which needs none of its support for forks.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

PING_EVERY_MS = 2_000
PING_TIMEOUT_MS = 5_000
MESSAGE_BYTES_MAX = 1 << 30
"""Far above any step. The largest message is the result of a step in which many long prompts got log probabilities: 180
bytes per prompt token with 20 alternatives. The pool reserves more memory than that for the same tokens, and has a
quarter of this bound by default. Activations never travel here."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_OPTIONS,
    # Find a stage that restarts within a second, not after gRPC's two-minute back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The name of a replaced pod has another address. gRPC by itself asks DNS again only after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Keep idle links between stages: gRPC would drop them after half an hour, and the first step after that might
    # connect with a certificate that has expired since.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    # Give each channel its own connection: a broken one must not fail the calls of another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", PING_EVERY_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_EVERY_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its calls by chance. A second process must fail to start instead.
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str, certificates: TlsFiles | None = None) -> aio.Channel:
    """Return a channel to `host:port`. It connects on first use and reconnects by itself; calls still need deadlines.

    The channel keeps its certificate: when that has expired, the channel cannot connect any more.

    Raises: EngineError when a certificate cannot be read.
    """
    if certificates is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return aio.secure_channel(address, _client_credentials(certificates), options=_secure_options(certificates))


def open_blocking_channel(address: str, certificates: TlsFiles | None = None) -> grpc.Channel:
    """Return a channel as `open_channel` does, for threads."""
    if certificates is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _client_credentials(certificates), options=_secure_options(certificates))


def stage_stub(channel: aio.Channel) -> Any:
    """Return a client of the Stage service (engine.proto)."""
    return engine_pb2_grpc.StageStub(channel)  # type: ignore[no-untyped-call]


def new_server() -> aio.Server:
    return aio.server(options=SERVER_OPTIONS)


def listen(server: aio.Server, address: str, certificates: TlsFiles | None = None) -> int:
    """Bind the server to `host:port`, before it starts; port 0 takes a free one.

    With certificates, a client that does not show one of the CA is refused.

    Returns: the port.
    Raises: EngineError when a certificate cannot be read; RuntimeError when the address is taken.
    """
    if certificates is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _server_credentials(certificates)))


def serve_stage(server: aio.Server, servicer: Any) -> None:
    engine_pb2_grpc.add_StageServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def serve_rendezvous(server: aio.Server, servicer: Any) -> None:
    engine_pb2_grpc.add_RendezvousServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def _client_credentials(certificates: TlsFiles) -> grpc.ChannelCredentials:
    ca, certificate, key = certificates.read()
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _secure_options(certificates: TlsFiles) -> list[tuple[str, int | str]]:
    name = certificates.server_name
    return [*CHANNEL_OPTIONS, *([] if name is None else [("grpc.ssl_target_name_override", name)])]


def _server_credentials(certificates: TlsFiles) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, certificate, key = certificates.read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)

    def reload() -> grpc.ServerCertificateConfiguration | None:
        # During a rotation, or without the files, the last good ones stay.
        try:
            return configuration()
        except EngineError:
            return None

    return grpc.dynamic_ssl_server_credentials(configuration(), reload, require_client_authentication=True)
