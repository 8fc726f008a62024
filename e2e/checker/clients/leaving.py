"""Clients that leave at random moments: in the middle of their headers, while they wait, between two events.

Half of them reset their connection, the others close it like a program that ends. A call has the client's number as its
seed, so that its request can be found in the pool.
"""

import asyncio
import itertools
import json
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STAY_SECONDS_MAX = 0.5

AT_A_TIME = 20
"""Number of concurrent clients."""


@dataclass(frozen=True, slots=True)
class Departure:
    """The departure of a client, with what it had sent and received before."""

    number: int
    at_s: float  # on `time.monotonic`
    is_sent: bool  # it had sent the whole call
    request_id: str | None  # the server's id of the call; None before the headers


async def leave_at_random(
    places: Sequence[tuple[str, int]],
    *,
    clients: int,
    seed: int,
    body: Mapping[str, Any],
    stay_s_max: float = STAY_SECONDS_MAX,
    on_left: Callable[[Departure], object] = lambda _: None,
) -> list[Departure]:
    """Send completions, AT_A_TIME at once, and leave each at a random moment; half of them are streams.

    Args:
        places: host and port of each gateway; they take turns.
        body: of each call; `stream` and `seed` are added.
        stay_s_max: longest stay of a client that has sent its headers, so that some leave while they are queued, and
            some during their stream.
        on_left: called for each client when it leaves.
    Returns: the departures in order of number.
    """
    chance = random.Random(seed)
    turns = asyncio.Semaphore(AT_A_TIME)
    gateways = itertools.cycle(places)

    async def one(number: int, chance: random.Random) -> Departure:
        async with turns:
            call = _call_bytes({**body, "stream": chance.random() < 0.5, "seed": number})
            departure = await _visit(*next(gateways), number, call, stay_s_max, chance)
        on_left(departure)
        return departure

    return await asyncio.gather(*(one(number, random.Random(chance.random())) for number in range(clients)))


def _call_bytes(body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: orca\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(content) + content


async def _visit(host: str, port: int, number: int, call: bytes, stay_s_max: float, chance: random.Random) -> Departure:
    reader, writer = await asyncio.open_connection(host, port)
    is_sent = chance.random() < 0.9
    writer.write(call if is_sent else call[: chance.randrange(len(call))])
    await writer.drain()
    stay_s = chance.uniform(0, stay_s_max) if is_sent else 0.0
    received = await _read_for(reader, stay_s)
    if chance.random() < 0.5:
        # Closing with a linger of zero seconds sends a reset.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left_s = time.monotonic()
    writer.transport.abort()
    named = re.search(
        rb"^x-request-id: (\S+)\r$", received.partition(b"\r\n\r\n")[0] + b"\r\n", re.MULTILINE | re.IGNORECASE
    )
    return Departure(number, left_s, is_sent, None if named is None else named[1].decode())


async def _read_for(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """Read for this time, or to the end of the answer. Returns: the start of the answer."""
    received = b""
    try:
        async with asyncio.timeout(seconds):
            while piece := await reader.read(1 << 16):
                received = (received + piece)[: 1 << 12]
    except (TimeoutError, ConnectionError):
        return received
    return received
