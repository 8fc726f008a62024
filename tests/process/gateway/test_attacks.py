"""Clients that hold connections on purpose, and bytes that are no HTTP: seconds until the server is rid of them.

On real sockets. The short form has bounds of its own, the long one (`prove`) the defaults, and prints what it measures.
"""

import asyncio
import contextlib
import random
import re
import time
from dataclasses import dataclass

import httptools
import httpx
import pytest

from orca.gateway.server import allow_open_files
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import check_refusal, until
from support.gateway.gateway_server import LIMIT_SECONDS, Served, completion, served

HEAD = b"GET /health HTTP/1.1\r\nhost: orca\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: orca\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Attack:
    first: bytes  # sent at once
    drip: bytes  # and then this, again and again
    bound: str | None  # the setting that ends it; None: an amount, so at once
    drip_seconds: float = 0.05


ATTACKS = {
    "no bytes": Attack(b"", b"", "header_seconds_max"),
    "slow request line": Attack(b"GET /", b"a", "header_seconds_max"),
    "slow headers": Attack(HEAD, b"x: y\r\n", "header_seconds_max", drip_seconds=0.3),
    "slow header value": Attack(HEAD + b"x: ", b"a", "header_seconds_max"),
    "empty lines": Attack(b"", b"\r\n", "header_seconds_max"),
    "many headers": Attack(HEAD, b"x: y\r\n" * 50, None),
    "endless header": Attack(HEAD + b"x: ", b"a" * 8192, None),
    "endless request line": Attack(b"GET /", b"a" * 8192, None),
    "endless chunk extension": Attack(CHUNKED + b"1;", b"a" * 8192, None),
    "slow body": Attack(POST + b"content-length: 100000\r\n\r\n{", b" ", "body_seconds_max"),
    "no body": Attack(POST + b"content-length: 100000\r\n\r\n", b"", "body_seconds_max"),
    "slow chunks": Attack(CHUNKED, b"1\r\n \r\n", "body_seconds_max"),
    "slow trailers": Attack(CHUNKED + b"2\r\n{}\r\n0\r\n", b"x: y\r\n", "body_seconds_max", drip_seconds=0.3),
    "endless body": Attack(POST + b"content-length: 99999999999\r\n\r\n", b" " * 8192, None),
}
# On a machine with much else to do.
pytestmark = pytest.mark.timeout(900)
SHORT = GatewaySettings(
    model="tiny", port=0, drain_seconds=1, header_seconds_max=0.5, body_seconds_max=0.5, idle_seconds_max=0.3
)
DEFAULT = GatewaySettings(model="tiny", port=0, drain_seconds=1)
BOUNDS = pytest.mark.parametrize(
    "settings", [SHORT, pytest.param(DEFAULT, marks=pytest.mark.prove)], ids=["short", "long"]
)
# Beside the bound: the second that a client has to read its answer, and a busy machine.
MARGIN_SECONDS = 1 + LIMIT_SECONDS


