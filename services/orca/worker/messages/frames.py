"""Frames between a controller and its rank processes, over one local socket pair per rank.

The layout is core.transport.frame_stream's. Steps and results travel as the protobuf bytes that came in or go out, so
neither side converts them twice.
"""

import dataclasses
import enum
import struct
from typing import Any

import orjson

from orca.core.transport.frame_stream import encode

_NUMBER = struct.Struct("<q")


class Kind(enum.IntEnum):
    """What a frame says, and its payload."""

    # Controller to rank.
    START = 1  # JSON: settings and rank; the first frame
    JOIN = 2  # JSON: JoinOrder; leave the present epoch now, then form this one
    STEP = 3  # i64 received_ns, then StepMessage bytes
    STOP = 4  # empty: end the process cleanly
    # i64 epoch, then what was read of the link: one of a master (master_link.py), whose socket comes with the frame.
    LINK = 5
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
    """A rank's heartbeat: its worker.parallel.progress, and what it holds for requests."""

    mark: int = 0
    doing: str = "starts"
    is_waiting: bool = False
    units: int = 1
    loaded_permille: int = 0  # share of the weights read
    slots_in_use: int = 0


def encode_json(kind: Kind, **fields: Any) -> bytes:
    return encode(kind, orjson.dumps(fields))


def encode_record(kind: Kind, record: JoinOrder | Loaded | Beat) -> bytes:
    # Read back by the record's own constructor, so a field that one side lacks is an error and no silent default.
    return encode(kind, orjson.dumps(record))


def encode_step(received_ns: int, message: bytes) -> bytes:
    return encode(Kind.STEP, step_payload(received_ns, message))


def step_payload(received_ns: int, message: bytes) -> bytes:
    """The payload of a STEP frame."""
    return _NUMBER.pack(received_ns) + message


def decode_step(payload: bytes) -> tuple[int, bytes]:
    """received_ns and the StepMessage bytes of a STEP frame."""
    return _split(payload)


def encode_link(epoch: int, arrived: bytes) -> bytes:
    return encode(Kind.LINK, _NUMBER.pack(epoch) + arrived)


def decode_link(payload: bytes) -> tuple[int, bytes]:
    """Of a LINK frame: the epoch, and what was read of the link already."""
    return _split(payload)


def _split(payload: bytes) -> tuple[int, bytes]:
    return _NUMBER.unpack_from(payload)[0], payload[_NUMBER.size :]
