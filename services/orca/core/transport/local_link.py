"""Steps and results between a master and a stage of one machine: a plain socket beside gRPC.

gRPC hands each message through five threads of each end. There and back with 16 rows takes 2.1 ms by it, and 1.1 ms of
processor time in master and controller; in frames 1.6 and 0.35 ms, and 1.4 and 0.2 ms where the stage is one rank, to
which the controller hands the link on (two processors; `PYTHONPATH=tests python tests/engine/measure_engine.py 1 1`):
time that a model on the same processors goes without. Only what there is for each step travels here. Joining, asking
and failing stay with gRPC, which also notices a peer that is frozen.

The stage listens on a name of Linux's abstract namespace, which nobody can reach from another machine or another
network namespace, so another pod: there the steps go by gRPC. The name and a key are told by the stage's Status, over
whatever protects the gRPC links; who does not show the key is not listened to.
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
"""Of the frame that shows the key: who has not shown it is not let fill any memory."""
_UNPROVED_MAX = 16
"""Links at a time whose key was not seen yet; further ones are hung up on."""
_PAUSE_S = 1.0
"""Before the next link is taken where the process has no descriptor left for one."""


class LinkFrameKind(enum.IntEnum):
    """What a frame says, and its payload."""

    # Master to stage.
    HELLO = 1  # LocalHello bytes; the first frame
    STEP = 2  # StepMessage bytes
    # Stage to master.
    RESULT = 11  # ResultMessage bytes
    OVER = 12  # text: why the stage takes no step and sends no result any more; the last frame


def read_step(kind: LinkFrameKind, payload: bytes) -> pb.StepMessage:
    """What a frame of a master brings behind its HELLO. Raises: ValueError or DecodeError for what is no step."""
    if kind is not LinkFrameKind.STEP:
        raise ValueError(f"{kind.name} behind the first frame")
    return pb.StepMessage.FromString(payload)


class LocalListener:
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
        self._unproved = 0
        self._listen()

    def close(self) -> None:
        """Open no more links."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
        self._listening.close()

    async def read_hello(
        self, link: LocalLink, frames: AsyncIterator[tuple[LinkFrameKind, bytes]], limit_s: float
    ) -> pb.Epoch:
        """The epoch that a link's first frame names.

        Args: frames: of the link.
        Raises: PermissionError when it does not show the key within `limit_s`.
        """
        self._unproved += 1
        try:
            if self._unproved > _UNPROVED_MAX:
                raise PermissionError("too many others have not shown the key either")
            async with asyncio.timeout(limit_s):
                kind, payload = await anext(frames)
            hello = pb.LocalHello.FromString(payload)
        except (TimeoutError, StopAsyncIteration, ValueError, DecodeError) as error:
            raise PermissionError(f"no first frame: {type(error).__name__} {error}") from error
        finally:
            self._unproved -= 1
        if kind is not LinkFrameKind.HELLO or not hmac.compare_digest(hello.key.encode(), self.address.key.encode()):
            raise PermissionError("it does not show the key")
        link.frame_bytes_max = FRAME_BYTES_MAX
        return hello.epoch

    def _listen(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        except OSError as error:
            log.warning("no local link can be taken for now: %s", error)
            self._loop.remove_reader(self._listening)
            self._loop.call_later(_PAUSE_S, self._listen)
            return
        self._on_link(FrameStream(connection, LinkFrameKind, _HELLO_BYTES_MAX))


def open_link(address: pb.LocalAddress, epoch: pb.Epoch) -> LocalLink | None:
    """A link to the stage that told `address`, for one epoch that it has joined; None where there is no way to it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(_abstract(address))  # at once or not at all: the other end is in this kernel
    except OSError as error:
        connection.close()
        log.info("a stage has no local link, steps go by gRPC: %s", error)
        return None
    link = FrameStream(connection, LinkFrameKind)
    link.write(encode(LinkFrameKind.HELLO, pb.LocalHello(key=address.key, epoch=epoch).SerializeToString()))
    return link


def _abstract(address: pb.LocalAddress) -> bytes:
    return b"\0" + address.name.encode()
