"""Input before any route: malformed HTTP, endless headers, too many connections. On real sockets."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Route

from orca.gateway.http import bounds
from orca.gateway.http.connection import LINGERING_MAX
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import until
from support.gateway.gateway_server import LIMIT_SECONDS, Served, refusal, served

HOST = b"host: orca\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"


@pytest.fixture(autouse=True)
def _nobody_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: but in the tests of that."""
    monkeypatch.setattr(bounds, "IDLE_LEAST_SECONDS", 1000.0)


@pytest.fixture
def _idle_at_once(monkeypatch: pytest.MonkeyPatch, _nobody_gives_way: None) -> None:
    monkeypatch.setattr(bounds, "IDLE_LEAST_SECONDS", 0.0)


def bounded(**fields: Any) -> GatewaySettings:
    return GatewaySettings(model="tiny", port=0, drain_seconds=1, **fields)


async def refused(one: Served, sent: bytes) -> tuple[int, str, str]:
    """Status, code and message."""
    reader, _ = await one.open(sent)
    status, error = await refusal(reader)
    return status, error["code"], error["message"]


BROKEN = [
    (b"nonsense\r\n\r\n", "Invalid method encountered"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01", "Invalid method encountered"),  # how TLS begins
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "PRI"),
    (b"GET /health HTTP/9.9\r\n\r\n", "Invalid HTTP version"),
    (b"GET /health\xff HTTP/1.1\r\n" + HOST + b"\r\n", "nvalid char"),
    (b"GET /health HTTP/1.1\r\nbad name: x\r\n\r\n", "Invalid header token"),
    (b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n", "Invalid header value char"),
    (POST + b"content-length: 5, 6\r\n\r\n", "Content-Length"),
    (POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", "Content-Length"),
    (POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", "Transfer-Encoding"),
    (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "Invalid character in chunk size"),
]


@pytest.mark.parametrize(("sent", "reason"), BROKEN, ids=[repr(sent[-30:]) for sent, _ in BROKEN])
async def test_invalid_http_is_answered_in_the_shape_of_all_errors(sent: bytes, reason: str) -> None:
    async with served() as one:
        status, code, message = await refused(one, sent)
        assert (status, code) == (400, "invalid_http")
        assert message.startswith("the request is not valid HTTP/1.1: ")
        assert reason in message


async def test_an_endless_url_is_414_while_it_is_still_sent() -> None:
    async with served(bounded(url_bytes_max=100)) as one:
        assert await refused(one, b"GET /" + b"a" * 200) == (414, "url_too_long", "the URL is longer than 100 bytes")


@pytest.mark.parametrize(
    "header",
    # Without an end, they are bounded by what is read at once.
    [b"x: " + b"a" * 200 + b"\r\n\r\n", b"x: " + b"a" * (1 << 20), b"x: y\r\n" * 60],
    ids=["long", "endless", "many"],
)
async def test_endless_headers_are_431(header: bytes) -> None:
    async with served(bounded(header_bytes_max=100)) as one:
        reader, _ = await one.open(b"GET /health HTTP/1.1\r\n" + HOST, header)
        status, error = await refusal(reader)
        assert (status, error["message"]) == (431, "the headers are larger than 100 bytes")


async def test_too_many_headers_are_431() -> None:
    async with served(bounded(header_count_max=3)) as one:
        told = (431, "headers_too_large", "the request has more than 3 headers")
        assert await refused(one, b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 4 + b"\r\n") == told


async def test_an_endless_trailer_is_cut_and_the_route_sees_a_disconnect() -> None:
    async with served(bounded(header_bytes_max=200)) as one:
        head = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        reader, _ = await one.open(head, b"x: " + b"a" * (1 << 20))
        assert (await refusal(reader))[0] == 431


async def test_a_malformed_second_request_is_answered_after_the_first() -> None:
    async with served() as one:
        reader, writer = await one.open(HEALTH)
        await reader.readuntil(b'"ok"}')
        writer.write(b"nonsense\r\n\r\n")
        assert (await refusal(reader))[0] == 400


@pytest.mark.parametrize("behind", [HEALTH, b"nonsense\r\n\r\n"])
async def test_input_during_a_stream_is_discarded_and_the_connection_closes_after_the_stream(
    behind: bytes,
) -> None:
    async with served() as one:
        one.rig.scheduler.turns_left = 1
        reader, writer = await one.open_stream()
        await reader.readuntil(b"\n\n\r\n")
        writer.write(behind)
        await until(lambda: not any(each.is_listening for each in one.server.server_state.connections))
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        rest = await asyncio.wait_for(reader.read(), LIMIT_SECONDS)
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_large_body_that_is_refused_unread_does_not_cost_the_client_its_answer() -> None:
    async with served(bounded(body_bytes_max=1000)) as one, httpx.AsyncClient(base_url=one.url) as client:
        response = await client.post("/v1/completions", json={"prompt": "a" * (16 << 20)}, timeout=LIMIT_SECONDS)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_request_to_upgrade_the_protocol_is_answered_in_http_1() -> None:
    async with served() as one:
        upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
        reader, _ = await one.open(HEALTH.removesuffix(b"\r\n") + upgrade)
        answer = await asyncio.wait_for(reader.read(), LIMIT_SECONDS)
        assert b" 200 " in answer
        assert answer.endswith(b'"ok"}')


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_the_body_of_a_request_to_upgrade_is_read(framing: str, pieces: int) -> None:
    body = b'{"tokens": [0, 1]}'
    length = b"content-length: %d\r\n" % len(body)
    sent = body if framing == "content-length" else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST /detokenize HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    head += b"content-type: application/json\r\n"
    head += (length if framing == "content-length" else b"transfer-encoding: chunked\r\n") + b"\r\n"
    async with served() as one:
        first = sent if pieces == 1 else sent[:5]
        reader, writer = await one.open(head + first)
        for more in [] if pieces == 1 else [sent[5:9], sent[9:]]:
            await writer.drain()
            writer.write(more)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b'{"prompt":"'), LIMIT_SECONDS)
        # The connection is still one of HTTP/1.1.
        writer.write(HEALTH)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b'"ok"}'), LIMIT_SECONDS)


