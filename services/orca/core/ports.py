"""Ports for servers that are told theirs on the command line, some time before they listen on it."""

import secrets
import socket

# Below the ports that the kernel gives to connections and to servers that ask for any (from 32768), so that none of
# those comes in between; and below the node ports of Kubernetes (from 30000).
_FIRST, _COUNT = 20_000, 10_000


def free_port() -> int:
    """A port on which nobody listens now, on any IPv4 address of this machine.

    Two who ask at the same time, perhaps in different processes, get the same one with a chance of 1 in 10,000.
    """
    while True:
        port = _FIRST + secrets.randbelow(_COUNT)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
