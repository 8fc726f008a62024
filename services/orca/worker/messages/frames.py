"""Frames between a controller and its rank processes, over one local socket pair for each rank.

Their layout is that of core.transport.frame_stream. Steps and results travel as the protobuf bytes of the gRPC links,
so neither side converts them twice.
"""

import dataclasses
import enum
import struct
from typing import Any

import orjson

from orca.core.transport.frame_stream import encode

_NUMBER = struct.Struct("<q")


class RankFrameKind(enum.IntEnum):
    """The kind of a frame, which decides its payload."""

    # Controller to rank.
    START = 1  # JSON: settings and rank; the first frame
    JOIN = 2  # JSON: JoinOrder; leave the present epoch now, then form this one
    STEP = 3  # i64 received_ns, then StepMessage bytes
    STOP = 4  # empty: end the process cleanly
    # i64 epoch, then the bytes already read of a master's link (master_link.py), whose socket comes with the frame.
    LINK = 5
    # Rank to controller.
    LOADED = 12  # JSON: LoadReport
    REFUSED = 13  # text: why the model or a setting cannot be served; a restart would not help
    LEFT = 14  # JSON: number of the epoch that the rank is about to form; it has left its old group
    JOINED = 15  # JSON: epoch number
    RESULT = 16  # ResultMessage bytes; from rank 0 of the last stage
    HEARTBEAT = 17  # JSON: RankHeartbeat
    # JSON: epoch number, detail, is_link (a wait for another rank failed); the rank waits for the next join.
    BROKEN = 18


RankFrame = tuple[RankFrameKind, bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinOrder:
    """The order to form an epoch."""

    epoch: int
    prefix: str  # of the epoch's keys in the rendezvous
    rendezvous: str  # host:port
    slots: int
    block_tokens: int
    feeds_tokens: bool
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The facts about a rank's share of the model, sent after loading."""

    revision: str
    max_model_len: int
    weight_bytes: int
    slots_possible: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankHeartbeat:
    """A rank's heartbeat: its progress (worker.parallel.progress), and the KV slots that its requests hold."""

    mark: int = 0
    doing: str = "starts"
    is_waiting: bool = False
    units: int = 1
    loaded_permille: int = 0  # share of the weights read
    slots_in_use: int = 0


def encode_json(kind: RankFrameKind, **fields: Any) -> bytes:
    return encode(kind, orjson.dumps(fields))


def encode_record(kind: RankFrameKind, record: JoinOrder | LoadReport | RankHeartbeat) -> bytes:
    # The reader calls the record's own constructor, so a field that one side lacks is an error and no silent default.
    return encode(kind, orjson.dumps(record))


def encode_step(received_ns: int, message: bytes) -> bytes:
    return encode(RankFrameKind.STEP, step_payload(received_ns, message))


def step_payload(received_ns: int, message: bytes) -> bytes:
    """Return the payload of a STEP frame."""
    return _NUMBER.pack(received_ns) + message


def decode_step(payload: bytes) -> tuple[int, bytes]:
    """Return received_ns and the StepMessage bytes of a STEP frame."""
    return _split(payload)


def encode_link(epoch: int, arrived: bytes) -> bytes:
    return encode(RankFrameKind.LINK, _NUMBER.pack(epoch) + arrived)


def decode_link(payload: bytes) -> tuple[int, bytes]:
    """Return the epoch of a LINK frame, and the bytes that were already read of the link."""
    return _split(payload)


def _split(payload: bytes) -> tuple[int, bytes]:
    return _NUMBER.unpack_from(payload)[0], payload[_NUMBER.size :]
