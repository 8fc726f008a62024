"""Free ports of this machine. Like most of the checker, it is independent of Orca's own code."""

import os
import secrets
import socket
from collections import deque

_HELD_MAX = 256
_held: deque[int] = deque()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port below those that the kernel assigns by itself, and reserve it.

    A socket that does not listen stays bound to the port. A server with SO_REUSEADDR can still use it, but the next
    search finds it in use.
    """
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
    """Return this number of different free ports."""
    return [free_port() for _ in range(count)]
