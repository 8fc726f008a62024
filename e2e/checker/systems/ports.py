"""Ports of this machine that nobody uses now; apart from Orca's own, as all of the checker that can be."""

import os
import secrets
import socket
from collections import deque

_HELD_MAX = 256
_held: deque[int] = deque()


def free_port(host: str = "127.0.0.1") -> int:
    """Below the ports that the kernel gives away by itself, and held: a socket that does not listen stays bound to it,
    which a server with SO_REUSEADDR does not mind and the next search does."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as holder:
            try:
                holder.bind((host, port))
            except OSError:
                continue
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _held.append(holder.detach())
        if len(_held) > _HELD_MAX:
            os.close(_held.popleft())
        return port


def free_ports(count: int) -> list[int]:
    """So many different ones."""
    return [free_port() for _ in range(count)]
