"""Ports of this machine that nobody uses now; apart from Orca's own, as all of the checker that can be."""

import secrets
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Below the ports that the kernel gives away by itself: until it is listened on, nobody else comes upon it."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port


def free_ports(count: int) -> list[int]:
    """So many different ones."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
