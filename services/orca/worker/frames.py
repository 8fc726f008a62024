"""Frames between a controller and its rank processes, over one local socket pair per rank.

Layout of a frame, little endian: u32 bytes that follow the header, u8 kind, payload. Steps and results travel as the
protobuf bytes that came in or go out, so neither side converts them twice.
"""

import asyncio
import dataclasses
import enum
import socket
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any

import orjson

_HEADER = struct.Struct("<IB")
_STEP = struct.Struct("<q")
_READ_BYTES = 1 << 16


class Kind(enum.IntEnum):
    """What a frame says, and its payload."""

    # Controller to rank.
    START = 1  # JSON: settings and rank; the first frame
    JOIN = 2  # JSON: JoinOrder; leave the present epoch now, then form this one
    STEP = 3  # i64 received_ns, then StepMessage bytes
    STOP = 4  # empty: end the process cleanly
    # Rank to controller.
    LOADED = 12  # JSON: Loaded
    REFUSED = 13  # text: the model or a setting cannot be served, a restart would not help
    LEFT = 14  # JSON: epoch number that the rank is about to form, its old group gone
    JOINED = 15  # JSON: epoch number
    RESULT = 16  # ResultMessage bytes; from rank 0 of the last stage
    BEAT = 17  # JSON: Beat
    # JSON: epoch number, detail, is_link (a wait for another rank failed); the rank waits for the next join.
    BROKEN = 18


Frame = tuple[Kind, bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinOrder:
    """What a rank needs to know of an epoch that it is to form."""

    epoch: int
    prefix: str  # of the epoch's keys in the rendezvous
    rendezvous: str  # host:port
    slots: int
    block_tokens: int
    feeds_tokens: bool
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank holds."""

    revision: str
    max_model_len: int
    weight_bytes: int
    slots_possible: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's heartbeat: its worker.progress, and what it holds for requests."""

    mark: int = 0
    doing: str = "starts"
    is_waiting: bool = False
    units: int = 1
    loaded_permille: int = 0  # share of the weights read
    slots_in_use: int = 0


def encode(kind: Kind, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), kind) + payload


def encode_json(kind: Kind, **fields: Any) -> bytes:
    return encode(kind, orjson.dumps(fields))


def encode_record(kind: Kind, record: JoinOrder | Loaded | Beat) -> bytes:
    # Read back by the record's own constructor, so a field that one side lacks is an error and no silent default.
    return encode(kind, orjson.dumps(record))


def encode_step(received_ns: int, message: bytes) -> bytes:
    return encode(Kind.STEP, _STEP.pack(received_ns) + message)


def decode_step(payload: bytes) -> tuple[int, bytes]:
    """received_ns and the StepMessage bytes of a STEP frame."""
    return _STEP.unpack_from(payload)[0], payload[_STEP.size :]


class FrameStream:
    """The controller's end, on its event loop: reads as they come, writes that never wait.

    asyncio's own streams drop what has arrived and was not read yet when a write finds the rank gone or the socket is
    reset. The last frame of a rank is the one that says why it ends, so here reading knows nothing of writing.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()

    async def frames(self) -> AsyncIterator[Frame]:
        """Frames until the rank is gone. Raises: ValueError for a kind that nobody knows."""
        arrived = bytearray()
        while data := await self._receive():
            arrived += data
            while (frame := _take_frame(arrived)) is not None:
                yield frame

    def write(self, frame: bytes) -> None:
        """Hand a frame over, at once if the socket takes it. A rank that is gone gets none."""
        if self._unsent:
            self._unsent += frame
        elif (sent := self._send(frame)) < len(frame):
            self._unsent += frame[sent:]
            self._loop.add_writer(self._connection, self._send_rest)

    def close(self) -> None:
        self._loop.remove_writer(self._connection)
        self._connection.close()

    async def _receive(self) -> bytes:
        """What has come, at least a byte; empty when the rank is gone."""
        try:
            return await self._loop.sock_recv(self._connection, _READ_BYTES)
        except ConnectionError:
            # The rank left frames unread. The kernel says so only behind all that the rank had sent.
            return b""

    def _send_rest(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._connection)

    def _send(self, data: bytes | bytearray) -> int:
        """Returns: how many of the bytes need not be sent any more."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)


def _take_frame(arrived: bytearray) -> Frame | None:
    """Cut the first frame off; None while it is not whole."""
    if len(arrived) < _HEADER.size:
        return None
    size, kind = _HEADER.unpack_from(arrived)
    end = _HEADER.size + size
    if len(arrived) < end:
        return None
    payload = bytes(arrived[_HEADER.size : end])
    del arrived[:end]
    return Kind(kind), payload


class FrameSocket:
    """The rank's end: blocking reads by one thread, whole-frame writes by any."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._file = connection.makefile("rb")
        self._write_lock = threading.Lock()

    def read(self) -> Frame | None:
        """The next frame; None when the controller is gone."""
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        size, kind = _HEADER.unpack(header)
        payload = self._file.read(size)
        return (Kind(kind), payload) if len(payload) == size else None

    def write(self, frame: bytes) -> None:
        with self._write_lock:
            self._connection.sendall(frame)
