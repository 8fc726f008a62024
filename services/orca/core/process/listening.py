"""Sockets of servers, bound for every address of a host. `::` stands for all addresses of this machine, IPv4 and IPv6.

Pods have IPv4 addresses, IPv6 addresses or both, as their cluster decides. asyncio binds `::` for IPv6 alone, and
0.0.0.0 is IPv4 alone.
"""

import contextlib
import errno
import socket
from collections.abc import Sequence
from typing import Any

ANY = ("::", "[::]")
_Address = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Family, and the address as the socket library has it: host, port, and for IPv6 two more numbers."""

_EVERYWHERE: Sequence[_Address] = ((socket.AF_INET6, ("::", 0)), (socket.AF_INET, ("0.0.0.0", 0)))
_FAMILY_MISSING = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
"""Errors of a machine without one of the two families. Most are without IPv6, some without IPv4."""

_TRIES = 20
"""Attempts to find one port that is free on both families."""


def bind_all(host: str, port: int) -> list[socket.socket]:
    """Bind one socket for each address of the host. The sockets do not listen yet.

    Args: host: `::` for all addresses of both families, as far as this machine has them. port: 0 takes a free one, the
        same for all addresses.
    Raises: OSError if the port is not available; socket.gaierror, which is one, if the host is no address.
    """
    addresses = _addresses(host)
    for _ in range(_TRIES - 1 if port == 0 else 0):
        try:
            return _bind_each(addresses, port, may_lack_family=host in ANY)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _bind_each(addresses, port, may_lack_family=host in ANY)


def _addresses(host: str) -> Sequence[_Address]:
    if host in ANY:
        return _EVERYWHERE
    found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bind_each(addresses: Sequence[_Address], port: int, *, may_lack_family: bool) -> list[socket.socket]:
    missing: OSError | None = None
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        for family, address in addresses:
            try:
                bound = stack.enter_context(_bind(family, address, port))
            except OSError as error:
                if not may_lack_family or error.errno not in _FAMILY_MISSING:
                    raise
                missing = error
                continue
            port = port or int(bound.getsockname()[1])
            sockets.append(bound)
        if not sockets and missing is not None:
            raise missing
        stack.pop_all()
        return sockets


def _bind(family: socket.AddressFamily, address: tuple[Any, ...], port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Ignore connections of an earlier server in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has a socket of its own, so that its clients keep their plain addresses.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((address[0], port, *address[2:]))
    except OSError:
        bound.close()
        raise
    return bound
