"""Ports that are given to servers on their command lines: nobody else may come in between."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from checker.systems import ports as checker_ports
from orca.core.process import ports
from orca.core.transport import grpc_links


@pytest.mark.parametrize("free_port", [ports.free_port, checker_ports.free_port])
async def test_the_servers_of_a_part_can_listen_on_it_one_after_the_other(free_port: Callable[[], int]) -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        plain = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        plain.close()
        await plain.wait_closed()
        server = grpc_links.new_server()
        assert grpc_links.listen(server, f"127.0.0.1:{port}") == port
        await server.start()
        await server.stop(grace=None)


def test_the_number_of_held_ports_is_bounded_and_the_oldest_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_HELD_MAX", 2)
    monkeypatch.setattr(ports, "_held", type(ports._held)())
    found = [ports.free_port() for _ in range(3)]
    assert len(ports._held) == 2
    with socket.socket() as probe:
        probe.bind(("", found[0]))
        for held in found[1:]:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", held))
