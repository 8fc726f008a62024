"""Clients that leave at random moments: in the middle of their headers, while they wait, between two events.

Every second one leaves without a word (a reset), the others close as programs that end do. A call carries the client's
number as its seed, so that whoever sees the pool can tell which request was whose.
"""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STAY_SECONDS_MAX = 0.5
"""A client that does not leave in its headers stays for so long at most: some are queued then, some in their stream."""

AT_A_TIME = 20


@dataclass(frozen=True, slots=True)
class Departure:
    """When a client left, on `time.monotonic`, and what it had got by then."""

    number: int
    at_s: float
    is_sent: bool  # the whole call was
    bytes_read: int


async def leave_at_random(host: str, port: int, *, clients: int, seed: int, body: Mapping[str, Any]) -> list[Departure]:
    """Send so many completions, AT_A_TIME at once, and leave each at a random moment; half of them are streams.

    Args: body: of each call; `stream` and `seed` are added.
    Returns: in order of number.
    """
    chance = random.Random(seed)
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int, chance: random.Random) -> Departure:
        async with turns:
            call = _call_bytes({**body, "stream": chance.random() < 0.5, "seed": number})
            return await _visit(host, port, number, call, chance)

    return await asyncio.gather(*(one(number, random.Random(chance.random())) for number in range(clients)))


def _call_bytes(body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: orca\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(content) + content


async def _visit(host: str, port: int, number: int, call: bytes, chance: random.Random) -> Departure:
    reader, writer = await asyncio.open_connection(host, port)
    is_sent = chance.random() < 0.9
    writer.write(call if is_sent else call[: chance.randrange(len(call))])
    await writer.drain()
    stay_s = chance.uniform(0, STAY_SECONDS_MAX) if is_sent else 0.0
    read = await _read_for(reader, stay_s)
    if chance.random() < 0.5:
        # Closing with a linger of zero seconds sends a reset.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left_s = time.monotonic()
    writer.transport.abort()
    return Departure(number, left_s, is_sent, read)


async def _read_for(reader: asyncio.StreamReader, seconds: float) -> int:
    """Read for so long, or to the end of what comes."""
    read = 0
    try:
        async with asyncio.timeout(seconds):
            while piece := await reader.read(1 << 16):
                read += len(piece)
    except (TimeoutError, ConnectionError):
        return read
    return read