async def test_early_input_after_the_body_of_an_upgrade_does_not_lose_the_answer() -> None:
    body = b'{"tokens": [0, 1]}'
    head = POST.replace(b"/v1/completions", b"/detokenize") + b"connection: upgrade\r\nupgrade: h2c\r\n"
    async with served() as one:
        reader, _ = await one.open(head + b"content-length: %d\r\n\r\n" % len(body) + body + HEALTH)
        answer = await asyncio.wait_for(reader.read(), LIMIT_SECONDS)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'{"prompt":"' in answer


async def test_a_flood_of_refused_connections_is_answered_and_few_stay_open() -> None:
    async with served(bounded(connections_max=1)) as one:
        held, _ = await one.open(HEALTH)
        await held.readuntil(b'"ok"}')
        answers = await asyncio.gather(*(refused(one, b"") for _ in range(2 * LINGERING_MAX)))
        # Nobody has closed yet.
        assert len(one.server.server_state.connections) <= 1 + LINGERING_MAX
        assert {code for _, code, _ in answers} == {"too_many_connections"}
        await until(lambda: len(one.server.server_state.connections) <= 1)


async def test_one_connection_too_many_is_503_and_the_next_one_after_a_close_is_served() -> None:
    async with served(bounded(connections_max=1)) as one:
        held, writer = await one.open(HEALTH)
        await held.readuntil(b'"ok"}')
        assert await refused(one, HEALTH) == (503, "too_many_connections", "more than 1 connections")
        writer.close()
        await writer.wait_closed()
        await _served_again(one)