async def seconds_to_close(port: int, attack: Attack) -> float:
    """Return the time from the connection's start to its end, as the attacker sees it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(attack.first)
    dripping = asyncio.create_task(_drip(writer, attack))
    with contextlib.suppress(ConnectionError):
        await reader.read()
    elapsed = time.perf_counter() - began
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    writer.transport.abort()
    return elapsed


async def _drip(writer: asyncio.StreamWriter, attack: Attack) -> None:
    while attack.drip:
        writer.write(attack.drip)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(attack.drip_seconds)


@BOUNDS
async def test_every_slow_or_endless_client_is_closed_within_its_bound(settings: GatewaySettings) -> None:
    async with served(settings) as one:
        seconds = await asyncio.gather(*(seconds_to_close(one.server.port, attack) for attack in ATTACKS.values()))
        for (name, attack), elapsed in zip(ATTACKS.items(), seconds, strict=True):
            bound = 0.0 if attack.bound is None else getattr(settings, attack.bound)
            print(f"{name}: closed after {elapsed:.2f} s, bound {attack.bound or 'an amount'} {bound:g} s")
            assert bound * 0.9 <= elapsed < bound + MARGIN_SECONDS, name
        await until(lambda: not one.server.server_state.connections)


@BOUNDS
async def test_idle_connections_are_all_closed_and_delay_nobody(settings: GatewaySettings) -> None:
    idle = 1000 if settings is DEFAULT else 100
    allow_open_files(3 * idle)
    async with served(settings) as one, httpx.AsyncClient(base_url=one.url) as client:
        closing = asyncio.gather(*(seconds_to_close(one.server.port, ATTACKS["no bytes"]) for _ in range(idle)))
        await until(lambda: len(one.server.server_state.connections) >= idle)
        began = time.perf_counter()
        assert (await client.get("/health", timeout=LIMIT_SECONDS)).status_code == 200
        print(f"beside {idle} idle connections: an answer in {time.perf_counter() - began:.3f} s")
        seconds = await closing
        print(f"closed after {min(seconds):.2f} to {max(seconds):.2f} s, bound {settings.header_seconds_max:g} s")
        assert max(seconds) < settings.header_seconds_max + MARGIN_SECONDS


@dataclass
class Answers:
    """Reads the answers of one connection, and holds each against the shape that it must have."""

    codes: list[str]

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 400:
            response = httpx.Response(status, headers=self._headers, content=self._body)
            self.codes.append(f"{status} {check_refusal(response)}")
        else:
            self.codes.append(str(status))
        self._headers, self._body = [], b""


GOOD = [
    HEAD + b"\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    completion(),
    completion(stream=True),
    CHUNKED + b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n',
    CHUNKED + b'8;a=b\r\n{"prompt\r\n7\r\n": "a"}\r\n0\r\nx: y\r\n\r\n',
    POST + b'content-length: 15\r\nexpect: 100-continue\r\n\r\n{"prompt": "a"}',
]
INSERTS = [
    b"\x00", b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\xff", b"content-length: 5\r\n", b"content-length: -1\r\n",
    b"content-length: 99999999999999999999\r\n", b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip\r\n",
    b"transfer-encoding: chunked, chunked\r\n", b"transfer-encoding : chunked\r\n", b"upgrade: websocket\r\n",
    b"connection: upgrade\r\n", b"connection: close\r\n", b" folded\r\n", b"host: a\r\nhost: b\r\n",
    b"x: " + b"a" * 40_000,
    b"x: y\r\n" * 120, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01",
    b"ffffffffffffffff1\r\n",
    b"-1\r\n", b"HTTP/1.1", b"HTTP/9.9", b"GET", b"//", b"/../", b"%00", b"%2e%2e/", b"http://evil/", b"*",
]  # fmt: skip


def raw_bytes(seed: int, count: int) -> list[bytes]:
    """Requests as bytes, each with a few of them gone, changed, put in, or another request behind. Never HEAD."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        sent = draw.choice(GOOD) + draw.choice((b"", b"", draw.choice(GOOD)))
        for _ in range(draw.choice((1, 1, 2, 3))):
            # Most of what can be wrong is in the head.
            at = draw.randrange(min(len(sent), draw.choice((60, 200, 10**6))) + 1)
            gone = draw.choice((0, 0, 1, 1, 5, 10**6 if draw.random() < 0.2 else 0))
            lines = [end.end() for end in re.finditer(b"\r\n", sent)] or [at]
            put = draw.choice((b"", bytes([draw.randrange(256)]), draw.choice(INSERTS)))
            at = draw.choice(lines) if put.endswith(b"\r\n") else at
            sent = sent[:at] + put + sent[at + gone :]
        found.append(sent.replace(b"HEAD", b"GET"))
    return found


async def exchange(one: Served, sent: bytes) -> list[str]:
    """Return the answer to these bytes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", one.server.port)
    answers = Answers([])
    try:
        writer.write(sent)
        while data := await asyncio.wait_for(reader.read(1 << 16), LIMIT_SECONDS):
            answers.feed(data)
    except ConnectionError:
        pass
    except Exception as error:
        raise AssertionError(f"for {sent[:600]!r}") from error
    finally:
        writer.transport.abort()
    assert not any(code.startswith("5") for code in answers.codes), (sent[:600], answers.codes)
    return answers.codes


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 100), pytest.param(2, 3000, marks=pytest.mark.prove)],
    ids=["short", "long"],
)
async def test_bytes_that_are_no_http_get_a_refusal_or_no_answer_and_leave_no_connection(seed: int, count: int) -> None:
    async with served(SHORT) as one:
        one.rig.scheduler.tokens_per_turn = 20
        sent, found = raw_bytes(seed, count), []
        for first in range(0, count, 50):
            found += await asyncio.gather(*(exchange(one, each) for each in sent[first : first + 50]))
        kinds = sorted({code for codes in found for code in codes})
        print(f"{count} connections, seed {seed}: {sum(map(len, found))} answers: {', '.join(kinds)}")
        assert len(kinds) > 5
        await until(lambda: not one.server.server_state.connections)
        await until(lambda: all(record.end for record in one.rig.pool.state.records.values()))
