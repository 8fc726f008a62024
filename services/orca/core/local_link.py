"""Steps and results between a master and a stage of one machine: a plain socket beside gRPC.

gRPC hands each message through five threads of each end. There and back with 16 rows takes 3.8 ms and 2.0 ms of
processor time by it, 2.7 ms and 0.7 ms in frames (two processors; `PYTHONPATH=tests python
tests/engine/measure_engine.py 1 1`), time that a model on the same processors goes without. Only what there is for each
step travels here. Joining, asking and failing stay with gRPC, which also notices a peer that is frozen.

The stage listens on a name of Linux's abstract namespace, which nobody can reach from another machine or another
network namespace, so another pod: there the steps go by gRPC. The name and a key are told by the stage's Status, over
whatever protects the gRPC links; who does not show the key is not listened to.
"""

import asyncio
import contextlib
import enum
import hmac
import secrets
import socket
from collections.abc import Callable

from orca.core import engine_pb2 as pb
from orca.core.frame_stream import FrameStream, encode

LocalLink = FrameStream["Kind"]

_CONNECT_S = 1.0
_WORD_BYTES = 16


class Kind(enum.IntEnum):
    """What a frame says, and its payload."""

    # Master to stage.
    HELLO = 1  # LocalHello bytes; the first frame
    STEP = 2  # StepMessage bytes
    # Stage to master.
    RESULT = 11  # ResultMessage bytes
    OVER = 12  # text: why the stage takes no step and sends no result any more; the last frame


class Door:
    """A stage's listening end."""

    def __init__(self, on_link: Callable[[LocalLink], None]) -> None:
        """Args: on_link: gets each link that is opened; nothing was read from it, its HELLO neither."""
        self._on_link = on_link
        self._loop = asyncio.get_running_loop()
        name, key = f"orca-{secrets.token_hex(_WORD_BYTES)}", secrets.token_hex(_WORD_BYTES)
        self.address = pb.LocalAddress(name=name, key=key)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        self._listening.bind(_abstract(self.address))
        self._listening.listen()
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Open no more links."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
        self._listening.close()

    def knows(self, hello: pb.LocalHello) -> bool:
        """Does it show the key?"""
        return hmac.compare_digest(hello.key.encode(), self.address.key.encode())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, _ = self._listening.accept()
            self._on_link(FrameStream(connection, Kind))


async def open_link(address: pb.LocalAddress, epoch: pb.Epoch) -> LocalLink | None:
    """A link to the stage that told `address`, for one epoch that it has joined; None where there is no way to it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(connection, _abstract(address))
    except (OSError, TimeoutError):
        connection.close()
        return None
    link = FrameStream(connection, Kind)
    link.write(encode(Kind.HELLO, pb.LocalHello(key=address.key, epoch=epoch).SerializeToString()))
    return link


def _abstract(address: pb.LocalAddress) -> bytes:
    return b"\0" + address.name.encode()