@pytest.mark.usefixtures("_idle_at_once")
async def test_one_connection_too_many_closes_the_one_idle_for_longest() -> None:
    async with served(bounded(connections_max=3)) as one:
        silent, _ = await one.open(b"")
        busy, asking = await one.open(HEALTH)
        await busy.readuntil(b'"ok"}')
        idle, _ = await one.open(HEALTH)
        await idle.readuntil(b'"ok"}')
        asking.write(HEALTH)
        await busy.readuntil(b'"ok"}')
        newcomer, _ = await one.open(HEALTH)
        assert b" 200 " in await newcomer.readline()
        assert await asyncio.wait_for(idle.read(), LIMIT_SECONDS) == b""
        asking.write(HEALTH)
        assert b" 200 " in await busy.readuntil(b'"ok"}'), "another one gave way"
        assert not silent.at_eof()


@pytest.mark.usefixtures("_idle_at_once")
@pytest.mark.parametrize("bound", ["connections_max", "connections_per_address_max"])
async def test_as_many_idle_connections_are_closed_as_new_ones_come_at_once(bound: str) -> None:
    async with served(bounded(**{bound: 5})) as one:
        for _ in range(5):
            idle, _ = await one.open(HEALTH)
            await idle.readuntil(b'"ok"}')
        opened = await asyncio.gather(*(one.open(HEALTH) for _ in range(5)))
        answers = await asyncio.gather(*(reader.readline() for reader, _ in opened))
        assert all(b" 200 " in answer for answer in answers)
        await until(lambda: len(one.server.server_state.connections) == 5)
        counted = one.open_connections
        for _, writer in opened:
            writer.close()
        await until(lambda: (counted.total, counted.idle, counted.by_address) == (0, {}, {}))


@pytest.mark.usefixtures("_idle_at_once")
async def test_a_connection_whose_answer_is_being_written_is_not_closed() -> None:
    async with served(bounded(connections_max=1)) as one:
        one.rig.app.router.routes.insert(0, Route("/large", lambda _: Response(bytes(16 << 20))))
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", one.server.port))
            await loop.sock_sendall(client, HEALTH.replace(b"/health", b"/large"))
            await until(lambda: one.open_connections.idle)
            assert (await refused(one, HEALTH))[0] == 503


async def test_a_connection_idle_for_too_long_is_closed() -> None:
    async with served(bounded(idle_seconds_max=0.2)) as one:
        reader, _ = await one.open(HEALTH)
        await reader.readuntil(b'"ok"}')
        assert await asyncio.wait_for(reader.read(), LIMIT_SECONDS) == b""
        await until(lambda: not one.open_connections.total and not one.open_connections.idle)


async def test_calls_refused_before_any_route_are_counted_by_status() -> None:
    async with served(bounded(connections_max=1, metrics_port=0)) as one:
        held, writer = await one.open(HEALTH)
        await held.readuntil(b'"ok"}')
        assert [(await refused(one, HEALTH))[0] for _ in range(2)] == [503, 503]
        writer.write(b"nonsense\r\n\r\n")
        assert (await refusal(held))[0] == 400
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{one.server.metrics_port}") as client:
            told = (await client.get("/metrics")).text
        assert 'orca_http_requests_total{method="none",route="none",status="400"} 1.0' in told
        assert 'orca_http_requests_total{method="none",route="none",status="503"} 2.0' in told


async def test_one_connection_too_many_from_an_address_is_429() -> None:
    async with served(bounded(connections_per_address_max=1)) as one:
        held, writer = await one.open(HEALTH)
        await held.readuntil(b'"ok"}')
        told = (429, "too_many_connections", "more than 1 connections from one address")
        assert await refused(one, HEALTH) == told
        writer.close()
        await writer.wait_closed()
        await _served_again(one)


async def _served_again(one: Served) -> None:
    """The server sees a close soon after the client made it."""
    await until(lambda: not one.server.server_state.connections)
    reader, _ = await one.open(HEALTH)
    assert b" 200 " in await reader.readline()
