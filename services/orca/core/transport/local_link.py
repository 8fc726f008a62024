"""Steps and results between a master and a stage on one machine: a plain socket besides gRPC.

gRPC passes each message through five threads on each end. A round trip with 16 rows takes 2.1 ms over gRPC, and 1.1 ms
of CPU time in master and controller. In frames it takes 1.6 and 0.35 ms, or 1.4 and 0.2 ms if the stage is one rank, to
which the controller hands the link on (two CPUs; `python -m orca.bench.parts.round_trip 1 1`). A model
on the same CPUs would miss that time. Only steps and results travel here. Joins, status and failures stay with gRPC,
which also notices a peer that is frozen.

The stage listens on a name in Linux's abstract namespace. Other machines and other network namespaces, so other pods,
cannot reach it: there the steps go by gRPC. The stage's Status reply contains the name and a key, protected as the gRPC
links are. A peer that does not show the key is ignored.
"""

import asyncio
import enum
import hmac
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable

from google.protobuf.message import DecodeError

from orca.core.transport import engine_pb2 as pb
from orca.core.transport.frame_stream import FRAME_BYTES_MAX, FrameStream, encode

log = logging.getLogger(__name__)

LocalLink = FrameStream["LinkFrameKind"]

_WORD_BYTES = 16
_HELLO_BYTES_MAX = 4096
"""Longest frame of a peer that has not shown the key, so that it cannot fill memory."""
_UNPROVED_MAX = 16
"""Links at a time that have not shown the key yet. Further ones are closed."""
_PAUSE_S = 1.0
"""Pause before the next link is accepted if the process has no descriptor left for one."""


class LinkFrameKind(enum.IntEnum):
    """The kind of a frame, which decides its payload."""

    # Master to stage.
    HELLO = 1  # LocalHello bytes; the first frame
    STEP = 2  # StepMessage bytes
    # Stage to master.
    RESULT = 11  # ResultMessage bytes
    OVER = 12  # text: why the epoch is over for this stage; the last frame


def read_step(kind: LinkFrameKind, payload: bytes) -> pb.StepMessage:
    """Read a frame that a master sends after its HELLO. Raises: ValueError or DecodeError for anything but a step."""
    if kind is not LinkFrameKind.STEP:
        raise ValueError(f"a {kind.name} frame after the first frame")
    return pb.StepMessage.FromString(payload)


class LocalListener:
    """The listening end on a stage."""

    def __init__(self, on_link: Callable[[LocalLink], None]) -> None:
        """Args: on_link: called with each new link, of which nothing was read, not even its HELLO."""
        self._on_link = on_link
        self._loop = asyncio.get_running_loop()
        name, key = f"orca-{secrets.token_hex(_WORD_BYTES)}", secrets.token_hex(_WORD_BYTES)
        self.address = pb.LocalAddress(name=name, key=key)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        self._listening.bind(_abstract(self.address))
        self._listening.listen()
        self._unproved = 0
        self._listen()

    def close(self) -> None:
        """Stop accepting links."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
        self._listening.close()

    async def read_hello(
        self, link: LocalLink, frames: AsyncIterator[tuple[LinkFrameKind, bytes]], limit_s: float
    ) -> pb.Epoch:
        """Read a link's first frame and return the epoch that it names.

        Args: frames: of the link.
        Raises: PermissionError if the frame does not show the key within `limit_s`.
        """
        self._unproved += 1
        try:
            if self._unproved > _UNPROVED_MAX:
                raise PermissionError("too many other links have not shown the key either")
            async with asyncio.timeout(limit_s):
                kind, payload = await anext(frames)
            hello = pb.LocalHello.FromString(payload)
        except (TimeoutError, StopAsyncIteration, ValueError, DecodeError) as error:
            raise PermissionError(f"no first frame: {type(error).__name__} {error}") from error
        finally:
            self._unproved -= 1
        if kind is not LinkFrameKind.HELLO or not hmac.compare_digest(hello.key.encode(), self.address.key.encode()):
            raise PermissionError("the link does not show the key")
        link.frame_bytes_max = FRAME_BYTES_MAX
        return hello.epoch

    def _listen(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return  # the peer has left again
        except OSError as error:
            log.warning("no local link can be accepted for now: %s", error)
            self._loop.remove_reader(self._listening)
            self._loop.call_later(_PAUSE_S, self._listen)
            return
        self._on_link(FrameStream(connection, LinkFrameKind, _HELLO_BYTES_MAX))


def open_link(address: pb.LocalAddress, epoch: pb.Epoch) -> LocalLink | None:
    """Open a link to a stage, for one epoch that it has joined; return None if the stage cannot be reached.

    Args: address: from the stage's Status reply.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(_abstract(address))  # never waits: the other end is in this kernel
    except OSError as error:
        connection.close()
        log.info("no local link to a stage, steps go by gRPC: %s", error)
        return None
    link = FrameStream(connection, LinkFrameKind)
    link.write(encode(LinkFrameKind.HELLO, pb.LocalHello(key=address.key, epoch=epoch).SerializeToString()))
    return link


def _abstract(address: pb.LocalAddress) -> bytes:
    return b"\0" + address.name.encode()
