"""core.process.internal_port: what a kubelet and Prometheus ask a part, and what they hear when its loop is blocked."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from orca.cli.up.health_checks import http_status
from orca.core.process.internal_port import InternalPort, Page

ANSWERS_WITHIN_S = 60.0  # a shared machine; alone it takes a millisecond


@pytest.fixture
async def port() -> AsyncIterator[InternalPort]:
    port = await InternalPort.open("127.0.0.1:0", {"/metrics": lambda: Page(b"orca_up 1\n", "text/plain")})
    yield port
    port.close()


async def exchange(port: InternalPort, request: bytes) -> bytes:
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), ANSWERS_WITHIN_S)
    writer.close()
    return answer


async def test_only_health_and_registered_pages_are_served(port: InternalPort) -> None:
    assert await http_status(port.address, "/health", ANSWERS_WITHIN_S) == 200
    assert await http_status(port.address, "/health?verbose", ANSWERS_WITHIN_S) == 200
    assert await http_status(port.address, "/other", ANSWERS_WITHIN_S) == 404
    answer = await exchange(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"\r\nContent-Type: text/plain\r\nContent-Length: 10\r\n" in answer
    assert answer.endswith(b"\r\n\r\norca_up 1\n")


async def test_only_get_is_answered(port: InternalPort) -> None:
    assert (await exchange(port, b"POST /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")


async def test_endless_headers_are_cut_without_affecting_others(port: InternalPort) -> None:
    assert await exchange(port, b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 4000) == b""
    assert await http_status(port.address, "/health", ANSWERS_WITHIN_S) == 200


async def test_an_address_in_use_is_refused(port: InternalPort) -> None:
    with pytest.raises(OSError, match="in use"):
        await InternalPort.open(port.address)
