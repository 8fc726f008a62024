"""The gateway as its own process, in front of a real Redis."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

import orca.cli.small_model as small_model
from orca.core.domain.model import load_model_info
from orca.core.domain.text import Tokenizer
from orca.core.process.ports import free_port
from orca.gateway.service import main
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from support.gateway.gateway_rig import FakeScheduler, events
from support.waiting import PATIENT_POOL, until

MODEL = Path(small_model.__file__).parent / "orca-austen"
TEXT = " It is a truth universally acknowledged"
TOKENS = Tokenizer.from_folder(MODEL).encode(TEXT)
LIMIT_S = 60.0
"""Limit for work that takes a second or two on an otherwise idle machine."""


@dataclass
class Process:
    process: asyncio.subprocess.Process
    client: httpx.AsyncClient

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)


@contextlib.asynccontextmanager
async def gateway(pool_url: str, *flags: str) -> AsyncIterator[Process]:
    """A gateway process that listens on a free port."""
    command = [sys.executable, "-m", "orca.gateway.service", "--model", str(MODEL), "--port", "0", "--pool", pool_url]
    environment = {**os.environ, "ORCA_GATEWAY_LOG_FORMAT": "json", "ORCA_POOL_CALL_TIMEOUT_MS": "500"}
    process = await asyncio.create_subprocess_exec(*command, *flags, stderr=asyncio.subprocess.PIPE, env=environment)
    assert process.stderr is not None
    draining: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while (line := orjson.loads(await process.stderr.readline()))["message"] != "gateway listens":
                pass
        draining = asyncio.create_task(process.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{line['port']}", timeout=20) as client:
            yield Process(process, client)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if draining is not None:
            await draining


@contextlib.asynccontextmanager
async def scheduling(url: str) -> AsyncIterator[FakeScheduler]:
    pool = RedisPool(url, "orca", PATIENT_POOL)
    revision = load_model_info(MODEL).revision
    await pool.set_revision(revision, 1)
    await pool.promise_slots(revision, 4096)
    scheduler = FakeScheduler(pool, revision=revision, answer=lambda _: TOKENS)
    task = asyncio.create_task(scheduler.run())
    try:
        yield scheduler
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pool.close()


async def ready(client: httpx.AsyncClient, status: int = 200) -> None:
    """Wait until the question whether it is ready is answered with this status."""

    async def is_answered_so() -> bool:
        return (await client.get("/ready")).status_code == status

    await until(is_answered_so, LIMIT_S)


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "the", "max_tokens": len(TOKENS), **body})


async def test_two_gateways_serve_from_one_pool_and_end_on_a_signal(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, port=0) as redis:
        async with scheduling(redis.url), gateway(redis.url) as one, gateway(redis.url) as two:
            for each in (one, two):
                await ready(each.client)
                assert (await complete(each.client)).json()["choices"][0]["text"] == TEXT
                streamed = await complete(each.client, stream=True)
                chunks = [data for _, data in events(streamed.text)]
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == TEXT
                assert chunks[-1] == "[DONE]"
            assert [await one.stop(), await two.stop()] == [0, 0]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
async def test_a_gateway_that_listens_everywhere_answers_at_both_families_at_each_of_its_ports(tmp_path: Path) -> None:
    metrics = free_port()
    flags = ("--host", "::", "--open-to-network", "true", "--metrics-port", str(metrics))
    with EmbeddedRedis(tmp_path, port=0) as redis:
        async with gateway(redis.url, *flags) as one, httpx.AsyncClient(timeout=20) as client:
            for port in (one.client.base_url.port, metrics):
                for host in ("127.0.0.1", "[::1]"):
                    assert (await client.get(f"http://{host}:{port}/health")).status_code == 200


async def test_a_gateway_starts_without_its_pool_and_answers_503(tmp_path: Path) -> None:
    async with gateway(f"unix://{tmp_path}/nothing.sock") as one:
        assert (await one.client.get("/health")).status_code == 200
        answer = await one.client.get("/ready")
        assert (answer.status_code, answer.json()["pool"]) == (503, "away")
        refused = await complete(one.client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "pool_unavailable")
        assert await one.stop() == 0


async def test_a_running_stream_survives_a_restart_of_redis(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(tmp_path, port=0))
        port = int(redis.url.rpartition(":")[2].partition("/")[0])
        async with scheduling(redis.url) as scheduler, gateway(redis.url) as one:
            await ready(one.client)
            scheduler.turns_left = 2
            body = {"prompt": "the", "max_tokens": len(TOKENS), "stream": True}
            async with one.client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                first = await anext(lines)
                await until(lambda: not scheduler.may_run.is_set(), LIMIT_S)
                redis.stop()
                assert (await complete(one.client)).status_code == 503
                stack.enter_context(EmbeddedRedis(tmp_path, port=port))
                scheduler.turns_left = None
                scheduler.may_run.set()
                async with asyncio.timeout(LIMIT_S):
                    rest = [line async for line in lines if line]
            assert first.startswith("data: ")
            assert len(rest) == len(TOKENS) + 1
            assert rest[-1] == "data: [DONE]"


async def test_a_second_signal_ends_a_gateway_with_open_streams_and_status_0(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, port=0) as redis:
        async with scheduling(redis.url) as scheduler, gateway(redis.url) as one:
            await ready(one.client)
            scheduler.turns_left = 2
            body = {"prompt": "the", "max_tokens": len(TOKENS), "stream": True}
            async with one.client.stream("POST", "/v1/completions", json=body) as response:
                # Kept: without it the stream would be closed.
                chunks = response.aiter_bytes()
                await anext(chunks)
                one.process.send_signal(signal.SIGTERM)
                await ready(one.client, status=503)
                assert one.process.returncode is None
                assert await one.stop() == 0


@pytest.mark.parametrize(
    ("flag", "value"), [("--port", "high"), ("--port", "65536"), ("--metrics-port", "65536"), ("--name", "")]
)
def test_a_bad_setting_is_exit_status_2(capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    assert main(["--model", "x", flag, value]) == 2
    assert flag.strip("-") in capsys.readouterr().err


async def test_a_model_that_can_never_be_served_is_exit_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orca.gateway.service", "--model", str(tmp_path), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, told = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 2
    assert f"the gateway cannot serve: {tmp_path} has no config.json".encode() in told


async def test_a_file_of_keys_that_cannot_be_used_is_exit_status_2(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("a-key-as-it-is\n")
    command = [sys.executable, "-m", "orca.gateway.service", "--model", str(MODEL), "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, "--api-keys-file", str(keys), stderr=asyncio.subprocess.PIPE
    )
    _, told = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 2
    assert f"setting api_keys_file: {keys}: line 1: ".encode() in told


async def test_a_metrics_port_in_use_stops_the_start_with_a_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ("--port", "0", "--metrics-port", str(taken.getsockname()[1]), "--pool", f"unix://{tmp_path}/no.sock")
        command = [sys.executable, "-m", "orca.gateway.service", "--model", str(MODEL), *flags]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, told = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 1
    assert b"the gateway cannot serve: setting metrics_port: " in told
    assert b"Traceback" not in told


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # A folder without a model: it is not read.
        assert main(["--model", str(tmp_path), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"setting port: {port} of host 127.0.0.1 is not available: Address already in use\n"
    )


def test_an_invalid_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "x", "--port", "0", "--host", "no.such.host.invalid"]) == 2
    assert capsys.readouterr().err.startswith("setting host: 'no.such.host.invalid' is not an address: ")
