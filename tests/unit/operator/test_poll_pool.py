"""The operator polls a pool and writes to it, and reports one that it cannot reach."""

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import pytest

from orca.core.domain.errors import OrcaError
from orca.operator.cluster.probes import poll_pool, set_promise
from orca.operator.domain.actions import PromiseSlots
from orca.operator.domain.api_refusals import Refusals
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.reconcile import reconcile
from support.operator.clusters import observation
from support.operator.deployments import deployment
from support.operator.fake_api_server import fake_api_server

LIMIT_S = 30.0

EXTERNAL = deployment(pool={"external": {"urlSecret": {"name": "redis"}}})


def secret(**texts: str) -> Json:
    return {"data": {key.replace("_", "."): base64.b64encode(text.encode()).decode() for key, text in texts.items()}}


def promise(slots: int, *, expected: int) -> PromiseSlots:
    return PromiseSlots(revision="r1", slots=slots, expected=expected, reason="the spec says so")


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        (None, "there is no Secret redis"),
        (secret(user="orca"), "the Secret redis has no key url"),
        (secret(url="rediss://redis:6379/0", tls_crt="x"), "tls_certificate_file and tls_key_file go together"),
        (secret(url="redis://redis:6379/0", ca_crt="x"), "its URL is not rediss://"),
        (secret(url="redis://me:word@redis:6379/0"), "its URL holds a user or password"),
    ],
)
async def test_a_secret_that_does_not_lead_to_a_pool_is_reported_with_the_reason(of: Json | None, problem: str) -> None:
    found = (await poll_pool(EXTERNAL, of, None)).problem
    assert found is not None
    assert problem in found
    assert "word@" not in found


@contextlib.asynccontextmanager
async def odd_redis(reply: bytes) -> AsyncIterator[Json]:
    """The Secret of a server that has one reply to all commands."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            for _ in range(2 * int(head[1:])):
                await reader.readline()
            writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield secret(url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")


@pytest.mark.parametrize("reply", ["ERR unknown command 'EVALSHA'", "MOVED 1234 10.0.0.7:6379"])
async def test_an_unexpected_redis_reply_is_reported_and_ends_no_reconcile(reply: str) -> None:
    async with odd_redis(f"-{reply}\r\n".encode()) as login:
        problem = (await poll_pool(EXTERNAL, login, None)).problem
        with pytest.raises(OrcaError, match=reply.split()[-1]):
            await asyncio.to_thread(set_promise, EXTERNAL, login, promise(48, expected=64), within_s=lambda: LIMIT_S)
    assert problem is not None
    assert reply.split()[-1] in problem


def test_a_failed_write_to_the_pool_is_retried_and_until_then_nothing_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = deployment(pool={"external": {"urlSecret": {"name": "redis"}}}, scheduler={"kvSlots": 48})
    login = secret(url="redis://127.0.0.1:1/0")
    with pytest.raises(OrcaError):
        set_promise(wanted, login, promise(48, expected=64), within_s=lambda: LIMIT_S)
    observed = observation(wanted, pool_secret=login, pool=PoolStatus(revision="r1", generation=1, promised_slots=64))
    caplog.set_level(logging.WARNING, "orca.operator")
    with fake_api_server() as (fake, cluster):
        assert reconcile(cluster, observed, {}, Refusals(time.monotonic))
    assert "the promise did not reach the pool" in caplog.text
    [told] = [each for each in fake.status("shop")["conditions"] if each["type"] == "PoolReady"]
    assert (told["status"], told["reason"]) == ("False", "PoolNotTold")
    assert "127.0.0.1" in told["message"]
    assert [path.rpartition("/")[2] for method, path, _ in fake.said if method == "PATCH"] == ["status"]
