"""Clients that leave at random moments: in the middle of their headers, while they wait, between two events.

`python -m checker leavers` lets them come to a real system, beside clients that stay and are judged as in every run.
Every second one leaves without a word (a reset), the others close as programs that end do. A call carries the client's
number as its seed, so that whoever sees the pool can tell which request was whose.
"""

import asyncio
import itertools
import json
import random
import re
import socket
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checker.history.records import Strangers
from checker.runs.run import Scene
from checker.systems.pool_reader import read_log

STAY_SECONDS_MAX = 0.5

AT_A_TIME = 20

FREE_WITHIN_S = 60.0
LOOK_S = 0.05
STAY_OF_REAL_S = 3.0
TOKENS = 800
"""Of a leaver's call on a real system, and how long its client stays at most: too short to see its end."""


@dataclass(frozen=True, slots=True)
class Departure:
    """When a client left, on `time.monotonic`, and what it had got by then."""

    number: int
    at_s: float
    is_sent: bool  # the whole call was
    request_id: str | None  # the server's name of the call, where its headers had come


async def leave_at_random(
    places: Sequence[tuple[str, int]],
    *,
    clients: int,
    seed: int,
    body: Mapping[str, Any],
    stay_s_max: float = STAY_SECONDS_MAX,
    on_left: Callable[[Departure], object] = lambda _: None,
) -> list[Departure]:
    """Send so many completions, AT_A_TIME at once, and leave each at a random moment; half of them are streams.

    Args:
        places: host and port of each gateway; they take turns.
        body: of each call; `stream` and `seed` are added.
        stay_s_max: a client that does not leave in its headers stays for so long at most, so that some are queued
            then, and some in their stream.
        on_left: hears of each at once.
    Returns: in order of number.
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
    heard = await _read_for(reader, stay_s)
    if chance.random() < 0.5:
        # Closing with a linger of zero seconds sends a reset.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left_s = time.monotonic()
    writer.transport.abort()
    named = re.search(
        rb"^x-request-id: (\S+)\r$", heard.partition(b"\r\n\r\n")[0] + b"\r\n", re.MULTILINE | re.IGNORECASE
    )
    return Departure(number, left_s, is_sent, None if named is None else named[1].decode())


async def _read_for(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """Read for so long, or to the end of what comes. Returns: its beginning."""
    heard = b""
    try:
        async with asyncio.timeout(seconds):
            while piece := await reader.read(1 << 16):
                heard = (heard + piece)[: 1 << 12]
    except (TimeoutError, ConnectionError):
        return heard
    return heard


@dataclass(frozen=True, slots=True, kw_only=True)
class Leavers:
    """A disturbance (see run.Disturb). That nothing is left of anybody is judged when the system is at rest again."""

    clients: int

    async def __call__(self, scene: Scene) -> None:
        plan = next(plan for plan in scene.plans if plan.path == "/v1/completions")
        body = {"model": plan.body["model"], "prompt": plan.body["prompt"], "max_tokens": TOKENS, "ignore_eos": True}
        places = [(host, int(port)) for host, _, port in (url[7:].rpartition(":") for url in scene.system.urls)]
        async with asyncio.TaskGroup() as tasks:
            waits: list[asyncio.Task[float]] = []

            def on_left(departure: Departure) -> None:
                if departure.request_id is not None:
                    waits.append(tasks.create_task(_free_s(scene, departure.request_id, departure.at_s)))

            seed = scene.settings.seed
            gone = await leave_at_random(
                places, clients=self.clients, seed=seed, body=body, stay_s_max=STAY_OF_REAL_S, on_left=on_left
            )
        sent = sum(departure.is_sent for departure in gone)
        scene.history.add(Strangers(at=time.monotonic(), calls=sent))
        seconds = sorted(wait.result() for wait in waits)
        scene.tell(f"{self.clients} clients left, {len(seconds)} of them behind the headers of an answer")
        if len(seconds) > 1:
            p99 = statistics.quantiles(seconds, n=100)[98]
            median = statistics.median(seconds)
            scene.tell(
                f"their requests had ended after {median:.2f} s (median), {p99:.2f} s (p99), {seconds[-1]:.2f} s"
            )


async def _free_s(scene: Scene, request_id: str, left_s: float) -> float:
    """How long after its client's leave a request ended in the pool. Raises: TimeoutError."""
    async with asyncio.timeout(FREE_WITHIN_S):
        while True:
            log = await read_log(scene.pool, f"{request_id}.0", at=time.monotonic())
            if log is not None and log.reason is not None:
                return time.monotonic() - left_s
            await asyncio.sleep(LOOK_S)
