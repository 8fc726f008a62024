"""Servers that listen everywhere are reached at both families of addresses, whichever of them a machine has."""

import asyncio
import errno
import socket
from contextlib import ExitStack

import pytest

from orca.core.process import listening
from orca.core.process.internal_port import InternalPort
from orca.core.process.listening import bind_all
from orca.core.transport import grpc_links


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
BOTH = [pytest.param("127.0.0.1", id="IPv4"), pytest.param("::1", id="IPv6", marks=needs_ipv6)]


def bound(stack: ExitStack, host: str, port: int = 0) -> list[socket.socket]:
    return [stack.enter_context(each) for each in bind_all(host, port)]


@pytest.mark.parametrize("client", BOTH)
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_everywhere_is_both_families_at_one_port_and_clients_keep_their_addresses(host: str, client: str) -> None:
    with ExitStack() as stack:
        sockets = bound(stack, host)
        [port] = {each.getsockname()[1] for each in sockets}
        for each in sockets:
            each.listen()
            each.setblocking(False)
        stack.enter_context(socket.create_connection((client, port), timeout=5))
        family = socket.AF_INET6 if ":" in client else socket.AF_INET
        [server] = [each for each in sockets if each.family == family]
        taken, peer = server.accept()
        taken.close()
        assert peer[0] == client


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_one_address_stays_one_address(host: str) -> None:
    with ExitStack() as stack:
        assert [each.getsockname()[0] for each in bound(stack, host)] == [host]


@pytest.mark.parametrize("missing", [socket.AF_INET6, socket.AF_INET])
@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_machine_without_one_family_listens_on_the_other(
    missing: socket.AddressFamily, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == socket.AF_INET and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    bind = listening._bind

    def refuse(family: socket.AddressFamily, address: tuple[object, ...], port: int) -> socket.socket:
        if family == missing:
            raise OSError(error, "there is none")
        return bind(family, address, port)

    monkeypatch.setattr(listening, "_bind", refuse)
    with ExitStack() as stack:
        [left] = bound(stack, "::")
        assert left.family != missing


def test_a_port_that_is_taken_on_one_family_is_not_taken_on_the_other_either() -> None:
    with socket.socket() as other, ExitStack() as stack:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            bound(stack, "::", port)
        if has_ipv6():
            with socket.socket(socket.AF_INET6) as free:
                free.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                free.bind(("::", port))


def test_a_host_that_is_no_address_is_refused_as_such() -> None:
    with pytest.raises(socket.gaierror):
        bind_all("no host", 0)


@pytest.mark.parametrize("client", BOTH)
async def test_an_internal_port_answers_probes_at_both_families(client: str) -> None:
    port = await InternalPort.open("[::]:0")
    try:
        number = int(port.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(client, number)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    finally:
        port.close()


@pytest.mark.parametrize("client", BOTH)
async def test_grpc_links_listen_at_both_families(client: str) -> None:
    server = grpc_links.new_server()
    port = grpc_links.listen(server, "[::]:0")
    await server.start()
    try:
        _, writer = await asyncio.open_connection(client, port)
        writer.close()
    finally:
        await server.stop(None)
