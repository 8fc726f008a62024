"""Free ports for servers that get their port on the command line, some time before they listen on it."""

import os
import secrets
import socket
from collections import deque

# These ports are below those that the kernel gives to connections and to servers that ask for any port (from 32768), so
# none of those takes one meanwhile. They are also below the node ports of Kubernetes (from 30000).
_FIRST, _COUNT = 20_000, 10_000
_HELD_MAX = 256

_held: deque[int] = deque()
"""File descriptors of sockets that are bound and do not listen, oldest first."""


def free_port() -> int:
    """Return a port on which nobody listens now, on any IPv4 address of this machine.

    The port stays bound while this process lives, or until it has asked for 256 more. So no other caller gets it, in
    this process or another. A server that sets SO_REUSEADDR, as all of ours do, can listen on it.
    """
    while True:
        port = _FIRST + secrets.randbelow(_COUNT)
        with socket.socket() as holder:
            try:
                holder.bind(("", port))  # without SO_REUSEADDR it fails also if another process only holds the port
            except OSError:
                continue
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _held.append(holder.detach())
        if len(_held) > _HELD_MAX:
            os.close(_held.popleft())
        return port
